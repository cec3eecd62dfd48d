// Package host is the host process put together: one identity, one Secure
// Link, and every path that leads to it. A path is a net.Listener; the host
// makes them (TCP sockets, a connector for each broker) and hands them to the
// same server. It also owns what only the operator may do: mint invites, list
// and revoke devices, enrol brokers. That goes over a Unix socket in the state
// folder (control.go), because nothing on TCP is trusted for its address.
package host

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/host/holder"
	"github.com/hermes-reach/hermes-reach/internal/localsock"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
	"github.com/hermes-reach/hermes-reach/securelink"
	"github.com/hermes-reach/hermes-reach/securelink/session"
)

// DefaultPort is where a Secure Link listens.
const DefaultPort = "9443"

// shutdownGrace is how long requests may take to end after the host was told
// to stop.
const shutdownGrace = 10 * time.Second

// Config is what a host is made of. Dir is required.
type Config struct {
	// Dir is the state folder; it must be private to its owner.
	Dir string
	// Listen are TCP addresses for the Secure Link; nil means ":9443", an
	// empty list none (brokers only).
	Listen []string
	// Listeners are served beside Listen: paths that somebody else opened. The
	// host owns them.
	Listeners []net.Listener
	// Advertise are HOST or HOST:PORT that devices should use, such as a name
	// of dynamic DNS; they come before the addresses found here.
	Advertise []string
	// Upstreams are the services behind the three namespaces.
	Upstreams securelink.Upstreams
	// QRSecret is the file of the secret that signs invites; "" means one of
	// our own in Dir.
	QRSecret string
	// Roots check brokers' certificates; nil means the system's.
	Roots *x509.CertPool
	// Version is told to devices and brokers.
	Version string
	// Link adjusts sessions to brokers; the zero value is right.
	Link link.Config
	// Limits of the Secure Link; the zero value is right.
	Limits securelink.Limits
	// Log never gets a secret; nil discards.
	Log *slog.Logger
	// Ready is called once everything listens; nil is no one.
	Ready func(Status)
}

// A ConfigError says that a Config asks for what cannot be.
type ConfigError struct{ Err error }

func (e *ConfigError) Error() string { return e.Err.Error() }
func (e *ConfigError) Unwrap() error { return e.Err }

// IdentityDir is where the host with state in dir keeps its key.
func IdentityDir(dir string) string { return filepath.Join(dir, "identity") }

// Host is a running host. Make it with New, run it with Run.
type Host struct {
	cfg      Config
	log      *slog.Logger
	identity *pins.Identity
	sessions *session.Store
	server   *securelink.Server
	routes   *routes
	streams  *streams
	pairings *pairings
	enrolled *Enrolled
	secret   []byte // signs invites
	instance wire.ID
	epoch    int64

	lock      io.Closer // keeps other processes off the state, until all is over
	control   net.Listener
	listeners []net.Listener

	life  context.Context // of what runs in the background; ends with the host
	end   context.CancelFunc
	drain atomic.Bool // nothing new is let in

	reload sync.Mutex // one Reload at a time; before mu

	mu         sync.Mutex
	loaded     bool // the list of brokers was read
	stopped    bool // no connector and no background task may start
	connectors []*running
	background sync.WaitGroup
}

// errStopping is the answer to what comes too late.
var errStopping = errors.New("this host is stopping")

// New opens the state and the listeners, so that what is wrong with either is
// known at once. Run must follow.
func New(cfg Config) (_ *Host, err error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Listen == nil {
		cfg.Listen = []string{":" + DefaultPort}
	}
	h := &Host{cfg: cfg, log: cfg.Log, instance: wire.NewID(), pairings: newPairings(), listeners: slices.Clone(cfg.Listeners)}
	h.life, h.end = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			h.closeAll()
		}
	}()
	if err := checkAdvertise(cfg.Advertise); err != nil {
		return nil, &ConfigError{err}
	}
	h.log.Debug("host starts", "state_folder", cfg.Dir)
	if err := h.claim(); err != nil { // first: it keeps a second process out
		return nil, err
	}
	if err := h.openState(); err != nil {
		return nil, err
	}
	if err := h.listen(); err != nil {
		return nil, err
	}
	hosts := advertised(cfg.Advertise, h.listeners)
	h.identity, err = pins.LoadOrCreate(IdentityDir(cfg.Dir), hostNames(hosts), time.Now())
	if err != nil {
		return nil, err
	}
	h.server, err = securelink.New(securelink.Config{
		Identity: h.identity, Upstreams: cfg.Upstreams, Sessions: h.sessions, Authority: hosts[0],
		Peer: peerOf, Limits: cfg.Limits, Log: cfg.Log,
	})
	if err != nil {
		return nil, &ConfigError{err}
	}
	return h, nil
}

// claim takes the state folder and opens the operator's socket in it. The lock
// is what counts: it holds until the last byte of state is written, and no
// second start can slip in beside the first.
func (h *Host) claim() error {
	var err error
	if h.lock, err = localsock.Lock(filepath.Join(h.cfg.Dir, "lock")); err == nil {
		h.control, err = localsock.Listen(ControlPath(h.cfg.Dir))
	}
	if errors.Is(err, localsock.ErrLocked) || errors.Is(err, localsock.ErrServed) {
		return fmt.Errorf("a host with this state folder runs already, or is still stopping (%s): stop it first, "+
			"or set HERMES_REACH_HOME to another folder", h.cfg.Dir)
	}
	return err
}

