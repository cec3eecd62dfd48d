package wire

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/netip"
	"time"
)

// Bounds of protocol 2 members.
const (
	MaxSlot     = 7           // a host holds at most 8 sessions to one broker
	MaxAgent    = 128         // printable ASCII characters
	MaxFeatures = 16          // names in one list
	MaxFeature  = 64          // visible ASCII characters in one name
	MaxVia      = 64          // printable ASCII characters, of source_tag too
	maxSeconds  = 366 * 86400 // of anything that waits
)

// Version2 is the protocol_version of protocol 2.
const Version2 = 2

// A Message is one message of protocol 2: a pointer to one of the structs
// below (only the pointer has the methods, so that a type switch on the value
// does not compile). Missing optional members are zero.
type Message interface {
	messageType() string
	fields(*fields) // reads, checks and writes alike
}

// Register opens a session. It is the first message on its first stream, which
// becomes the control stream. It prints without its token.
type Register struct {
	ProtocolVersion int // 2; written as 2 when 0
	Role            Role
	HostID          ID
	ConnectionID    ID // fresh for each attempt
	CredentialKind  Kind
	Token           string   // secret
	Agent           string   // "hermes-reach/1.2.3"
	InstanceID      ID       // fresh for each process
	Features        []string // unknown ones are ignored by the peer
	Slot            *int     // hosts only: 0 to 7
	Epoch           int64    // hosts only: raised at each process start
}

// Limits are what the broker grants a session. A zero is a limit not told.
type Limits struct {
	Streams      int // live streams in this session
	StreamWindow int // bytes one unread stream may hold
	IdleSeconds  int // a stream without payload this long is ended
}

// Registered answers Register.
type Registered struct {
	SessionID    ID
	Limits       Limits
	ObservedAddr string // "ip:port" the broker sees, "" when it does not say
	Features     []string
	RawPoolKey   RawToken // hosts only, zero when no pool is offered; prints hidden
}

// Dial is a client's first message on a new stream: join me to my host.
type Dial struct{}

// Matched answers Dial once the host has accepted; raw bytes follow it.
type Matched struct {
	StreamID ID
	Raw      *RawOffer // nil: none
}

// Open is the broker's first message on a new stream to the host. It names
// the credential by exactly one of the two ids: CredentialID for KindRoute,
// PairingID for KindBootstrap.
type Open struct {
	StreamID         ID
	HostConnectionID ID     // the registration it is meant for; any other is not obeyed
	Via              string // how the client came in, the broker's word
	SourceTag        string // keyed hash of the client's address, the broker's word
	CredentialKind   Kind
	CredentialID     string
	PairingID        string
	Raw              *RawOffer // nil: none
}

// Accept answers Open; raw bytes follow it.
type Accept struct{}

// Refuse answers Open with a no.
type Refuse struct{ Code Code }

// PublishBootstrap asks the broker to know a one-use credential.
type PublishBootstrap struct {
	RequestID   string // 1 to 128 characters, repeated in the answer
	PairingID   string
	TokenSHA256 Digest
	ExpiresAt   Expiry
	MaxUses     int // 1
}

// PublishRoute asks the broker to know a durable credential, or replaces it.
type PublishRoute struct {
	RequestID    string
	CredentialID string
	TokenSHA256  Digest
	ExpiresAt    Expiry
	DeviceIDHash Digest
}

// Revoke takes a credential back: CredentialID for KindRoute, PairingID for
// KindBootstrap.
type Revoke struct {
	RequestID      string
	CredentialKind Kind
	CredentialID   string
	PairingID      string
}

// Published answers PublishBootstrap and PublishRoute.
type Published struct {
	RequestID      string
	CredentialKind Kind
	CredentialID   string
	PairingID      string
}

// Revoked answers Revoke.
type Revoked struct {
	RequestID      string
	CredentialKind Kind
	CredentialID   string
	PairingID      string
}

// Error refuses a register or a dial, or one request when it names it. It is
// never answered.
type Error struct {
	Code       Code
	RequestID  string        // "": not about one request
	RetryAfter time.Duration // 0: not said; whole seconds on the wire, rounded up
}

