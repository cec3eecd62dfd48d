package wire

import (
	"encoding/json"
	"fmt"
	"iter"
	"log/slog"
	"slices"
)

// Version1 is the protocol_version of protocol 1.
const Version1 = 1

// A Message1 is one text message of protocol 1: a pointer to one of the structs
// below. Each has exactly the members of its form on the wire, no more and no
// fewer: phones in the field drop a connection for a member they do not know.
type Message1 interface {
	message1Type() string
	fields(*fields)
}

// Register1 is the first frame of every peer. It prints without its token.
type Register1 struct {
	Role           Role
	HostID         ID
	ConnectionID   ID // fresh for each attempt; a second use is replayed
	CredentialKind Kind
	Token          string // secret
}

// Registered1 answers a host's Register1.
type Registered1 struct{}

// Matched1 answers a client's Register1; opaque bytes follow it.
type Matched1 struct{ StreamID ID }

// Open1 tells the host of a new stream. HostConnectionID is the registration it
// is meant for; any other is not obeyed.
type Open1 struct {
	StreamID         ID
	HostConnectionID ID
}

// PublishBootstrap1 asks the broker to know a one-use credential.
type PublishBootstrap1 struct {
	PairingID   string
	TokenSHA256 Digest
	ExpiresAt   Expiry
	MaxUses     int // 1
}

// PublishRoute1 asks the broker to know a durable credential, or replaces it.
type PublishRoute1 struct {
	CredentialID string
	TokenSHA256  Digest
	ExpiresAt    Expiry
	DeviceIDHash Digest
}

// Revoke1 takes a route credential back; protocol 1 has no other revoke.
type Revoke1 struct{ CredentialID string }

// Published1 answers the two publish messages: CredentialID for KindRoute,
// PairingID for KindBootstrap.
type Published1 struct {
	CredentialKind Kind
	CredentialID   string
	PairingID      string
}

// Revoked1 answers Revoke1.
type Revoked1 struct{ CredentialID string }

// Error1 refuses, and a close follows it.
type Error1 struct{ Code Code }

// Refused returns the message as an error.
func (m *Error1) Refused() *RefusedError { return &RefusedError{Code: m.Code} }

func (*Register1) message1Type() string         { return "register" }
func (*Registered1) message1Type() string       { return "registered" }
func (*Matched1) message1Type() string          { return "matched" }
func (*Open1) message1Type() string             { return "open" }
func (*PublishBootstrap1) message1Type() string { return "publish_bootstrap" }
func (*PublishRoute1) message1Type() string     { return "publish_route" }
func (*Revoke1) message1Type() string           { return "revoke" }
func (*Published1) message1Type() string        { return "published" }
func (*Revoked1) message1Type() string          { return "revoked" }
func (*Error1) message1Type() string            { return "error" }

func (*Registered1) fields(*fields)  {}
func (m *Matched1) fields(f *fields) { f.id("stream_id", &m.StreamID) }
func (m *Error1) fields(f *fields)   { f.code("code", &m.Code) }
func (m *Revoke1) fields(f *fields)  { f.routeOnly(&m.CredentialID) }
func (m *Revoked1) fields(f *fields) { f.routeOnly(&m.CredentialID) }

func (m *Register1) fields(f *fields) {
	f.registration(&m.Role, &m.HostID, &m.ConnectionID, &m.CredentialKind, &m.Token)
}

func (m *Open1) fields(f *fields) {
	f.id("stream_id", &m.StreamID)
	f.id("host_connection_id", &m.HostConnectionID)
}

func (m *PublishBootstrap1) fields(f *fields) {
	f.bootstrap(&m.PairingID, &m.TokenSHA256, &m.ExpiresAt, &m.MaxUses)
}

func (m *PublishRoute1) fields(f *fields) {
	f.route(&m.CredentialID, &m.TokenSHA256, &m.ExpiresAt, &m.DeviceIDHash)
}

func (m *Published1) fields(f *fields) {
	f.credential(&m.CredentialKind, &m.CredentialID, &m.PairingID)
}

func (f *fields) routeOnly(credentialID *string) {
	kind := KindRoute
	text(f, "credential_kind", &kind, func(s string) bool { return Kind(s) == KindRoute }, "route")
	f.opaque("credential_id", credentialID)
}

// A Flow is who sends a text message to whom and when, which decides what it
// may be.
type Flow int

// The flows of protocol 1. What a flow does not have is malformed.
const (
	FirstFrame     Flow = iota // any peer to the broker: register
	HostToBroker               // publish_bootstrap, publish_route, revoke
	BrokerToHost               // registered, open, published, revoked, error
	BrokerToClient             // matched, error
)

// newMessage1 makes the empty message of each type that a flow has.
var newMessage1 = map[Flow]map[string]func() Message1{
	FirstFrame: {
		"register": func() Message1 { return new(Register1) },
	},
	HostToBroker: {
		"publish_bootstrap": func() Message1 { return new(PublishBootstrap1) },
		"publish_route":     func() Message1 { return new(PublishRoute1) },
		"revoke":            func() Message1 { return new(Revoke1) },
	},
	BrokerToHost: {
		"registered": func() Message1 { return new(Registered1) },
		"open":       func() Message1 { return new(Open1) },
		"published":  func() Message1 { return new(Published1) },
		"revoked":    func() Message1 { return new(Revoked1) },
		"error":      func() Message1 { return new(Error1) },
	},
	BrokerToClient: {
		"matched": func() Message1 { return new(Matched1) },
		"error":   func() Message1 { return new(Error1) },
	},
}