// openState opens everything that is kept in the state folder.
func (h *Host) openState() error {
	var err error
	if h.enrolled, err = OpenEnrolled(h.cfg.Dir); err != nil {
		return err
	}
	if h.epoch, err = nextEpoch(h.cfg.Dir); err != nil {
		return err
	}
	routeSecret, err := loadSecret(h.cfg.Dir, "route-secret")
	if err != nil {
		return err
	}
	qr := h.cfg.QRSecret
	if qr == "" {
		qr = filepath.Join(h.cfg.Dir, "qr-secret")
	}
	if h.secret, err = endpoints.LoadOrCreateSecret(qr); err != nil {
		return err
	}
	h.routes = &routes{host: h, secret: routeSecret}
	h.streams = newStreams(func(id string) bool { return h.sessions.Knows(id) })
	h.sessions, err = session.Open(filepath.Join(h.cfg.Dir, "sessions"), session.Options{
		Log: h.log, Version: h.cfg.Version, Routes: h.routes, OnJoin: h.pairings.joined, OnCode: h.codeEnded,
	})
	return err
}

// listen opens the TCP listeners.
func (h *Host) listen() error {
	for _, addr := range h.cfg.Listen {
		ln, err := holder.Listen(addr)
		if errors.Is(err, holder.ErrTaken) {
			return fmt.Errorf("%w: stop that first, or choose another address with --listen", err)
		}
		if err != nil {
			err = fmt.Errorf("listen for devices: %w", err)
			_, noAddr := errors.AsType[*net.AddrError](err)
			if _, noName := errors.AsType[*net.DNSError](err); noName || noAddr {
				err = &ConfigError{err}
			}
			return err
		}
		h.listeners = append(h.listeners, ln)
	}
	return nil
}

// Run serves until ctx ends, lets what runs end for a while, and returns when
// everything it started is over.
func (h *Host) Run(ctx context.Context) error {
	defer h.closeAll() // 3. release what New opened
	ctx, fail := context.WithCancelCause(ctx)
	over, end := context.WithCancel(context.WithoutCancel(ctx))
	var tasks sync.WaitGroup
	defer tasks.Wait() // 2. wait for what runs
	defer end()        // 1. the operator is heard until nothing else runs
	defer fail(nil)
	if err := h.Reload(); err != nil { // before anybody is answered: an invite names all brokers
		fail(err)
	}
	for _, ln := range h.listeners {
		tasks.Go(func() {
			if err := h.server.Serve(ln); err != nil {
				fail(fmt.Errorf("serve devices on %s: %w", ln.Addr(), err))
			}
		})
	}
	tasks.Go(func() {
		if err := h.serveControl(ctx, over, h.control); err != nil {
			fail(err)
		}
	})
	if h.cfg.Ready != nil {
		h.awaitBrokers(ctx)
		if st := h.Status(ctx); ctx.Err() == nil { // told to stop meanwhile: it is not ready
			h.cfg.Ready(st)
		}
	}
	<-ctx.Done()
	h.shutdown()
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// shutdown lets requests end in order, on every path, and then the brokers'
// sessions.
func (h *Host) shutdown() {
	h.drain.Store(true)
	grace, cancel := context.WithTimeout(context.Background(), shutdownGrace)
	defer cancel()
	if err := h.server.Shutdown(grace); err != nil {
		h.log.Warn("requests were cut at the stop", "err", err)
	}
	h.stopAll()
}

// stopAll ends the connectors and what runs in the background, for good.
func (h *Host) stopAll() {
	h.mu.Lock()
	old := h.connectors
	h.connectors, h.stopped = nil, true
	h.mu.Unlock()
	h.end()
	for _, r := range old {
		r.stop()
	}
	for _, r := range old {
		<-r.done
	}
	h.background.Wait()
}

// spawn runs f beside everything else; f ends when its context does.
func (h *Host) spawn(f func(context.Context)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.stopped {
		h.background.Go(func() { f(h.life) })
	}
}

// closeAll releases what New opened, the state last.
func (h *Host) closeAll() {
	for _, ln := range h.listeners {
		_ = ln.Close()
	}
	if h.server != nil {
		_ = h.server.Close()
	}
	h.stopAll()
	if h.sessions != nil {
		if err := h.sessions.Close(); err != nil {
			h.log.Error("sessions not saved", "err", err)
		}
	}
	if h.control != nil {
		_ = h.control.Close()
	}
	if h.lock != nil {
		_ = h.lock.Close()
	}
}

// peerOf tells the Secure Link who is at the other end of a connection.
func peerOf(a net.Addr) securelink.Peer {
	addr, ok := a.(connector.Addr)
	if !ok {
		return securelink.DefaultPeer(a)
	}
	who := addr.CredentialID
	if who == "" {
		who = "pairing " + addr.PairingID
	}
	return securelink.Peer{
		Key:     connector.Path + " " + addr.Broker + " " + who,
		Addr:    netip.Addr{},
		Session: session.Source{Kind: session.Reach, Key: addr.SourceTag, Broker: addr.Broker},
		Path:    connector.Path,
	}
}

// Identity is what devices pin.
func (h *Host) Identity() *pins.Identity { return h.identity }

// Addrs are the addresses of the TCP listeners.
func (h *Host) Addrs() []net.Addr {
	var addrs []net.Addr
	for _, ln := range h.listeners {
		addrs = append(addrs, ln.Addr())
	}
	return addrs
}
