// Package wire is what a host, a client and a broker say to each other: the
// messages, frames, ids, tokens and error codes of protocol 1 and 2, and the
// URLs and the enrolment line that lead one to another.
//
// It is pure: it opens no socket, reads no clock (whoever judges an expiry
// passes the time in) and keeps nothing. Everything in it that parses meets
// bytes from strangers, so each parser checks the size before it decodes,
// accepts one spelling where a spelling can be compared or stored, and puts
// neither a value it refused nor any token into an error.
//
// Both protocols are described once, in the fields methods of v1.go and
// v2.go: the same lines read, check and write a message, so that no end can
// send what the other refuses. docs/protocol/ fixes the bytes.
//
// Functions may be called from any goroutine; values are plain data without
// locks.
package wire

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"fmt"
	"unicode"
	"unicode/utf8"
)

// Lengths in characters of what has a fixed form.
const (
	IDLen     = 22 // 16 bytes in base64url without padding
	TokenLen  = 43 // 32 bytes in base64url without padding
	DigestLen = 43
)

// Bounds in characters of what has none.
const (
	MinHostToken = 32
	MaxHostToken = 512
	MaxOpaque    = 128 // credential_id, pairing_id, request_id
)

// rawURL is the one text form of bytes in both protocols.
var rawURL = base64.RawURLEncoding

// An ID names a host, a connection, an instance, a session or a stream. It
// locates and never authenticates: it may be logged. The zero ID is a valid
// one on the wire, and stands for "none" in the structs where an id is optional.
type ID [16]byte

// NewID returns a random ID.
func NewID() ID {
	var id ID
	rand.Read(id[:]) // never fails: crypto/rand ends the process instead
	return id
}

// ParseID reads the 22 characters of an ID. Only the canonical spelling is
// taken, so that two texts are equal exactly when the ids are.
func ParseID(s string) (ID, error) {
	var id ID
	if !decodeExact(id[:], s) {
		return ID{}, fmt.Errorf("%w: an id is %d characters of canonical base64url", ErrMalformed, IDLen)
	}
	return id, nil
}

// String returns the 22 characters.
func (id ID) String() string { return rawURL.EncodeToString(id[:]) }

// IsZero says whether id is the zero ID.
func (id ID) IsZero() bool { return id == ID{} }

// MarshalText implements [encoding.TextMarshaler]; it never fails.
func (id ID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler]; see [ParseID].
func (id *ID) UnmarshalText(b []byte) error {
	got, err := ParseID(string(b))
	if err == nil {
		*id = got
	}
	return err
}

// A Digest is the SHA-256 of a token's (or a device id's) UTF-8 text: what a
// broker stores instead of the text. It opens nothing.
type Digest [sha256.Size]byte

// DigestOf hashes text as it stands, without decoding it.
func DigestOf(text string) Digest { return sha256.Sum256([]byte(text)) }

// ParseDigest reads the 43 characters of a Digest, canonical spelling only.
func ParseDigest(s string) (Digest, error) {
	var d Digest
	if !decodeExact(d[:], s) {
		return Digest{}, fmt.Errorf("%w: a digest is %d characters of canonical base64url", ErrMalformed, DigestLen)
	}
	return d, nil
}

// String returns the 43 characters.
func (d Digest) String() string { return rawURL.EncodeToString(d[:]) }

// Equal compares in constant time, so that the time of a refusal tells
// nothing about a stored digest.
func (d Digest) Equal(other Digest) bool { return subtle.ConstantTimeCompare(d[:], other[:]) == 1 }

// MarshalText implements [encoding.TextMarshaler]; it never fails.
func (d Digest) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler]; see [ParseDigest].
func (d *Digest) UnmarshalText(b []byte) error {
	got, err := ParseDigest(string(b))
	if err == nil {
		*d = got
	}
	return err
}

// NewToken returns a fresh route or bootstrap token: 32 random bytes as 43
// characters. It is a secret.
func NewToken() string {
	var b [32]byte
	rand.Read(b[:])
	return rawURL.EncodeToString(b[:])
}

// CheckToken says whether s has the form of a route or bootstrap token. The
// error does not contain s.
func CheckToken(s string) error {
	var b [32]byte
	if !decodeExact(b[:], s) {
		return fmt.Errorf("%w: a token is %d characters of canonical base64url", ErrMalformed, TokenLen)
	}
	return nil
}

// CheckHostToken says whether s has the form of a host registration token: 32
// to 512 characters, none of them a control character. The error does not
// contain s.
func CheckHostToken(s string) error {
	if !plainText(s, MinHostToken, MaxHostToken) {
		return fmt.Errorf("%w: a host token is %d to %d characters", ErrMalformed, MinHostToken, MaxHostToken)
	}
	return nil
}

// decodeExact fills dst from the one canonical base64url spelling of it. Go's
// decoder, strict or not, skips line breaks; encoding again catches those and
// stray low bits alike.
func decodeExact(dst []byte, s string) bool {
	if len(s) != rawURL.EncodedLen(len(dst)) { // before anything is decoded
		return false
	}
	b, err := rawURL.DecodeString(s)
	if err != nil || len(b) != len(dst) || rawURL.EncodeToString(b) != s {
		return false
	}
	copy(dst, b)
	return true
}

// plainText bounds a text in code points and refuses what would not survive a
// log, a key with separators, or JSON: control characters, and U+FFFD, which is
// what Go makes of broken UTF-8 and of every lone surrogate (two ids would
// become one).
func plainText(s string, lo, hi int) bool {
	if len(s) > hi*utf8.UTFMax {
		return false
	}
	for _, r := range s {
		if unicode.IsControl(r) || r == utf8.RuneError {
			return false
		}
	}
	n := utf8.RuneCountInString(s)
	return lo <= n && n <= hi
}

// visible says whether s is at most hi printable ASCII characters, the space
// only where allowed.
func visible(s string, hi int, space bool) bool {
	if len(s) > hi {
		return false
	}
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == ' ' && !space {
			return false
		}
	}
	return true
}
