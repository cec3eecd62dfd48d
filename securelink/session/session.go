// Package session is who may come in: pairing codes, paired devices, their
// sessions and grants, and the socket on which a device proves itself.
//
// One idea holds it together: a device is paired once, by a code that a person
// carried to it, and from then on its authority only shrinks. Sessions end,
// grants run out, the operator and the device itself may shorten or revoke; a
// refresh token renews a session within what is left and never beyond. More
// authority needs a new pairing.
//
// What ends, ends at once: everything live that rests on a session (sockets,
// streams, broker routes) is tracked here and is ended when the session is
// revoked, replaced or runs out, on time and not at the next request.
//
// Nothing raw is kept. Session and refresh tokens are stored as SHA-256
// digests, codes in memory only and as keyed digests; no token or code is in a
// log line or an error. The state is one file, owner-only, replaced
// atomically; a file that cannot be read stops the start, because starting
// empty would hide that every device was forgotten.
//
// The package knows neither TLS nor brokers: callers say where a peer came
// from ([Source]) and how broker routes are made ([Routes]).
package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/hermes-reach/hermes-reach/securelink/session/guard"
)

// Kind is how a peer reached the host.
type Kind uint8

const (
	Direct Kind = iota // a connection of its own: the peer address is its real address
	Reach              // through a broker: the address is the broker's word
)

// Source is where an attempt to authenticate came from. Failures are counted
// by it, so that one peer's mistakes do not lock out another.
type Source struct {
	Kind Kind
	// Key tells peers apart. Direct: the real peer address without its port
	// (IPv6 peers are counted by their /64). Reach: the broker's source tag,
	// empty when the broker gives none (protocol 1); then all of that broker's
	// peers are one source for codes, and tokens are not counted.
	Key string
	// Broker names the broker of a Reach peer. All guesses at codes that come
	// through one broker are bounded together, because its tags prove nothing.
	Broker string
}

// peer is a source as failures are counted by it. Direct IPv6 peers are
// counted by their /64: one line gives a peer all of those addresses.
func (s Source) peer() guard.Peer {
	if s.Kind == Reach {
		if s.Key == "" {
			return guard.Peer{Key: "broker " + s.Broker, Broker: cmp.Or(s.Broker, "?"), Shared: true}
		}
		return guard.Peer{Key: "tag " + s.Broker + " " + brief(s.Key), Broker: cmp.Or(s.Broker, "?")}
	}
	a, err := netip.ParseAddr(s.Key)
	if err != nil {
		return guard.Peer{Key: "direct " + brief(s.Key)}
	}
	a = a.Unmap().WithZone("")
	if a.Is6() {
		p, _ := a.Prefix(64) // 64 bits are never too many for an IPv6 address
		a = p.Addr()
	}
	return guard.Peer{Key: "direct " + a.String()}
}

// brief bounds a key that a broker may have chosen.
func brief(key string) string {
	if len(key) <= maxText {
		return key
	}
	return publicID(digestOf(key))
}

// RouteRequest asks for a broker route for one session.
type RouteRequest struct {
	CredentialID string    // base64url of the first 16 bytes of SHA-256(session token)
	DeviceIDHash string    // base64url of SHA-256(device id, or session token where there is none)
	Expires      time.Time // the session's end, or 30 days from now for one without end
	Broker       string    // the broker this device came through, "" for none: its credential goes first
}

// RouteCredential is what lets a device reach this host through a broker. It
// is a secret; it prints without its token.
type RouteCredential struct {
	BrokerURL    string // byte for byte the broker.url of the device's candidate
	HostID       string
	CredentialID string
	Token        string
	Expires      time.Time
}

func (r RouteCredential) String() string {
	return fmt.Sprintf("route %s at %s", r.CredentialID, r.BrokerURL)
}

// LogValue keeps the token out of logs.
func (r RouteCredential) LogValue() slog.Value { return slog.StringValue(r.String()) }

