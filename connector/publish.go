package connector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// ErrOffline says that no session to the broker is up. What was asked is not
// lost: it is said when one is.
var ErrOffline = errors.New("no session to the broker is up")

// window is how many requests may wait for their answer.
const window = 32

// A Publication is a credential that devices may use at the broker.
type Publication struct {
	Kind    wire.Kind   // wire.KindBootstrap or wire.KindRoute
	ID      string      // pairing_id or credential_id
	Digest  wire.Digest // of its token
	Expires time.Time
	Device  wire.Digest // device_id_hash, for a route
}

type pubKey struct {
	kind wire.Kind
	id   string
}

// publications is what the broker should know, and the requests that tell it.
type publications struct {
	mu      sync.Mutex
	want    map[pubKey]Publication
	revoked map[pubKey]time.Time // taken back, until the credential would have expired
	waiting map[string]request
	live    []*link.Control // in the order of their registration
	slots   chan struct{}
}

// request is a message that waits for its answer.
type request struct {
	answer chan error
	on     *link.Control
}

func newPublications() *publications {
	return &publications{
		want: make(map[pubKey]Publication), revoked: make(map[pubKey]time.Time),
		waiting: make(map[string]request), slots: make(chan struct{}, window),
	}
}

// attach adds a session and says whether it is the first one after a time
// without any.
func (p *publications) attach(ctl *link.Control) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.live = append(p.live, ctl)
	return len(p.live) == 1
}

// resync tells the broker everything again over the session that came up, one
// after the other: it may be a new broker, or have lost its disk. A session
// that is up elsewhere proves nothing: it may be dead. What was taken back
// meanwhile is left out, and what changed while it was told is told again,
// because the change may have been faster over another session.
func (p *publications) resync(ctx context.Context, ctl *link.Control, log *slog.Logger) {
	revoked, want := p.snapshot(time.Now())
	for _, k := range revoked {
		if err := p.ask(ctx, ctl, k.revoke); err != nil {
			log.Warn("revocation not repeated", "kind", k.kind, "err", err)
		}
	}
	for _, pub := range want {
		k, told := pubKey{pub.Kind, pub.ID}, false
		err := p.ask(ctx, ctl, func(request string) wire.Message {
			if p.want[k] != pub {
				return nil
			}
			told = true
			return pub.message(request)
		})
		if err == nil && told {
			err = p.ask(ctx, ctl, func(request string) wire.Message { return p.changed(k, pub, request) })
		}
		if err != nil {
			log.Warn("publication not repeated", "kind", pub.Kind, "err", err)
		}
	}
}

// changed says what the broker should know of k if that is no longer pub, and
// nil if it is. The lock is held.
func (p *publications) changed(k pubKey, pub Publication, request string) wire.Message {
	now, ok := p.want[k]
	_, gone := p.revoked[k]
	switch {
	case ok && now != pub:
		return now.message(request)
	case !ok && gone:
		return k.revoke(request)
	}
	return nil
}

// snapshot lists what still matters, and forgets the rest.
func (p *publications) snapshot(now time.Time) (revoked []pubKey, want []Publication) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, until := range p.revoked {
		if until.Before(now) {
			delete(p.revoked, k)
			continue
		}
		revoked = append(revoked, k)
	}
	for k, pub := range p.want {
		if pub.Expires.Before(now) {
			delete(p.want, k)
			continue
		}
		want = append(want, pub)
	}
	return revoked, want
}

// detach takes a session out. What waits for an answer over it will not get one.
func (p *publications) detach(ctl *link.Control) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.live = slices.DeleteFunc(p.live, func(c *link.Control) bool { return c == ctl })
	for id, r := range p.waiting {
		if r.on == ctl {
			r.answer <- ErrOffline
			delete(p.waiting, id)
		}
	}
}

// answer gives a request its answer; answers nobody waits for are dropped.
func (p *publications) answer(id string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r, ok := p.waiting[id]; ok {
		r.answer <- err
		delete(p.waiting, id)
	}
}

