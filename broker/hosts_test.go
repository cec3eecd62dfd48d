package broker_test

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// says answers every stream with a name and ends it.
func says(name string) func(net.Conn) {
	return func(c net.Conn) { _, _ = io.WriteString(c, name); _ = c.Close() }
}

func (s *site) answeredBy(d *reach.Dialer) string {
	s.t.Helper()
	c := s.dial(d)
	defer c.Close()
	name, err := io.ReadAll(c)
	if err != nil {
		s.t.Error(err)
	}
	return string(name)
}

// echoes wants a stream to work.
func echoes(t testing.TB, c net.Conn) {
	t.Helper()
	if err := tryEcho(c); err != nil {
		t.Fatalf("a stream that should work: %v", err)
	}
}

func tryEcho(c net.Conn) error {
	if _, err := c.Write([]byte("ping")); err != nil {
		return err
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	_, err := io.ReadFull(c, make([]byte, 4))
	return err
}

// TestNewerProcessTakesTheHostOver: a higher epoch wins at once; the older
// process is told and keeps off for a minute, and what it has under way may
// finish for as long as Takeover.
func TestNewerProcessTakesTheHostOver(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{Takeover: 500 * time.Millisecond})
	var seen states
	old := s.host(func(c *connector.Config) { c.Epoch, seen = 1, watchStates(c) }, echo)
	d := s.route(old, "device", nil)
	conn := s.dial(d)
	defer conn.Close()
	echoes(t, conn)
	var up states
	s.host(func(c *connector.Config) { c.Epoch, up = 2, watchStates(c) }, says("new"))
	if s := up.await(t, "connected", isConnected); s.Clone {
		t.Error("a newer process takes the older one for a clone")
	}
	start := time.Now()
	if got := s.answeredBy(d); got != "new" {
		t.Errorf("answered by %q, want the newer process", got)
	}
	st := seen.await(t, "replaced", refusedWith(wire.CodeReplaced))
	if wait := time.Until(st.Retry); wait < 55*time.Second {
		t.Errorf("the older process comes back in %v, want a minute", wait)
	}
	eventually(t, "the older process is not connected", func() bool { return !old.Connected() })
	if time.Since(start) < 300*time.Millisecond { // or the machine is too slow to tell
		echoes(t, conn)
	}
	var reset *link.ResetError
	if _, err := conn.Read(make([]byte, 1)); !errors.As(err, &reset) || reset.Code != wire.CodeReplaced {
		t.Errorf("its stream ended with %v, want replaced", err)
	}
	if took := time.Since(start); took < 300*time.Millisecond {
		t.Errorf("its stream ended after %v, want the takeover time", took)
	}
	eventually(t, "the older sessions are gone", func() bool { return s.broker.Status().Sessions == 2+1 })
}

// TestOlderProcessIsRefused: it never passes for connected, and is told when
// to come back.
func TestOlderProcessIsRefused(t *testing.T) {
	s := newSite(t, broker.Limits{})
	newer := s.mustRegister(s.asHost(0, 7, wire.NewID()))
	_, err := s.register(s.asHost(0, 6, wire.NewID()))
	if r, ok := errors.AsType[*wire.RefusedError](err); !ok || r.Code != wire.CodeReplaced || r.RetryAfter != time.Minute {
		t.Errorf("a lower epoch: %v, want replaced and a minute", err)
	}
	var seen states
	older := s.host(func(c *connector.Config) { c.Epoch, seen = 6, watchStates(c) }, echo)
	for range older.Status() {
		st := seen.await(t, "replaced", func(s connector.SlotStatus) bool {
			if isConnected(s) {
				t.Error("the older process was connected")
			}
			return s.State == "waiting"
		})
		if wire.CodeOf(st.Err) != wire.CodeReplaced || time.Until(st.Retry) < 55*time.Second {
			t.Errorf("it waits %v because of %v", time.Until(st.Retry), st.Err)
		}
	}
	if s.broker.Host(s.hostID).Sessions != 1 || newer.sess.Err() != nil {
		t.Error("the newer process lost its session")
	}
}

