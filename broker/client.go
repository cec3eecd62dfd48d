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
func (b *Broker) serveClient(ctx context.Context, sess *link.Session, st *link.Stream, reg *wire.Register, from *origin) error {
	c := &client{
		token: wire.DigestOf(reg.Token), instance: reg.InstanceID, source: b.tags.tag(from.src),
		addr: sess.Carrier().RemoteAddr().String(), sess: sess, live: make(map[*match]struct{}),
	}
	cred, code, err := b.checkClient(reg, c)
	if code != "" {
		if code != wire.CodeHostOffline {
			b.sources.failed(from.src)
		}
		return b.refuse(st, code, 0, err)
	}
	c.cred = credential{reg.HostID, reg.CredentialKind, cred.ID}
	c.ctl = sess.StartControl(st)
	if r := b.reg.addClient(c, b.registered(sess, b.limits.CredentialStreams)); r != nil {
		c.ctl.Send(&wire.Error{Code: r.Code, RetryAfter: r.RetryAfter})
		return r
	}
	defer b.reg.removeClient(c)
	from.registered()
	b.log.Info("client registered", "host", reg.HostID, "kind", reg.CredentialKind, "agent", reg.Agent,
		"peer", c.addr, "transport", sess.Carrier().Transport())
	return b.serveDials(ctx, c)
}

// checkClient proves the credential before anything is said of the host.
func (b *Broker) checkClient(reg *wire.Register, c *client) (store.Credential, wire.Code, error) {
	cred, err := b.store.Check(reg.HostID, reg.CredentialKind, c.token, reg.InstanceID)
	if err != nil {
		b.tellReuse(reg.HostID, cred.ID, c, err)
		return cred, b.codeOfStore(err), fmt.Errorf("client of host %s: %w", reg.HostID, err)
	}
	if reg.CredentialKind == wire.KindBootstrap && !b.reg.online(reg.HostID) {
		return cred, wire.CodeHostOffline, fmt.Errorf("host %s has no session", reg.HostID)
	}
	if !b.replays.fresh(c.token, reg.ConnectionID) {
		return cred, wire.CodeReplayed, errors.New("the connection_id was used before")
	}
	return cred, "", nil
}

// tellReuse tells the host when err is that somebody tried a used bootstrap.
func (b *Broker) tellReuse(host wire.ID, pairing string, c *client, err error) {
	if errors.Is(err, store.ErrReplayed) {
		b.reg.reused(host, pairing, string(c.sess.Carrier().Transport()))
	}
}

// codeOfStore is what a client is told. A disk that fails must not cost a
// device its credential: it is told to come back.
func (b *Broker) codeOfStore(err error) wire.Code {
	switch {
	case errors.Is(err, store.ErrExpired):
		return wire.CodeExpired
	case errors.Is(err, store.ErrReplayed):
		return wire.CodeReplayed
	case errors.Is(err, store.ErrUnknown):
		return wire.CodeUnauthorized
	}
	b.log.Error("credential not looked up", "err", err)
	return wire.CodeHostOffline
}

// serveDials takes streams until the session ends, and waits for theirs.
func (b *Broker) serveDials(ctx context.Context, c *client) error {
	var dials sync.WaitGroup
	defer dials.Wait()
	dials.Go(func() {
		_ = b.controlLoop(c.ctl, func(m wire.Message) {
			if _, ok := m.(*wire.Drain); !ok { // a client that drains dials no more: nothing to do
				c.ctl.Send(&wire.Error{Code: wire.CodeMalformed})
			}
		})
		c.sess.CloseSoon()
	})
	for {
		st, err := c.sess.AcceptStream(ctx)
		if err != nil {
			return err
		}
		switch n := c.sess.NumStreams(); {
		case n > 4*b.limits.CredentialStreams+spareStreams:
			c.sess.CloseSoon()
			return fmt.Errorf("client of host %s: %d streams are open, most of them refused", c.cred.host, n)
		case n > 2*b.limits.CredentialStreams+spareStreams: // they do not even say what they want
			dials.Go(func() { b.refuseDial(st, wire.CodeHostBusy) })
		default:
			dials.Go(func() { b.dial(ctx, c, st) })
		}
	}
}

// spareStreams is how many streams a client's session may hold beyond what the
// limits allow to be matched: those that ask, were refused, or are closing.
const spareStreams = 64

