package wire

import (
	"crypto/rand"
	"encoding/base32"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
)

// A RawToken is a single-use ticket to the fast path, or the key of a pool of
// such connections. It is a secret until it is used and prints hidden; Text
// shows it. The zero RawToken stands for none.
type RawToken [32]byte

// NewRawToken returns a random one.
func NewRawToken() RawToken {
	var t RawToken
	rand.Read(t[:])
	return t
}

// ParseRawToken reads the 43 characters that Text writes.
func ParseRawToken(s string) (RawToken, error) {
	var t RawToken
	if !decodeExact(t[:], s) {
		return RawToken{}, fmt.Errorf("%w: a raw token is %d characters of canonical base64url", ErrMalformed, TokenLen)
	}
	return t, nil
}

// Text returns the token itself: a secret.
func (t RawToken) Text() string { return rawURL.EncodeToString(t[:]) }

// IsZero says whether t is none.
func (t RawToken) IsZero() bool { return t == RawToken{} }

func (t RawToken) String() string {
	if t.IsZero() {
		return "none"
	}
	return "hidden"
}

// Format implements [fmt.Formatter]: every verb prints String, %x too.
func (t RawToken) Format(s fmt.State, _ rune) { fmt.Fprint(s, t.String()) }

// LogValue implements [slog.LogValuer].
func (t RawToken) LogValue() slog.Value { return slog.StringValue(t.String()) }

// MarshalJSON hides the token; messages write it by themselves.
func (t RawToken) MarshalJSON() ([]byte, error) { return json.Marshal(t.String()) }

// A RawOffer is one end's ticket to the fast path, in matched and open. It
// prints without its token.
type RawOffer struct {
	Token           RawToken
	DeadlineSeconds int
}

func (o RawOffer) String() string { return fmt.Sprintf("raw{token hidden, %d s}", o.DeadlineSeconds) }

// Format implements [fmt.Formatter]. It is not left to the token: for a verb
// that does not fit a pointer, fmt prints all behind it without asking anyone.
func (o RawOffer) Format(s fmt.State, _ rune) { fmt.Fprint(s, o.String()) }

// rawSuffix ends the server name of a client that comes to the fast path. The
// domain can never be a real one (RFC 2606).
const rawSuffix = ".raw.invalid"

// rawBase32 fits 32 bytes into one DNS label: 52 characters of at most 63.
// Lower case, because resolvers and TLS stacks may lower names.
var rawBase32 = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// RawServerName returns the server name that carries t in a ClientHello.
func RawServerName(t RawToken) string { return rawBase32.EncodeToString(t[:]) + rawSuffix }

// ParseRawServerName returns the token in a server name, in either case of
// letters. Any name that is not exactly one gets the broker's own TLS instead:
// ok is false.
func ParseRawServerName(name string) (t RawToken, ok bool) {
	if len(name) != rawBase32.EncodedLen(len(t))+len(rawSuffix) {
		return RawToken{}, false
	}
	label, found := strings.CutSuffix(strings.ToLower(name), rawSuffix)
	if !found {
		return RawToken{}, false
	}
	b, err := rawBase32.DecodeString(label) // it skips line breaks and stray low bits: encode again
	if err != nil || len(b) != len(t) || rawBase32.EncodeToString(b) != label {
		return RawToken{}, false
	}
	return RawToken(b), true
}

// A host's fast-path connection begins with  HRR2 | flags:u32 | token:32.
const (
	rawMagic    = "HRR2"
	PreambleLen = len(rawMagic) + 4 + len(RawToken{})
)

// RawFlags are the flags of a Preamble, big-endian on the wire.
type RawFlags uint32

// RawPool says that the token is the pool key: the connection was opened ahead
// of need, and its own token follows, alone, once it is used.
const RawPool RawFlags = 1

// What the broker sends the host, one byte, once it has decided.
const (
	RawNo  = 0x00 // the session stream carries the bytes
	RawYes = 0x01 // spliced: payload follows
)

// A Preamble is the host's first 40 bytes on the fast path.
type Preamble struct {
	Flags RawFlags
	Token RawToken
}

// AppendPreamble appends the 40 bytes to b.
func AppendPreamble(b []byte, p Preamble) []byte {
	b = append(b, rawMagic...)
	b = binary.BigEndian.AppendUint32(b, uint32(p.Flags))
	return append(b, p.Token[:]...)
}

// IsPreamble says whether b, the first bytes of a connection, can still become
// a Preamble; a TLS record never can. Any length of b will do.
func IsPreamble(b []byte) bool {
	n := min(len(b), len(rawMagic))
	return string(b[:n]) == rawMagic[:n]
}

// ParsePreamble reads exactly [PreambleLen] bytes. Flags it does not know are
// refused: they change what the token means.
func ParsePreamble(b []byte) (Preamble, error) {
	if len(b) != PreambleLen || !IsPreamble(b) {
		return Preamble{}, fmt.Errorf("%w: not a raw preamble of %d bytes", ErrMalformed, PreambleLen)
	}
	flags := RawFlags(binary.BigEndian.Uint32(b[len(rawMagic):]))
	if flags&^RawPool != 0 {
		return Preamble{}, fmt.Errorf("%w: raw preamble with flags %#x", ErrMalformed, uint32(flags))
	}
	return Preamble{Flags: flags, Token: RawToken(b[len(rawMagic)+4:])}, nil
}
