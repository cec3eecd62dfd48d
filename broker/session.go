package broker

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// serveSession runs one session from its first byte to its end. It owns c.
func (b *Broker) serveSession(ctx context.Context, c *carrier.Carrier, src netip.Prefix) {
	from := &origin{src: src, registered: sync.OnceFunc(func() { b.sources.leave(src) })}
	defer from.registered() // at the latest
	sess, err := link.Server(c, b.link)
	if err != nil {
		b.log.Debug("session did not start", "peer", c.RemoteAddr(), "err", err)
		return
	}
	defer func() { _ = sess.Close() }()
	defer context.AfterFunc(ctx, sess.CloseSoon)()
	if err := b.register(ctx, sess, from); err != nil {
		b.log.Info("session ended", "peer", c.RemoteAddr(), "transport", c.Transport(), "err", err)
	}
	// A connection that we close takes along what the other end has not read
	// yet: who was refused closes it himself, when he knows why.
	grace, cancel := context.WithTimeout(ctx, refusalGrace)
	defer cancel()
	_, _ = sess.AcceptStream(grace) // one more stream ends it at once
}

// origin is where a session comes from.
type origin struct {
	src        netip.Prefix
	registered func() // ends its time as a stranger; may be called again
}

// refusalGrace is how long who was refused may take to close the session.
const refusalGrace = time.Second

// register reads the first message and serves the session as what it says.
func (b *Broker) register(ctx context.Context, sess *link.Session, from *origin) error {
	st, m, err := b.firstMessage(ctx, sess)
	if st == nil {
		if errors.Is(err, context.DeadlineExceeded) {
			b.sources.failed(from.src)
		}
		return fmt.Errorf("wait for the registration: %w", err)
	}
	if err != nil {
		b.sources.failed(from.src)
		return b.refuse(st, codeOfParse(err), 0, fmt.Errorf("read the registration: %w", err))
	}
	reg, ok := m.(*wire.Register)
	if !ok || reg.InstanceID.IsZero() || reg.ConnectionID.IsZero() {
		b.sources.failed(from.src)
		return b.refuse(st, wire.CodeUnauthorized, 0, errors.New("the first message is no registration, or one without ids"))
	}
	if reg.Role == wire.RoleHost {
		return b.serveHost(ctx, sess, st, reg, from)
	}
	return b.serveClient(ctx, sess, st, reg, from)
}

// firstMessage reads the first message of the first stream. Who opens another
// stream before that was answered wants to be given memory without a
// credential: the session ends.
func (b *Broker) firstMessage(ctx context.Context, sess *link.Session) (*link.Stream, wire.Message, error) {
	ctx, cancel := context.WithTimeout(ctx, b.limits.Register)
	defer cancel()
	start := time.Now()
	st, err := sess.AcceptStream(ctx)
	if err != nil {
		return nil, nil, err
	}
	var watch sync.WaitGroup
	defer watch.Wait()
	defer cancel()
	watch.Go(func() {
		if _, err := sess.AcceptStream(ctx); err == nil {
			sess.CloseSoon()
		}
	})
	m, err := link.ReadHeader(st, b.limits.Register-time.Since(start))
	return st, m, err
}

func codeOfParse(err error) wire.Code {
	if errors.Is(err, wire.ErrVersion) {
		return wire.CodeUnsupportedVersion
	}
	return wire.CodeUnauthorized
}

// refuse answers a registration with a code and returns why, for the log.
func (b *Broker) refuse(st *link.Stream, code wire.Code, wait time.Duration, why error) error {
	err := wire.WriteMessage(st, &wire.Error{Code: code, RetryAfter: wait})
	return errors.Join(fmt.Errorf("refused with %s: %w", code, why), err)
}

func (b *Broker) registered(sess *link.Session, streams int) *wire.Registered {
	return &wire.Registered{
		SessionID: wire.NewID(),
		Limits: wire.Limits{
			Streams: streams, StreamWindow: link.Window, IdleSeconds: int(b.limits.Idle / time.Second),
		},
		ObservedAddr: sess.Carrier().RemoteAddr().String(),
	}
}

// serveHost checks a host's registration and serves its control stream.
func (b *Broker) serveHost(ctx context.Context, sess *link.Session, st *link.Stream, reg *wire.Register, from *origin) error {
	token := wire.DigestOf(reg.Token)
	ok, err := b.store.CheckHost(reg.HostID, token)
	if err != nil {
		return b.refuse(st, wire.CodeHostOffline, time.Minute, err)
	}
	if !ok {
		b.sources.failed(from.src)
		return b.refuse(st, wire.CodeUnauthorized, 0, fmt.Errorf("host %s: wrong id or token", reg.HostID))
	}
	if !b.replays.fresh(token, reg.ConnectionID) {
		b.sources.failed(from.src)
		return b.refuse(st, wire.CodeReplayed, 0, fmt.Errorf("host %s: its connection_id was used before", reg.HostID))
	}
	hs := &hostSession{
		id: reg.HostID, connection: reg.ConnectionID, slot: slotOf(reg), epoch: reg.Epoch, instance: reg.InstanceID,
		token: token, sess: sess, live: make(map[*match]struct{}),
	}
	hs.ctl = sess.StartControl(st)
	if r := b.reg.addHost(hs, b.registered(sess, b.limits.HostStreams)); r != nil {
		hs.ctl.Send(&wire.Error{Code: r.Code, RetryAfter: r.RetryAfter})
		return fmt.Errorf("host %s: %w", hs.id, r)
	}
	from.registered()
	var strays sync.WaitGroup
	defer strays.Wait()
	defer b.reg.removeHost(hs)
	b.recheckHost(hs.id) // it may have been removed since its token was checked
	b.log.Info("host registered", "host", hs.id, "slot", hs.slot, "epoch", hs.epoch,
		"agent", reg.Agent, "peer", sess.Carrier().RemoteAddr(), "transport", sess.Carrier().Transport())
	strays.Go(func() { b.refuseStrays(ctx, sess) })
	err = b.controlLoop(hs.ctl, func(m wire.Message) { b.hostMessage(hs, m) })
	b.reg.abortAll(hs, wire.CodeHostOffline)
	sess.CloseSoon()
	return fmt.Errorf("host %s: %w", hs.id, err)
}

