package pins

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"testing"
	"time"
)

func atNow() time.Time { return now }

// meeting is one connection over loopback TCP, as each end saw it.
type meeting struct {
	client tls.ConnectionState
	server tls.ConnectionState
	got    []byte // application bytes that reached the server
}

// handshake lets a client connect and send its request without waiting for
// anything, so that a byte sent too early would be seen.
func handshake(t testing.TB, server, client *tls.Config) (meeting, error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	var m meeting
	done := make(chan struct{})
	go func() {
		defer close(done)
		raw, err := ln.Accept()
		if err != nil {
			return
		}
		c := tls.Server(raw, server)
		defer c.Close()
		_, _ = io.WriteString(c, "hi") // carries the session ticket along
		m.got, _ = io.ReadAll(c)
		m.server = c.ConnectionState()
	}()
	raw, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c := tls.Client(raw, client)
	_, err = io.WriteString(c, "secret request")
	if err == nil {
		_, err = io.ReadFull(c, make([]byte, 2))
	}
	m.client = c.ConnectionState()
	c.Close()
	<-done
	return m, err
}

func TestPinnedHandshake(t *testing.T) {
	id := newID(t, "home.example", "192.168.1.10", "2001:db8::7")
	for _, host := range []string{"home.example", "HOME.example.", "192.168.1.10", "2001:DB8:0::7", "[2001:db8::7]"} {
		m, err := handshake(t, id.ServerConfig(), ClientConfig(Client{Pin: id.Pin(), Host: host, Now: atNow}))
		if err != nil || string(m.got) != "secret request" {
			t.Errorf("%s: %q, %v", host, m.got, err)
		}
		if m.client.Version != tls.VersionTLS13 || m.client.CurveID != tls.X25519MLKEM768 {
			t.Errorf("%s: %s with %v, want TLS 1.3 with the hybrid default", host, tls.VersionName(m.client.Version), m.client.CurveID)
		}
	}
}

func TestServerName(t *testing.T) {
	id := newID(t, "home.example", "192.168.1.10")
	for _, tt := range []struct{ host, sni, want string }{
		{"Home.Example.", "", "home.example"},
		{"home.example", "front.example", "front.example"},
		{"192.168.1.10", "", ""},
	} {
		m, err := handshake(t, id.ServerConfig(), ClientConfig(Client{Pin: id.Pin(), Host: tt.host, SNI: tt.sni, Now: atNow}))
		if err != nil || m.server.ServerName != tt.want {
			t.Errorf("host %s, SNI %q: server saw %q, %v; want %q", tt.host, tt.sni, m.server.ServerName, err, tt.want)
		}
	}
}

// Every refusal comes before the first byte of the application.
func TestRefused(t *testing.T) {
	id, other := newID(t, "home.example"), newID(t, "home.example")
	end := id.NotAfter()
	at := func(tm time.Time) func() time.Time { return func() time.Time { return tm } }
	good := Client{Pin: id.Pin(), Host: "home.example", Now: atNow}
	with := func(change func(*Client)) Client { c := good; change(&c); return c }
	for name, tt := range map[string]struct {
		c    Client
		want error
	}{
		"right":                 {good, nil},
		"wrong pin":             {with(func(c *Client) { c.Pin = other.Pin() }), ErrPin},
		"no pin":                {with(func(c *Client) { c.Pin = Pin{} }), ErrPin},
		"wrong name":            {with(func(c *Client) { c.Host = "away.example" }), ErrName},
		"parent name":           {with(func(c *Client) { c.Host = "example" }), ErrName},
		"wrong address":         {with(func(c *Client) { c.Host = "192.168.1.10" }), ErrName},
		"no name":               {with(func(c *Client) { c.Host = "" }), ErrName},
		"right SNI, wrong name": {with(func(c *Client) { c.Host = "away.example"; c.SNI = "home.example" }), ErrName},
		"clock in 1970":         {with(func(c *Client) { c.Now = at(time.Unix(0, 0)) }), nil},
		"clock 3 years ahead":   {with(func(c *Client) { c.Now = at(now.AddDate(3, 0, 0)) }), nil},
		"expired a year ago":    {with(func(c *Client) { c.Now = at(end.AddDate(1, 0, 0)) }), nil},
		"tolerance used up":     {with(func(c *Client) { c.Now = at(end.Add(ExpiryTolerance)) }), nil},
		"expired for too long":  {with(func(c *Client) { c.Now = at(end.Add(ExpiryTolerance + time.Second)) }), ErrExpired},
	} {
		t.Run(name, func(t *testing.T) {
			m, err := handshake(t, id.ServerConfig(), ClientConfig(tt.c))
			if !errors.Is(err, tt.want) || IsTrust(err) != (tt.want != nil) {
				t.Errorf("client: %v (trust: %v), want %v", err, IsTrust(err), tt.want)
			}
			if tt.want != nil && len(m.got) > 0 {
				t.Errorf("the server received %d bytes of the request", len(m.got))
			}
		})
	}
}

