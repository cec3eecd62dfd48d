package securelink

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/securelink/session"
)

// pipes is a listener whose connections have no network address, as those of a
// connector.
type pipes struct {
	conns  chan net.Conn
	closed chan struct{}
}

type pipeAddr string

func (a pipeAddr) Network() string { return "reach" }
func (a pipeAddr) String() string  { return string(a) }

type pipeConn struct {
	net.Conn
	addr pipeAddr
}

func (c pipeConn) RemoteAddr() net.Addr { return c.addr }
func (c pipeConn) LocalAddr() net.Addr  { return c.addr }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.conns:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}
func (p *pipes) Close() error   { close(p.closed); return nil }
func (p *pipes) Addr() net.Addr { return pipeAddr("pipes") }

// The same server behind TCP and behind something that is no network at all.
func TestManyListeners(t *testing.T) {
	forwarded := make(chan string, 8)
	srv := service(t, func(w http.ResponseWriter, r *http.Request) { forwarded <- r.Header.Get("X-Forwarded-For") })
	sessions := echoSessions{make(chan session.Peer, 8)}
	l := start(t, Config{Upstreams: Upstreams{Dashboard: srv.URL}, Sessions: sessions})
	second := l.listen(t)
	p := &pipes{conns: make(chan net.Conn), closed: make(chan struct{})}
	l.serve(t, p)

	if resp, _ := get(t, l.h2, "https://"+second+"/dashboard/"); resp.StatusCode != 200 {
		t.Errorf("second listener: %d", resp.StatusCode)
	}
	if got := await(t, forwarded, "a request"); got != "127.0.0.1" {
		t.Errorf("X-Forwarded-For %q", got)
	}
	for _, h2 := range []bool{false, true} {
		cfg := l.tls()
		if !h2 {
			cfg.NextProtos = []string{"http/1.1"}
		}
		tr := &http.Transport{TLSClientConfig: cfg, ForceAttemptHTTP2: h2, DialContext: func(context.Context, string, string) (net.Conn, error) {
			near, far := net.Pipe()
			p.conns <- pipeConn{far, "device 7"}
			return near, nil
		}}
		c := &http.Client{Transport: tr}
		for range 3 {
			if resp, _ := get(t, c, "https://127.0.0.1/dashboard/"); resp.StatusCode != 200 || (resp.ProtoMajor == 2) != h2 {
				t.Errorf("through the pipe: %d %s", resp.StatusCode, resp.Proto)
			}
			if got, want := await(t, forwarded, "a request"), peerAddress(Peer{Key: "device 7"}); got != want {
				t.Errorf("X-Forwarded-For %q, want %q", got, want)
			}
		}
		if !h2 {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			ws, _, err := websocket.Dial(ctx, "wss://127.0.0.1/relay/session", &websocket.DialOptions{HTTPClient: c})
			cancel()
			if err != nil {
				t.Fatal(err)
			}
			ws.CloseNow()
			if got := await(t, sessions.peers, "the peer"); got.Source != (session.Source{Kind: session.Reach, Key: "device 7"}) || got.Path != "outbound_broker" {
				t.Errorf("peer %+v", got)
			}
		}
		tr.CloseIdleConnections()
	}
}

