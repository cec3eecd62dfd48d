package wire

import (
	"errors"
	"fmt"
	"time"
)

// A Code is the reason in an error, refuse or reset message: 1 to 32
// characters of a to z and underscore. Codes this version does not know are
// kept as they are.
type Code string

// Codes of protocol 1. Never renamed, never reused.
const (
	CodeUnauthorized       Code = "unauthorized"        // the one answer to every failed proof
	CodeUnsupportedVersion Code = "unsupported_version" // protocol_version is not served here
	CodeExpired            Code = "expired"             // right credential, past its time
	CodeReplayed           Code = "replayed"            // connection_id or one-use credential used before
	CodeHostOffline        Code = "host_offline"        // right credential, no live host
	CodeHostBusy           Code = "host_busy"           // stream limit reached
	CodeQuotaExceeded      Code = "quota_exceeded"      // frame, queue, control or credential limit
	CodeRevoked            Code = "revoked"             // the credential was taken back
)

// Codes that protocol 2 adds.
const (
	CodeMalformed       Code = "malformed"        // a message that is not one, or of an unknown type
	CodeReplaced        Code = "replaced"         // a later registration took this one's place
	CodeDraining        Code = "draining"         // no new streams here: go elsewhere
	CodeRefused         Code = "refused"          // the host said no
	CodeRateLimited     Code = "rate_limited"     // too many tries; retry_after says when
	CodeBootstrapReused Code = "bootstrap_reused" // a used bootstrap was tried again
	CodeIdleTimeout     Code = "idle_timeout"     // no payload for the idle limit
	CodeClosed          Code = "closed"           // in reset: I will read no more of this stream
)

// maxCode is the longest code on the wire, in characters.
const maxCode = 32

// Valid says whether c has the form of a code, known or not.
func (c Code) Valid() bool {
	if c == "" || len(c) > maxCode {
		return false
	}
	for i := range len(c) {
		if b := c[i]; b != '_' && (b < 'a' || b > 'z') {
			return false
		}
	}
	return true
}

// meanings are for people who read an error: what happened, and what to do.
var meanings = map[Code]string{
	CodeUnauthorized:       "the broker does not know this credential: enroll or pair again",
	CodeUnsupportedVersion: "the broker does not serve this protocol version: update it",
	CodeExpired:            "the credential is past its time: pair again",
	CodeReplayed:           "this one-use credential was used before: ask for a new invite",
	CodeHostOffline:        "the host is not connected to this broker",
	CodeHostBusy:           "the host has as many streams as it may: try again later",
	CodeQuotaExceeded:      "a limit of the broker was reached",
	CodeRevoked:            "the credential was taken back: pair again",
	CodeMalformed:          "the peer did not understand a message",
	CodeReplaced:           "another connection of this host took this one's place",
	CodeDraining:           "the peer is about to stop and takes no new streams",
	CodeRefused:            "the host refused the stream",
	CodeRateLimited:        "too many attempts: wait before the next one",
	CodeBootstrapReused:    "a used invite was tried again",
	CodeIdleTimeout:        "nothing was sent for the idle limit",
	CodeClosed:             "the peer reads no more of this stream",
}

// A Role is which end of the broker registers.
type Role string

// The two roles.
const (
	RoleHost   Role = "host"
	RoleClient Role = "client"
)

// A Kind is which sort of credential a token is.
type Kind string

// The kinds. A host registers with KindHost, a client with one of the others.
const (
	KindHost      Kind = "host"
	KindBootstrap Kind = "bootstrap" // one use, from an invite
	KindRoute     Kind = "route"     // durable, one for each paired device
)

// A RefusedError is a peer's own no, as opposed to a path that broke:
//
//	if r, ok := errors.AsType[*wire.RefusedError](err); ok && r.Code == wire.CodeHostOffline { … }
type RefusedError struct {
	Code       Code
	RetryAfter time.Duration // 0: not said
	StreamID   ID            // zero: not about one stream
	RequestID  string        // "": not about one request
}

func (e *RefusedError) Error() string {
	s := "refused: " + string(e.Code)
	if m := meanings[e.Code]; m != "" {
		s += " (" + m + ")"
	}
	if e.RetryAfter > 0 {
		s += fmt.Sprintf(", retry after %v", e.RetryAfter)
	}
	return s
}

// CodeOf returns the code of the first [RefusedError] in err's tree, or "".
func CodeOf(err error) Code {
	if r, ok := errors.AsType[*RefusedError](err); ok {
		return r.Code
	}
	return ""
}

// Errors a caller acts on. None of them, nor what wraps them, repeats a value
// that was refused.
var (
	ErrMalformed = errors.New("wire: malformed")                  // protocol 1 answers unauthorized, protocol 2 malformed
	ErrVersion   = errors.New("wire: unsupported version")        // answered with unsupported_version
	ErrFrameSize = errors.New("wire: frame size out of bounds")   // protocol 1 host socket
	ErrFlags     = errors.New("wire: frame flags not understood") // protocol 1 host socket
)

// An UnknownTypeError is a well-formed message of protocol 2 whose type this
// version does not know. It is answered once with malformed.
type UnknownTypeError struct{ Type string } // at most 64 visible ASCII characters

func (e *UnknownTypeError) Error() string {
	return fmt.Sprintf("wire: unknown message type %q", e.Type)
}