// TestClones: with the same epoch the newer wins, and both are told.
func TestClones(t *testing.T) {
	s := newSite(t, broker.Limits{Takeover: 50 * time.Millisecond})
	var first, second states
	old := s.host(func(c *connector.Config) { first = watchStates(c) }, says("first"))
	d := s.route(old, "device", nil)
	if got := s.answeredBy(d); got != "first" {
		t.Fatalf("answered by %q", got)
	}
	s.host(func(c *connector.Config) { second = watchStates(c) }, says("second"))
	second.await(t, "told of a clone", func(s connector.SlotStatus) bool { return isConnected(s) && s.Clone })
	first.await(t, "replaced", refusedWith(wire.CodeReplaced))
	if got := s.answeredBy(d); got != "second" {
		t.Errorf("answered by %q, want the newer one", got)
	}
}

// TestSlotIsReplaced: the same process again on the same slot, as after a line
// that was cut; its other slot is not touched.
func TestSlotIsReplaced(t *testing.T) {
	s := newSite(t, broker.Limits{Takeover: 50 * time.Millisecond})
	me := wire.NewID()
	ghost, other := s.mustRegister(s.asHost(0, 1, me)), s.mustRegister(s.asHost(1, 1, me))
	again := s.mustRegister(s.asHost(0, 1, me))
	ghost.wantError(wire.CodeReplaced)
	ended(t, ghost.sess) // even though it does nothing by itself
	if h := s.broker.Host(s.hostID); h.Sessions != 2 {
		t.Errorf("%d sessions, want 2", h.Sessions)
	}
	if other.sess.Err() != nil || again.sess.Err() != nil {
		t.Error("another session ended")
	}
}

// TestSlotsShareTheLoad: a new stream goes where the fewest are.
func TestSlotsShareTheLoad(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{})
	me := wire.NewID()
	slots := make([]*peer, 4)
	for i := range slots {
		slots[i] = s.mustRegister(s.asHost(i, 1, me))
	}
	client := s.mustRegister(s.asClient(s.stored(wire.KindRoute, "device")))
	streams := make([]*link.Stream, len(slots)) // one of each slot
	match := func(slot int) {
		t.Helper()
		dialled := make(chan *link.Stream)
		go func() {
			st, m := client.dial()
			if _, ok := m.(*wire.Matched); !ok {
				t.Errorf("the dial is answered with %T %v", m, m)
			}
			dialled <- st
		}()
		st, _ := slots[slot].accept()
		if err := wire.WriteMessage(st, &wire.Accept{}); err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = io.Copy(io.Discard, st); _ = st.Close() }()
		streams[slot] = <-dialled
	}
	for range 3 {
		for slot := range slots {
			match(slot)
		}
	}
	_ = streams[2].Close()
	eventually(t, "the broker forgets the stream", func() bool { return s.broker.Status().Streams == 11 })
	match(2)
}

// TestSilentSlotIsPassedOver: a session that is dead without anybody knowing
// costs the first dial some time and the next ones nothing.
func TestSilentSlotIsPassedOver(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{Accept: 300 * time.Millisecond})
	me := wire.NewID()
	silent := s.mustRegister(s.asHost(0, 1, me))
	works := s.mustRegister(s.asHost(1, 1, me))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			st, err := works.sess.AcceptStream(ctx)
			if err != nil {
				return
			}
			if _, err := link.ReadHeader(st, patience); err == nil {
				_ = wire.WriteMessage(st, &wire.Accept{})
			}
		}
	}()
	defer func() { cancel(); <-done }()
	client := s.mustRegister(s.asClient(s.stored(wire.KindRoute, "device")))
	for i := range 3 {
		if _, m := client.dial(); wire.Message(m) == nil {
			t.Fatal("no answer")
		} else if _, ok := m.(*wire.Matched); !ok {
			t.Errorf("dial %d is answered with %T %v, want a match on the other session", i+1, m, m)
		}
	}
	if n := silent.sess.NumStreams(); n > 2 {
		t.Errorf("the silent session was asked %d times, want once", n-1)
	}
}

// TestHostThatOpensStreams: hosts have no business to, and cannot fill memory
// that way.
func TestHostThatOpensStreams(t *testing.T) {
	s := newSite(t, broker.Limits{})
	host := s.mustRegister(s.asHost(0, 1, wire.NewID()))
	st := open(t, host.sess)
	if m, err := link.ReadHeader(st, patience); err != nil || written(t, m) != written(t, &wire.Error{Code: wire.CodeMalformed}) {
		t.Errorf("a stream of the host's is answered with %v, %v", m, err)
	}
	for host.sess.Err() == nil {
		_, _ = host.sess.OpenStream(t.Context())
	}
}

