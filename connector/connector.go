// Package connector is the host's outbound side: it keeps sessions to one
// broker alive and hands every stream that a device opens through it out as a
// net.Conn. A Connector is a net.Listener like any other; what stands behind
// it does not know the path.
//
// It also tells the broker which credentials devices may use. What was
// published is remembered and said again whenever the broker may have
// forgotten it, so a broker that lost its disk needs no new pairing.
package connector

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// DefaultSessions is how many sessions a host keeps to each broker.
const DefaultSessions = 2

// Path is the role that connections of a Connector carry in their address.
const Path = "outbound_broker"

// Config is what a Connector needs.
type Config struct {
	URL    wire.BrokerURL
	HostID wire.ID
	// Token registers the host. It is a secret.
	Token string
	// TLS checks the broker's certificate; nil means the system's roots.
	TLS *tls.Config
	// NetDial opens TCP connections; nil means a net.Dialer.
	NetDial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Transports, in order; nil means all.
	Transports []carrier.Transport

	// Instance names this process, Epoch counts its starts: the broker gives
	// the host to the highest.
	Instance wire.ID
	Epoch    int64
	// Agent is shown by the broker: "hermes-reach/1.2.3".
	Agent string
	// Sessions is how many to keep, 1 to 8; 0 is DefaultSessions.
	Sessions int

	// Admit decides on each stream before the device is told of a match; a
	// code refuses it. Nil admits all.
	Admit func(*wire.Open) wire.Code
	// OnReused hears that somebody tried a bootstrap that was used.
	OnReused func(pairingID, via string)
	// OnUp hears that a session is up after a time without any. It should
	// return soon.
	OnUp func()

	// OnState hears of every change of a session's state, in order for each
	// slot. It should return soon.
	OnState func(slot int, s SlotStatus)

	// Link adjusts sessions; the zero value is right.
	Link link.Config
	// Log gets what happens, never a token; nil discards.
	Log *slog.Logger
}

// Connector is the host's end at one broker. Its methods may be called by any
// number of goroutines.
type Connector struct {
	cfg      Config
	log      *slog.Logger
	incoming chan net.Conn
	life     context.Context // ends with Close
	end      context.CancelFunc
	pubs     *publications

	mu    sync.Mutex
	slots []SlotStatus
	pause time.Time // no slot registers before: another process has the host
}

// New checks cfg and makes a Connector. Nothing runs before Run.
func New(cfg Config) (*Connector, error) {
	if cfg.URL.IsZero() {
		return nil, errors.New("connector: a broker URL is required")
	}
	if err := wire.CheckHostToken(cfg.Token); err != nil {
		return nil, err
	}
	if cfg.Sessions == 0 {
		cfg.Sessions = DefaultSessions
	}
	if cfg.Sessions < 0 || cfg.Sessions > wire.MaxSlot+1 {
		return nil, errors.New("connector: a host keeps 1 to 8 sessions to a broker")
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.Link.Log = cfg.Log
	life, end := context.WithCancel(context.Background())
	return &Connector{
		cfg: cfg, log: cfg.Log.With("broker", cfg.URL.HostPort()),
		incoming: make(chan net.Conn), life: life, end: end, pubs: newPublications(),
		slots: make([]SlotStatus, cfg.Sessions),
	}, nil
}

// Run keeps the sessions up until ctx ends, and returns when all of them and
// their streams are over. It may be called once.
func (c *Connector) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.life, cancel)()
	defer c.end() // Accept must not wait for streams that nobody brings
	var slots sync.WaitGroup
	for slot := range c.cfg.Sessions {
		slots.Go(func() { c.keep(ctx, slot) })
	}
	slots.Wait()
	return nil
}

// Accept waits for a device's stream. The connection's RemoteAddr is an Addr.
func (c *Connector) Accept() (net.Conn, error) {
	select {
	case conn := <-c.incoming:
		return conn, nil
	case <-c.life.Done():
		return nil, net.ErrClosed
	}
}

// Close ends the Connector: Accept fails and Run returns.
func (c *Connector) Close() error {
	c.end()
	return nil
}

// Addr is the broker's place, as a net.Addr.
func (c *Connector) Addr() net.Addr { return Addr{Broker: c.cfg.URL.HostPort()} }

// URL is the broker's URL as it was given.
func (c *Connector) URL() wire.BrokerURL { return c.cfg.URL }

// HostID is the host's id at this broker.
func (c *Connector) HostID() wire.ID { return c.cfg.HostID }

// An Addr says how a stream came in.
type Addr struct {
	Broker       string // host:port of the broker
	StreamID     wire.ID
	Via          string // how the device reached the broker, the broker's word
	SourceTag    string // names the device's network, the broker's word
	CredentialID string // of the device's route, or "" while it pairs
	PairingID    string // of the bootstrap, or ""
}

// Network is the path's role.
func (a Addr) Network() string { return Path }

// String names the peer without naming a secret: the broker and the stream.
func (a Addr) String() string {
	if a.StreamID.IsZero() {
		return a.Broker
	}
	return a.Broker + "/" + a.StreamID.String()
}

// SlotStatus is the state of one session.
type SlotStatus struct {
	State     string // "connecting", "connected", "waiting"
	Since     time.Time
	Transport string
	// Clone says that this registration took the host from another process
	// with the same identity and epoch: a copy of this host runs somewhere.
	Clone bool
	Err   error // of the last attempt or session, nil while connected
	Retry time.Time
}

// Status tells the state of each session.
func (c *Connector) Status() []SlotStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]SlotStatus(nil), c.slots...)
}

// Connected says whether at least one session is registered.
func (c *Connector) Connected() bool {
	for _, s := range c.Status() {
		if s.State == "connected" {
			return true
		}
	}
	return false
}

func (c *Connector) setStatus(slot int, s SlotStatus) {
	s.Since = time.Now()
	c.mu.Lock()
	c.slots[slot] = s
	c.mu.Unlock()
	if c.cfg.OnState != nil {
		c.cfg.OnState(slot, s)
	}
}
