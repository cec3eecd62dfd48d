package broker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// serveSession runs one session from its first byte to its end. It owns c.
func (b *Broker) serveSession(ctx context.Context, c *link.Carrier, src string) {
	sess, err := link.Server(c, b.link)
	if err != nil {
		b.log.Debug("session did not start", "peer", c.RemoteAddr(), "err", err)
		return
	}
	defer func() { _ = sess.Close() }()
	defer context.AfterFunc(ctx, sess.CloseSoon)()
	if err := b.register(ctx, sess, src); err != nil {
		b.log.Info("session ended", "peer", c.RemoteAddr(), "transport", c.Transport(), "err", err)
	}
}

// register reads the first message and serves the session as what it says.
func (b *Broker) register(ctx context.Context, sess *link.Session, src string) error {
	early, cancel := context.WithTimeout(ctx, b.limits.Register)
	defer cancel()
	st, err := sess.AcceptStream(early)
	if err != nil {
		return fmt.Errorf("wait for the registration: %w", err)
	}
	m, err := link.ReadHeader(st, b.limits.Register)
	if err != nil {
		b.sources.failed(src)
		return b.refuse(st, codeOfParse(err), 0, fmt.Errorf("read the registration: %w", err))
	}
	reg, ok := m.(*wire.Register)
	if !ok {
		b.sources.failed(src)
		return b.refuse(st, wire.CodeUnauthorized, 0, errors.New("the first message is no registration"))
	}
	if reg.Role == wire.RoleHost {
		return b.serveHost(ctx, sess, st, reg, src)
	}
	return b.serveClient(ctx, sess, st, reg, src)
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
func (b *Broker) serveHost(ctx context.Context, sess *link.Session, st *link.Stream, reg *wire.Register, src string) error {
	token := wire.DigestOf(reg.Token)
	ok, err := b.store.CheckHost(reg.HostID, token)
	if err != nil {
		return b.refuse(st, wire.CodeHostOffline, time.Minute, err)
	}
	if !ok {
		b.sources.failed(src)
		return b.refuse(st, wire.CodeUnauthorized, 0, fmt.Errorf("host %s: wrong id or token", reg.HostID))
	}
	if !b.replays.fresh(token, reg.ConnectionID) {
		b.sources.failed(src)
		return b.refuse(st, wire.CodeReplayed, 0, fmt.Errorf("host %s: its connection_id was used before", reg.HostID))
	}
	hs := &hostSession{
		id: reg.HostID, connection: reg.ConnectionID, slot: slotOf(reg), epoch: reg.Epoch, instance: reg.InstanceID,
		sess: sess, live: make(map[*match]struct{}),
	}
	// The answer is the first message on the control stream, before anything
	// the registry may send.
	hs.ctl = sess.StartControl(st)
	hs.ctl.Send(b.registered(sess, b.limits.HostStreams))
	if r := b.reg.addHost(hs); r != nil {
		hs.ctl.Send(&wire.Error{Code: r.Code, RetryAfter: r.RetryAfter})
		return fmt.Errorf("host %s: %w", hs.id, r)
	}
	defer b.reg.removeHost(hs)
	b.log.Info("host registered", "host", hs.id, "slot", hs.slot, "epoch", hs.epoch,
		"agent", reg.Agent, "peer", sess.Carrier().RemoteAddr(), "transport", sess.Carrier().Transport())
	err = b.controlLoop(ctx, hs.ctl, func(m wire.Message) error { return b.hostMessage(hs, m) })
	hs.abortAll(b.reg, wire.CodeHostOffline)
	return fmt.Errorf("host %s: %w", hs.id, err)
}

func slotOf(reg *wire.Register) int {
	if reg.Slot == nil {
		return 0
	}
	return *reg.Slot
}

// controlLoop hands messages to handle until the session ends. What it does
// not know is answered with malformed and does no harm.
func (b *Broker) controlLoop(_ context.Context, ctl *link.Control, handle func(wire.Message) error) error {
	for {
		m, err := ctl.Receive()
		var unknown *wire.UnknownTypeError
		switch {
		case errors.As(err, &unknown):
			ctl.Send(&wire.Error{Code: wire.CodeMalformed})
			continue
		case err != nil:
			return err
		}
		switch m := m.(type) {
		case *wire.Ping:
			ctl.Send(&wire.Pong{T: m.T})
		case *wire.Pong, *wire.Error:
		case *wire.Reset:
			ctl.Session().Reset(m.StreamID, m.Code)
		default:
			if err := handle(m); err != nil {
				return err
			}
		}
	}
}

// hostMessage serves what only a host may say.
func (b *Broker) hostMessage(hs *hostSession, m wire.Message) error {
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
	return nil
}

// publish stores a credential and answers once it is on disk. A refusal names
// the request and hurts nothing else.
func (b *Broker) publish(hs *hostSession, request string, c store.Credential, done *wire.Published) {
	if !c.Expires.After(b.now()) {
		hs.ctl.Send(&wire.Error{Code: wire.CodeExpired, RequestID: request})
		return
	}
	if err := b.store.Publish(c); err != nil {
		code := wire.CodeQuotaExceeded
		if !errors.Is(err, store.ErrQuota) {
			code = wire.CodeRefused
			b.log.Error("credential not stored", "host", hs.id, "kind", c.Kind, "err", err)
		}
		hs.ctl.Send(&wire.Error{Code: code, RequestID: request, RetryAfter: time.Minute})
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
