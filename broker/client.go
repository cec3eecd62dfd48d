package broker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// pairingGrace is how long a pairing's session may go on after its bootstrap
// was used, to register with the route credential it got.
const pairingGrace = time.Minute

// serveClient checks a device's registration and serves its dials.
func (b *Broker) serveClient(ctx context.Context, sess *link.Session, st *link.Stream, reg *wire.Register, src string) error {
	c := &client{
		token: wire.DigestOf(reg.Token), instance: reg.InstanceID, source: b.tags.tag(src),
		addr: sess.Carrier().RemoteAddr().String(), sess: sess,
	}
	cred, code, err := b.checkClient(reg, c)
	if code != "" {
		if code != wire.CodeHostOffline {
			b.sources.failed(src)
		}
		return b.refuse(st, code, 0, err)
	}
	c.cred = credential{reg.HostID, reg.CredentialKind, cred.ID}
	c.ctl = sess.StartControl(st)
	c.ctl.Send(b.registered(sess, b.limits.CredentialStreams))
	if r := b.reg.addClient(c); r != nil {
		c.ctl.Send(&wire.Error{Code: r.Code, RetryAfter: r.RetryAfter})
		return r
	}
	defer b.reg.removeClient(c)
	b.log.Info("client registered", "host", reg.HostID, "kind", reg.CredentialKind, "agent", reg.Agent,
		"peer", c.addr, "transport", sess.Carrier().Transport())
	return b.serveDials(ctx, c)
}

// checkClient proves the credential before anything is said of the host.
func (b *Broker) checkClient(reg *wire.Register, c *client) (store.Credential, wire.Code, error) {
	cred, err := b.store.Check(reg.HostID, reg.CredentialKind, c.token, reg.InstanceID)
	if err != nil {
		if errors.Is(err, store.ErrReplayed) {
			b.reg.reused(reg.HostID, cred.ID, c.source)
		}
		return cred, codeOfStore(err), fmt.Errorf("client of host %s: %w", reg.HostID, err)
	}
	if !b.replays.fresh(c.token, reg.ConnectionID) {
		return cred, wire.CodeReplayed, errors.New("the connection_id was used before")
	}
	if reg.CredentialKind == wire.KindBootstrap && !b.reg.online(reg.HostID) {
		return cred, wire.CodeHostOffline, fmt.Errorf("host %s has no session", reg.HostID)
	}
	return cred, "", nil
}

func codeOfStore(err error) wire.Code {
	switch {
	case errors.Is(err, store.ErrExpired):
		return wire.CodeExpired
	case errors.Is(err, store.ErrReplayed):
		return wire.CodeReplayed
	}
	return wire.CodeUnauthorized
}

// serveDials takes streams until the session ends, and waits for theirs.
func (b *Broker) serveDials(ctx context.Context, c *client) error {
	var dials sync.WaitGroup
	defer dials.Wait()
	dials.Go(func() {
		_ = b.controlLoop(ctx, c.ctl, func(wire.Message) error {
			c.ctl.Send(&wire.Error{Code: wire.CodeMalformed})
			return nil
		})
		c.sess.CloseSoon()
	})
	for {
		st, err := c.sess.AcceptStream(ctx)
		if err != nil {
			return err
		}
		if c.sess.NumStreams() > 2*b.limits.CredentialStreams {
			st.Abort(wire.CodeHostBusy) // streams that never say what they want
			continue
		}
		dials.Go(func() { b.dial(ctx, c, st) })
	}
}

// dial serves one stream of a device: the credential is looked up again, a host
// session chosen, its consent waited for, and the two ends joined.
func (b *Broker) dial(ctx context.Context, c *client, st *link.Stream) {
	m, err := link.ReadHeader(st, b.limits.Register)
	if _, ok := m.(*wire.Dial); err != nil || !ok {
		b.refuseDial(st, wire.CodeMalformed)
		return
	}
	if _, err := b.store.Check(c.cred.host, c.cred.kind, c.token, c.instance); err != nil {
		code := codeOfStore(err)
		if code == wire.CodeUnauthorized {
			code = wire.CodeRevoked // it was right when the session registered
		}
		b.refuseDial(st, code)
		return
	}
	b.join(ctx, newMatch(c, st), st)
}

// join matches a dial with a host session and splices the two.
func (b *Broker) join(ctx context.Context, m *match, st *link.Stream) {
	if code := b.reg.reserve(m); code != "" {
		b.refuseDial(st, code)
		return
	}
	defer b.reg.release(m)
	start := b.now()
	hst, code, err := b.askHost(ctx, m)
	if code != "" {
		b.log.Debug("dial refused", "host", m.cred.host, "stream", m.id, "code", code, "err", err)
		b.refuseDial(st, code)
		return
	}
	if m.cred.kind == wire.KindBootstrap {
		if err := b.store.Bind(m.cred.host, m.client.token, m.client.instance); err != nil {
			hst.Abort(wire.CodeReplayed)
			b.refuseDial(st, codeOfStore(err))
			return
		}
	}
	if err := wire.WriteMessage(st, &wire.Matched{StreamID: m.id}); err != nil {
		m.abort(wire.CodeClosed)
		return
	}
	up, down, code := splice(st, hst, b.limits.Idle)
	b.log.Debug("stream ended", "host", m.cred.host, "stream", m.id, "up", up, "down", down,
		"code", code, "took", b.now().Sub(start))
}

// askHost opens a stream to the host and waits for its consent.
func (b *Broker) askHost(ctx context.Context, m *match) (*link.Stream, wire.Code, error) {
	ctx, cancel := context.WithTimeout(ctx, b.limits.Accept)
	defer cancel()
	st, err := m.host.sess.OpenStream(ctx)
	if err != nil {
		return nil, wire.CodeHostOffline, err
	}
	m.add(st)
	open := &wire.Open{
		StreamID: m.id, HostConnectionID: m.host.connection, Via: string(m.client.sess.Carrier().Transport()),
		SourceTag: m.client.source, CredentialKind: m.cred.kind,
	}
	if m.cred.kind == wire.KindBootstrap {
		open.PairingID = m.cred.id
	} else {
		open.CredentialID = m.cred.id
	}
	if err := wire.WriteMessage(st, open); err != nil {
		return nil, wire.CodeHostOffline, errors.Join(err, st.Close())
	}
	answer, err := link.ReadHeader(st, b.limits.Accept)
	if err != nil {
		st.Abort(wire.CodeHostOffline)
		return nil, wire.CodeHostOffline, err
	}
	switch answer := answer.(type) {
	case *wire.Accept:
		return st, "", nil
	case *wire.Refuse:
		return nil, answer.Code, st.Close()
	}
	st.Abort(wire.CodeMalformed)
	return nil, wire.CodeRefused, errors.New("the host answered neither accept nor refuse")
}

func (b *Broker) refuseDial(st *link.Stream, code wire.Code) {
	_ = wire.WriteMessage(st, &wire.Error{Code: code})
	_ = st.Close()
}
