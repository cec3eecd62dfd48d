package broker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func goroutines() int { return runtime.NumGoroutine() }

// cuts dials connections that can be cut, as when a process is killed.
type cuts struct {
	mu    sync.Mutex
	conns []*net.TCPConn
}

func newCuts() *cuts { return &cuts{} }

func (c *cuts) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns = append(c.conns, conn.(*net.TCPConn))
	return conn, nil
}

// all resets every connection that was dialled.
func (c *cuts) all() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.conns {
		_ = conn.SetLinger(0)
		_ = conn.Close()
	}
	c.conns = nil
}

// reconnect is one round of TestManyReconnectsLeaveNothing.
func reconnect(t *testing.T, s *site, token string, me wire.ID, i int) {
	cut := newCuts()
	host := s.mustRegister(s.asHost(0, 1, me))
	done := make(chan struct{})
	go func() {
		defer close(done)
		st, err := host.sess.AcceptStream(t.Context())
		if err != nil {
			return
		}
		if _, err := link.ReadHeader(st, patience); err == nil {
			_ = wire.WriteMessage(st, &wire.Accept{})
			_, _ = io.Copy(st, st)
		}
	}()
	d := s.dialer(wire.KindRoute, token, func(c *reach.DialerConfig) { c.NetDial = cut.dial })
	conn := s.dial(d)
	echoes(t, conn)
	switch i % 4 { // who ends first, and how
	case 0:
		_ = conn.Close()
	case 1:
		cut.all()
	case 2:
		_ = host.sess.Close()
	case 3:
		_ = d.Close()
	}
	_, _ = conn.Read(make([]byte, 1))
	_ = conn.Close()
	_ = d.Close()
	_ = host.sess.Close()
	<-done
}

// TestDrain: peers are told, a new dial is refused with draining, and what runs
// goes on until the deadline.
func TestDrain(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{Drain: 2 * time.Second})
	var seen states
	c := s.host(func(c *connector.Config) { seen = watchStates(c) }, echo)
	conn := s.dial(s.route(c, "device", nil))
	defer conn.Close()
	client := s.mustRegister(s.asClient(s.stored(wire.KindRoute, "other")))
	start := time.Now()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		s.stop()
	}()
	if m, ok := client.next().(*wire.Drain); !ok || m.DeadlineSeconds != 2 {
		t.Errorf("a client is told %v, want drain in 2 s", m)
	}
	seen.await(t, "told of the drain", func(s connector.SlotStatus) bool { return s.State == "waiting" })
	if _, m := client.dial(); written(t, m) != written(t, &wire.Error{Code: wire.CodeDraining}) {
		t.Errorf("a new dial is answered with %v, want draining", m)
	}
	echoes(t, conn)
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("at the deadline the stream ended with %v, want an error", err)
	}
	if took := time.Since(start); took < 1900*time.Millisecond {
		t.Errorf("the stream was cut after %v, before the deadline", took)
	}
	<-stopped
}

// TestDrainEndsWithTheLastStream: nobody waits for a deadline without need.
func TestDrainEndsWithTheLastStream(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{Drain: time.Hour})
	c := s.host(nil, echo)
	conn := s.dial(s.route(c, "device", nil))
	client := s.mustRegister(s.asClient(s.stored(wire.KindRoute, "other")))
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		s.stop()
	}()
	client.next()
	echoes(t, conn)
	_ = conn.Close()
	select {
	case <-stopped:
	case <-time.After(patience):
		t.Fatal("the broker still waits")
	}
}

// TestBrokerThatLostItsDisk: hosts are back by themselves and tell it again
// which devices may come; nobody pairs again.
func TestBrokerThatLostItsDisk(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{})
	var seen states
	c := s.host(func(c *connector.Config) { seen = watchStates(c) }, echo)
	d := s.route(c, "device", nil)
	seen.await(t, "connected", isConnected)
	echoes(t, s.dial(d))
	s.stop()
	if err := errors.Join(s.store.Close(), os.Remove(s.path)); err != nil {
		t.Fatal(err)
	}
	s.open()
	s.start(s.addr)
	eventually(t, "the host told of its device", func() bool {
		creds, err := s.store.Credentials(s.hostID)
		return err == nil && len(creds) == 1
	})
	conn := s.dial(d)
	defer conn.Close()
	echoes(t, conn)
}

// TestRevocationSurvivesAnOutage: what is taken back while the broker is away
// is taken back when it is there again.
func TestRevocationSurvivesAnOutage(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{})
	c := s.host(nil, echo)
	d := s.route(c, "lost-phone", nil)
	s.stop()
	eventually(t, "the host knows that the broker is away", func() bool { return !c.Connected() })
	err := c.Revoke(t.Context(), wire.KindRoute, "lost-phone")
	for err == nil { // a session that is just ending
		err = c.Revoke(t.Context(), wire.KindRoute, "lost-phone")
	}
	if !errors.Is(err, connector.ErrOffline) {
		t.Fatalf("Revoke = %v, want ErrOffline", err)
	}
	s.start(s.addr)
	eventually(t, "it is revoked", func() bool {
		creds, err := s.store.Credentials(s.hostID)
		return err == nil && len(creds) == 0
	})
	if code := s.refusal(d); code != wire.CodeUnauthorized {
		t.Errorf("the device is refused with %q, want unauthorized", code)
	}
}

