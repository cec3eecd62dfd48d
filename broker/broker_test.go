package broker_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/nettest"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func TestStreamsCross(t *testing.T) {
	t.Parallel()
	for _, transport := range []carrier.Transport{carrier.TLS, carrier.WSS} {
		t.Run(string(transport), func(t *testing.T) {
			s := newSite(t, broker.Limits{})
			only := []carrier.Transport{transport}
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
	t.Parallel()
	for _, transport := range []carrier.Transport{carrier.TLS, carrier.WSS} {
		t.Run(string(transport), func(t *testing.T) {
			s := newSite(t, broker.Limits{})
			only := []carrier.Transport{transport}
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
