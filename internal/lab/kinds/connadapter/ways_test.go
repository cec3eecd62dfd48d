package connadapter

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/lab/kinds"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A way gives both ends of new connections between a device and a host.
type way struct {
	tls  bool // the ends are crypto/tls's
	dial func(context.Context) (net.Conn, error)
	host *handout
}

// ways are all kinds of connections that a program gets from us.
var ways = map[string]func(testing.TB) *way{
	"broker over tls":       func(t testing.TB) *way { return opaque(t, carrier.TLS) },
	"broker over wss":       func(t testing.TB) *way { return opaque(t, carrier.WSS) },
	"pinned":                func(t testing.TB) *way { return pinned(t, endpoints.RolePluginProxy) },
	"pinned through broker": func(t testing.TB) *way { return pinned(t, endpoints.RoleOutboundBroker) },
}

// opaque is a stream through a broker, without the TLS that belongs inside.
func opaque(t testing.TB, transport carrier.Transport) *way {
	s := kinds.NewSite(t, nil)
	only := []carrier.Transport{transport}
	c := s.Host(func(c *connector.Config) { c.Transports = only })
	d := s.Device(s.Route("device"), func(c *reach.DialerConfig) { c.Transports = only })
	return &way{host: newHandout(t, c), dial: d.DialContext}
}

// pinned is what reach.Client gives: TLS to the host's key, directly or through
// a broker.
func pinned(t testing.TB, role endpoints.Role) *way {
	s := kinds.NewSite(t, nil)
	id, err := pins.New([]string{"127.0.0.1"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	ln := kinds.Listen(t)
	addr := ln.Addr().String()
	if role == endpoints.RoleOutboundBroker {
		_ = ln.Close()
		ln = s.Host(nil)
	}
	client, err := reach.New(reach.Config{Profile: s.Profile(id, addr, s.Route("device")), Outer: s.CA.Client(), Only: role})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return &way{tls: true, host: newHandout(t, tls.NewListener(ln, id.ServerConfig())),
		dial: func(ctx context.Context) (net.Conn, error) {
			conn, _, err := client.DialContext(ctx)
			return conn, err
		}}
}

// device opens a connection; the host's end waits to be accepted.
func (w *way) device(t testing.TB) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), kinds.Patience)
	defer cancel()
	c, err := w.dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// ends opens a connection and gives both ends.
func (w *way) ends(t testing.TB) (device, host net.Conn) {
	t.Helper()
	device, host = w.device(t), w.host.take(t)
	// A device that closes before it has read the session tickets resets its
	// TCP connection, as every TLS 1.3 client does: let it read them first.
	if _, err := host.Write([]byte{1}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(device, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return device, host
}

// A handout accepts at once and finishes handshakes, so that dials succeed
// whether somebody takes the connection already or not. It is a net.Listener.
type handout struct {
	net.Listener
	conns <-chan net.Conn
	over  context.Context
	end   context.CancelFunc
}

func newHandout(t testing.TB, ln net.Listener) *handout {
	h := &handout{Listener: ln}
	h.over, h.end = context.WithCancel(context.Background())
	t.Cleanup(h.end)
	h.conns = kinds.Accepted(t, ln, func(c net.Conn) error {
		if c, ok := c.(*tls.Conn); ok {
			return c.HandshakeContext(h.over)
		}
		return nil
	})
	return h
}

func (h *handout) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.over.Done():
		return nil, net.ErrClosed
	}
}

func (h *handout) Close() error {
	h.end()
	return h.Listener.Close()
}

func (h *handout) take(t testing.TB) net.Conn {
	t.Helper()
	select {
	case c := <-h.conns:
		return c
	case <-time.After(kinds.Patience):
		t.Fatal("the host accepted nothing")
		return nil
	}
}

// each runs test for all ways at once.
func each(t *testing.T, test func(*testing.T, *way)) {
	for name, make := range ways {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, make(t))
		})
	}
}

// pair dials and closes both ends with the test.
func (w *way) pair(t testing.TB) (device, host net.Conn) {
	device, host = w.ends(t)
	t.Cleanup(func() { _ = device.Close(); _ = host.Close() })
	return device, host
}

// roundTrip proves that both directions work.
func roundTrip(t testing.TB, a, b net.Conn) {
	t.Helper()
	for _, dir := range [][2]net.Conn{{a, b}, {b, a}} {
		sent, got := []byte("there and back"), make([]byte, 14)
		if _, err := dir[0].Write(sent); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(dir[1], got); err != nil || string(got) != string(sent) {
			t.Fatalf("read %q, %v", got, err)
		}
	}
}
