package kinds

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/profile"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// Patience is how long a test waits for what must happen. It never passes in a
// good run.
const Patience = 20 * time.Second

// A Site is a broker on loopback with one host enrolled, which is not running
// before Host is called.
type Site struct {
	CA     *lab.CA
	Store  *store.Store
	Broker *broker.Broker
	Addr   string // of the broker
	HostID wire.ID

	t     testing.TB
	token string // registers the host
}

// NewSite runs a broker until the test ends. adjust may be nil.
func NewSite(t testing.TB, adjust func(*broker.Config)) *Site {
	t.Helper()
	s := &Site{HostID: wire.NewID(), t: t, token: wire.NewToken()}
	var err error
	if s.CA, err = lab.NewCA(); err != nil {
		t.Fatal(err)
	}
	if s.Store, err = store.Open(filepath.Join(t.TempDir(), "broker.db"), nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Store.Close() })
	if err := s.Store.AddHost("home", s.HostID, wire.DigestOf(s.token)); err != nil {
		t.Fatal(err)
	}
	cfg := broker.Config{Store: s.Store, Limits: broker.Limits{Drain: time.Second}}
	if cfg.TLS, err = s.CA.Server("localhost"); err != nil {
		t.Fatal(err)
	}
	if adjust != nil {
		adjust(&cfg)
	}
	if s.Broker, err = broker.New(cfg); err != nil {
		t.Fatal(err)
	}
	ln := Listen(t)
	s.Addr = ln.Addr().String()
	Run(t, func(ctx context.Context) error { return s.Broker.Serve(ctx, ln) })
	return s
}

// Listen opens a loopback port.
func Listen(t testing.TB) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// Run runs f until the test ends, and wants no error of it.
func Run(t testing.TB, f func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// URL is the broker's URL for whoever reaches it at addr.
func (s *Site) URL(addr string) wire.BrokerURL {
	s.t.Helper()
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		s.t.Fatal(err)
	}
	u, err := wire.ParseBrokerURL("wss://localhost:"+port+"/v1/connect", false)
	if err != nil {
		s.t.Fatal(err)
	}
	return u
}

// Neighbour is the same broker with another host enrolled.
func (s *Site) Neighbour() *Site {
	s.t.Helper()
	n := *s
	n.HostID, n.token = wire.NewID(), wire.NewToken()
	if err := s.Store.AddHost(n.HostID.String(), n.HostID, wire.DigestOf(n.token)); err != nil {
		s.t.Fatal(err)
	}
	return &n
}

// HostConfig is what the enrolled host connects with.
func (s *Site) HostConfig() connector.Config {
	return connector.Config{
		URL: s.URL(s.Addr), HostID: s.HostID, Token: s.token, TLS: s.CA.Client(),
		Instance: wire.NewID(), Epoch: 1, Agent: "kinds/1",
	}
}

// Host runs the host's connector until the test ends and returns once all its
// sessions are registered. adjust may be nil.
func (s *Site) Host(adjust func(*connector.Config)) *connector.Connector {
	s.t.Helper()
	cfg := s.HostConfig()
	if adjust != nil {
		adjust(&cfg)
	}
	c, err := connector.New(cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	Run(s.t, c.Run)
	Await(s.t, "the host to register", func() bool {
		for _, slot := range c.Status() {
			if slot.State != "connected" {
				return false
			}
		}
		return true
	})
	return c
}

// Await polls until ok, for at most Patience.
func Await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	if !Within(Patience, ok) {
		t.Fatalf("waited in vain for %s", what)
	}
}

// Within polls ok until it holds, for at most d.
func Within(d time.Duration, ok func() bool) bool {
	end := time.NewTimer(d)
	defer end.Stop()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-end.C:
			return false
		}
	}
	return true
}

// Echo sends back what the connections of a listener send, until the test ends.
func Echo(t testing.TB, ln net.Listener) {
	conns := Accepted(t, ln, nil)
	Run(t, func(ctx context.Context) error {
		var all sync.WaitGroup
		defer all.Wait()
		for {
			select {
			case c := <-conns:
				all.Go(func() {
					defer context.AfterFunc(ctx, func() { _ = c.Close() })()
					_, _ = io.Copy(c, c)
					_ = c.Close()
				})
			case <-ctx.Done():
				return nil
			}
		}
	})
}

// Dial opens a stream to the host.
func Dial(t testing.TB, d *reach.Dialer) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	c, err := d.DialContext(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Route gives a device the right to dial the host and returns its token.
func (s *Site) Route(id string) string {
	s.t.Helper()
	token := wire.NewToken()
	err := s.Store.Publish(store.Credential{
		Host: s.HostID, Kind: wire.KindRoute, ID: id, Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Hour),
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return token
}

// DeviceConfig is what a device with that token connects with.
func (s *Site) DeviceConfig(token string) reach.DialerConfig {
	return reach.DialerConfig{
		URL: s.URL(s.Addr).String(), HostID: s.HostID, Kind: wire.KindRoute, Token: token, TLS: s.CA.Client(), Agent: "kinds/1",
	}
}

// Device makes a dialer that ends with the test. adjust may be nil.
func (s *Site) Device(token string, adjust func(*reach.DialerConfig)) *reach.Dialer {
	s.t.Helper()
	cfg := s.DeviceConfig(token)
	if adjust != nil {
		adjust(&cfg)
	}
	d, err := reach.NewDialer(cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = d.Close() })
	return d
}

// Profile is what a paired device remembers of a host with that identity: one
// candidate straight to the address, one through the broker.
func (s *Site) Profile(id *pins.Identity, addr, token string) *profile.Profile {
	url := s.URL(s.Addr).String()
	proxy := &endpoints.Proxy{URL: "https://" + addr, PinSHA256: id.Pin().String(), Surfaces: []endpoints.Surface{endpoints.SurfaceAPI}}
	return &profile.Profile{
		Name: "home", Pin: id.Pin(), DeviceID: wire.NewID().String(),
		Candidates: []endpoints.Candidate{
			{Role: endpoints.RolePluginProxy, Proxy: proxy},
			{Role: endpoints.RoleOutboundBroker, Priority: 1, Experimental: true, Proxy: proxy,
				Broker: &endpoints.Broker{ProtocolVersion: 1, URL: url, HostID: s.HostID.String()}},
		},
		Routes: []profile.Route{{BrokerURL: url, HostID: s.HostID.String(), Kind: endpoints.KindRoute, Token: profile.Secret(token)}},
	}
}

// Accepted hands out what a listener accepts, each after prepare, until the
// listener or the test ends. Whoever takes a connection closes it.
func Accepted(t testing.TB, ln net.Listener, prepare func(net.Conn) error) <-chan net.Conn {
	out := make(chan net.Conn)
	over := make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				if prepare != nil {
					if err := prepare(c); err != nil {
						if !errors.Is(err, net.ErrClosed) {
							t.Error(err)
						}
						_ = c.Close()
						return
					}
				}
				select {
				case out <- c:
				case <-over:
					_ = c.Close()
				}
			})
		}
	})
	t.Cleanup(func() { close(over); _ = ln.Close(); all.Wait() })
	return out
}