// maxStrays is how many streams a host may open in one session. Hosts have no
// reason to: one who goes on fills our memory.
const maxStrays = 16

// refuseStrays ends streams that a host opened.
func (b *Broker) refuseStrays(ctx context.Context, sess *link.Session) {
	for range maxStrays {
		st, err := sess.AcceptStream(ctx)
		if err != nil {
			return
		}
		b.refuseDial(st, wire.CodeMalformed)
	}
	sess.CloseSoon()
}

func slotOf(reg *wire.Register) int {
	if reg.Slot == nil {
		return 0
	}
	return *reg.Slot
}

// controlLoop hands messages to handle until the session ends.
func (b *Broker) controlLoop(ctl *link.Control, handle func(wire.Message)) error {
	for {
		m, err := ctl.Receive()
		if err != nil {
			return err
		}
		if _, ok := m.(*wire.Error); !ok { // an error is never answered
			handle(m)
		}
	}
}

// hostMessage serves what only a host may say.
func (b *Broker) hostMessage(hs *hostSession, m wire.Message) {
	switch m := m.(type) {
	case *wire.PublishBootstrap:
		b.publish(hs, m.RequestID, store.Credential{
			Host: hs.id, Kind: wire.KindBootstrap, ID: m.PairingID, Digest: m.TokenSHA256, Expires: m.ExpiresAt.Time(),
		}, &wire.Published{RequestID: m.RequestID, CredentialKind: wire.KindBootstrap, PairingID: m.PairingID})
	case *wire.PublishRoute:
		b.publish(hs, m.RequestID, store.Credential{
			Host: hs.id, Kind: wire.KindRoute, ID: m.CredentialID, Digest: m.TokenSHA256, Expires: m.ExpiresAt.Time(),
			Device: m.DeviceIDHash,
		}, &wire.Published{RequestID: m.RequestID, CredentialKind: wire.KindRoute, CredentialID: m.CredentialID})
	case *wire.Revoke:
		b.revoke(hs, m)
	case *wire.Drain:
		b.reg.retire(hs)
	default:
		hs.ctl.Send(&wire.Error{Code: wire.CodeMalformed})
	}
}

// publish stores a credential and answers once it is on disk. A refusal names
// the request and hurts nothing else.
func (b *Broker) publish(hs *hostSession, request string, c store.Credential, done *wire.Published) {
	if !c.Expires.After(b.now()) {
		hs.ctl.Send(&wire.Error{Code: wire.CodeExpired, RequestID: request})
		return
	}
	if err := b.store.Publish(c); err != nil {
		refusal := &wire.Error{Code: wire.CodeRefused, RequestID: request, RetryAfter: time.Minute}
		switch {
		case errors.Is(err, store.ErrQuota):
			refusal.Code = wire.CodeQuotaExceeded
		case errors.Is(err, store.ErrToken), errors.Is(err, store.ErrNoHost):
			refusal.RetryAfter = 0 // it will never do
		default:
			b.log.Error("credential not stored", "host", hs.id, "kind", c.Kind, "err", err)
		}
		hs.ctl.Send(refusal)
		return
	}
	hs.ctl.Send(done)
}

func (b *Broker) revoke(hs *hostSession, m *wire.Revoke) {
	id := m.CredentialID
	if m.CredentialKind == wire.KindBootstrap {
		id = m.PairingID
	}
	if _, _, err := b.store.Revoke(hs.id, m.CredentialKind, id); err != nil {
		b.log.Error("credential not revoked", "host", hs.id, "kind", m.CredentialKind, "err", err)
		hs.ctl.Send(&wire.Error{Code: wire.CodeRefused, RequestID: m.RequestID, RetryAfter: time.Minute})
		return
	}
	if m.CredentialKind == wire.KindRoute {
		b.reg.revoke(credential{hs.id, m.CredentialKind, id})
	} else {
		b.reg.revokeBootstrap(credential{hs.id, m.CredentialKind, id}, pairingGrace)
	}
	hs.ctl.Send(&wire.Revoked{
		RequestID: m.RequestID, CredentialKind: m.CredentialKind, CredentialID: m.CredentialID, PairingID: m.PairingID,
	})
}
