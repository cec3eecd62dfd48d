package broker_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/nettest"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// site is a broker on loopback with one host enrolled.
type site struct {
	t      testing.TB
	ca     *lab.CA
	store  *store.Store
	path   string
	url    wire.BrokerURL
	addr   string
	hostID wire.ID
	token  string
	log    *bytes.Buffer
	logMu  sync.Mutex
	broker *broker.Broker
	stop   func()
}

type lockedWriter struct{ s *site }

func (w lockedWriter) Write(p []byte) (int, error) {
	w.s.logMu.Lock()
	defer w.s.logMu.Unlock()
	return w.s.log.Write(p)
}

func newSite(t testing.TB, limits broker.Limits) *site {
	t.Helper()
	s := &site{t: t, hostID: wire.NewID(), token: wire.NewToken(), path: filepath.Join(t.TempDir(), "broker.db"), log: &bytes.Buffer{}}
	var err error
	if s.ca, err = lab.NewCA(); err != nil {
		t.Fatal(err)
	}
	if s.store, err = store.Open(s.path, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.store.AddHost("home", s.hostID, wire.DigestOf(s.token)); err != nil {
		t.Fatal(err)
	}
	s.start("127.0.0.1:0", limits)
	t.Cleanup(func() { s.stop(); _ = s.store.Close() })
	return s
}

func (s *site) start(addr string, limits broker.Limits) {
	s.t.Helper()
	cfg, err := s.ca.Server("localhost")
	if err != nil {
		s.t.Fatal(err)
	}
	limits.Drain = time.Second
	log := slog.New(slog.NewJSONHandler(lockedWriter{s}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	b, err := broker.New(broker.Config{Store: s.store, TLS: cfg, Limits: limits, Log: log})
	if err != nil {
		s.t.Fatal(err)
	}
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.broker, s.addr = b, ln.Addr().String()
	_, port, _ := net.SplitHostPort(s.addr)
	if s.url, err = wire.ParseBrokerURL("wss://localhost:"+port+"/v1/connect", false); err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- b.Serve(ctx, ln) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			s.t.Errorf("Serve = %v", err)
		}
	})
}

// host runs a connector and answers every stream with serve.
func (s *site) host(adjust func(*connector.Config), serve func(net.Conn)) *connector.Connector {
	s.t.Helper()
	cfg := connector.Config{URL: s.url, HostID: s.hostID, Token: s.token, TLS: s.ca.Client(), Instance: wire.NewID(), Epoch: 1, Agent: "test/1"}
	if adjust != nil {
		adjust(&cfg)
	}
	c, err := connector.New(cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() { _ = c.Run(ctx) })
	all.Go(func() {
		for {
			conn, err := c.Accept()
			if err != nil {
				return
			}
			all.Go(func() { serve(conn) })
		}
	})
	s.t.Cleanup(func() { cancel(); all.Wait() })
	return c
}

func echo(c net.Conn) {
	_, _ = io.Copy(c, c)
	_ = c.Close()
}

// route publishes a route credential and gives a dialer that uses it.
func (s *site) route(c *connector.Connector, id string, adjust func(*reach.DialerConfig)) *reach.Dialer {
	s.t.Helper()
	token := wire.NewToken()
	s.publish(c, connector.Publication{Kind: wire.KindRoute, ID: id, Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Hour)})
	return s.dialer(wire.KindRoute, token, adjust)
}