// Routes makes and takes back broker routes. Calls may come from several
// goroutines at once; each has a deadline ([Limits].RouteTimeout).
type Routes interface {
	// Issue publishes the route of one session and returns its credentials, one
	// a broker. Asked again with the same request it returns the same tokens.
	Issue(ctx context.Context, r RouteRequest) ([]RouteCredential, error)
	// Withdraw takes a route back at every broker. It must be safe to repeat
	// and to call for an id that was never issued; an error means "try again".
	Withdraw(ctx context.Context, credentialID string) error
}

// Joined says that a device was paired.
type Joined struct {
	Device    Device
	Path      string // the path it came by, as [Peer].Path
	PairingID string // of the code that it used up
}

// CodeEnd says that a pairing code is no longer usable. PairingID is the one
// given to [Store.MintCode]: what was published for the code can be revoked.
type CodeEnd struct {
	PairingID string
	Why       CodeFate
}

// CodeFate is why a pairing code ended.
type CodeFate string

const (
	CodeUsed      CodeFate = "used"
	CodeCancelled CodeFate = "cancelled"
	CodeExpired   CodeFate = "expired"
	CodeVoided    CodeFate = "voided" // too many wrong guesses while it lived
)

// Options are what a [Store] needs besides its folder. The zero value works.
type Options struct {
	Now     func() time.Time // nil: time.Now
	Log     *slog.Logger     // nil: nothing is logged
	Version string           // server_version in auth.ok
	Routes  Routes           // nil: no broker routes
	// OnJoin and OnCode are told of pairings and of codes that ended, after it
	// is durable and after the device has its answer. They are called from the
	// goroutine that caused it, without locks held, and should return soon.
	OnJoin func(Joined)
	OnCode func(CodeEnd)
	Limits Limits
}

// Limits bound everything that a peer can make us keep or wait for. A zero
// field takes its default.
type Limits struct {
	CodeTTL     time.Duration // life of a pairing code; 10 min
	Codes       int           // live codes at once; 64
	CodeGuesses int           // wrong codes, from anywhere, that void a live code; 300

	CodeFailures   int           // wrong codes by one source within CodeWindow that block it; 10
	CodeWindow     time.Duration // 60 s
	CodeBlock      time.Duration // 120 s
	BrokerFailures int           // wrong codes by one broker within CodeWindow; 60
	TokenFailures  int           // wrong tokens by one source within TokenWindow that block it; 5
	TokenWindow    time.Duration // 60 s
	TokenBlock     time.Duration // 300 s
	Sources        int           // sources remembered one by one; 4096

	Devices    int           // paired devices; 1024
	Sessions   int           // sessions of one device, the least recent goes; 8
	SessionTTL time.Duration // of a code minted without one; 30 days
	RefreshTTL time.Duration // of a refresh token, not renewed by use; 180 days
	FileBytes  int64         // the state file; 16 MiB

	Waiting        int           // sockets that have not authenticated yet; 64
	WaitingPeer    int           // of them by one peer; 16
	Sockets        int           // live sockets of one device, the oldest goes; 16
	FirstFrameWait time.Duration // 30 s
	FirstFrame     int64         // bytes of a message before auth.ok; 64 KiB
	Message        int64         // bytes of a message after it; 4 MiB
	Heartbeat      time.Duration // between pings, and the wait for a pong; 30 s
	WriteTimeout   time.Duration // for one message; 30 s
	CloseGrace     time.Duration // for the peer's half of a close; 1 s
	RouteTimeout   time.Duration // for one call of Routes; 5 s
}

func (l Limits) withDefaults() Limits {
	def(&l.CodeTTL, 10*time.Minute)
	def(&l.Codes, 64)
	def(&l.CodeGuesses, 300)
	def(&l.CodeFailures, 10)
	def(&l.CodeWindow, time.Minute)
	def(&l.CodeBlock, 2*time.Minute)
	def(&l.BrokerFailures, 60)
	def(&l.TokenFailures, 5)
	def(&l.TokenWindow, time.Minute)
	def(&l.TokenBlock, 5*time.Minute)
	def(&l.Sources, 4096)
	def(&l.Devices, 1024)
	def(&l.Sessions, 8)
	def(&l.SessionTTL, 30*day)
	def(&l.RefreshTTL, 180*day)
	def(&l.FileBytes, 16<<20)
	def(&l.Waiting, 64)
	def(&l.WaitingPeer, 16)
	def(&l.Sockets, 16)
	def(&l.FirstFrameWait, 30*time.Second)
	def(&l.FirstFrame, 64<<10)
	def(&l.Message, 4<<20)
	def(&l.Heartbeat, 30*time.Second)
	def(&l.WriteTimeout, 30*time.Second)
	def(&l.CloseGrace, time.Second)
	def(&l.RouteTimeout, 5*time.Second)
	return l
}

