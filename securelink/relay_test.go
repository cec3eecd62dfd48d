package securelink

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coder/websocket"

	"github.com/hermes-reach/hermes-reach/securelink/session"
)

var _ Sessions = (*session.Store)(nil)

// echoSessions answers like a Relay that says who called.
type echoSessions struct{ peers chan session.Peer }

func (e echoSessions) ServeRelay(w http.ResponseWriter, r *http.Request, p session.Peer) {
	c, err := websocket.Accept(w, r, &websocket.AcceptOptions{OriginPatterns: []string{"*"}})
	if err != nil {
		return
	}
	defer c.CloseNow()
	e.peers <- p
	echo(r.Context(), c)
}

func echo(ctx context.Context, c *websocket.Conn) {
	for {
		kind, data, err := c.Read(ctx)
		if err != nil || c.Write(ctx, kind, data) != nil {
			return
		}
	}
}

// talk opens a relay socket and sends a few messages to and fro.
func (l *link) talk(t *testing.T, path string) *websocket.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, resp, err := websocket.Dial(ctx, "wss://"+l.addr+path, &websocket.DialOptions{
		HTTPClient: l.h1, CompressionMode: websocket.CompressionContextTakeover, Subprotocols: []string{"x"},
		HTTPHeader: http.Header{"Authorization": {"Bearer b"}, "Cookie": {"a=b"}, "X-Hermes-Proxy-Secret": {"forged"}, "X-Mine": {"1"}},
	})
	if err != nil {
		t.Fatal(path, err)
	}
	t.Cleanup(func() { c.CloseNow() })
	if resp.Header.Get("Sec-Websocket-Extensions") != "" || c.Subprotocol() != "" {
		t.Errorf("%s: agreed on %q, %q", path, resp.Header.Get("Sec-Websocket-Extensions"), c.Subprotocol())
	}
	for i := range 10 {
		text := strings.Repeat(fmt.Sprint("message ", i), 1000)
		if err := c.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if _, got, err := c.Read(ctx); err != nil || string(got) != text {
			t.Fatalf("%s: %d bytes, %v", path, len(got), err)
		}
	}
	return c
}

func TestBuiltInRelay(t *testing.T) {
	sessions := echoSessions{make(chan session.Peer, 2)}
	l := start(t, Config{Sessions: sessions})
	for _, path := range []string{"/relay/ws", "/relay/session"} {
		l.talk(t, path)
		p := await(t, sessions.peers, "the peer")
		if want := (session.Peer{Source: session.Source{Kind: session.Direct, Key: "127.0.0.1"}, Path: "plugin_proxy", OriginChecked: true}); p != want {
			t.Errorf("%s: peer %+v, want %+v", path, p, want)
		}
	}
}

// relayStandIn is a Relay on loopback that keeps the heads of its upgrades.
func relayStandIn(t *testing.T, heads chan http.Header) *httptest.Server {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			return
		}
		h := r.Header.Clone()
		h.Set("Request", r.Method+" "+r.RequestURI+" "+r.Host)
		heads <- h
		c, err := websocket.Accept(w, r, &websocket.AcceptOptions{CompressionMode: websocket.CompressionContextTakeover})
		if err != nil {
			return
		}
		defer c.CloseNow()
		echo(r.Context(), c)
	}))
	t.Cleanup(srv.Close)
	return srv
}

func TestLoopbackRelay(t *testing.T) {
	heads := make(chan http.Header, 4)
	srv := relayStandIn(t, heads)
	sessions := echoSessions{make(chan session.Peer, 2)}
	for name, tt := range map[string]struct {
		url, secret string
		want        map[string]string
	}{
		"with a secret": {srv.URL + "/ws", "s3cret", map[string]string{"X-Hermes-Proxy-Secret": "s3cret", "X-Hermes-Proxy-Peer": "127.0.0.1"}},
		"without":       {srv.URL, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			l := start(t, Config{Upstreams: Upstreams{Relay: tt.url}, RelaySecret: tt.secret, Sessions: sessions})
			c := l.talk(t, "/relay/ws?query=lost")
			h := await(t, heads, "the upgrade")
			if got, want := h.Get("Request"), "GET /ws "+strings.TrimPrefix(srv.URL, "http://"); got != want {
				t.Errorf("the Relay was asked %q, want %q", got, want)
			}
			for name := range h {
				switch name {
				case "Request", "Connection", "Upgrade", "Sec-Websocket-Version", "Sec-Websocket-Key":
				default:
					if h.Get(name) != tt.want[name] {
						t.Errorf("the Relay saw %s: %s", name, h.Get(name))
					}
				}
			}
			for name, value := range tt.want {
				if h.Get(name) != value {
					t.Errorf("the Relay saw %s: %q, want %q", name, h.Get(name), value)
				}
			}
			c.Close(4000, "done") // and its answer comes back
			l.talk(t, "/relay/session")
			if p := await(t, sessions.peers, "the built-in sessions"); !p.OriginChecked {
				t.Errorf("peer %+v", p)
			}
		})
	}
}

