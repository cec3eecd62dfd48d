// Package bench measures what a broker costs: how fast bytes, messages and new
// connections are through it, as ratios to the least that a hop can cost.
//
// Everything leads to one origin, which speaks the pinned TLS 1.3 of a host, by
// five paths:
//
//	direct   device > origin: no hop at all
//	splice   device > a bare TCP splice > origin: io.Copy between TCP sockets,
//	         the kernel does the work; the limit that ratios are taken to
//	relay    device > a relay that ends an outer TLS on both sides > origin, with
//	         a connection for each stream and no multiplexer: the least that
//	         crossing somebody else's TLS twice costs
//	tls      device > broker > host over transport tls (yamux in the outer TLS)
//	wss      the same over transport wss
//
// The inner TLS is the same on all of them and the origin is the host's own
// process, so what differs is the way between. Device, broker, host with origin,
// and splice with relay are a process each, made of the code of the real commands; the
// device is the one that measures. A round measures every path, in an order that
// rotates; figures are medians over the rounds, ratios are taken within a round
// and then their median, so that a busy machine hurts all paths alike.
//
// Measured: bulk one way on one stream, down and up (bytes that arrived, by the
// time until the last of them did); a 1 KiB message there and back, one at a
// time; new connections (dial, inner handshake, one byte back), 16 at once; CPU
// time of all processes for each gigabyte; what the broker allocates for each
// message; what an idle stream holds in the broker.
//
// Not measured: a real network. Loopback has no delay, no loss and one clock for
// all processes, so that throughput here says what the processors do. Windows
// against delay and small messages beside bulk on a slow link are the business of
// reach/link's tests. Neither are many devices or hosts at a time.
package bench

import (
	"context"
	"net"
	"time"
)

// The paths, in the order of the table.
const (
	Direct = "direct"
	Splice = "splice"
	Relay  = "relay"
	TLS    = "tls"
	WSS    = "wss"
)

// Paths lists all paths.
var Paths = []string{Direct, Splice, Relay, TLS, WSS}

// A Dialer opens a connection to the origin, without the inner handshake.
type Dialer func(ctx context.Context) (net.Conn, error)

// Config says how long to measure.
type Config struct {
	Rounds int           // how often every path is measured
	Time   time.Duration // of one measurement
	Idle   int           // streams of the idle measurement, 0 leaves it out; at most 200
	// Progress hears what is being done; nil does not care.
	Progress func(string)
}

// Full takes less than a minute.
func Full() Config { return Config{Rounds: 5, Time: 350 * time.Millisecond, Idle: 200} }

// Short takes less than 15 seconds: enough to see that everything works and
// what is wrong by a factor.
func Short() Config { return Config{Rounds: 3, Time: 100 * time.Millisecond, Idle: 100} }