// TestRefusedPublicationHurtsNothingElse: neither the session nor its streams,
// nor what was published before.
func TestRefusedPublicationHurtsNothingElse(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{})
	var seen states
	c := s.host(func(c *connector.Config) { seen, c.Sessions = watchStates(c), 1 }, echo)
	d := s.route(c, "device", nil)
	conn := s.dial(d)
	defer conn.Close()
	seen.await(t, "connected", isConnected)
	for i := range store.MaxCredentials - 1 {
		err := s.store.Publish(store.Credential{
			Host: s.hostID, Kind: wire.KindRoute, ID: fmt.Sprint(i), Digest: wire.DigestOf(fmt.Sprint(i)), Expires: time.Now().Add(time.Hour),
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	hour, digest := time.Now().Add(time.Hour), wire.DigestOf("x")
	for name, tt := range map[string]struct {
		pub  connector.Publication
		want wire.Code // "" is refused before it is sent
	}{
		"over the quota":   {connector.Publication{Kind: wire.KindRoute, ID: "more", Digest: digest, Expires: hour}, wire.CodeQuotaExceeded},
		"expired":          {connector.Publication{Kind: wire.KindRoute, ID: "0", Digest: digest, Expires: time.Now().Add(-time.Hour)}, wire.CodeExpired},
		"another's token":  {connector.Publication{Kind: wire.KindRoute, ID: "0", Digest: wire.DigestOf("1"), Expires: hour}, wire.CodeRefused},
		"an impossible id": {connector.Publication{Kind: wire.KindRoute, ID: "a\x00b", Digest: digest, Expires: hour}, ""},
		"no expiry":        {connector.Publication{Kind: wire.KindBootstrap, ID: "p", Digest: digest}, ""},
	} {
		if err := c.Publish(t.Context(), tt.pub); err == nil || wire.CodeOf(err) != tt.want {
			t.Errorf("%s: %v, want the code %q", name, err, tt.want)
		}
	}
	if err := c.Revoke(t.Context(), wire.KindRoute, ""); err == nil {
		t.Error("nothing is revoked")
	}
	echoes(t, conn)
	if code := s.refusal(d); code != "" {
		t.Errorf("a new dial is refused with %q", code)
	}
	select {
	case st := <-seen:
		t.Errorf("the session's state became %+v", st)
	default:
	}
}

// A hole is a line that can go dead: nothing crosses it, and nobody is told.
type hole struct {
	t      *testing.T
	target string
	ln     net.Listener
	all    sync.WaitGroup

	mu    sync.Mutex
	open  chan struct{} // closed while the line works
	conns []net.Conn
}

func newHole(t *testing.T, target string) *hole {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &hole{t: t, target: target, ln: ln, open: make(chan struct{})}
	close(h.open)
	h.all.Go(h.serve)
	t.Cleanup(func() {
		h.thaw()
		_ = ln.Close()
		h.mu.Lock()
		for _, c := range h.conns {
			_ = c.Close()
		}
		h.mu.Unlock()
		h.all.Wait()
	})
	return h
}

func (h *hole) dial(ctx context.Context, network, _ string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, network, h.ln.Addr().String())
}

func (h *hole) serve() {
	for {
		in, err := h.ln.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", h.target)
		if err != nil {
			_ = in.Close()
			continue
		}
		h.mu.Lock()
		h.conns = append(h.conns, in, out)
		h.mu.Unlock()
		h.all.Go(func() { h.carry(in, out) })
		h.all.Go(func() { h.carry(out, in) })
	}
}

func (h *hole) carry(dst, src net.Conn) {
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		h.mu.Lock()
		open := h.open
		h.mu.Unlock()
		<-open // an end is a packet too
		if n > 0 {
			_, _ = dst.Write(buf[:n])
		}
		if err != nil {
			_ = dst.Close()
			return
		}
	}
}

func (h *hole) freeze() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.open = make(chan struct{})
}

func (h *hole) thaw() {
	h.mu.Lock()
	defer h.mu.Unlock()
	select {
	case <-h.open:
	default:
		close(h.open)
	}
}

// TestDeadLinkIsNoticed: when nothing crosses the line any more and nobody says
// so, the host is soon no longer connected, and back soon after the repair.
func TestDeadLinkIsNoticed(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{})
	line := newHole(t, s.addr)
	var seen states
	c := s.host(func(c *connector.Config) {
		c.NetDial, c.Sessions, c.Link = line.dial, 1, link.Config{DeadAfter: 1500 * time.Millisecond}
		seen = watchStates(c)
	}, echo)
	d := s.route(c, "device", nil)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for round := range 2 {
		conn := s.dial(d)
		for range 40 * (1 - round) { // its traffic stands for the pings, which come every 10 s
			<-tick.C
			echoes(t, conn)
		}
		if !c.Connected() {
			t.Error("a line that works is given up")
		}
		line.freeze()
		frozen := time.Now()
		st := seen.await(t, "given up", func(s connector.SlotStatus) bool { return s.State == "waiting" })
		if took := time.Since(frozen); !errors.Is(st.Err, link.ErrDead) || took > 5*time.Second {
			t.Errorf("after %v the session ended with %v, want ErrDead soon", took, st.Err)
		}
		line.thaw()
		seen.await(t, "connected again", isConnected)
		_ = conn.Close()
	}
}