// ParseV1 reads one text message: a type that the flow has, protocol_version
// 1 ([ErrVersion] otherwise, whatever else is wrong), and exactly the members
// of that type. Everything else is [ErrMalformed]. The result does not alias
// body.
func ParseV1(flow Flow, body []byte) (Message1, error) {
	in, err := splitObject(body)
	if err != nil {
		return nil, err
	}
	f := &fields{in: in}
	var kind string
	f.visible("type", &kind, MaxFeature, false)
	f.version(Version1)
	if f.err != nil {
		return nil, f.err
	}
	newOne, known := newMessage1[flow][kind]
	if !known {
		return nil, fmt.Errorf("%w: a type that is not expected here", ErrMalformed)
	}
	m := newOne()
	m.fields(f)
	if f.err == nil && len(f.in) != 0 {
		f.err = fmt.Errorf("%w: a member that does not belong there", ErrMalformed)
	}
	if f.err != nil {
		return nil, fmt.Errorf("%s: %w", kind, f.err)
	}
	return m, nil
}

// AppendV1 appends the text message to b. It refuses what [ParseV1] would
// refuse; b is then returned as it was.
func AppendV1(b []byte, m Message1) ([]byte, error) {
	return appendJSON(b, m.message1Type(), func(f *fields) {
		f.version(Version1)
		m.fields(f)
	})
}

// String returns the registration without its token.
func (m Register1) String() string {
	return registrationText("register", m.Role, m.HostID, m.ConnectionID, m.CredentialKind)
}

// Format implements [fmt.Formatter]: every verb prints String, %#v too.
func (m Register1) Format(s fmt.State, _ rune) { fmt.Fprint(s, m.String()) }

// LogValue implements [slog.LogValuer] without the token.
func (m Register1) LogValue() slog.Value { return slog.StringValue(m.String()) }

// MarshalJSON hides the token as well; see [Register.MarshalJSON].
func (m Register1) MarshalJSON() ([]byte, error) { return json.Marshal(m.String()) }

// A frame on the host's socket is  version:1 | flags:1 | stream id:16 | bytes.
const (
	FrameVersion   = 1
	FrameHeaderLen = 1 + 1 + len(ID{})
	MaxHostFrame   = 1<<20 - 1 // header included: one byte more kills a Python host
	MaxClientFrame = 1 << 20   // on a client's socket, where there is no header
	MaxHostPayload = MaxHostFrame - FrameHeaderLen
	OwnClientFrame = 256 << 10 // what our own client sends, because field brokers do not split
)

// Flags say what a frame is. They are values, not bits: no two go together.
type Flags byte

// On the wire: never renumber, never reuse.
const (
	FlagData  Flags = 2 // 1 or more opaque bytes
	FlagClose Flags = 4 // no payload; ends the stream
)

// AppendFrame appends one frame to b. The caller keeps payload within
// [MaxHostPayload] (see [SplitPayload]), not empty for FlagData and empty for
// FlagClose; [ParseFrame] refuses anything else.
func AppendFrame(b []byte, id ID, flags Flags, payload []byte) []byte {
	b = slices.Grow(b, FrameHeaderLen+len(payload))
	b = append(b, FrameVersion, byte(flags))
	b = append(b, id[:]...)
	return append(b, payload...)
}

// ParseFrame splits one frame. The payload aliases b. The errors are
// [ErrFrameSize], [ErrVersion] and [ErrFlags].
func ParseFrame(b []byte) (id ID, flags Flags, payload []byte, err error) {
	if len(b) < FrameHeaderLen || len(b) > MaxHostFrame {
		return ID{}, 0, nil, fmt.Errorf("%w: %d bytes", ErrFrameSize, len(b))
	}
	if b[0] != FrameVersion {
		return ID{}, 0, nil, fmt.Errorf("%w: frame version %d", ErrVersion, b[0])
	}
	flags, payload = Flags(b[1]), b[FrameHeaderLen:]
	switch {
	case flags != FlagData && flags != FlagClose:
		return ID{}, 0, nil, fmt.Errorf("%w: %#x", ErrFlags, byte(flags))
	case flags == FlagData && len(payload) == 0:
		return ID{}, 0, nil, fmt.Errorf("%w: data without a byte", ErrFrameSize)
	case flags == FlagClose && len(payload) != 0:
		return ID{}, 0, nil, fmt.Errorf("%w: close with %d bytes", ErrFrameSize, len(payload))
	}
	return ID(b[2:FrameHeaderLen]), flags, payload, nil
}

// SplitPayload yields p in order, in pieces of at most limit bytes that alias
// p; none for an empty p. A limit that is not positive is [MaxHostPayload].
func SplitPayload(p []byte, limit int) iter.Seq[[]byte] {
	if limit <= 0 {
		limit = MaxHostPayload
	}
	return slices.Chunk(p, limit)
}