// ask sends a message and waits for its answer, over the session on, or, if that
// is nil, over the latest and then over others while there are any. The message
// is made while mu is held; nil sends nothing.
func (p *publications) ask(ctx context.Context, on *link.Control, message func(request string) wire.Message) error {
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	for {
		id, answer, err := p.send(on, message)
		if answer == nil {
			return err
		}
		select {
		case err = <-answer:
		case <-ctx.Done():
			p.mu.Lock()
			delete(p.waiting, id)
			p.mu.Unlock()
			return context.Cause(ctx)
		}
		if on != nil || !errors.Is(err, ErrOffline) {
			return err
		}
	}
}

func (p *publications) send(on *link.Control, message func(request string) wire.Message) (string, <-chan error, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case on == nil && len(p.live) > 0:
		on = p.live[len(p.live)-1]
	case on == nil || !slices.Contains(p.live, on):
		return "", nil, ErrOffline
	}
	id := wire.NewID().String()
	m := message(id)
	if m == nil {
		return "", nil, nil
	}
	answer := make(chan error, 1)
	p.waiting[id] = request{answer, on}
	on.Send(m)
	return id, answer, nil
}

func (pub Publication) message(request string) wire.Message {
	if pub.Kind == wire.KindBootstrap {
		return &wire.PublishBootstrap{
			RequestID: request, PairingID: pub.ID, TokenSHA256: pub.Digest, ExpiresAt: wire.ExpiryAt(pub.Expires), MaxUses: 1,
		}
	}
	return &wire.PublishRoute{
		RequestID: request, CredentialID: pub.ID, TokenSHA256: pub.Digest, ExpiresAt: wire.ExpiryAt(pub.Expires), DeviceIDHash: pub.Device,
	}
}

func (k pubKey) revoke(request string) wire.Message {
	m := &wire.Revoke{RequestID: request, CredentialKind: k.kind}
	if k.kind == wire.KindBootstrap {
		m.PairingID = k.id
	} else {
		m.CredentialID = k.id
	}
	return m
}

// sayable refuses what cannot be a message before it is remembered: it would
// end every session that is to carry it.
func sayable(message func(request string) wire.Message) error {
	_, err := wire.AppendMessage(nil, message(wire.NewID().String()))
	return err
}

// Publish lets devices use a credential and returns when the broker has it on
// disk. It is remembered even if the broker is away (ErrOffline) and then told
// when it is back; a refusal is a *wire.RefusedError and is not retried.
func (c *Connector) Publish(ctx context.Context, pub Publication) error {
	k := pubKey{pub.Kind, pub.ID}
	if err := sayable(pub.message); err != nil {
		return fmt.Errorf("publish a %s: %w", pub.Kind, err)
	}
	c.pubs.mu.Lock()
	c.pubs.want[k] = pub
	delete(c.pubs.revoked, k)
	c.pubs.mu.Unlock()
	err := c.pubs.ask(ctx, nil, pub.message)
	if _, refused := errors.AsType[*wire.RefusedError](err); refused {
		c.pubs.mu.Lock()
		if c.pubs.want[k] == pub { // and not what was asked for meanwhile
			delete(c.pubs.want, k)
		}
		c.pubs.mu.Unlock()
	}
	if err != nil {
		return fmt.Errorf("publish a %s at %s: %w", pub.Kind, c.cfg.URL.HostPort(), err)
	}
	return nil
}

// Revoke takes a credential back: its sessions and streams end and it opens
// nothing more. Like Publish it is remembered while the broker is away.
func (c *Connector) Revoke(ctx context.Context, kind wire.Kind, id string) error {
	k := pubKey{kind, id}
	if err := sayable(k.revoke); err != nil {
		return fmt.Errorf("revoke a %s: %w", kind, err)
	}
	c.pubs.mu.Lock()
	until := time.Now().Add(30 * 24 * time.Hour)
	if pub, ok := c.pubs.want[k]; ok {
		until = pub.Expires
	}
	delete(c.pubs.want, k)
	c.pubs.revoked[k] = until
	c.pubs.mu.Unlock()
	err := c.pubs.ask(ctx, nil, k.revoke)
	if err != nil {
		return fmt.Errorf("revoke a %s at %s: %w", kind, c.cfg.URL.HostPort(), err)
	}
	return nil
}