func TestOldTLSRefused(t *testing.T) {
	id := newID(t, "home.example")
	old := &tls.Config{Certificates: []tls.Certificate{id.first}, MaxVersion: tls.VersionTLS12}
	cfg := ClientConfig(Client{Pin: id.Pin(), Host: "home.example", Now: atNow})
	if m, err := handshake(t, old, cfg); err == nil || len(m.got) > 0 {
		t.Errorf("client spoke TLS 1.2: %q, %v", m.got, err)
	}
	if cfg.MinVersion != tls.VersionTLS13 || id.ServerConfig().MinVersion != tls.VersionTLS13 {
		t.Error("TLS 1.2 is offered")
	}
	cfg.MinVersion = tls.VersionTLS12 // somebody's slip
	if m, err := handshake(t, old, cfg); !errors.Is(err, ErrVersion) || len(m.got) > 0 {
		t.Errorf("with MinVersion lowered: %q, %v", m.got, err)
	}
	cfg.MaxVersion = tls.VersionTLS12
	if m, err := handshake(t, id.ServerConfig(), cfg); err == nil || len(m.got) > 0 {
		t.Errorf("server spoke TLS 1.2: %q, %v", m.got, err)
	}
}

func TestResumption(t *testing.T) {
	id := newID(t, "home.example")
	cfg := ClientConfig(Client{Pin: id.Pin(), Host: "home.example", Now: atNow, Resume: true})
	for i, want := range []bool{false, true, true} {
		m, err := handshake(t, id.ServerConfig(), cfg) // a config for each listener
		if err != nil || m.client.DidResume != want {
			t.Errorf("connection %d: resumed = %v, %v; want %v", i, m.client.DidResume, err, want)
		}
	}
	if m, err := handshake(t, id.ServerConfig(), ClientConfig(Client{Pin: id.Pin(), Host: "home.example", Now: atNow, Resume: true})); err != nil || m.client.DidResume {
		t.Errorf("another config resumed the session: %v, %v", m.client.DidResume, err)
	}
	if m, err := handshake(t, id.ServerConfig(), ClientConfig(Client{Pin: id.Pin(), Host: "home.example", Now: atNow})); err != nil || m.client.DidResume {
		t.Errorf("resumed without Resume: %v, %v", m.client.DidResume, err)
	}
}

// A resumed connection sends no certificate. Still the whole check must run on
// it: here a session with A lies in the cache of a client that wants B.
func TestResumedSessionIsChecked(t *testing.T) {
	a, b := newID(t, "home.example"), newID(t, "home.example")
	for name, tt := range map[string]struct {
		c    Client
		want error
	}{
		"same":       {Client{Pin: a.Pin(), Host: "home.example", Now: atNow}, nil},
		"other pin":  {Client{Pin: b.Pin(), Host: "home.example", Now: atNow}, ErrPin},
		"other name": {Client{Pin: a.Pin(), Host: "away.example", SNI: "home.example", Now: atNow}, ErrName},
		"later":      {Client{Pin: a.Pin(), Host: "home.example", Now: func() time.Time { return now.AddDate(30, 0, 0) }}, ErrExpired},
	} {
		t.Run(name, func(t *testing.T) {
			cfgA := ClientConfig(Client{Pin: a.Pin(), Host: "home.example", Now: atNow, Resume: true})
			if _, err := handshake(t, a.ServerConfig(), cfgA); err != nil {
				t.Fatal(err)
			}
			cfg := ClientConfig(tt.c)
			cfg.ClientSessionCache = cfgA.ClientSessionCache
			m, err := handshake(t, a.ServerConfig(), cfg)
			if !errors.Is(err, tt.want) || (tt.want != nil && len(m.got) > 0) {
				t.Errorf("%v, %d bytes sent; want %v", err, len(m.got), tt.want)
			}
			if !m.client.DidResume {
				t.Error("nothing was resumed: this test shows nothing")
			}
		})
	}
}

