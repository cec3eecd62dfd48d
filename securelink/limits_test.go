package securelink

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/securelink/session"
)

// Every limit has a default and refuses a negative value: a field added to
// Limits and forgotten in withDefaults fails here.
func TestLimits(t *testing.T) {
	def, err := Limits{}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	v := reflect.ValueOf(def)
	for i := range v.NumField() {
		name := v.Type().Field(i).Name
		if v.Field(i).IsZero() {
			t.Errorf("%s has no default", name)
		}
		bad := reflect.New(v.Type()).Elem()
		bad.Field(i).SetInt(-1)
		if _, err := bad.Interface().(Limits).withDefaults(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("a negative %s: %v", name, err)
		}
		kept := reflect.New(v.Type()).Elem()
		kept.Field(i).SetInt(v.Field(i).Int() - 1)
		if got, err := kept.Interface().(Limits).withDefaults(); err != nil || reflect.ValueOf(got).Field(i).Int() != v.Field(i).Int()-1 {
			t.Errorf("a %s of one less than the default: %v", name, err)
		}
	}
	want := Limits{HeaderBytes: 32 << 10, HeaderTime: 10 * time.Second, BodyBytes: 128 << 20, Idle: 15 * time.Minute, ConnectTime: 5 * time.Second,
		Connections: 256, PeerConns: 64, ProbeEvery: 15 * time.Second, ProbeTime: 3 * time.Second}
	if def != want {
		t.Errorf("defaults %+v, want %+v", def, want)
	}
	for _, l := range []Limits{{Connections: 4, PeerConns: 5}, {ProbeEvery: 3 * time.Second}, {HeaderBytes: 10}, {HeaderBytes: 1 << 30}} {
		if _, err := l.withDefaults(); err == nil {
			t.Errorf("%+v is taken", l)
		}
	}
	if got, err := (Limits{Connections: 10}).withDefaults(); err != nil || got.PeerConns != 10 {
		t.Errorf("few connections: %+v, %v", got, err)
	}
}

