package connector

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

const (
	firstDelay = 500 * time.Millisecond // upper bound of the first random wait

	// maxDelay bounds the waits that follow. Whatever the outage, a host is back
	// within 15 s of its end.
	maxDelay = 12 * time.Second

	// replacedPause is how long a connector whose host another process took
	// over keeps off.
	replacedPause = time.Minute

	// steady is how long a session must have lived for the next loss to be
	// retried at once again.
	steady = 30 * time.Second

	// maxDrain bounds how long a session that the broker drains is kept,
	// whatever it asks for.
	maxDrain = time.Minute

	headerTimeout  = 10 * time.Second
	handoutTimeout = 10 * time.Second

	// maxStreams bounds what a broker may open in one session, twice what an
	// honest one does by default.
	maxStreams = 512

	// lingerSlack is how much longer than the broker a session that only
	// finishes its streams waits for their end.
	lingerSlack = 5 * time.Second

	// takeover is how long the streams of a replaced session may go on.
	takeover = 10 * time.Second
)

// errDrain is why a slot makes its next session while this one goes on.
var errDrain = errors.New("the broker is about to stop")

// keep holds one session up: the first retry is at once, the following wait a
// random part of a growing time, so that many hosts spread.
func (c *Connector) keep(ctx context.Context, slot int) {
	var sessions sync.WaitGroup
	defer sessions.Wait()
	failures := 0
	for {
		c.setStatus(slot, SlotStatus{State: "connecting"})
		start := time.Now()
		err := c.session(ctx, slot, &sessions)
		if ctx.Err() != nil {
			return
		}
		if time.Since(start) > steady {
			failures = 0
		}
		wait := max(backoff(failures, err), c.pauseLeft())
		failures++
		c.log.Warn("broker session ended", "slot", slot, "retry_in", wait, "err", err)
		c.setStatus(slot, SlotStatus{State: "waiting", Err: err, Retry: time.Now().Add(wait)})
		for ; wait > 0; wait = c.pauseLeft() { // which may have begun meanwhile
			timer := time.NewTimer(wait)
			select {
			case <-timer.C:
			case <-ctx.Done():
				timer.Stop()
				return
			}
		}
	}
}

// replaced makes all slots keep off for a while: the host is another process's.
func (c *Connector) replaced() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pause = time.Now().Add(replacedPause)
}

func (c *Connector) pauseLeft() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Until(c.pause)
}

// backoff says how long to wait after so many failures in a row; a broker that
// named a time is obeyed.
func backoff(failures int, err error) time.Duration {
	var wait time.Duration
	if failures > 0 {
		wait = rand.N(min(maxDelay, firstDelay<<min(failures-1, 10))) //nolint:gosec // it spreads, it hides nothing
	}
	if refused, ok := errors.AsType[*wire.RefusedError](err); ok {
		if refused.Code == wire.CodeReplaced {
			wait = max(wait, replacedPause)
		}
		wait = max(wait, min(refused.RetryAfter, 5*time.Minute))
	}
	return wait
}

// A session is one registered session of a slot.
type session struct {
	slot       int
	sess       *link.Session
	ctl        *link.Control
	connection wire.ID
	clone      bool
	over       chan error // why the slot needs another one; first reason wins
	retired    sync.Once
}

func (s *session) leave(err error) {
	select {
	case s.over <- err:
	default:
	}
}

// session makes a session and returns when the slot needs another one. It may
// live on then to finish its streams; sessions waits for it.
func (c *Connector) session(ctx context.Context, slot int, sessions *sync.WaitGroup) error {
	s, err := c.connect(ctx, slot)
	if err != nil {
		if wire.CodeOf(err) == wire.CodeReplaced {
			c.replaced()
		}
		return err
	}
	sessions.Go(func() { c.serve(ctx, s) })
	return <-s.over
}

// connect dials and registers.
func (c *Connector) connect(ctx context.Context, slot int) (*session, error) {
	d := &carrier.Dialer{URL: c.cfg.URL, TLS: c.cfg.TLS, NetDial: c.cfg.NetDial, Transports: c.cfg.Transports}
	carrier, err := d.Dial(ctx)
	if err != nil {
		return nil, err
	}
	sess, err := link.Client(carrier, c.cfg.Link)
	if err != nil {
		return nil, err
	}
	s := &session{slot: slot, sess: sess, connection: wire.NewID(), over: make(chan error, 1)}
	ctl, answer, err := sess.Register(ctx, &wire.Register{
		Role: wire.RoleHost, HostID: c.cfg.HostID, ConnectionID: s.connection, CredentialKind: wire.KindHost,
		Token: c.cfg.Token, Agent: c.cfg.Agent, InstanceID: c.cfg.Instance, Slot: &slot, Epoch: c.cfg.Epoch,
	})
	if err != nil {
		return nil, errors.Join(err, sess.Close())
	}
	s.ctl, s.clone = ctl, slices.Contains(answer.Features, featureClone)
	if s.clone {
		c.log.Warn("another process runs with this host's identity: one of the two is a copy", "slot", slot)
	}
	return s, nil
}

// featureClone is what a broker answers to a registration that took the place
// of another process with the same identity and epoch.
const featureClone = "clone"