func (s *site) publish(c *connector.Connector, pub connector.Publication) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := c.Publish(ctx, pub)
	for errors.Is(err, connector.ErrOffline) && ctx.Err() == nil {
		err = c.Publish(ctx, pub)
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) dialer(kind wire.Kind, token string, adjust func(*reach.DialerConfig)) *reach.Dialer {
	s.t.Helper()
	cfg := reach.DialerConfig{URL: s.url.String(), HostID: s.hostID, Kind: kind, Token: token, TLS: s.ca.Client(), Agent: "test/1"}
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

func (s *site) dial(d *reach.Dialer) net.Conn {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	c, err := d.DialContext(ctx)
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

func (s *site) refusal(d *reach.Dialer) wire.Code {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	c, err := d.DialContext(ctx)
	if err == nil {
		_ = c.Close()
		return ""
	}
	if r, ok := errors.AsType[*wire.RefusedError](err); ok {
		return r.Code
	}
	s.t.Fatalf("dial: %v, want a refusal with a code", err)
	return ""
}

func TestStreamsCross(t *testing.T) {
	for _, transport := range []link.Transport{link.TLS, link.WSS} {
		t.Run(string(transport), func(t *testing.T) {
			s := newSite(t, broker.Limits{})
			only := []link.Transport{transport}
			c := s.host(func(c *connector.Config) { c.Transports = only }, echo)
			d := s.route(c, "device", func(c *reach.DialerConfig) { c.Transports = only })
			sent := make([]byte, 5<<20)
			_, _ = rand.Read(sent)
			conn := s.dial(d)
			defer conn.Close()
			go func() {
				_, _ = conn.Write(sent)
				_ = conn.(interface{ CloseWrite() error }).CloseWrite()
			}()
			got, err := io.ReadAll(conn)
			if err != nil || !bytes.Equal(got, sent) {
				t.Fatalf("read %d bytes, %v; want the %d that were sent, and the end", len(got), err, len(sent))
			}
		})
	}
}

// TestConnContractThroughTheBroker: what a host accepts and a device dials are
// net.Conns in every respect, over either transport.
func TestConnContractThroughTheBroker(t *testing.T) {
	for _, transport := range []link.Transport{link.TLS, link.WSS} {
		t.Run(string(transport), func(t *testing.T) {
			s := newSite(t, broker.Limits{})
			only := []link.Transport{transport}
			accepted := make(chan net.Conn)
			c := s.host(func(c *connector.Config) { c.Transports = only }, func(c net.Conn) { accepted <- c })
			d := s.route(c, "device", func(c *reach.DialerConfig) { c.Transports = only })
			nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
				c1 = s.dial(d)
				c2 = <-accepted
				return c1, c2, func() { _ = c1.Close(); _ = c2.Close() }, nil
			})
		})
	}
}

func TestAddressNamesPathAndCredential(t *testing.T) {
	s := newSite(t, broker.Limits{})
	got := make(chan net.Addr, 1)
	c := s.host(nil, func(c net.Conn) { got <- c.RemoteAddr(); _ = c.Close() })
	conn := s.dial(s.route(c, "device-7", nil))
	defer conn.Close()
	addr, ok := (<-got).(connector.Addr)
	if !ok || addr.Network() != "outbound_broker" || addr.CredentialID != "device-7" || addr.StreamID.IsZero() || addr.SourceTag == "" || addr.Via != "tls" {
		t.Errorf("remote address = %+v, want path, stream, source and credential", addr)
	}
	if addr.SourceTag == "127.0.0.1" {
		t.Error("the source tag shows the address")
	}
}

func TestWrongCredentialsAreAllUnauthorized(t *testing.T) {
	s := newSite(t, broker.Limits{})
	c := s.host(nil, echo)
	good := s.route(c, "device", nil)
	_ = s.dial(good).Close()
	other := wire.NewID()
	for name, adjust := range map[string]func(*reach.DialerConfig){
		"unknown token":        func(c *reach.DialerConfig) { c.Token = wire.NewToken() },
		"token of other host":  func(c *reach.DialerConfig) { c.HostID = other },
		"route as a bootstrap": func(c *reach.DialerConfig) { c.Kind = wire.KindBootstrap },
	} {
		t.Run(name, func(t *testing.T) {
			token := wire.NewToken()
			s.publish(c, connector.Publication{Kind: wire.KindRoute, ID: name, Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Hour)})
			if code := s.refusal(s.dialer(wire.KindRoute, token, adjust)); code != wire.CodeUnauthorized {
				t.Errorf("refused with %q, want unauthorized", code)
			}
		})
	}
}

// TestStrangersLearnNothing: without a right credential the answer is the same
// whether the host exists, is online, or is not.
func TestStrangersLearnNothing(t *testing.T) {
	s := newSite(t, broker.Limits{})
	if code := s.refusal(s.dialer(wire.KindRoute, wire.NewToken(), nil)); code != wire.CodeUnauthorized {
		t.Errorf("host offline, wrong token: %q, want unauthorized", code)
	}
	s.host(nil, echo)
	if code := s.refusal(s.dialer(wire.KindRoute, wire.NewToken(), nil)); code != wire.CodeUnauthorized {
		t.Errorf("host online, wrong token: %q, want unauthorized", code)
	}
}