// Refused returns the message as an error.
func (m *Error) Refused() *RefusedError {
	return &RefusedError{Code: m.Code, RetryAfter: m.RetryAfter, RequestID: m.RequestID}
}

// Reset says that a stream was aborted, and why. CodeClosed is milder: the
// sender reads no more of it, while what it already sent stays readable.
type Reset struct {
	StreamID ID
	Code     Code
}

// BootstrapReused tells the host that somebody tried a used bootstrap.
type BootstrapReused struct {
	PairingID string
	Via       string
}

// Drain says: no new streams here; live ones run until the deadline.
type Drain struct{ DeadlineSeconds int }

// Ping asks for a Pong with the same T: an opaque number, by custom the
// sender's clock in microseconds.
type Ping struct{ T int64 }

// Pong answers Ping.
type Pong struct{ T int64 }

// UseRaw tells both ends that this stream's bytes go over the fast path.
type UseRaw struct{}

// UseSession tells the host that they do not.
type UseSession struct{}

// newMessage makes the empty message of each type.
var newMessage = map[string]func() Message{
	"register":          func() Message { return new(Register) },
	"registered":        func() Message { return new(Registered) },
	"dial":              func() Message { return new(Dial) },
	"matched":           func() Message { return new(Matched) },
	"open":              func() Message { return new(Open) },
	"accept":            func() Message { return new(Accept) },
	"refuse":            func() Message { return new(Refuse) },
	"publish_bootstrap": func() Message { return new(PublishBootstrap) },
	"publish_route":     func() Message { return new(PublishRoute) },
	"revoke":            func() Message { return new(Revoke) },
	"published":         func() Message { return new(Published) },
	"revoked":           func() Message { return new(Revoked) },
	"error":             func() Message { return new(Error) },
	"reset":             func() Message { return new(Reset) },
	"bootstrap_reused":  func() Message { return new(BootstrapReused) },
	"drain":             func() Message { return new(Drain) },
	"ping":              func() Message { return new(Ping) },
	"pong":              func() Message { return new(Pong) },
	"raw":               func() Message { return new(UseRaw) },
	"session":           func() Message { return new(UseSession) },
}

func (*Register) messageType() string         { return "register" }
func (*Registered) messageType() string       { return "registered" }
func (*Dial) messageType() string             { return "dial" }
func (*Matched) messageType() string          { return "matched" }
func (*Open) messageType() string             { return "open" }
func (*Accept) messageType() string           { return "accept" }
func (*Refuse) messageType() string           { return "refuse" }
func (*PublishBootstrap) messageType() string { return "publish_bootstrap" }
func (*PublishRoute) messageType() string     { return "publish_route" }
func (*Revoke) messageType() string           { return "revoke" }
func (*Published) messageType() string        { return "published" }
func (*Revoked) messageType() string          { return "revoked" }
func (*Error) messageType() string            { return "error" }
func (*Reset) messageType() string            { return "reset" }
func (*BootstrapReused) messageType() string  { return "bootstrap_reused" }
func (*Drain) messageType() string            { return "drain" }
func (*Ping) messageType() string             { return "ping" }
func (*Pong) messageType() string             { return "pong" }
func (*UseRaw) messageType() string           { return "raw" }
func (*UseSession) messageType() string       { return "session" }

func (*Dial) fields(*fields)        {}
func (*Accept) fields(*fields)      {}
func (*UseRaw) fields(*fields)      {}
func (*UseSession) fields(*fields)  {}
func (m *Refuse) fields(f *fields)  { f.code("code", &m.Code) }
func (m *Drain) fields(f *fields)   { number(f, "deadline_seconds", &m.DeadlineSeconds, 0, maxSeconds) }
func (m *Ping) fields(f *fields)    { number(f, "t", &m.T, math.MinInt64, math.MaxInt64) }
func (m *Pong) fields(f *fields)    { number(f, "t", &m.T, math.MinInt64, math.MaxInt64) }
func (m *Matched) fields(f *fields) { f.id("stream_id", &m.StreamID); f.rawOffer(&m.Raw) }