func TestTLS(t *testing.T) {
	l := start(t, Config{Hosts: []string{"Public.Example"}})
	other, err := pins.New([]string{"127.0.0.1"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		change func(*tls.Config)
		alpn   string
		ok     bool
	}{
		"h2":        {func(c *tls.Config) { c.NextProtos = []string{"h2", "http/1.1"} }, "h2", true},
		"http/1.1":  {func(c *tls.Config) { c.NextProtos = []string{"http/1.1"} }, "http/1.1", true},
		"none":      {func(c *tls.Config) { c.NextProtos = nil }, "", true},
		"other":     {func(c *tls.Config) { c.NextProtos = []string{"acme-tls/1"} }, "", false},
		"TLS 1.2":   {func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12 }, "", false},
		"wrong pin": {func(c *tls.Config) { *c = *pins.ClientConfig(pins.Client{Pin: other.Pin(), Host: "127.0.0.1"}) }, "", false},
	} {
		cfg := l.tls()
		tt.change(cfg)
		c, err := tls.Dial("tcp", l.addr, cfg)
		if (err == nil) != tt.ok {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil {
			continue
		}
		if st := c.ConnectionState(); st.NegotiatedProtocol != tt.alpn || st.Version != tls.VersionTLS13 || st.CurveID != tls.X25519MLKEM768 {
			t.Errorf("%s: %q, %s, %v", name, st.NegotiatedProtocol, tls.VersionName(st.Version), st.CurveID)
		}
		c.Close()
	}
	if resp, _ := l.raw(t, "GET /relay/health HTTP/1.1\r\nHost: public.example\r\nConnection: close\r\n\r\n"); resp.StatusCode != 200 {
		t.Errorf("a further host: %d", resp.StatusCode)
	}
}

// Who says nothing, or speaks slowly, is cut; in the handshake and in the
// headers alike.
func TestSlowClients(t *testing.T) {
	l := start(t, Config{Limits: Limits{HeaderTime: 200 * time.Millisecond}})
	raw, err := net.Dial("tcp", l.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	half := l.dial(t)
	io.WriteString(half, "GET /relay/health HTTP/1.1\r\nHost: home.")
	for name, c := range map[string]net.Conn{"silent": raw, "half a request": half} {
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.ReadAll(c); errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: still open", name)
		}
	}
}

// Close ends everything: a stream, a WebSocket, an idle connection, a client
// that never speaks. goleak sees whether something is left.
func TestClose(t *testing.T) {
	begun := make(chan bool, 1)
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		http.NewResponseController(w).Flush()
		begun <- true
		<-r.Context().Done()
	})
	heads := make(chan http.Header, 1)
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL, Relay: relayStandIn(t, heads).URL}, Sessions: echoSessions{make(chan session.Peer, 1)}})
	ended := make(chan error, 2)
	for _, c := range []*http.Client{l.h1, l.h2} {
		resp, err := c.Get(l.url("/api/stream"))
		if err != nil {
			t.Fatal(err)
		}
		await(t, begun, "the stream")
		go func() {
			defer resp.Body.Close()
			_, err := io.ReadAll(resp.Body)
			ended <- err
		}()
	}
	sockets := []*websocket.Conn{l.talk(t, "/relay/ws"), l.talk(t, "/relay/session")}
	l.dial(t)
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := await(t, ended, "the end of a stream"); err == nil {
			t.Error("a stream ended as if it were complete")
		}
	}
	for _, c := range sockets {
		if _, _, err := c.Read(t.Context()); err == nil {
			t.Error("a WebSocket is still open")
		}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Serve(ln); !errors.Is(err, ErrClosed) {
		t.Errorf("Serve after Close: %v", err)
	}
	for _, ns := range l.Status(t.Context()).Namespaces {
		if ns.Open || ns.Message == "" {
			t.Errorf("status after Close: %+v", ns)
		}
	}
}

// Shutdown lets a request end that is under way, and takes no new one.
func TestShutdown(t *testing.T) {
	begun, finish := make(chan bool), make(chan bool)
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		begun <- true
		<-finish
		io.WriteString(w, "done")
	})
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL}, Sessions: echoSessions{make(chan session.Peer, 1)}})
	ws := l.talk(t, "/relay/session")
	got := make(chan string, 1)
	go func() {
		resp, err := l.h2.Get(l.url("/api/slow"))
		if err != nil {
			got <- err.Error()
			return
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		got <- string(body)
	}()
	await(t, begun, "the request")
	down := make(chan error, 1)
	go func() { down <- l.Shutdown(context.Background()) }()
	for deadline := time.Now().Add(patience); ; { // until the listener is gone
		c, err := net.Dial("tcp", l.addr)
		if err != nil {
			break
		}
		c.Close()
		if time.Now().After(deadline) {
			t.Fatal("still accepting")
		}
	}
	close(finish)
	if body := await(t, got, "the answer"); body != "done" {
		t.Errorf("the request under way ended with %q", body)
	}
	if err := await(t, down, "Shutdown"); err != nil {
		t.Errorf("Shutdown: %v", err)
	}
	if _, _, err := ws.Read(t.Context()); err == nil {
		t.Error("a WebSocket is still open")
	}
}

func TestShutdownHasAnEnd(t *testing.T) {
	begun := make(chan bool, 1)
	srv := service(t, func(w http.ResponseWriter, r *http.Request) { begun <- true; <-r.Context().Done() })
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL}})
	done := make(chan error, 1)
	go func() {
		resp, err := l.h1.Get(l.url("/api/stuck"))
		if err == nil {
			resp.Body.Close()
		}
		done <- err
	}()
	await(t, begun, "the request")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Shutdown(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Shutdown = %v", err)
	}
	if err := await(t, done, "the client"); err == nil {
		t.Error("a request that was cut looks answered")
	}
}

// A handler that is reached on another way than our listeners serves nothing.
func TestOnlyThroughListeners(t *testing.T) {
	l := start(t, Config{})
	w := &answer{header: http.Header{}}
	r, _ := http.NewRequest("GET", "/relay/health", nil)
	r.RequestURI, r.Host = "/relay/health", "home.example"
	if l.ServeHTTP(w, r); w.status != 500 || !strings.Contains(w.String(), "internal") {
		t.Errorf("%d %s", w.status, w)
	}
}

type answer struct {
	strings.Builder
	header http.Header
	status int
}

func (a *answer) Header() http.Header    { return a.header }
func (a *answer) WriteHeader(status int) { a.status = status }