func TestHostOffline(t *testing.T) {
	s := newSite(t, broker.Limits{})
	token := wire.NewToken()
	err := s.store.Publish(store.Credential{Host: s.hostID, Kind: wire.KindRoute, ID: "d", Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	if code := s.refusal(s.dialer(wire.KindRoute, token, nil)); code != wire.CodeHostOffline {
		t.Errorf("refused with %q, want host_offline", code)
	}
}

func TestRevocationEndsWhatIsLive(t *testing.T) {
	s := newSite(t, broker.Limits{})
	c := s.host(nil, echo)
	d, other := s.route(c, "lost-phone", nil), s.route(c, "laptop", nil)
	conn, kept := s.dial(d), s.dial(other)
	defer kept.Close()
	if err := c.Revoke(t.Context(), wire.KindRoute, "lost-phone"); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("Read on the revoked stream = %v, want an abort", err)
	}
	if code := s.refusal(d); code != wire.CodeUnauthorized && code != wire.CodeRevoked {
		t.Errorf("a new dial is refused with %q, want unauthorized or revoked", code)
	}
	if _, err := kept.Write([]byte("x")); err != nil {
		t.Errorf("the other device's stream: %v", err)
	}
	if _, err := io.ReadFull(kept, make([]byte, 1)); err != nil {
		t.Errorf("the other device's stream: %v", err)
	}
}

func TestHostMayRefuse(t *testing.T) {
	s := newSite(t, broker.Limits{})
	c := s.host(func(c *connector.Config) {
		c.Admit = func(o *wire.Open) wire.Code {
			if o.CredentialID == "gone" {
				return wire.CodeRevoked
			}
			return ""
		}
	}, echo)
	if code := s.refusal(s.route(c, "gone", nil)); code != wire.CodeRevoked {
		t.Errorf("refused with %q, want the host's own code", code)
	}
	if code := s.refusal(s.route(c, "here", nil)); code != "" {
		t.Errorf("refused with %q, want a stream", code)
	}
}

func TestCredentialStreamLimit(t *testing.T) {
	s := newSite(t, broker.Limits{CredentialStreams: 2})
	c := s.host(nil, echo)
	d := s.route(c, "device", nil)
	a, b := s.dial(d), s.dial(d)
	defer b.Close()
	if code := s.refusal(d); code != wire.CodeHostBusy {
		t.Errorf("the third stream is refused with %q, want host_busy", code)
	}
	_ = a.Close()
	for code := wire.CodeHostBusy; code != ""; code = s.refusal(d) { // the place comes free
	}
}

func TestExpiredCredential(t *testing.T) {
	s := newSite(t, broker.Limits{})
	s.host(nil, echo)
	token := wire.NewToken()
	if err := s.store.Publish(store.Credential{Host: s.hostID, Kind: wire.KindRoute, ID: "d", Digest: wire.DigestOf(token), Expires: time.Now().Add(-time.Second)}); err != nil {
		t.Fatal(err)
	}
	if code := s.refusal(s.dialer(wire.KindRoute, token, nil)); code != wire.CodeExpired {
		t.Errorf("refused with %q, want expired", code)
	}
}

// TestBootstrapBindsToOneClient: the first dial that the host accepts binds it;
// the same client may dial again, any other is a replay of which the host hears.
func TestBootstrapBindsToOneClient(t *testing.T) {
	s := newSite(t, broker.Limits{})
	reused := make(chan string, 1)
	c := s.host(func(c *connector.Config) { c.OnReused = func(id, _ string) { reused <- id } }, echo)
	token := wire.NewToken()
	s.publish(c, connector.Publication{Kind: wire.KindBootstrap, ID: "pairing", Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Minute)})
	first, second := s.dialer(wire.KindBootstrap, token, nil), s.dialer(wire.KindBootstrap, token, nil)
	_ = s.dial(first).Close()
	_ = s.dial(first).Close()
	if code := s.refusal(second); code != wire.CodeReplayed {
		t.Errorf("another client is refused with %q, want replayed", code)
	}
	if id := <-reused; id != "pairing" {
		t.Errorf("the host hears of %q, want its pairing", id)
	}
	if err := c.Revoke(t.Context(), wire.KindBootstrap, "pairing"); err != nil {
		t.Fatal(err)
	}
	if code := s.refusal(s.dialer(wire.KindBootstrap, token, nil)); code != wire.CodeReplayed {
		t.Errorf("after the code was used: %q, want replayed", code)
	}
}

