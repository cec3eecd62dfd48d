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
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/endpoints"
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
	pairings *pairings
	enrolled *Enrolled
	secret   []byte // signs invites
	instance wire.ID
	epoch    int64

	control   net.Listener
	listeners []net.Listener

	mu         sync.Mutex
	connectors []*running
}

// running is a broker that is being served.
type running struct {
	broker EnrolledBroker
	conn   *connector.Connector
	stop   context.CancelFunc
	done   chan struct{}
}

// New opens the state and the listeners, so that what is wrong with either is
// known at once. Run must follow.
func New(cfg Config) (_ *Host, err error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Listen == nil {
		cfg.Listen = []string{":" + DefaultPort}
	}
	h := &Host{cfg: cfg, log: cfg.Log, instance: wire.NewID(), pairings: newPairings(), listeners: cfg.Listeners}
	defer func() {
		if err != nil {
			h.closeAll()
		}
	}()
	if h.control, err = h.listenControl(); err != nil { // first: it keeps a second process out
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
	return h, err
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
	h.sessions, err = session.Open(filepath.Join(h.cfg.Dir, "sessions"), session.Options{
		Log: h.log, Version: h.cfg.Version, Routes: h.routes, OnJoin: h.pairings.joined, OnCode: h.codeEnded,
	})
	return err
}

// listen opens the TCP listeners.
func (h *Host) listen() error {
	for _, addr := range h.cfg.Listen {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			return fmt.Errorf("listen for devices on %s: %w (is another Secure Link running here? "+
				"choose another address with --listen)", addr, err)
		}
		h.listeners = append(h.listeners, ln)
	}
	return nil
}

// Run serves until ctx ends, lets what runs end for a while, and returns when
// everything it started is over.
func (h *Host) Run(ctx context.Context) error {
	defer h.closeAll()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var tasks sync.WaitGroup
	defer tasks.Wait()
	for _, ln := range h.listeners {
		tasks.Go(func() {
			if err := h.server.Serve(ln); err != nil {
				fail(fmt.Errorf("serve devices on %s: %w", ln.Addr(), err))
			}
		})
	}
	tasks.Go(func() {
		if err := h.serveControl(ctx, h.control); err != nil {
			fail(err)
		}
	})
	if err := h.Reload(); err != nil {
		return err
	}
	if h.cfg.Ready != nil {
		h.cfg.Ready(h.Status(ctx))
	}
	<-ctx.Done()
	h.shutdown()
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// shutdown ends requests in order, then the brokers' sessions.
func (h *Host) shutdown() {
	grace, cancel := context.WithTimeout(context.Background(), shutdownGrace)
	defer cancel()
	if err := h.server.Shutdown(grace); err != nil {
		h.log.Warn("requests were cut at the stop", "err", err)
	}
	h.mu.Lock()
	old := h.connectors
	h.connectors = nil
	h.mu.Unlock()
	for _, r := range old {
		r.stop()
		<-r.done
	}
}

// closeAll releases what New opened.
func (h *Host) closeAll() {
	if h.control != nil {
		_ = h.control.Close()
	}
	for _, ln := range h.listeners {
		_ = ln.Close()
	}
	if h.server != nil {
		_ = h.server.Close()
	}
	if h.sessions != nil {
		if err := h.sessions.Close(); err != nil {
			h.log.Error("sessions not saved", "err", err)
		}
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
