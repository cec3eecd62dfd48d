package forward

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"
	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A host stands in for a reach.Client and what lies behind it: requests to
// https://reach/… end at a real server under the authority host.test:9443.
type host struct {
	srv  *httptest.Server
	rt   *http.Transport
	fail error // what RoundTrip answers, if set

	mu   sync.Mutex
	seen []*http.Request
}

const authority = "host.test:9443"

func newHost(t *testing.T, h http.HandlerFunc) *host {
	t.Helper()
	out := &host{srv: httptest.NewServer(h)}
	out.rt = &http.Transport{DisableCompression: true}
	t.Cleanup(func() { out.rt.CloseIdleConnections(); out.srv.Close() })
	return out
}

func (h *host) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.URL.Scheme+"://"+req.URL.Host != reach.Origin || req.Host != "" {
		return nil, fmt.Errorf("asked for %v as %q", req.URL, req.Host)
	}
	h.mu.Lock()
	h.seen = append(h.seen, req)
	h.mu.Unlock()
	if h.fail != nil {
		if req.Body != nil {
			req.Body.Close()
		}
		return nil, h.fail
	}
	out := req.Clone(req.Context())
	to, _ := url.Parse(h.srv.URL)
	out.URL.Scheme, out.URL.Host = "http", to.Host
	res, err := h.rt.RoundTrip(out)
	if err != nil {
		return nil, err
	}
	asSent := req.Clone(req.Context())
	asSent.URL.Host = authority
	res.Request = asSent
	return res, nil
}

func (h *host) requests() []*http.Request {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.seen
}

// start runs a Forwarder for the test.
func start(t *testing.T, cfg Config) *Forwarder {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Profile == "" {
		cfg.Profile = "home"
	}
	f, err := New(ln, cfg)
	if err != nil {
		t.Fatal(err)
	}
	run(t, f)
	return f
}

func run(t *testing.T, f *Forwarder) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func (f *Forwarder) port() string {
	_, port, _ := strings.Cut(f.hosts[0], ":")
	return port
}

// ask sends a request to the loopback port. Header "Host" sets the host; "@" in
// values stands for the port.
func ask(t *testing.T, f *Forwarder, method, path string, header map[string]string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://127.0.0.1:"+f.port()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range header {
		v = strings.ReplaceAll(v, "@", f.port())
		if k == "Host" {
			req.Host = v
			continue
		}
		req.Header.Set(k, v)
	}
	tr := &http.Transport{DisableKeepAlives: true, DisableCompression: true}
	res, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	t.Cleanup(func() { res.Body.Close() })
	return res
}

func text(t *testing.T, res *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Each write of the host arrives before the next is made; a stream that is cut
// is seen as cut.
func TestStreaming(t *testing.T) {
	for name, sized := range map[string]bool{"chunked": false, "sized": true} {
		next := make(chan string)
		h := newHost(t, func(w http.ResponseWriter, r *http.Request) {
			if sized {
				w.Header().Set("Content-Length", "1000")
			}
			http.NewResponseController(w).Flush()
			for s := range next {
				io.WriteString(w, s)
				http.NewResponseController(w).Flush()
			}
			panic(http.ErrAbortHandler)
		})
		f := start(t, Config{Transport: h})
		res := ask(t, f, "GET", "/", map[string]string{keyHeader: f.Key()})
		for i := range 5 {
			s := fmt.Sprintf("data: %d\n\n", i)
			next <- s
			got := make([]byte, len(s))
			if _, err := io.ReadFull(res.Body, got); err != nil || string(got) != s {
				t.Fatalf("%s: %q, %v", name, got, err)
			}
		}
		close(next)
		if rest, err := io.ReadAll(res.Body); err == nil {
			t.Errorf("%s: a cut stream ended well after %q", name, rest)
		}
	}
}

// A client that goes away ends the request at the host.
func TestClientGoesAway(t *testing.T) {
	gone := make(chan struct{})
	h := newHost(t, func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
		close(gone)
	})
	f := start(t, Config{Transport: h})
	ask(t, f, "GET", "/", map[string]string{keyHeader: f.Key()}).Body.Close()
	<-gone
}

