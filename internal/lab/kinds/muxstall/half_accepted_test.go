package muxstall

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/internal/lab/kinds"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// halfAccepted is how many streams are opened and not taken.
const halfAccepted = 2000

// TestHalfAcceptedStreams: 2,000 streams that the other end never accepts end
// with their context, 20 that it did accept go on beside them, and when it
// wakes up nothing is left of the others.
func TestHalfAcceptedStreams(t *testing.T) {
	a, b := sessions(t)
	e := newEchoer(t)
	for range 20 {
		cs, hs := open(t, a, b)
		c, h := link.NewConn(cs, nil, nil), link.NewConn(hs, nil, nil)
		e.tasks.Go(func() { _, _ = io.Copy(h, h); _ = h.Close() })
		e.add(c)
	}
	kinds.Await(t, "the first echoes", func() bool { return e.count() > 20 })
	before, streams := runtime.NumGoroutine(), a.NumStreams()

	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	var all sync.WaitGroup
	var opened, gaveUp atomic.Int32
	for range halfAccepted {
		all.Go(func() {
			st, err := a.OpenStream(ctx)
			if err == nil {
				opened.Add(1)
				<-ctx.Done()
				_ = st.Close()
			} else if gaveUp.Add(1); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("OpenStream = %v, want the end of its context", err)
			}
		})
	}
	all.Wait()
	t.Logf("%d were opened and not accepted, %d waited in vain", opened.Load(), gaveUp.Load())
	if opened.Load() == 0 || gaveUp.Load() == 0 {
		t.Error("the backlog did not fill up: the test shows nothing")
	}
	if a.Err() != nil || b.Err() != nil {
		t.Fatalf("the session has ended: %v, %v", a.Err(), b.Err())
	}
	during := e.count()
	kinds.Await(t, "echoes beside streams that nobody accepts", func() bool { return e.count() > during+100 })

	wake, sleep := context.WithCancel(t.Context())
	defer sleep()
	awake := make(chan struct{})
	go func() {
		defer close(awake)
		for {
			st, err := b.AcceptStream(wake)
			if err != nil {
				return
			}
			_ = st.Close()
		}
	}()
	kinds.Await(t, "the streams to go", func() bool { return a.NumStreams() == streams && b.NumStreams() == streams })
	sleep()
	<-awake
	settle(t, before)
	e.end()
}

// sessions is a link with both ends in the hands of the test, each serving its
// control stream.
func sessions(t *testing.T) (client, server *link.Session) {
	t.Helper()
	ln := kinds.Listen(t)
	accepted := kinds.Accepted(t, ln, nil)
	near, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	client, err = link.Client(carrier.NewCarrier(near, carrier.TLS), link.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	server, err = link.Server(carrier.NewCarrier(<-accepted, carrier.TLS), link.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	c, s := open(t, client, server)
	receive(t, client.StartControl(c))
	receive(t, server.StartControl(s))
	return client, server
}

// receive serves a control stream until its session ends.
func receive(t *testing.T, ctl *link.Control) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			if _, err := ctl.Receive(); err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() { ctl.Session().CloseSoon(); <-done })
}

func open(t *testing.T, a, b *link.Session) (*link.Stream, *link.Stream) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), kinds.Patience)
	defer cancel()
	as, err := a.OpenStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	bs, err := b.AcceptStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	id := wire.NewID()
	as.Bind(id)
	bs.Bind(id)
	return as, bs
}

// peer registers a session with the broker and leaves the rest to the test.
func peer(t *testing.T, s *kinds.Site, reg *wire.Register) *link.Session {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), kinds.Patience)
	defer cancel()
	carrier, err := (&carrier.Dialer{URL: s.URL(s.Addr), TLS: s.CA.Client()}).Dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	sess, err := link.Client(carrier, link.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sess.Close() })
	ctl, _, err := sess.Register(ctx, reg)
	if err != nil {
		t.Fatal(err)
	}
	receive(t, ctl)
	return sess
}

func asHost(s *kinds.Site) *wire.Register {
	c, slot := s.HostConfig(), 0
	return &wire.Register{
		Role: wire.RoleHost, HostID: c.HostID, ConnectionID: wire.NewID(), CredentialKind: wire.KindHost,
		Token: c.Token, Agent: c.Agent, InstanceID: c.Instance, Slot: &slot, Epoch: c.Epoch,
	}
}

func asDevice(s *kinds.Site, id string) *wire.Register {
	return &wire.Register{
		Role: wire.RoleClient, HostID: s.HostID, ConnectionID: wire.NewID(), CredentialKind: wire.KindRoute,
		Token: s.Route(id), Agent: "kinds/1", InstanceID: wire.NewID(),
	}
}

