package connector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
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
	waiting map[string]chan error
	live    []*link.Control
	slots   chan struct{}
}

func newPublications() *publications {
	return &publications{
		want: make(map[pubKey]Publication), revoked: make(map[pubKey]time.Time),
		waiting: make(map[string]chan error), slots: make(chan struct{}, window),
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

// resync tells the broker everything again, one after the other: it may be a
// new one, or have lost its disk.
func (p *publications) resync(ctx context.Context, log *slog.Logger) {
	revoked, want := p.snapshot(time.Now())
	for _, k := range revoked {
		if err := p.ask(ctx, k.revoke); err != nil {
			log.Warn("revocation not repeated", "kind", k.kind, "err", err)
		}
	}
	for _, pub := range want {
		if err := p.ask(ctx, pub.message); err != nil {
			log.Warn("publication not repeated", "kind", pub.Kind, "err", err)
		}
	}
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

func (p *publications) detach(ctl *link.Control) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, c := range p.live {
		if c == ctl {
			p.live = append(p.live[:i], p.live[i+1:]...)
			break
		}
	}
	if len(p.live) == 0 {
		for id, ch := range p.waiting {
			ch <- ErrOffline
			delete(p.waiting, id)
		}
	}
}

// answer gives a request its answer; answers nobody waits for are dropped.
func (p *publications) answer(request string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ch := p.waiting[request]; ch != nil {
		ch <- err
		delete(p.waiting, request)
	}
}

// ask sends a message and waits for its answer.
func (p *publications) ask(ctx context.Context, message func(request string) wire.Message) error {
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	request := wire.NewID().String()
	ch := make(chan error, 1)
	p.mu.Lock()
	if len(p.live) == 0 {
		p.mu.Unlock()
		return ErrOffline
	}
	p.waiting[request] = ch
	p.live[0].Send(message(request))
	p.mu.Unlock()
	select {
	case err := <-ch:
		return err
	case <-ctx.Done():
		p.mu.Lock()
		delete(p.waiting, request)
		p.mu.Unlock()
		return context.Cause(ctx)
	}
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

// Publish lets devices use a credential and returns when the broker has it on
// disk. It is remembered even if the broker is away (ErrOffline) and then told
// when it is back; a refusal is a *wire.RefusedError and is not retried.
func (c *Connector) Publish(ctx context.Context, pub Publication) error {
	k := pubKey{pub.Kind, pub.ID}
	c.pubs.mu.Lock()
	c.pubs.want[k] = pub
	delete(c.pubs.revoked, k)
	c.pubs.mu.Unlock()
	err := c.pubs.ask(ctx, pub.message)
	if _, refused := errors.AsType[*wire.RefusedError](err); refused {
		c.pubs.mu.Lock()
		delete(c.pubs.want, k)
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
	c.pubs.mu.Lock()
	until := time.Now().Add(30 * 24 * time.Hour)
	if pub, ok := c.pubs.want[k]; ok {
		until = pub.Expires
	}
	delete(c.pubs.want, k)
	c.pubs.revoked[k] = until
	c.pubs.mu.Unlock()
	err := c.pubs.ask(ctx, k.revoke)
	if err != nil {
		return fmt.Errorf("revoke a %s at %s: %w", kind, c.cfg.URL.HostPort(), err)
	}
	return nil
}