func TestWebSocket(t *testing.T) {
	ended := make(chan struct{})
	h := newHost(t, func(w http.ResponseWriter, r *http.Request) {
		ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{OriginPatterns: []string{reach.OriginHost}, Subprotocols: []string{"p"}})
		if err != nil {
			t.Error(err)
			return
		}
		defer close(ended)
		defer ws.CloseNow()
		for {
			kind, msg, err := ws.Read(r.Context())
			if err != nil || ws.Write(r.Context(), kind, append([]byte(r.RequestURI+" "), msg...)) != nil {
				return
			}
		}
	})
	f := start(t, Config{Transport: h, Namespace: "relay"})
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	ws, _, err := websocket.Dial(t.Context(), "ws://127.0.0.1:"+f.port()+"/ws?ticket=1", &websocket.DialOptions{
		HTTPClient: &http.Client{Transport: tr}, Subprotocols: []string{"p"},
		HTTPHeader: http.Header{keyHeader: {f.Key()}, "Origin": {"http://localhost:" + f.port()}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer ws.CloseNow()
	if ws.Subprotocol() != "p" {
		t.Error("the sub-protocol was lost")
	}
	if err := ws.Write(t.Context(), websocket.MessageBinary, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if _, msg, err := ws.Read(t.Context()); string(msg) != "/relay/ws?ticket=1 hello" {
		t.Errorf("%q, %v", msg, err)
	}
	if got := h.requests()[0].Header.Get("Origin"); got != reach.Origin {
		t.Errorf("Origin %q", got)
	}
	ws.CloseNow()
	<-ended
}

// Run returns only when WebSockets, which the server does not know, have ended.
func TestStopEndsWebSockets(t *testing.T) {
	h := newHost(t, func(w http.ResponseWriter, r *http.Request) {
		ws, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		ws.Read(r.Context())
	})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f, err := New(ln, Config{Profile: "home", Transport: h})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.Run(ctx) }()
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	ws, _, err := websocket.Dial(t.Context(), "ws://127.0.0.1:"+f.port()+"/relay/ws", &websocket.DialOptions{
		HTTPClient: &http.Client{Transport: tr}, HTTPHeader: http.Header{keyHeader: {f.Key()}}})
	if err != nil {
		t.Fatal(err)
	}
	defer ws.CloseNow()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if _, _, err := ws.Read(t.Context()); err == nil {
		t.Error("the WebSocket outlived the forwarder")
	}
}

// lingering is a transport that takes its time to end a cancelled request.
type lingering struct {
	begun, stopped chan struct{} // stopped: Run has returned
	early          atomic.Bool   // … before this request had ended
}

func (l *lingering) RoundTrip(req *http.Request) (*http.Response, error) {
	close(l.begun)
	<-req.Context().Done()
	select {
	case <-l.stopped:
		l.early.Store(true)
	case <-time.After(50 * time.Millisecond): // long enough for Run to make its mistake
	}
	return nil, req.Context().Err()
}

func TestRunWaits(t *testing.T) {
	l := &lingering{begun: make(chan struct{}), stopped: make(chan struct{})}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f, err := New(ln, Config{Profile: "home", Transport: l})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.Run(ctx) }()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\n%s: %s\r\n\r\n", f.hosts[0], keyHeader, f.Key())
	<-l.begun
	cancel()
	err = <-done
	close(l.stopped)
	f.busy.Wait()
	if err != nil || l.early.Load() {
		t.Errorf("Run = %v with a request still running: %v", err, l.early.Load())
	}
}

type timeout struct{ error }

func (timeout) Timeout() bool { return true }

func TestFailures(t *testing.T) {
	refused := errors.New("connection refused")
	silent := &reach.UnreachableError{Attempts: []reach.Attempt{{Path: reach.Path{Role: "lan"}, Err: context.DeadlineExceeded}}}
	mixed := &reach.UnreachableError{Attempts: append(silent.Attempts, reach.Attempt{Path: reach.Path{Role: "outbound_broker"}, Err: refused})}
	trust := &reach.UnreachableError{Attempts: append(silent.Attempts, reach.Attempt{Err: &pins.TrustError{Err: pins.ErrPin, Detail: "x"}})}
	for name, tt := range map[string]struct {
		err    error
		status int
		code   string
	}{
		"unreachable": {mixed, 502, "host_unreachable"},
		"silent":      {silent, 504, "host_timeout"},
		"trust":       {trust, 502, "trust_refused"},
		"path lost":   {fmt.Errorf("x: %w", reach.ErrNotResent), 502, "path_lost"},
		"timeout":     {timeout{refused}, 504, "host_timeout"},
		"other":       {refused, 502, "forward_failed"},
	} {
		h := newHost(t, nil)
		h.fail = tt.err
		f := start(t, Config{Transport: h})
		res := ask(t, f, "GET", "/", map[string]string{keyHeader: f.Key()})
		body := text(t, res)
		var e struct {
			Error struct{ Code, Message string }
		}
		if json.Unmarshal([]byte(body), &e) != nil || res.StatusCode != tt.status || e.Error.Code != tt.code || e.Error.Message != tt.err.Error() {
			t.Errorf("%s: %s %s", name, res.Status, body)
		}
	}
}

func TestNew(t *testing.T) {
	h := newHost(t, nil)
	for name, cfg := range map[string]Config{
		"no transport": {Profile: "home"}, "bad profile": {Profile: "a.b", Transport: h}, "no profile": {Transport: h},
		"bad namespace": {Profile: "home", Transport: h, Namespace: "relay/ws"}, "capitals": {Profile: "Home", Transport: h},
	} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := New(ln, cfg); err == nil {
			t.Errorf("%s: accepted", name)
		}
		if _, err := ln.Accept(); !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s: the listener was left open", name)
		}
	}
	// A socket on all interfaces is never opened here: the address is enough.
	for _, addr := range []net.Addr{&net.TCPAddr{IP: net.IPv4zero, Port: 1}, &net.TCPAddr{IP: net.IPv6unspecified, Port: 1},
		&net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 1}, &net.TCPAddr{Port: 1}, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)}} {
		if _, _, err := origins(addr, "home"); err == nil {
			t.Errorf("%v is no loopback", addr)
		}
	}
	hosts, _, err := origins(&net.TCPAddr{IP: net.IPv6loopback, Port: 80}, "home")
	if want := "home.localhost 127.0.0.1 localhost [::1] home.localhost:80 127.0.0.1:80 localhost:80 [::1]:80"; err != nil || strings.Join(hosts, " ") != want {
		t.Errorf("%v, %v", hosts, err)
	}
}

func TestUnix(t *testing.T) {
	h := newHost(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "answer") })
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	ln, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	f, err := New(ln, Config{Profile: "home", Transport: h})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.Run(ctx) }()
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}
	for key, want := range map[string]int{"": 401, f.Key(): 200} {
		req, _ := http.NewRequestWithContext(t.Context(), "GET", f.URL()+"/api/x", nil)
		req.Header.Set(keyHeader, key)
		res, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != want {
			t.Errorf("key %q: %s", key, res.Status)
		}
	}
	if _, err := ListenUnix(path); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("a socket in use was taken: %v", err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	stale.SetUnlinkOnClose(false)
	stale.Close()
	if ln, err = ListenUnix(path); err != nil {
		t.Fatalf("a dead socket was kept: %v", err)
	}
	ln.Close()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenUnix(path); err == nil {
		t.Error("a file was replaced")
	}
	if _, err := ListenUnix(filepath.Join(dir, strings.Repeat("long", 30))); err == nil || !strings.Contains(err.Error(), "shorter") {
		t.Errorf("a path that no program could open: %v, want a refusal", err)
	}
}