// busy is a broker with a neighbour that echoes and must not notice anything.
func busy(t *testing.T, limits broker.Limits) (*kinds.Site, *echoer) {
	limits.Drain = time.Second
	s := kinds.NewSite(t, func(c *broker.Config) { c.Limits = limits })
	n := s.Neighbour()
	kinds.Echo(t, n.Host(nil))
	d := n.Device(n.Route("neighbour"), nil)
	e := newEchoer(t)
	for range neighbours {
		e.add(kinds.Dial(t, d))
	}
	kinds.Await(t, "the first echoes", func() bool { return e.count() > 20 })
	return s, e
}

const neighbours = 4 // streams of the neighbour

// TestHostThatAcceptsNothing: a host takes one stream and no more. 2,000 dials
// to it are refused in time, the stream it took goes on, and so do others.
func TestHostThatAcceptsNothing(t *testing.T) {
	s, e := busy(t, broker.Limits{Accept: time.Second})
	before := runtime.NumGoroutine()
	host := peer(t, s, asHost(s))
	own := newEchoer(t)
	dialer := s.Device(s.Route("device"), nil)
	took := make(chan struct{})
	go func() {
		defer close(took)
		takeOne(t, host)
	}()
	own.add(kinds.Dial(t, dialer))
	kinds.Await(t, "the host's own echoes", func() bool { return own.count() > 20 })

	// So many devices that their limits let more dials through to the host than
	// its own limit has room for.
	const devices = 20
	var all sync.WaitGroup
	var silent, full atomic.Int32
	for i := range devices {
		d := s.Device(s.Route(fmt.Sprint("device ", i)), nil)
		all.Go(func() {
			refusals(t, d, halfAccepted/devices, map[wire.Code]*atomic.Int32{wire.CodeHostOffline: &silent, wire.CodeHostBusy: &full})
			_ = d.Close()
		})
	}
	all.Wait()
	t.Logf("%d dials waited for the host in vain, %d found it full", silent.Load(), full.Load())
	if n := broker.DefaultLimits().HostStreams - 1; int(silent.Load()) < n {
		t.Errorf("%d dials were half accepted, want at least the %d that a host may have", silent.Load(), n)
	}
	during := own.count()
	kinds.Await(t, "echoes of the stream that the host took", func() bool { return own.count() > during+100 })
	own.end()
	_ = dialer.Close()
	_ = host.Close()
	<-took
	kinds.Await(t, "the broker to forget", func() bool {
		st := s.Broker.Status()
		return st.Hosts == 1 && st.Streams == neighbours
	})
	settle(t, before)
	e.end()
}

// refusals dials n times at once and counts the refusals by their code.
func refusals(t *testing.T, d *reach.Dialer, n int, codes map[wire.Code]*atomic.Int32) {
	ctx, cancel := context.WithTimeout(t.Context(), kinds.Patience)
	defer cancel()
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			c, err := d.DialContext(ctx)
			if err == nil {
				t.Error("a dial succeeded that the host never accepted")
				_ = c.Close()
			} else if count := codes[wire.CodeOf(err)]; count != nil {
				count.Add(1)
			} else {
				t.Errorf("dial: %v, want a refusal for the host's sake", err)
			}
		})
	}
	all.Wait()
}

// takeOne accepts the first stream as a host does, and echoes on it.
func takeOne(t *testing.T, host *link.Session) {
	st, err := host.AcceptStream(t.Context())
	if err != nil {
		t.Error(err)
		return
	}
	m, err := link.ReadHeader(st, kinds.Patience)
	o, ok := m.(*wire.Open)
	if err != nil || !ok {
		t.Errorf("the broker's header: %v, %v", m, err)
		return
	}
	st.Bind(o.StreamID)
	if err := wire.WriteMessage(st, &wire.Accept{}); err != nil {
		t.Error(err)
		return
	}
	c := link.NewConn(st, nil, nil)
	_, _ = io.Copy(c, c)
	_ = c.Close()
}

// TestDeviceThatSaysNothing: a device opens 2,000 streams and never says what
// for, nor ends one. That costs it its session, and the broker nothing.
func TestDeviceThatSaysNothing(t *testing.T) {
	s, e := busy(t, broker.Limits{})
	before := runtime.NumGoroutine()
	device := peer(t, s, asDevice(s, "device"))
	ctx, cancel := context.WithTimeout(t.Context(), kinds.Patience)
	defer cancel()
	var opened, refused atomic.Int32
	var all sync.WaitGroup
	for range halfAccepted {
		all.Go(func() {
			st, err := device.OpenStream(ctx)
			if err != nil {
				if refused.Add(1); !errors.Is(err, link.ErrSessionClosed) {
					t.Errorf("OpenStream = %v, want the end of the session", err)
				}
				return
			}
			opened.Add(1)
			_ = st.SetReadDeadline(time.Now().Add(kinds.Patience))
			_, err = io.Copy(io.Discard, reader{st})
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("a stream that says nothing was kept")
			}
			<-device.Done() // and is not ended by us
		})
	}
	all.Wait()
	t.Logf("%d streams were opened before the broker had enough, %d not", opened.Load(), refused.Load())
	_ = device.Close()
	settle(t, before)
	e.end()
}

// reader hides everything but Read.
type reader struct{ io.Reader }
