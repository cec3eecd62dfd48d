// Package pins answers one question for both ends of a link: who is at the
// other end?
//
// The host has one long-lived key, its [Identity]. A device learns the [Pin] of
// that key (a hash of the public key) while it pairs, over a channel a person
// looks at, and from then on accepts that key and no other, whatever network,
// tailnet or broker the bytes came through. No certificate authority takes
// part. [Identity.ServerConfig] and [ClientConfig] are the two halves of the
// check; docs/pinning.md tells it to users.
package pins

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
)

// Pin is the SHA-256 of a certificate's SubjectPublicKeyInfo (DER). It is
// public: it may stand in logs and errors. The zero Pin matches nothing.
type Pin [sha256.Size]byte

const pinPrefix = "sha256/"

// ErrSyntax is wrapped by every error of [Parse].
var ErrSyntax = errors.New("not a pin")

// Of gives the pin of the certificate's key.
func Of(cert *x509.Certificate) Pin {
	return sha256.Sum256(cert.RawSubjectPublicKeyInfo)
}

// Parse reads the one accepted spelling: "sha256/" and 44 characters of padded
// standard base64. Anything else, surrounding blanks included, is [ErrSyntax]:
// one pin has one spelling, so texts can be compared as texts.
func Parse(s string) (Pin, error) {
	var p Pin
	text, ok := strings.CutPrefix(s, pinPrefix)
	if !ok {
		return p, fmt.Errorf("%w: it must start with %q", ErrSyntax, pinPrefix)
	}
	if len(text) != base64.StdEncoding.EncodedLen(len(p)) {
		return p, fmt.Errorf("%w: %d characters after %q, want 44", ErrSyntax, len(text), pinPrefix)
	}
	raw, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil || len(raw) != len(p) {
		return p, fmt.Errorf("%w: no standard base64 of 32 bytes after %q", ErrSyntax, pinPrefix)
	}
	copy(p[:], raw)
	// encoding/base64 skips line breaks even when it is strict.
	if p.String() != s {
		return Pin{}, fmt.Errorf("%w: not in canonical form", ErrSyntax)
	}
	return p, nil
}

// String gives the spelling that [Parse] reads.
func (p Pin) String() string {
	return pinPrefix + base64.StdEncoding.EncodeToString(p[:])
}

// MarshalText is String, for JSON and YAML.
func (p Pin) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// UnmarshalText is Parse, for JSON and YAML.
func (p *Pin) UnmarshalText(text []byte) error {
	got, err := Parse(string(text))
	if err != nil {
		return err
	}
	*p = got
	return nil
}

// Equal compares in constant time. The zero Pin equals nothing, itself
// included, so that a pin somebody forgot to set opens no door.
func (p Pin) Equal(q Pin) bool {
	var zero Pin
	same := subtle.ConstantTimeCompare(p[:], q[:])
	empty := subtle.ConstantTimeCompare(p[:], zero[:])
	return same&(1-empty) == 1
}