// match is one stream from a client to a host.
type match struct {
	id     wire.ID
	cred   credential
	client *client
	host   *hostSession // set by the registry

	mu   sync.Mutex
	ends []*link.Stream
	code wire.Code // why it was aborted
}

func newMatch(c *client) *match { return &match{id: wire.NewID(), cred: c.cred, client: c} }

// add makes st an end of the match. An end of an aborted match is aborted at
// once.
func (m *match) add(st *link.Stream) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ends = append(m.ends, st)
	if m.code != "" {
		st.Abort(m.code)
	}
}

// abort ends the match whatever it is doing. It does not wait.
func (m *match) abort(code wire.Code) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.code == "" {
		m.code = code
	}
	for _, st := range m.ends {
		st.Abort(m.code)
	}
}

// aborted is the code that the match was aborted with, or "".
func (m *match) aborted() wire.Code {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.code
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
		b.tellReuse(c.cred.host, c.cred.id, c, err)
		code := b.codeOfStore(err)
		if code == wire.CodeUnauthorized {
			code = wire.CodeRevoked // it was right when the session registered
		}
		b.refuseDial(st, code)
		return
	}
	b.join(ctx, newMatch(c), st)
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
			b.tellReuse(m.cred.host, m.cred.id, m.client, err)
			code := b.codeOfStore(err)
			m.abort(code)
			b.refuseDial(st, code)
			return
		}
	}
	st.Bind(m.id) // the client may reset it as soon as it knows the name
	if err := wire.WriteMessage(st, &wire.Matched{StreamID: m.id}); err != nil {
		m.add(st)
		m.abort(wire.CodeClosed)
		return
	}
	m.add(st) // until now an abort was the host's end only, and a code for the client
	up, down, code := splice(st, hst, b.limits.Idle)
	b.log.Debug("stream ended", "host", m.cred.host, "stream", m.id, "up", up, "down", down,
		"code", code, "took", b.now().Sub(start))
}

// askHost opens a stream to the host and waits for its consent. A session that
// does not answer may be dead without anybody knowing: one other is asked.
func (b *Broker) askHost(ctx context.Context, m *match) (*link.Stream, wire.Code, error) {
	st, code, err := b.askSession(ctx, m)
	if errors.Is(err, errSilent) && ctx.Err() == nil && m.aborted() == "" && b.reg.elsewhere(m) {
		st, code, err = b.askSession(ctx, m)
	}
	if why := m.aborted(); why != "" && code != "" {
		code = why
	}
	return st, code, err
}

var errSilent = errors.New("the host's session does not answer")

func (b *Broker) askSession(ctx context.Context, m *match) (*link.Stream, wire.Code, error) {
	hs := m.host
	ctx, cancel := context.WithTimeout(ctx, b.limits.Accept)
	defer cancel()
	start := time.Now()
	if hs.sess.NumStreams() > 2*b.limits.HostStreams { // it does not let go of what has ended
		return nil, wire.CodeHostBusy, errors.New("the host's session holds too many streams that are over")
	}
	st, err := hs.sess.OpenStream(ctx)
	if err != nil {
		return nil, wire.CodeHostOffline, fmt.Errorf("%w: %w", errSilent, err)
	}
	st.Bind(m.id)
	m.add(st)
	open := &wire.Open{
		StreamID: m.id, HostConnectionID: hs.connection, Via: string(m.client.sess.Carrier().Transport()),
		SourceTag: m.client.source, CredentialKind: m.cred.kind,
	}
	if m.cred.kind == wire.KindBootstrap {
		open.PairingID = m.cred.id
	} else {
		open.CredentialID = m.cred.id
	}
	if err := wire.WriteMessage(st, open); err != nil {
		st.Abort(wire.CodeHostOffline)
		return nil, wire.CodeHostOffline, fmt.Errorf("%w: %w", errSilent, err)
	}
	answer, err := link.ReadHeader(st, b.limits.Accept-time.Since(start))
	if reset, ok := errors.AsType[*link.ResetError](err); ok && m.aborted() == "" {
		b.reg.answered(hs) // it accepted and gave up, and the second was faster
		return nil, reset.Code, err
	}
	if err != nil && !errors.Is(err, wire.ErrMalformed) {
		st.Abort(wire.CodeHostOffline)
		return nil, wire.CodeHostOffline, fmt.Errorf("%w: %w", errSilent, err)
	}
	b.reg.answered(hs)
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