// serve hands out the session's streams and reads its control messages until
// it ends.
func (c *Connector) serve(ctx context.Context, s *session) {
	defer func() { _ = s.sess.Close() }()
	var tasks sync.WaitGroup
	defer tasks.Wait()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(ctx, s.sess.CloseSoon)()
	first := c.pubs.attach(s.ctl)
	defer c.pubs.detach(s.ctl)
	transport := s.sess.Carrier().Transport()
	c.log.Info("broker session up", "slot", s.slot, "transport", transport)
	c.setStatus(s.slot, SlotStatus{State: "connected", Transport: string(transport), Clone: s.clone})
	tasks.Go(func() { c.pubs.resync(ctx, s.ctl, c.log) })
	if first && c.cfg.OnUp != nil {
		c.cfg.OnUp()
	}
	tasks.Go(func() {
		err := c.control(ctx, s, &tasks)
		s.leave(err)
		cancel(err)
	})
	c.accept(ctx, s, &tasks)
	s.sess.CloseSoon()
}

// accept takes streams until the session ends. Why it ended is the control
// stream's to say: its last message may be the reason.
func (c *Connector) accept(ctx context.Context, s *session, tasks *sync.WaitGroup) {
	for {
		st, err := s.sess.AcceptStream(ctx)
		if err != nil {
			return
		}
		switch n := s.sess.NumStreams(); {
		case n > 2*maxStreams:
			s.leave(fmt.Errorf("the broker opened %d streams", n))
			return
		case n > maxStreams:
			tasks.Go(func() { c.refuse(st, wire.CodeHostBusy) })
		default:
			tasks.Go(func() { c.take(ctx, st, s.connection) })
		}
	}
}

// retire makes the slot look for its next session, while this one finishes its
// streams for at most d.
func (c *Connector) retire(ctx context.Context, s *session, tasks *sync.WaitGroup, d time.Duration, why error) {
	s.retired.Do(func() {
		c.pubs.detach(s.ctl)
		s.leave(why)
		tasks.Go(func() { s.linger(ctx, min(d, maxDrain)+lingerSlack) })
	})
}

// linger ends a session when its streams have ended, or after d.
func (s *session) linger(ctx context.Context, d time.Duration) {
	defer s.sess.CloseSoon()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	end := time.NewTimer(d)
	defer end.Stop()
	for s.sess.NumStreams() > 1 { // the control stream is one
		select {
		case <-tick.C:
		case <-end.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// control serves the broker's messages until the session ends.
func (c *Connector) control(ctx context.Context, s *session, tasks *sync.WaitGroup) error {
	for {
		m, err := s.ctl.Receive()
		if err != nil {
			return err
		}
		switch m := m.(type) {
		case *wire.Published:
			c.pubs.answer(m.RequestID, nil)
		case *wire.Revoked:
			c.pubs.answer(m.RequestID, nil)
		case *wire.BootstrapReused:
			if c.cfg.OnReused != nil {
				c.cfg.OnReused(m.PairingID, m.Via)
			}
		case *wire.Drain:
			c.log.Info("broker drains", "slot", s.slot, "deadline_seconds", m.DeadlineSeconds)
			c.retire(ctx, s, tasks, time.Duration(m.DeadlineSeconds)*time.Second, errDrain)
		case *wire.Error:
			switch {
			case m.RequestID != "":
				c.pubs.answer(m.RequestID, m.Refused())
			case m.Code == wire.CodeReplaced:
				c.replaced()
				c.retire(ctx, s, tasks, takeover, m.Refused())
			case m.Code != wire.CodeMalformed:
				return m.Refused()
			}
		}
	}
}

// take reads what a stream is for, consents or refuses, and hands it out.
func (c *Connector) take(ctx context.Context, st *link.Stream, connection wire.ID) {
	m, err := link.ReadHeader(st, headerTimeout)
	open, ok := m.(*wire.Open)
	if err != nil || !ok || open.HostConnectionID != connection {
		c.log.Debug("stream refused: it does not open for this registration", "err", err)
		c.refuse(st, wire.CodeMalformed)
		return
	}
	st.Bind(open.StreamID)
	if c.cfg.Admit != nil {
		if code := c.cfg.Admit(open); code != "" {
			c.log.Info("stream refused", "stream", open.StreamID, "code", code)
			c.refuse(st, code)
			return
		}
	}
	if err := wire.WriteMessage(st, &wire.Accept{}); err != nil {
		_ = st.Close()
		return
	}
	addr := Addr{
		Broker: c.cfg.URL.HostPort(), StreamID: open.StreamID, Via: open.Via, SourceTag: open.SourceTag,
		CredentialID: open.CredentialID, PairingID: open.PairingID,
	}
	conn := link.NewConn(st, Addr{Broker: c.cfg.URL.HostPort()}, addr)
	timer := time.NewTimer(handoutTimeout)
	defer timer.Stop()
	select {
	case c.incoming <- conn:
	case <-timer.C:
		conn.Abort(wire.CodeHostBusy)
	case <-ctx.Done():
		conn.Abort(wire.CodeHostOffline)
	}
}

func (c *Connector) refuse(st *link.Stream, code wire.Code) {
	_ = wire.WriteMessage(st, &wire.Refuse{Code: code})
	_ = st.Close()
}