// TestBootstrapIsNotBurntByARefusal: an attempt that did not reach the host
// consumes nothing.
func TestBootstrapIsNotBurntByARefusal(t *testing.T) {
	s := newSite(t, broker.Limits{})
	var refuse sync.Map
	refuse.Store("on", true)
	c := s.host(func(c *connector.Config) {
		c.Admit = func(*wire.Open) wire.Code {
			if _, on := refuse.Load("on"); on {
				return wire.CodeRefused
			}
			return ""
		}
	}, echo)
	token := wire.NewToken()
	s.publish(c, connector.Publication{Kind: wire.KindBootstrap, ID: "pairing", Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Minute)})
	if code := s.refusal(s.dialer(wire.KindBootstrap, token, nil)); code != wire.CodeRefused {
		t.Fatalf("refused with %q, want refused", code)
	}
	refuse.Delete("on")
	if code := s.refusal(s.dialer(wire.KindBootstrap, token, nil)); code != "" {
		t.Errorf("after an attempt that the host refused: %q, want a stream for another client", code)
	}
}

// TestNewerProcessTakesTheHostOver: a higher epoch wins at once, the older
// process is told and its registration attempts are refused.
func TestNewerProcessTakesTheHostOver(t *testing.T) {
	s := newSite(t, broker.Limits{Takeover: 50 * time.Millisecond})
	name := func(n string) func(net.Conn) {
		return func(c net.Conn) { _, _ = io.WriteString(c, n); _ = c.Close() }
	}
	old := s.host(func(c *connector.Config) { c.Epoch = 1 }, name("old"))
	d := s.route(old, "device", nil)
	if got, _ := io.ReadAll(s.dial(d)); string(got) != "old" {
		t.Fatalf("answered by %q", got)
	}
	newer := s.host(func(c *connector.Config) { c.Epoch = 2 }, name("new"))
	s.publish(newer, connector.Publication{Kind: wire.KindRoute, ID: "x", Digest: wire.DigestOf(wire.NewToken()), Expires: time.Now().Add(time.Hour)})
	if got, _ := io.ReadAll(s.dial(d)); string(got) != "new" {
		t.Errorf("answered by %q, want the newer process", got)
	}
	for old.Connected() {
		time.Sleep(time.Millisecond) //nolint:forbidigo // waits for another goroutine's state
	}
	for _, st := range old.Status() {
		if st.Err != nil && !strings.Contains(st.Err.Error(), "replaced") {
			t.Errorf("the older process ended with %v, want replaced", st.Err)
		}
	}
}

func TestLogsHoldNoSecret(t *testing.T) {
	s := newSite(t, broker.Limits{})
	c := s.host(nil, echo)
	token := wire.NewToken()
	s.publish(c, connector.Publication{Kind: wire.KindRoute, ID: "d", Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Hour)})
	d := s.dialer(wire.KindRoute, token, nil)
	conn := s.dial(d)
	_, _ = conn.Write([]byte("the payload itself"))
	_, _ = io.ReadFull(conn, make([]byte, 3))
	_ = conn.Close()
	s.refusal(s.dialer(wire.KindRoute, wire.NewToken(), nil))
	s.stop()
	s.logMu.Lock()
	defer s.logMu.Unlock()
	for what, secret := range map[string]string{"host token": s.token, "route token": token, "payload": "the payload itself"} {
		if strings.Contains(s.log.String(), secret) {
			t.Errorf("the log holds the %s", what)
		}
	}
	if !strings.Contains(s.log.String(), "client registered") {
		t.Error("the search looked at no log")
	}
}