func (m *Register) fields(f *fields) {
	if !f.reading() && m.ProtocolVersion != 0 && m.ProtocolVersion != Version2 {
		f.err = fmt.Errorf("%w: protocol %d in a register of protocol 2", ErrVersion, m.ProtocolVersion)
		return
	}
	f.version(Version2)
	f.registration(&m.Role, &m.HostID, &m.ConnectionID, &m.CredentialKind, &m.Token)
	f.visible("agent", &m.Agent, MaxAgent, true)
	f.id("instance_id", &m.InstanceID)
	f.features(&m.Features)
	if m.Role != RoleHost {
		f.absent("slot", m.Slot != nil)
		f.absent("epoch", m.Epoch != 0)
	} else {
		f.slot(&m.Slot)
		number(f, "epoch", &m.Epoch, 0, math.MaxInt64)
	}
	if f.reading() && f.err == nil {
		m.ProtocolVersion = Version2
	}
}

func (f *fields) slot(p **int) {
	if f.reading() {
		*p = new(int)
	} else if *p == nil {
		f.fail("slot", "is missing")
		return
	}
	number(f, "slot", *p, 0, MaxSlot)
}

func (f *fields) features(p *[]string) {
	f.texts("features", p, MaxFeatures, func(s string) bool { return s != "" && visible(s, MaxFeature, false) },
		"at most 16 names of 1 to 64 visible ASCII characters")
}

func (m *Registered) fields(f *fields) {
	f.id("session_id", &m.SessionID)
	f.nested("limits", func(f *fields) {
		number(f, "streams", &m.Limits.Streams, 0, math.MaxInt32)
		number(f, "stream_window", &m.Limits.StreamWindow, 0, math.MaxInt32)
		number(f, "idle_seconds", &m.Limits.IdleSeconds, 0, math.MaxInt32)
	})
	if f.has("observed_addr", m.ObservedAddr != "") {
		text(f, "observed_addr", &m.ObservedAddr, func(s string) bool {
			_, err := netip.ParseAddrPort(s)
			return err == nil && visible(s, MaxVia, false)
		}, "ip:port")
	}
	f.features(&m.Features)
	if f.has("raw_pool_key", !m.RawPoolKey.IsZero()) {
		exact(f, "raw_pool_key", m.RawPoolKey[:])
	}
}

func (f *fields) rawOffer(p **RawOffer) {
	if !f.has("raw", *p != nil) {
		return
	}
	if f.reading() {
		*p = new(RawOffer)
	}
	f.nested("raw", func(f *fields) {
		exact(f, "token", (*p).Token[:])
		number(f, "deadline_seconds", &(*p).DeadlineSeconds, 1, maxSeconds)
	})
}

func (m *Open) fields(f *fields) {
	f.id("stream_id", &m.StreamID)
	f.id("host_connection_id", &m.HostConnectionID)
	f.visible("via", &m.Via, MaxVia, true)
	f.visible("source_tag", &m.SourceTag, MaxVia, true)
	f.credential(&m.CredentialKind, &m.CredentialID, &m.PairingID)
	f.rawOffer(&m.Raw)
}

func (m *PublishBootstrap) fields(f *fields) {
	f.opaque("request_id", &m.RequestID)
	f.bootstrap(&m.PairingID, &m.TokenSHA256, &m.ExpiresAt, &m.MaxUses)
}

func (m *PublishRoute) fields(f *fields) {
	f.opaque("request_id", &m.RequestID)
	f.route(&m.CredentialID, &m.TokenSHA256, &m.ExpiresAt, &m.DeviceIDHash)
}

func (m *Revoke) fields(f *fields) {
	f.opaque("request_id", &m.RequestID)
	f.credential(&m.CredentialKind, &m.CredentialID, &m.PairingID)
}

func (m *Published) fields(f *fields) {
	f.opaque("request_id", &m.RequestID)
	f.credential(&m.CredentialKind, &m.CredentialID, &m.PairingID)
}

func (m *Revoked) fields(f *fields) {
	f.opaque("request_id", &m.RequestID)
	f.credential(&m.CredentialKind, &m.CredentialID, &m.PairingID)
}

func (m *Error) fields(f *fields) {
	f.code("code", &m.Code)
	if f.has("request_id", m.RequestID != "") {
		f.opaque("request_id", &m.RequestID)
	}
	if f.has("retry_after", m.RetryAfter != 0) {
		f.seconds("retry_after", &m.RetryAfter, maxSeconds)
	}
}

