// Package broker is the rendezvous: hosts and devices that cannot reach each
// other both connect out to it, and it joins their streams. It authenticates
// by digests, matches, splices and meters. What it splices is TLS between the
// two ends, and it imports nothing that could open it.
//
// One port serves everything: TLS, then HTTP/1.1, then GET /health or an
// upgrade to a Reach session (docs/protocol/reach-v2.md). The package is laid
// out along a session's life: http.go lets it in, abuse.go keeps out who
// guesses, session.go registers it and serves hosts, client.go serves devices,
// registry.go knows who is there, splice.go moves the bytes.
package broker

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// Config is what a broker needs.
type Config struct {
	// Store holds hosts and credentials. The caller opens and closes it.
	Store *store.Store
	// TLS is the broker's own certificate. Required, but for PlainLoopback.
	TLS *tls.Config
	// PlainLoopback serves without TLS, for development, on loopback listeners
	// only; any other listener is refused.
	PlainLoopback bool
	// Limits bound peers; zero fields are the defaults.
	Limits Limits
	// Link adjusts sessions; the zero value is right.
	Link link.Config
	// Log gets registrations and refusals, never a token; nil discards.
	Log *slog.Logger
	// Now is the clock that expiries are judged by; nil is time.Now.
	Now func() time.Time
}

// Broker is a running rendezvous. Its methods may be called by any number of
// goroutines.
type Broker struct {
	store   *store.Store
	tls     *tls.Config
	plain   bool
	limits  Limits
	link    link.Config
	log     *slog.Logger
	now     func() time.Time
	reg     *registry
	sources *sources
	replays *replays
	tags    *tagger
	slots   chan struct{} // one for each session, held from its upgrade on
}

// New checks cfg and makes a broker. It starts nothing.
func New(cfg Config) (*Broker, error) {
	if cfg.Store == nil {
		return nil, errors.New("broker: a store is required")
	}
	if cfg.TLS == nil && !cfg.PlainLoopback {
		return nil, errors.New("broker: a TLS certificate is required")
	}
	if err := cfg.Limits.Validate(); err != nil {
		return nil, err
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	limits := cfg.Limits.withDefaults()
	cfg.Link.Log = cfg.Log
	return &Broker{
		store: cfg.Store, tls: cfg.TLS, plain: cfg.PlainLoopback, limits: limits, link: cfg.Link,
		log: cfg.Log, now: cfg.Now,
		reg: newRegistry(limits), sources: newSources(limits, cfg.Now),
		replays: newReplays(cfg.Now), tags: newTagger(cfg.Now),
		slots: make(chan struct{}, limits.Sessions),
	}, nil
}

// Serve takes sessions from ln until ctx ends, then drains: peers are told, no
// new stream starts, and what runs may go on for Limits.Drain. It owns ln and
// every goroutine it starts; when it returns, all of it is over.
func (b *Broker) Serve(ctx context.Context, ln net.Listener) error {
	if b.plain && !isLoopback(ln.Addr()) {
		return errors.Join(fmt.Errorf("broker: %s is not loopback: without TLS nothing else is served", ln.Addr()), ln.Close())
	}
	sessions := &group{}
	live, kill := context.WithCancel(context.WithoutCancel(ctx))
	defer b.reg.close()
	defer sessions.wait()
	defer kill()
	srv := b.server(live, sessions)
	defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
	if !b.plain {
		ln = carrier.Listener(ln, b.tls)
	}
	err := srv.Serve(ln)
	if ctx.Err() == nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("broker: %w", err)
	}
	b.drain()
	return nil
}

// drain tells every peer and waits for streams to end, as long as they may.
func (b *Broker) drain() {
	over, stop := context.WithTimeout(context.Background(), b.limits.Drain)
	defer stop()
	select {
	case <-b.reg.drain(b.limits.Drain):
	case <-over.Done():
	}
}

func isLoopback(a net.Addr) bool {
	t, ok := a.(*net.TCPAddr)
	return ok && t.IP.IsLoopback()
}

// HostRemoved ends what a host has here, and its devices' sessions: it is no
// longer in the store. It returns at once.
func (b *Broker) HostRemoved(id wire.ID) {
	b.log.Info("host removed", "host", id)
	b.reg.removeHostID(id)
}

// HostRotated ends those sessions of a host that registered with a token which
// no longer holds, now, and later those whose token runs out. It returns at
// once.
func (b *Broker) HostRotated(id wire.ID) {
	b.log.Info("host token rotated", "host", id)
	b.recheckHost(id)
}

// recheckHost looks at the tokens of a host's sessions again. A host that is
// not in the store has none that holds.
func (b *Broker) recheckHost(id wire.ID) {
	h, ok, err := b.store.Host(id)
	if err != nil {
		b.log.Error("host not looked up", "host", id, "err", err)
		return
	}
	if !ok {
		b.reg.removeHostID(id)
		return
	}
	now := b.now()
	next := b.reg.recheckHost(id, func(token wire.Digest) (bool, time.Duration) {
		for _, t := range h.Tokens {
			if t.Digest.Equal(token) {
				return t.Until.IsZero() || t.Until.After(now), t.Until.Sub(now)
			}
		}
		return false, 0
	})
	if next > 0 {
		b.reg.later(next, func() { b.recheckHost(id) })
	}
}

// HostStatus is what a host has at a broker, in numbers.
type HostStatus struct {
	Sessions int // registered, of its current process
	Streams  int // matched
}

// Host tells the state of one host; of one that is not here it is zero.
func (b *Broker) Host(id wire.ID) HostStatus { return b.reg.hostStatus(id) }

// Status is a broker's state in numbers.
type Status struct {
	Hosts    int // hosts with at least one session
	Sessions int // registered sessions of hosts and clients
	Streams  int // matched streams
}

// Status tells the state of now.
func (b *Broker) Status() Status { return b.reg.status() }