// TestRefusedStreamsAreBounded: a device that opens streams and never closes
// the refused ones loses its session, not the broker its memory.
func TestRefusedStreamsAreBounded(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{CredentialStreams: 1})
	client := s.mustRegister(s.asClient(s.stored(wire.KindRoute, "device")))
	n := 0
	for ; client.sess.Err() == nil; n++ {
		_, _ = client.sess.OpenStream(t.Context())
	}
	if n > 500 {
		t.Errorf("the session ended after %d streams", n)
	}
}

func TestHostStreamLimits(t *testing.T) {
	s := newSite(t, broker.Limits{HostStreams: 3, BootstrapStreams: 1})
	c := s.host(nil, echo)
	a, b := s.route(c, "a", nil), s.route(c, "b", nil)
	token := wire.NewToken()
	s.publish(c, connector.Publication{Kind: wire.KindBootstrap, ID: "p", Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Hour)})
	pairing := s.dialer(wire.KindBootstrap, token, nil)
	defer s.dial(pairing).Close()
	if code := s.refusal(pairing); code != wire.CodeHostBusy {
		t.Errorf("a second stream of a pairing: %q, want host_busy", code)
	}
	defer s.dial(a).Close()
	defer s.dial(b).Close()
	for name, d := range map[string]*reach.Dialer{"a": a, "b": b} {
		if code := s.refusal(d); code != wire.CodeHostBusy {
			t.Errorf("a fourth stream of the host, by %s: %q, want host_busy", name, code)
		}
	}
}

func TestHostsLimit(t *testing.T) {
	s := newSite(t, broker.Limits{Hosts: 1})
	s.mustRegister(s.asHost(0, 1, wire.NewID()))
	second := s.asHost(0, 1, wire.NewID())
	second.HostID, second.Token = wire.NewID(), wire.NewToken()
	if err := s.store.AddHost("second", second.HostID, wire.DigestOf(second.Token)); err != nil {
		t.Fatal(err)
	}
	_, err := s.register(second)
	if r, ok := errors.AsType[*wire.RefusedError](err); !ok || r.Code != wire.CodeQuotaExceeded || r.RetryAfter == 0 {
		t.Errorf("a second host: %v, want quota_exceeded and a wait", err)
	}
}

// TestRevocationReachesReplacedSessions: a stream that only finishes on an
// older session is ended like any other.
func TestRevocationReachesReplacedSessions(t *testing.T) {
	s := newSite(t, broker.Limits{})
	accepted := make(chan net.Conn, 1)
	old := s.host(nil, func(c net.Conn) { accepted <- c })
	conn := s.dial(s.route(old, "lost-phone", nil))
	defer conn.Close()
	host := <-accepted
	defer host.Close()
	var up states
	newer := s.host(func(c *connector.Config) { c.Epoch, up = 2, watchStates(c) }, echo)
	up.await(t, "connected", isConnected)
	if err := newer.Revoke(t.Context(), wire.KindRoute, "lost-phone"); err != nil {
		t.Fatal(err)
	}
	var reset *link.ResetError
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) || errors.As(err, &reset) && reset.Code != wire.CodeRevoked {
		t.Errorf("the stream ended with %v, want revoked", err)
	}
	_, err := host.Read(make([]byte, 1))
	wantReset(t, "host", err, wire.CodeRevoked)
}

// TestManyReconnectsLeaveNothing: a hundred sessions of a host and of devices,
// ended in every way, leave neither counts nor goroutines.
func TestManyReconnectsLeaveNothing(t *testing.T) {
	s := newSite(t, broker.Limits{Takeover: time.Millisecond})
	token, me := s.stored(wire.KindRoute, "device"), wire.NewID()
	before := goroutines()
	for i := range 100 {
		reconnect(t, s, token, me, i)
	}
	eventually(t, "the broker counts nothing", func() bool { return s.broker.Status() == broker.Status{} })
	eventually(t, "the goroutines are gone", func() bool { return goroutines() <= before })
}