func (l Limits) guard() guard.Limits {
	return guard.Limits{Codes: l.CodeFailures, CodeWindow: l.CodeWindow, CodeBlock: l.CodeBlock,
		Tokens: l.TokenFailures, TokenWindow: l.TokenWindow, TokenBlock: l.TokenBlock,
		BrokerCodes: l.BrokerFailures, Sources: l.Sources}
}

// def sets a limit that was not given. A limit below zero is no limit anybody
// can mean, so it takes the default too.
func def[T int | int64 | time.Duration](v *T, d T) {
	if *v <= 0 {
		*v = d
	}
}

// A Device is one paired device as people and programs see it.
type Device struct {
	ID         string               `json:"id"`        // ours: 16 hex digits, stable while the device keeps its own id
	DeviceID   string               `json:"device_id"` // its own word for itself; empty for a device that names none
	Name       string               `json:"name"`
	Model      string               `json:"model,omitempty"`
	Platform   string               `json:"platform,omitempty"`
	Surface    string               `json:"surface,omitempty"`
	FormFactor string               `json:"form_factor,omitempty"`
	Created    time.Time            `json:"created"` // when it was paired
	LastSeen   time.Time            `json:"last_seen"`
	Expires    time.Time            `json:"expires"` // of its longest session; [Forever] for one without end
	Grants     map[string]time.Time `json:"grants"`  // of that session: name to end
	Path       string               `json:"path"`    // the path last used
	Sessions   int                  `json:"sessions"`
	Live       int                  `json:"live"` // what is open right now
	Renewable  bool                 `json:"renewable"`
}

// A Session is a proof of pairing that held when it was looked up. It is a
// copy: it does not change when the session does.
type Session struct {
	ID      string // the credential id: names the session, proves nothing
	Device  Device
	Created time.Time
	Expires time.Time
	Grants  map[string]time.Time
	token   digest
}

// Allows says whether the session's grants name it and it has not run out.
func (s Session) Allows(name string, now time.Time) error {
	end, ok := s.Grants[name]
	switch {
	case !now.Before(s.Expires):
		return fmt.Errorf("%w: expired", ErrUnauthorized)
	case !ok:
		return fmt.Errorf("%w: this device has no grant for %s", ErrGrant, name)
	case !now.Before(end):
		return fmt.Errorf("%w: the grant for %s has run out", ErrGrant, name)
	}
	return nil
}

// Errors a caller acts on.
var (
	ErrUnauthorized = errors.New("session: no such session") // unknown, expired and revoked alike
	ErrGrant        = errors.New("session: not granted")
	ErrNoDevice     = errors.New("session: no paired device has this id")
	ErrAmbiguous    = errors.New("session: several paired devices begin like this: give more of the id")
	ErrShortID      = errors.New("session: give at least 4 characters of the device's id")
	ErrIncrease     = errors.New("session: this would add authority: pair the device again instead")
	ErrFull         = errors.New("session: limit reached")
	ErrCorrupt      = errors.New("session: the state file cannot be trusted")
	ErrClosed       = errors.New("session: store closed")
)

// Reasons of auth.fail, word for word what devices in the field know.
const (
	ReasonTimeout = "Authentication timeout"
	ReasonFormat  = "Invalid message format"
	ReasonFirst   = "First message must be system/auth"
	ReasonInvalid = "Invalid pairing code or session token"
)

// AuthError is a refusal to authenticate. Reason is one of the Reason
// constants (or, on a device, whatever its host said); it never tells which
// credential was wrong.
type AuthError struct{ Reason string }

func (e *AuthError) Error() string { return "session: authentication refused: " + e.Reason }

// discard is the logger of those who gave none.
var discard = slog.New(slog.DiscardHandler)
