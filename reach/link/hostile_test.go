package link

import (
	"errors"
	"io"
	"runtime"
	"testing"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// hostile is a session whose other end is yamux under the test's own hands: it
// pings, so that the watchdog is content, and otherwise does what the test says.
func hostile(t *testing.T) (s *Session, ctl *Control, peer *yamux.Session, peerCtl *yamux.Stream) {
	t.Helper()
	a, b := tcpPair(t)
	s, err := Server(carrier.NewCarrier(b, carrier.TLS), Config{DeadAfter: 700 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	cfg := yamux.DefaultConfig()
	cfg.LogOutput, cfg.KeepAliveInterval = io.Discard, 100*time.Millisecond
	if peer, err = yamux.Client(a, cfg); err != nil {
		t.Fatal(err)
	}
	if peerCtl, err = peer.OpenStream(); err != nil {
		t.Fatal(err)
	}
	own, err := s.AcceptStream(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctl = s.StartControl(own)
	s.spawn(func() { serveResets(ctl) })
	t.Cleanup(func() { _ = peer.Close(); _ = s.Close() })
	return s, ctl, peer, peerCtl
}

// block fills the window of a control stream that nobody reads.
func block(t *testing.T, ctl *Control) {
	t.Helper()
	for range Window/64 + controlQueue/2 {
		ctl.Send(&wire.Pong{T: 1e15})
		ctl.mu.Lock()
		waiting := len(ctl.queue)
		ctl.mu.Unlock()
		if waiting > controlQueue/2 {
			return // the writer waits for the window
		}
	}
}

// TestStuckControlCannotHoldASession: a peer that takes no control messages but
// sends pings cannot outlive the end that we decide on.
func TestStuckControlCannotHoldASession(t *testing.T) {
	s, ctl, _, _ := hostile(t)
	block(t, ctl)
	start := time.Now()
	s.CloseSoon()
	<-s.Done()
	if took := time.Since(start); took > 3*closeGrace {
		t.Errorf("CloseSoon took %v", took)
	}
}

func TestCloseIsShortWithAStuckControl(t *testing.T) {
	s, ctl, _, _ := hostile(t)
	block(t, ctl)
	start := time.Now()
	_ = s.Close()
	if took := time.Since(start); took > 3*closeGrace {
		t.Errorf("Close took %v", took)
	}
}

// TestFullControlQueueEndsTheSession: who never reads is not waited for.
func TestFullControlQueueEndsTheSession(t *testing.T) {
	s, ctl, _, _ := hostile(t)
	for range Window/20 + 2*controlQueue {
		ctl.Send(&wire.Pong{T: 1})
	}
	<-s.Done()
	if !errors.Is(s.Err(), ErrControlStuck) {
		t.Errorf("Err = %v, want ErrControlStuck", s.Err())
	}
}

// TestUnansweredResetsEndTheSession: a peer that reads but never answers would
// have us keep every stream that we aborted.
func TestUnansweredResetsEndTheSession(t *testing.T) {
	s, _, peer, peerCtl := hostile(t)
	go func() { _, _ = io.Copy(io.Discard, peerCtl) }()
	for range 10 {
		own, err := s.OpenStream(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := peer.AcceptStream(); err != nil {
			t.Fatal(err)
		}
		own.Bind(wire.NewID())
		own.Abort(wire.CodeHostOffline)
	}
	<-s.Done()
	if !errors.Is(s.Err(), ErrControlStuck) {
		t.Errorf("Err = %v, want ErrControlStuck", s.Err())
	}
}

// TestManyAbortsShareOneAnswer: hundreds of streams aborted together do not
// flood the control stream.
func TestManyAbortsShareOneAnswer(t *testing.T) {
	a, b := tcpPair(t)
	e := connect(t, a, b)
	defer e.close()
	var theirs []*Stream
	for range 600 {
		c, s := e.open(t)
		id := wire.NewID()
		c.Bind(id)
		s.Bind(id)
		theirs = append(theirs, s)
		defer c.Abort(wire.CodeRevoked)
		c.Abort(wire.CodeRevoked)
	}
	for _, s := range theirs {
		var reset *ResetError
		if _, err := s.Read(make([]byte, 1)); !errors.As(err, &reset) || reset.Code != wire.CodeRevoked {
			t.Fatalf("Read = %v, want the reset", err)
		}
		_ = s.Close()
	}
	if err := e.client.Err(); err != nil {
		t.Errorf("the session ended: %v", err)
	}
}

// TestUndeliveredIsNoOrderlyEnd: what Close could not deliver in time must not
// look like the end of what was written.
func TestUndeliveredIsNoOrderlyEnd(t *testing.T) {
	_, c, s := conns(t)
	c.linger = 50 * time.Millisecond
	_ = c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
	_, _ = c.Write(make([]byte, 4<<20)) // more than the window: some is left
	_ = c.Close()
	for s.st.check(&s.st.readErr) == nil { // the reset arrives once the linger is over
		runtime.Gosched()
	}
	if _, err := io.Copy(io.Discard, s); err == nil {
		t.Error("the reader saw an orderly end of bytes that were cut")
	}
}