func TestNewRefuses(t *testing.T) {
	id, err := pins.New([]string{"home.example"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]Config{
		"no identity":   {},
		"bad limit":     {Identity: id, Limits: Limits{Idle: -1}},
		"bad authority": {Identity: id, Authority: "home.example/x"},
		"bad host":      {Identity: id, Hosts: []string{"a b"}},
		"bad upstream":  {Identity: id, Upstreams: Upstreams{API: "https://api.example"}},
		"bad dashboard": {Identity: id, Upstreams: Upstreams{Dashboard: "http://10.0.0.1:9119"}},
		"bad relay":     {Identity: id, Upstreams: Upstreams{Relay: "unix:relative"}},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestDefaultPeer(t *testing.T) {
	for _, tt := range []struct {
		addr     net.Addr
		key, xff string
		kind     session.Kind
	}{
		{&net.TCPAddr{IP: net.ParseIP("192.0.2.7"), Port: 1}, "192.0.2.7", "192.0.2.7", session.Direct},
		{&net.TCPAddr{IP: net.ParseIP("::ffff:192.0.2.7"), Port: 2}, "192.0.2.7", "192.0.2.7", session.Direct},
		{&net.UDPAddr{IP: net.ParseIP("fe80::1"), Zone: "eth0"}, "fe80::1", "fe80::1", session.Direct},
		{&net.UnixAddr{Name: "stream 7", Net: "x"}, "stream 7", "fd5a:c3e1:9b70:", session.Reach},
	} {
		p := DefaultPeer(tt.addr)
		if p.Key != tt.key || p.Session.Kind != tt.kind || !strings.HasPrefix(peerAddress(p), tt.xff) {
			t.Errorf("%v: %+v, address %s", tt.addr, p, peerAddress(p))
		}
	}
	a, b := peerAddress(Peer{Key: "a"}), peerAddress(Peer{Key: "b"})
	if a == b || a != peerAddress(Peer{Key: "a"}) {
		t.Errorf("devices behind a broker are %s and %s", a, b)
	}
}

// One connection more than allowed is told so; those beyond that are closed;
// one that ends makes room.
func TestConnectionLimit(t *testing.T) {
	l := start(t, Config{Limits: Limits{Connections: 3, PeerConns: 2}})
	ask := func(c net.Conn) string {
		io.WriteString(c, "GET /relay/health HTTP/1.1\r\nHost: home.example\r\n\r\n")
		b := make([]byte, 4096)
		n, _ := c.Read(b)
		return string(b[:n])
	}
	a, b := l.dial(t), l.dial(t)
	for _, c := range []net.Conn{a, b} {
		if got := ask(c); !strings.HasPrefix(got, "HTTP/1.1 200 ") {
			t.Fatalf("within the limit: %s", got)
		}
	}
	if resp, body := l.raw(t, "GET /relay/health HTTP/1.1\r\nHost: home.example\r\n\r\n"); resp.StatusCode != 503 ||
		!strings.Contains(body, `"too_many_connections"`) || !resp.Close {
		t.Errorf("one too many: %d %s", resp.StatusCode, body)
	}
	a.Close()
	for deadline := time.Now().Add(patience); ; {
		if got := ask(l.dial(t)); strings.HasPrefix(got, "HTTP/1.1 200 ") {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("after one has gone: %s", got)
		}
	}
}

func TestCrowd(t *testing.T) {
	w := newCrowd(Limits{Connections: 20, PeerConns: 2})
	join := func(key string) (*conn, error) {
		c := &conn{Conn: nopConn{}, peer: Peer{Key: key}, crowd: w}
		return c, w.admit(c)
	}
	var mine []*conn
	for i := range 2 + peerExcuses {
		c, err := join("a")
		if err != nil || c.excuse != (i >= 2) {
			t.Fatalf("connection %d of a: excuse %v, %v", i, c.excuse, err)
		}
		mine = append(mine, c)
	}
	if _, err := join("a"); err == nil {
		t.Error("one peer has no end of excuses")
	}
	if c, err := join("b"); err != nil || c.excuse {
		t.Error("one peer keeps out another")
	}
	for _, c := range mine {
		c.Close()
		c.Close() // twice is once
	}
	if w.size() != 1 || len(w.peers) != 1 {
		t.Errorf("left: %d connections, peers %v", w.size(), w.peers)
	}
	for i := w.size(); i < 20+excuses; i++ {
		if _, err := join(strings.Repeat("x", i)); err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
	}
	if _, err := join("z"); err == nil {
		t.Error("no end of connections")
	}
	w.end()
	if _, err := join("b"); err == nil || w.size() != 0 {
		t.Error("still open after the end")
	}
}

type nopConn struct{ net.Conn }

func (nopConn) Close() error { return nil }

func TestParseUpstream(t *testing.T) {
	lim, _ := Limits{}.withDefaults()
	for in, want := range map[string]string{ // network and address, "" = refused
		"http://127.0.0.1:8642":        "tcp 127.0.0.1:8642",
		"http://127.0.0.1":             "tcp 127.0.0.1:80",
		"http://localhost:8642/":       "tcp localhost:8642",
		"http://[::1]:8642/base":       "tcp [::1]:8642",
		"http://127.9.9.9:1":           "tcp 127.9.9.9:1",
		"unix:/run/hermes/api.sock":    "unix /run/hermes/api.sock",
		"unix:api.sock":                "",
		"https://127.0.0.1:8642":       "",
		"http://192.168.1.10:8642":     "",
		"http://0.0.0.0:8642":          "",
		"http://api.example:8642":      "",
		"http://localhost.example:1":   "",
		"http://user@127.0.0.1:1":      "",
		"http://127.0.0.1:1/?x":        "",
		"http://127.0.0.1:1/?":         "",
		"http://127.0.0.1:1/#x":        "",
		"http://127.0.0.1:1/a/../b":    "",
		"http://127.0.0.1:1/a%2fb":     "",
		"http://127.0.0.1:1/a%20b":     "",
		"http:127.0.0.1:1":             "",
		"127.0.0.1:8642":               "",
		"ws://127.0.0.1:8767/ws":       "",
		"http://127.0.0.1:bad":         "",
		"http://user:hunter2@10.0.0.1": "",
	} {
		u, err := parseUpstream(in, lim)
		got := ""
		if err == nil {
			got = u.network + " " + u.address
		} else if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("the error quotes a password: %v", err)
		}
		if got != want {
			t.Errorf("%q: %q, %v; want %q", in, got, err, want)
		}
	}
	if _, err := parseUpstream("http://10.0.0.1:1", lim); err == nil || !strings.Contains(err.Error(), "host networking") {
		t.Errorf("no word about containers: %v", err)
	}
}

// What a name resolves to is decided when it is dialled, not when it is read.
func TestOnlyLoopbackIsDialled(t *testing.T) {
	u := &upstream{network: "tcp", address: "192.0.2.1:80"}
	if c, err := u.dialOnce(t.Context()); !errors.Is(err, errNotLoopback) {
		t.Errorf("dialled %v, %v", c, err)
	}
}

func TestUnixUpstream(t *testing.T) {
	sock := filepath.Join(t.TempDir(), "api.sock")
	ln, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	inner := service(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, r.Host+" "+r.RequestURI) })
	srv := &http.Server{Handler: inner.Config.Handler}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ln) }()
	t.Cleanup(func() { srv.Close(); <-done })
	l := start(t, Config{Upstreams: Upstreams{API: "unix:" + sock}})
	if resp, body := get(t, l.h1, l.url("/api/x?y")); resp.StatusCode != 200 || body != "localhost /x?y" {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

// A service that restarts is not noticed; one that is down is reported fast.
func TestRestartingUpstream(t *testing.T) {
	lim, _ := Limits{}.withDefaults()
	sock := filepath.Join(t.TempDir(), "api.sock")
	u, err := parseUpstream("unix:"+sock, lim)
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if _, err := u.dial(t.Context(), lim.ConnectTime); !nobodyListens(err) || time.Since(begin) < dialPatience || time.Since(begin) > 5*time.Second {
		t.Errorf("nobody there: %v after %v", err, time.Since(begin))
	}
	if _, err := u.dial(context.WithValue(t.Context(), impatient{}, true), lim.ConnectTime); !nobodyListens(err) {
		t.Errorf("a probe: %v", err)
	}
	type dialled struct {
		c   net.Conn
		err error
	}
	got := make(chan dialled, 1)
	go func() {
		c, err := u.dial(t.Context(), lim.ConnectTime)
		got <- dialled{c, err}
	}()
	ln, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	defer os.Remove(sock)
	if d := await(t, got, "a connection"); d.err != nil {
		t.Error(d.err)
	} else {
		d.c.Close()
	}
}