func (m *Reset) fields(f *fields) {
	f.id("stream_id", &m.StreamID)
	f.code("code", &m.Code)
}

func (m *BootstrapReused) fields(f *fields) {
	f.opaque("pairing_id", &m.PairingID)
	f.visible("via", &m.Via, MaxVia, true)
}

// ParseMessage reads the JSON of one message, without its length. Unknown
// members are ignored; a member twice, a missing one, or one out of its bounds
// is [ErrMalformed]; another protocol_version is [ErrVersion]; a type that is
// not known is an [UnknownTypeError]. The result does not alias body.
func ParseMessage(body []byte) (Message, error) {
	in, err := splitObject(body)
	if err != nil {
		return nil, err
	}
	f := &fields{in: in}
	var kind string
	f.visible("type", &kind, MaxFeature, false)
	if f.err != nil {
		return nil, f.err
	}
	newOne, known := newMessage[kind]
	if !known {
		return nil, &UnknownTypeError{Type: kind}
	}
	m := newOne()
	if m.fields(f); f.err != nil {
		return nil, fmt.Errorf("%s: %w", kind, f.err)
	}
	return m, nil
}

// AppendMessage appends the JSON of m to b, without its length. It refuses
// what [ParseMessage] would refuse; b is then returned as it was.
func AppendMessage(b []byte, m Message) ([]byte, error) {
	return appendJSON(b, m.messageType(), m.fields)
}

// lengthLen is the big-endian u16 in front of each message of protocol 2.
const lengthLen = 2

// WriteMessage writes one message with its length in exactly one Write call,
// so that a message and what another goroutine writes cannot mix.
func WriteMessage(w io.Writer, m Message) error {
	b, err := AppendMessage(make([]byte, lengthLen, 512), m)
	if err != nil {
		return err
	}
	binary.BigEndian.PutUint16(b, uint16(len(b)-lengthLen))
	if _, err := w.Write(b); err != nil {
		return fmt.Errorf("write %s: %w", m.messageType(), err)
	}
	return nil
}

// ReadMessage reads exactly one message and not a byte more: what follows it
// on the stream may be raw payload. It buffers at most [MaxMessage] bytes. The
// error is io.EOF itself if the stream ended before the message, and wraps
// io.ErrUnexpectedEOF if it ended within; else see [ParseMessage].
func ReadMessage(r io.Reader) (Message, error) {
	var head [lengthLen]byte
	if _, err := io.ReadFull(r, head[:]); err == io.EOF {
		return nil, io.EOF
	} else if err != nil {
		return nil, fmt.Errorf("read message length: %w", err)
	}
	n := int(binary.BigEndian.Uint16(head[:]))
	if n > MaxMessage { // before anything is allocated
		return nil, fmt.Errorf("%w: a message of %d bytes, at most %d are allowed", ErrMalformed, n, MaxMessage)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err == io.EOF {
		return nil, fmt.Errorf("read message: %w", io.ErrUnexpectedEOF)
	} else if err != nil {
		return nil, fmt.Errorf("read message: %w", err)
	}
	return ParseMessage(body)
}

// String returns the registration without its token.
func (m Register) String() string {
	return registrationText("register", m.Role, m.HostID, m.ConnectionID, m.CredentialKind)
}

// Format implements [fmt.Formatter]: every verb prints String, %#v too.
func (m Register) Format(s fmt.State, _ rune) { fmt.Fprint(s, m.String()) }

// LogValue implements [slog.LogValuer] without the token.
func (m Register) LogValue() slog.Value { return slog.StringValue(m.String()) }

// MarshalJSON hides the token as well: a log handler may come to it inside
// another value. [AppendMessage] writes the wire form.
func (m Register) MarshalJSON() ([]byte, error) { return json.Marshal(m.String()) }

func registrationText(kind string, role Role, host, conn ID, cred Kind) string {
	return fmt.Sprintf("%s{role %s, host_id %s, connection_id %s, credential_kind %s, token hidden}", kind, role, host, conn, cred)
}
