// Package link runs a Reach session: on one byte stream between a peer and a
// broker, which package carrier made, many streams.
//
// The layers, from the network up:
//
//	carrier   one ordered byte stream (package carrier)
//	joiner    below yamux: a header and its body leave in one write
//	Session   yamux with a watchdog, the control stream, resets by stream id
//	Stream    one yamux stream with half-close and abort; what a splice uses
//	Conn      a Stream as a whole net.Conn: deadlines and Close never wait for
//	          a link that hangs; what ends use
//
// It is shared by broker, connector and device, and knows nothing of what the
// streams carry (docs/protocol/reach-v2.md, sections Transports and Messages).
package link

import (
	"errors"
	"io"
	"log/slog"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/hermes-reach/hermes-reach/reach/carrier"
)

// Timing and sizes of a session. The values are part of what both ends expect
// of each other: docs/protocol/reach-v2.md, section Transports.
const (
	// Window is how many bytes of one stream may be under way or unread: what
	// a stopped reader holds, and the most one stream carries in a round trip.
	Window = 1 << 20

	// PingInterval is how often each end sends something, whatever happens.
	PingInterval = 10 * time.Second

	// DeadAfter is how long an end reads nothing at all before it gives the
	// link up. A slow link never gets there: in each direction come either
	// data or the other end's pings.
	DeadAfter = 35 * time.Second

	// writeTimeout bounds one write inside yamux. It only has to end at some
	// time: a dead link is found by DeadAfter, and a slow one is no fault.
	writeTimeout = 5 * time.Minute

	// openTimeout bounds the acknowledgement of a new stream by a peer that
	// is alive; yamux closes the session when it passes.
	openTimeout = time.Minute

	// backlog is how many streams may wait to be accepted.
	backlog = 256
)

// Errors a caller acts on.
var (
	// ErrDead says that nothing was heard from the other end for DeadAfter.
	ErrDead = errors.New("the link is dead: nothing heard from the other end")

	// ErrSessionClosed says that the session is over, in good order or not.
	ErrSessionClosed = errors.New("the session is closed")
)

// Config adjusts a session. The zero value is right for use.
type Config struct {
	// Window overrides Window; 0 keeps it. At least 256 KiB.
	Window int
	// DeadAfter overrides DeadAfter; 0 keeps it. A shorter one makes pings come
	// more often, and must be the same at both ends: each is kept alive by the
	// pings of the other.
	DeadAfter time.Duration
	// Log gets what goes wrong inside the session; nil discards it.
	Log *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Window == 0 {
		c.Window = Window
	}
	if c.DeadAfter == 0 {
		c.DeadAfter = DeadAfter
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

func (c Config) yamux() *yamux.Config {
	return &yamux.Config{
		AcceptBacklog:          backlog,
		EnableKeepAlive:        true,
		KeepAliveInterval:      min(PingInterval, c.DeadAfter*2/7), // three and a half fit
		ConnectionWriteTimeout: writeTimeout,
		MaxStreamWindowSize:    uint32(c.Window),
		StreamOpenTimeout:      openTimeout,
		StreamCloseTimeout:     0, // a half-closed stream may live as long as it likes
		LogOutput:              nil,
		Logger:                 yamuxLog{c.Log},
	}
}

// yamuxLog hands yamux's complaints to slog at debug level: each of them also
// arrives as an error where it matters.
type yamuxLog struct{ log *slog.Logger }

func (l yamuxLog) Print(v ...any)            { l.log.Debug("yamux", "message", v) }
func (l yamuxLog) Printf(f string, v ...any) { l.log.Debug("yamux", "message", f, "args", v) }
func (l yamuxLog) Println(v ...any)          { l.Print(v...) }

var _ io.ReadWriteCloser = (*carrier.Carrier)(nil)