func TestRelayRefuses(t *testing.T) {
	raw := func(answer string) string {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan bool)
		go func() {
			defer close(done)
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				r, err := http.ReadRequest(bufio.NewReader(c))
				if err == nil {
					key := acceptKey(r.Header.Get("Sec-Websocket-Key"))
					io.WriteString(c, strings.ReplaceAll(answer, "KEY", key))
				}
				c.Close()
			}
		}()
		t.Cleanup(func() { ln.Close(); <-done })
		return "http://" + ln.Addr().String() + "/ws"
	}
	gone := httptest.NewServer(nil)
	gone.Close()
	const ok = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: "
	for name, tt := range map[string]struct {
		relay  string
		status int
		code   string
	}{
		"none at all":       {"", 503, "relay_unavailable"},
		"not running":       {gone.URL, 502, "relay_unavailable"},
		"blocked peer":      {raw("HTTP/1.1 429 Too Many Requests\r\nContent-Length: 3\r\n\r\nno\n"), 429, "rate_limited"},
		"no WebSocket":      {raw("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), 502, "relay_refused"},
		"a redirect":        {raw("HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:22/\r\nContent-Length: 0\r\n\r\n"), 502, "relay_refused"},
		"wrong accept":      {raw(ok + "x\r\n\r\n"), 502, "relay_refused"},
		"unasked extension": {raw(ok + "KEY\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n"), 502, "relay_refused"},
		"unasked protocol":  {raw(ok + "KEY\r\nSec-WebSocket-Protocol: x\r\n\r\n"), 502, "relay_refused"},
		"hangs up":          {raw(""), 502, "relay_unavailable"},
	} {
		t.Run(name, func(t *testing.T) {
			l := start(t, Config{Upstreams: Upstreams{Relay: tt.relay}})
			resp, body := l.raw(t, "GET /relay/ws HTTP/1.1\r\nHost: home.example\r\n"+handshakeLines+"\r\n")
			if resp.StatusCode != tt.status || !strings.Contains(body, `"code":"`+tt.code+`"`) || resp.Header["Location"] != nil {
				t.Errorf("%d %s; want %d %s", resp.StatusCode, body, tt.status, tt.code)
			}
			if (resp.StatusCode == 429) != (resp.Header.Get("Retry-After") != "") {
				t.Errorf("Retry-After %q", resp.Header.Get("Retry-After"))
			}
		})
	}
}

func TestRelayHandshake(t *testing.T) {
	l := start(t, Config{Sessions: echoSessions{make(chan session.Peer, 9)}})
	for name, tt := range map[string]struct {
		change func(string) string
		status int
	}{
		"version 8":  {func(s string) string { return strings.Replace(s, "Version: 13", "Version: 8", 1) }, 426},
		"short key":  {func(s string) string { return strings.Replace(s, "dGhlIHNhbXBsZSBub25jZQ==", "c2hvcnQ=", 1) }, 400},
		"no base64":  {func(s string) string { return strings.Replace(s, "dGhlIHNhbXBsZSBub25jZQ==", "!", 1) }, 400},
		"no upgrade": {func(s string) string { return strings.Replace(s, "Connection: Upgrade", "Connection: keep-alive", 1) }, 400},
		"own origin": {func(s string) string { return s + "Origin: https://home.example\r\n" }, 101},
		"no origin":  {func(s string) string { return s }, 101},
		"HTTP/1.0":   {func(s string) string { return s }, 400},
	} {
		proto := " HTTP/1.1"
		if name == "HTTP/1.0" {
			proto = " HTTP/1.0"
		}
		c := l.dial(t)
		io.WriteString(c, "GET /relay/ws"+proto+"\r\nHost: home.example\r\n"+tt.change(handshakeLines)+"\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || resp.StatusCode != tt.status {
			t.Errorf("%s: %+v, %v; want %d", name, resp, err, tt.status)
		}
		c.Close()
	}
}

// The members and values that apps in the field read, to the letter.
const healthInContract = `{"status":"ok","surface":"hermes_secure_proxy","display_name":"Hermes Secure Link",
 "security":"pinned_tls",
 "capabilities":["relay","api","dashboard"],"namespaces":["relay","api","dashboard"],
 "services":{
  "relay":{"supported":true,"available":true,"base_path":"/relay","health_path":"/relay/health",
           "websocket_path":"/relay/ws","authentication":"relay_session"},
  "api":{"supported":true,"available":true,"base_path":"/api","authentication":"api_bearer"},
  "dashboard":{"supported":true,"available":false,"base_path":"/dashboard",
               "authentication":"dashboard_session"}}}`

func TestHealth(t *testing.T) {
	l := start(t, Config{Upstreams: Upstreams{API: service(t, nil).URL}, Sessions: echoSessions{}})
	l.each(t, func(t *testing.T, c *http.Client) {
		resp, body := get(t, c, l.url("/relay/health"))
		if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "application/json" || resp.Header.Get("Cache-Control") != "no-store" {
			t.Errorf("%d %v", resp.StatusCode, resp.Header)
		}
		var got, want any
		if err := json.Unmarshal([]byte(body), &got); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(healthInContract), &want); err != nil {
			t.Fatal(err)
		}
		holds(t, "", got, want)
		for _, secret := range []string{"127.0.0.1", l.id.Pin().String()} {
			if strings.Contains(body, secret) {
				t.Errorf("%s tells %s to anybody", body, secret)
			}
		}
		head, err := c.Head(l.url("/relay/health"))
		if err != nil || head.StatusCode != 200 {
			t.Errorf("HEAD: %+v, %v", head, err)
		}
		head.Body.Close()
	})
}

// holds checks that got has everything that want has; it may have more.
func holds(t *testing.T, path string, got, want any) {
	t.Helper()
	members, ok := want.(map[string]any)
	if !ok {
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s is %v, want %v", path, got, want)
		}
		return
	}
	have, _ := got.(map[string]any)
	for name, value := range members {
		holds(t, path+"/"+name, have[name], value)
	}
}