// Two identities that share their ticket keys, as one process after a rotation
// or two behind one balancer might: a session with the first must not be
// resumed by the second, whose key the device never saw.
func TestTicketOfAnotherIdentity(t *testing.T) {
	a, b := newID(t, "home.example"), newID(t, "home.example")
	keys := [][32]byte{{1, 2, 3}}
	a.tickets.SetSessionTicketKeys(keys)
	b.tickets.SetSessionTicketKeys(keys)
	cfg := ClientConfig(Client{Pin: a.Pin(), Host: "home.example", Now: atNow, Resume: true})
	for i := range 2 {
		if m, err := handshake(t, a.ServerConfig(), cfg); err != nil || m.client.DidResume != (i == 1) {
			t.Fatalf("with the right host: resumed = %v, %v", m.client.DidResume, err)
		}
	}
	m, err := handshake(t, b.ServerConfig(), cfg)
	if !errors.Is(err, ErrPin) || m.client.DidResume || len(m.got) > 0 {
		t.Errorf("second identity: resumed = %v, %d bytes, %v; want %v", m.client.DidResume, len(m.got), err, ErrPin)
	}
}

func TestServedLeaf(t *testing.T) {
	id := newID(t, "old.example", "127.0.0.1")
	if _, err := id.AddHosts([]string{"new.example"}, now); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		host  string
		first bool
	}{{"old.example", true}, {"127.0.0.1", true}, {"new.example", false}} {
		m, err := handshake(t, id.ServerConfig(), ClientConfig(Client{Pin: id.Pin(), Host: tt.host, Now: atNow}))
		if err != nil {
			t.Errorf("%s: %v", tt.host, err)
			continue
		}
		if got := bytes.Equal(m.client.PeerCertificates[0].Raw, id.LeafDER()); got != tt.first {
			t.Errorf("%s: first leaf = %v", tt.host, got)
		}
	}
	// A stream from a connector: no TCP address, no server name.
	near, far := net.Pipe()
	defer far.Close()
	go tls.Server(far, id.ServerConfig()).Handshake()
	c := tls.Client(near, ClientConfig(Client{Pin: id.Pin(), Host: "127.0.0.1", Now: atNow}))
	if err := c.Handshake(); err != nil || bytes.Equal(c.ConnectionState().PeerCertificates[0].Raw, id.LeafDER()) {
		t.Errorf("nameless stream: %v; want the current leaf", err)
	}
	near.Close()
}

// Through net/http, redirects and connection reuse included.
func TestHTTP(t *testing.T) {
	id, other := newID(t, "home.example"), newID(t, "home.example")
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := 0
	cfg := id.ServerConfig()
	cfg.NextProtos = []string{"h2", "http/1.1"}
	srv := &http.Server{TLSConfig: cfg, ErrorLog: log.New(io.Discard, "", 0), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		served++
		fmt.Fprint(w, r.Proto)
	})}
	done := make(chan error, 1)
	go func() { done <- srv.ServeTLS(ln, "", "") }()
	for _, tt := range []struct {
		pin    Pin
		want   error
		served int
	}{{other.Pin(), ErrPin, 0}, {id.Pin(), nil, 1}} {
		tr := &http.Transport{
			TLSClientConfig: ClientConfig(Client{Pin: tt.pin, Host: "home.example", Now: atNow}), ForceAttemptHTTP2: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "tcp", ln.Addr().String())
			},
		}
		resp, err := (&http.Client{Transport: tr}).Get("https://home.example/")
		if !errors.Is(err, tt.want) || served != tt.served {
			t.Errorf("Get = %v with %d requests served; want %v, %d", err, served, tt.want, tt.served)
		}
		if err == nil {
			if body, _ := io.ReadAll(resp.Body); string(body) != "HTTP/2.0" {
				t.Errorf("spoke %s", body)
			}
			resp.Body.Close()
		}
		tr.CloseIdleConnections()
	}
	srv.Close()
	<-done
}
