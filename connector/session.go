package connector

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

const (
	firstDelay = 500 * time.Millisecond // upper bound of the first random wait
	maxDelay   = 20 * time.Second

	// steady is how long a session must have lived for the next loss to be
	// retried at once again.
	steady = 30 * time.Second

	headerTimeout  = 10 * time.Second
	handoutTimeout = 10 * time.Second
)

// keep holds one session up: the first retry is at once, the following wait a
// random part of a growing time, so that many hosts spread.
func (c *Connector) keep(ctx context.Context, slot int) {
	failures := 0
	for ctx.Err() == nil {
		c.setStatus(slot, SlotStatus{State: "connecting"})
		start := time.Now()
		err := c.session(ctx, slot)
		if ctx.Err() != nil {
			return
		}
		if time.Since(start) > steady {
			failures = 0
		}
		wait := backoff(failures, err)
		failures++
		c.log.Warn("broker session ended", "slot", slot, "retry_in", wait, "err", err)
		c.setStatus(slot, SlotStatus{State: "waiting", Err: err, Retry: time.Now().Add(wait)})
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// backoff says how long to wait after so many failures in a row; a broker that
// named a time is obeyed.
func backoff(failures int, err error) time.Duration {
	var wait time.Duration
	if failures > 0 {
		wait = rand.N(min(maxDelay, firstDelay<<min(failures-1, 10)))
	}
	if refused, ok := errors.AsType[*wire.RefusedError](err); ok {
		if refused.Code == wire.CodeReplaced {
			wait = max(wait, time.Minute)
		}
		wait = max(wait, min(refused.RetryAfter, 5*time.Minute))
	}
	return wait
}

// session connects, registers and serves until the session ends.
func (c *Connector) session(ctx context.Context, slot int) error {
	d := &link.Dialer{URL: c.cfg.URL, TLS: c.cfg.TLS, NetDial: c.cfg.NetDial, Transports: c.cfg.Transports}
	carrier, err := d.Dial(ctx)
	if err != nil {
		return err
	}
	sess, err := link.Client(carrier, c.cfg.Link)
	if err != nil {
		return err
	}
	defer func() { _ = sess.Close() }()
	defer context.AfterFunc(ctx, sess.CloseSoon)()
	connection := wire.NewID()
	ctl, _, err := sess.Register(ctx, &wire.Register{
		Role: wire.RoleHost, HostID: c.cfg.HostID, ConnectionID: connection, CredentialKind: wire.KindHost,
		Token: c.cfg.Token, Agent: c.cfg.Agent, InstanceID: c.cfg.Instance, Slot: &slot, Epoch: c.cfg.Epoch,
	})
	if err != nil {
		return err
	}
	c.log.Info("broker session up", "slot", slot, "transport", carrier.Transport())
	c.setStatus(slot, SlotStatus{State: "connected", Transport: string(carrier.Transport())})
	return c.serve(ctx, sess, ctl, connection)
}

// serve hands out the session's streams and reads its control messages.
func (c *Connector) serve(ctx context.Context, sess *link.Session, ctl *link.Control, connection wire.ID) error {
	var tasks sync.WaitGroup
	defer tasks.Wait()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	first := c.pubs.attach(ctl)
	defer c.pubs.detach(ctl)
	if first {
		tasks.Go(func() { c.pubs.resync(ctx, c.log) })
	}
	tasks.Go(func() {
		err := c.control(ctl)
		cancel(err)
		sess.CloseSoon()
	})
	for {
		st, err := sess.AcceptStream(ctx)
		if err != nil {
			sess.CloseSoon()
			return err
		}
		tasks.Go(func() { c.take(ctx, st, connection) })
	}
}

// control serves the broker's messages until the session ends.
func (c *Connector) control(ctl *link.Control) error {
	for {
		m, err := ctl.Receive()
		if unknown, ok := errors.AsType[*wire.UnknownTypeError](err); ok {
			c.log.Debug("control message not understood", "type", unknown.Type)
			ctl.Send(&wire.Error{Code: wire.CodeMalformed})
			continue
		}
		if err != nil {
			return fmt.Errorf("control stream: %w", err)
		}
		switch m := m.(type) {
		case *wire.Ping:
			ctl.Send(&wire.Pong{T: m.T})
		case *wire.Reset:
			ctl.Session().Reset(m.StreamID, m.Code)
		case *wire.Published:
			c.pubs.answer(m.RequestID, nil)
		case *wire.Revoked:
			c.pubs.answer(m.RequestID, nil)
		case *wire.BootstrapReused:
			if c.cfg.OnReused != nil {
				c.cfg.OnReused(m.PairingID, m.Via)
			}
		case *wire.Drain:
			c.log.Info("broker drains", "deadline_seconds", m.DeadlineSeconds)
		case *wire.Error:
			if m.RequestID != "" {
				c.pubs.answer(m.RequestID, m.Refused())
				continue
			}
			if m.Code != wire.CodeMalformed {
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
