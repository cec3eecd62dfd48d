package host_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/reach/wire"
	"github.com/hermes-reach/hermes-reach/securelink/session"
)

func asRefused(err error) (*wire.RefusedError, bool) { return errors.AsType[*wire.RefusedError](err) }

func brokerURL(t *testing.T, text string) wire.BrokerURL {
	t.Helper()
	u, err := wire.ParseBrokerURL(text, true)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// TestRouteTokens: the same for ever, and each for one broker and one session.
func TestRouteTokens(t *testing.T) {
	secret, other := []byte(strings.Repeat("s", 32)), []byte(strings.Repeat("t", 32))
	one, two := brokerURL(t, "wss://one.example.com"), brokerURL(t, "wss://two.example.com")
	token := host.RouteToken(secret, one, "device")
	if err := wire.CheckToken(token); err != nil {
		t.Fatal(err)
	}
	// HMAC-SHA256 over "one.example.com:443\0device\0" and the generation 1.
	if want := "XBF0dkcR92ehc8e1Qha2vML1A7JU7qvnz7IKJKmGIS0"; token != want {
		t.Errorf("token = %s, want %s: devices in the field hold these", token, want)
	}
	seen := map[string]string{token: "itself"}
	for name, other := range map[string]string{
		"another broker": host.RouteToken(secret, two, "device"), "another session": host.RouteToken(secret, one, "device2"),
		"another host": host.RouteToken(other, one, "device"),
	} {
		if same := seen[other]; same != "" {
			t.Errorf("%s has the token of %s", name, same)
		}
		seen[other] = name
	}
	if again := host.RouteToken(secret, brokerURL(t, "wss://One.Example.com:443/v1/connect"), "device"); again != token {
		t.Error("another spelling of the broker changes the token")
	}
}

func request(t *testing.T, broker string) session.RouteRequest {
	t.Helper()
	return session.RouteRequest{
		CredentialID: wire.NewID().String(), DeviceIDHash: wire.DigestOf("device").String(), Expires: time.Now().Add(time.Hour), Broker: broker,
	}
}

// TestRoutesSurviveRestarts: the token a device has is the one it gets again.
func TestRoutesSurviveRestarts(t *testing.T) {
	s := newSite(t)
	b := newBroker(t, s.ca)
	s.enroll(b)
	s.start()
	s.connected(1)
	req := request(t, "")
	first, err := s.host.Issue(t.Context(), req)
	if err != nil || len(first) != 1 {
		t.Fatalf("Issue = %v, %v", first, err)
	}
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	s.start()
	s.connected(1)
	again, err := s.host.Issue(t.Context(), req)
	if err != nil || len(again) != 1 || again[0] != first[0] {
		t.Errorf("after a restart Issue = %v, %v; want the same", again, err)
	}
	if first[0].BrokerURL != b.line.URL.V1() || first[0].HostID != b.line.HostID.String() || first[0].CredentialID != req.CredentialID {
		t.Errorf("credential = %v", first[0])
	}
}

// TestIssueBesideTrouble: a broker that is away gets the route later, so its
// credential counts; one that refuses is left out; none at all is an error.
func TestIssueBesideTrouble(t *testing.T) {
	s := newSite(t)
	good, away := newBroker(t, s.ca), newBroker(t, s.ca)
	s.enroll(good)
	s.enroll(away)
	away.stop()
	s.start()
	s.connected(1)
	req := request(t, away.line.URL.HostPort())
	creds, err := s.host.Issue(t.Context(), req)
	if err != nil || len(creds) != 2 || creds[0].BrokerURL != away.line.URL.V1() {
		t.Fatalf("Issue = %v, %v; want both, that of the device's own broker first", creds, err)
	}
	if creds[0].Token == creds[1].Token {
		t.Error("two brokers have one token")
	}
	if !good.has(wire.KindRoute, req.CredentialID) {
		t.Error("the broker that is there was not told")
	}
	away.start()
	until(t, "the route at the broker that was away", func() bool { return away.has(wire.KindRoute, req.CredentialID) })

	over := request(t, "")
	over.Expires = time.Now().Add(-time.Hour) // which brokers refuse
	s.connected(2)
	if creds, err := s.host.Issue(t.Context(), over); err == nil || len(creds) != 0 {
		t.Errorf("Issue of what is refused = %v, %v; want an error", creds, err)
	} else if r, ok := asRefused(err); !ok || r.Code != wire.CodeExpired {
		t.Errorf("error = %v, want the broker's refusal", err)
	}
	bad := request(t, "")
	bad.DeviceIDHash = "short"
	if _, err := s.host.Issue(t.Context(), bad); err == nil {
		t.Error("a bad device hash was published")
	}
}

// TestNoBrokerNoRoute is no error: such a host is reached directly.
func TestNoBrokerNoRoute(t *testing.T) {
	s := newSite(t)
	s.start()
	if creds, err := s.host.Issue(t.Context(), request(t, "")); err != nil || len(creds) != 0 {
		t.Errorf("Issue = %v, %v", creds, err)
	}
}

// TestWithdrawWaitsForTheBrokers: before the list was read and after the stop
// there is nobody to tell, which must not pass for having told everybody.
func TestWithdrawWaitsForTheBrokers(t *testing.T) {
	s := newSite(t)
	h, err := host.New(s.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Withdraw(t.Context(), "id"); err == nil {
		t.Error("taken back before the brokers were known")
	}
	if err := h.Reload(); err != nil {
		t.Fatal(err)
	}
	if err := h.Withdraw(t.Context(), "id"); err != nil {
		t.Errorf("Withdraw = %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if err := h.Withdraw(t.Context(), "id"); err == nil {
		t.Error("taken back after the stop")
	}
}

// TestOnUp is called once for both sessions of a connector, and again when the
// broker comes back.
func TestOnUp(t *testing.T) {
	ca, err := lab.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	b := newBroker(t, ca)
	up := make(chan struct{}, 8)
	c, err := connector.New(connector.Config{
		URL: b.line.URL, HostID: b.line.HostID, Token: b.line.Token, TLS: ca.Client(), Instance: wire.NewID(), Epoch: 1, Agent: "test/1",
		OnUp: func() { up <- struct{}{} },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	defer func() { cancel(); <-done }()
	for range 2 {
		<-up
		until(t, "both sessions", func() bool { st := c.Status(); return st[0].State == "connected" && st[1].State == "connected" })
		if n := len(up); n != 0 {
			t.Errorf("called %d times more", n)
		}
		b.stop()
		until(t, "no session", func() bool { return !c.Connected() })
		b.start()
	}
}
