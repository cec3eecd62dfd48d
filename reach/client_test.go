package reach

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// The better path is used as long as it is there; the next one takes over
// without an error.
func TestFailover(t *testing.T) {
	for _, proto := range []string{"h2", "h1"} {
		t.Run(proto, func(t *testing.T) {
			h := newHost(t, http.HandlerFunc(saysDoor))
			if proto == "h1" {
				h.srv.TLSConfig.NextProtos = []string{"http/1.1"}
				h.srv.TLSNextProto = noH2
			}
			direct, broker := h.door("direct"), h.broker()
			c := newClient(t, Config{
				Profile: h.profile(broker.candidate(1, direct.addr), direct.candidate(0)), NewBroker: broker.factory,
			}, newClock())
			for range 3 {
				mustGet(t, c, "/", "direct")
			}
			if direct.count() != 1 || broker.dials() != 0 {
				t.Errorf("%d direct connections and %d broker dials, want 1 and 0", direct.count(), broker.dials())
			}
			direct.shut()
			for range 3 {
				mustGet(t, c, "/", "broker")
			}
			if broker.cfg.Token != token || broker.cfg.HostID.String() != hostID || broker.cfg.Kind != endpoints.KindRoute {
				t.Errorf("broker was asked as %s %s", broker.cfg.HostID, broker.cfg.Kind)
			}
		})
	}
}

// A better path that comes back is taken by the requests that follow; what
// runs on the other stays there.
func TestBetterPathComesBack(t *testing.T) {
	more := make(chan string)
	h := newHost(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		saysDoor(w, r)
		if r.URL.Path != "/stream" {
			return
		}
		http.NewResponseController(w).Flush()
		for s := range more {
			fmt.Fprint(w, s)
			http.NewResponseController(w).Flush()
		}
	}))
	direct, broker := h.door("direct"), h.broker()
	clk := newClock()
	c := newClient(t, Config{Profile: h.profile(direct.candidate(0), broker.candidate(1, direct.addr)), NewBroker: broker.factory}, clk)
	direct.shut()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, Origin+"/stream", nil)
	res, err := c.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	expect(t, res.Body, "broker")

	direct.open()
	mustGet(t, c, "/", "broker") // it rests 2 s after the failure
	c.routes[0].settled(t)
	if n := direct.count(); n != 0 {
		t.Errorf("a resting path was tried %d times", n)
	}
	clk.advance(3 * time.Second)
	mustGet(t, c, "/", "broker") // not held up by the trial it starts
	c.routes[0].settled(t)
	mustGet(t, c, "/", "direct")
	if p, _ := PathOf(res); p.Role != endpoints.RoleOutboundBroker || p.Broker != brokerURL {
		t.Errorf("the stream says it runs over %v", p)
	}
	for _, s := range []string{"one", "two"} {
		more <- s
		expect(t, res.Body, s)
		mustGet(t, c, "/", "direct")
	}
	close(more)
	if rest, err := io.ReadAll(res.Body); err != nil || len(rest) > 0 {
		t.Errorf("end of the stream: %q, %v", rest, err)
	}
}

// noH2 keeps a server from speaking HTTP/2.
var noH2 = map[string]func(*http.Server, *tls.Conn, http.Handler){}

func expect(t *testing.T, r io.Reader, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(r, got); err != nil || string(got) != want {
		t.Fatalf("read %q, %v; want %q", got, err, want)
	}
}

// Three better candidates that swallow everything cost three head starts, in
// real time; one that refuses costs nothing.
func TestBlackHoles(t *testing.T) {
	h := newHost(t, http.HandlerFunc(saysDoor))
	broker := h.broker()
	c := newClient(t, Config{
		Profile: h.profile(h.direct(silence(t), 0), h.direct(silence(t), 1), h.direct(nothing(t), 2), h.direct(silence(t), 3),
			broker.candidate(4, "127.0.0.1:9443")), NewBroker: broker.factory,
	}, nil)
	start := time.Now()
	mustGet(t, c, "/", "broker")
	if d := time.Since(start); d > 1500*time.Millisecond || d < 3*HeadStart {
		t.Errorf("answered after %v, want three head starts", d)
	}
	start = time.Now()
	mustGet(t, c, "/", "broker")
	if d := time.Since(start); d > HeadStart {
		t.Errorf("the second request waited %v", d)
	}
}

// Within its head start the better one wins, however fast the other would be.
func TestHeadStart(t *testing.T) {
	h := newHost(t, http.HandlerFunc(saysDoor))
	direct, broker := h.door("direct"), h.broker()
	clk := newClock()
	c := newClient(t, Config{Profile: h.profile(direct.candidate(0), broker.candidate(0, direct.addr)), NewBroker: broker.factory}, clk)
	release := direct.hold()
	done := make(chan error, 1)
	go func() {
		got, err := get(t, c, "/")
		if err == nil && got != "direct" {
			err = fmt.Errorf("came through %s", got)
		}
		done <- err
	}()
	clk.await(t, HeadStart)
	clk.advance(HeadStart - 1)
	if broker.dials() != 0 {
		t.Error("the broker was dialled within the head start")
	}
	release()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if broker.dials() != 0 {
		t.Error("the broker was dialled although the better path answered")
	}
}

func TestEqualsAreRaced(t *testing.T) {
	h := newHost(t, http.HandlerFunc(saysDoor))
	a, b := h.door("a"), h.door("b")
	release := a.hold()
	defer release()
	c := newClient(t, Config{Profile: h.profile(a.candidate(0), b.candidate(0))}, newClock())
	mustGet(t, c, "/", "b")
	release()
	c.routes[0].settled(t)
	mustGet(t, c, "/", "b") // among equals the one in use stays
}

// A stranger in the host's place learns nothing: not one byte of the
// application reaches it. Another path is used if there is one; only if not is
// it a trust error.
func TestWrongPin(t *testing.T) {
	h := newHost(t, http.HandlerFunc(saysDoor))
	thief := newHost(t, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the thief got a request") }))
	stolen, broker := thief.door("stolen"), h.broker()
	cand := h.direct(stolen.addr, 0)
	c := newClient(t, Config{Profile: h.profile(cand, broker.candidate(1, "127.0.0.1:1")), NewBroker: broker.factory}, newClock())
	mustGet(t, c, "/", "broker")

	broker.refuse(errTest)
	c = newClient(t, Config{Profile: h.profile(cand, broker.candidate(1, "127.0.0.1:1")), NewBroker: broker.factory}, newClock())
	for _, try := range []func() error{
		func() error { _, err := get(t, c, "/"); return err },
		func() error { _, err := do(t, c, "POST", "/", strings.NewReader("secret")); return err },
		func() error { _, _, err := c.DialContext(t.Context()); return err },
		func() error { _, err := dialWS(t, c, "/ws"); return err },
	} {
		if err := try(); !pins.IsTrust(err) || !errors.Is(err, ErrUnreachable) || !errors.Is(err, errTest) {
			t.Errorf("%v is not a trust error that lists both paths", err)
		}
	}
	if stolen.count() < 4 {
		t.Errorf("the thief was dialled %d times: this shows nothing", stolen.count())
	}
	if len(c.routes[0].conns) != 0 {
		t.Error("a connection to the thief was pooled")
	}
}

func TestAllFail(t *testing.T) {
	h := newHost(t, nil)
	broker := h.broker()
	broker.refuse(&wire.RefusedError{Code: wire.CodeHostOffline})
	plain := endpoints.Candidate{Role: "lan", Priority: 3, Relay: &endpoints.Relay{URL: "ws://192.0.2.1:8767"}}
	other := broker.candidate(4, "127.0.0.1:9443")
	b := *other.Broker
	b.URL = "wss://other.invalid/v1/connect"
	other.Broker = &b
	refused := nothing(t)
	alien := h.direct(refused, 5)
	alien.Proxy.PinSHA256 = pins.Pin{1}.String()
	c := newClient(t, Config{Profile: h.profile(h.direct(refused, 0), broker.candidate(1, "127.0.0.1:9443"), plain, other, alien), NewBroker: broker.factory}, newClock())
	_, err := get(t, c, "/")
	if !errors.Is(err, ErrUnreachable) || pins.IsTrust(err) {
		t.Errorf("%v", err)
	}
	for _, want := range []string{refused, "connection refused", brokerURL, "host_offline", "lan", "no pinned Secure Link", "no credential for the broker", "not that of the paired host"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in: %v", want, err)
		}
	}
	if strings.Contains(err.Error(), token) {
		t.Error("the error holds the token")
	}
	if u, ok := errors.AsType[*UnreachableError](err); !ok || u.Timeout() || len(u.Attempts) != 5 {
		t.Errorf("%+v", u)
	}
}

func TestGiveUp(t *testing.T) {
	h := newHost(t, nil)
	c := newClient(t, Config{Profile: h.profile(h.direct(silence(t), 0))}, nil)
	c.routes[0].timeout = 200 * time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, http.MethodGet, Origin+"/", nil)
	_, err := c.RoundTrip(req)
	u, ok := errors.AsType[*UnreachableError](err)
	if !ok || !u.Timeout() || !errors.Is(err, context.DeadlineExceeded) || len(u.Attempts) != 1 {
		t.Errorf("deadline: %v", err)
	}
	ctx, cancel = context.WithCancel(t.Context())
	cancel()
	req, _ = http.NewRequestWithContext(ctx, http.MethodGet, Origin+"/", nil)
	if _, err := c.RoundTrip(req); !errors.Is(err, context.Canceled) || errors.Is(err, ErrUnreachable) {
		t.Errorf("cancel: %v", err)
	}
	if _, err := get(t, c, "/"); !errors.Is(err, ErrUnreachable) {
		t.Errorf("silence: %v", err)
	}
}

func TestOnly(t *testing.T) {
	h := newHost(t, http.HandlerFunc(saysDoor))
	direct, broker := h.door("direct"), h.broker()
	p := h.profile(direct.candidate(0), broker.candidate(1, direct.addr))
	for role, want := range map[endpoints.Role]string{"outbound_broker": "broker", "PLUGIN_PROXY": "direct"} {
		mustGet(t, newClient(t, Config{Profile: p, Only: role, NewBroker: broker.factory}, newClock()), "/", want)
	}
	c := newClient(t, Config{Profile: p, Only: "outbound_broker", NewBroker: broker.factory}, newClock())
	broker.refuse(errTest)
	if _, err := get(t, c, "/"); !errors.Is(err, ErrUnreachable) {
		t.Errorf("another path was taken: %v", err)
	}
	if _, err := New(Config{Profile: p, Only: "tailscale"}); !errors.Is(err, ErrUnreachable) || !strings.Contains(err.Error(), "plugin_proxy, outbound_broker") {
		t.Errorf("unknown role: %v", err)
	}
}

// Requests, and what they carry, go to the host and nowhere else.
func TestURLs(t *testing.T) {
	h := newHost(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.Host, "|", r.RequestURI, "|", r.Header.Get("Origin"), "|", r.Header.Get("Referer"))
	}))
	direct := h.door("direct")
	c := newClient(t, Config{Profile: h.profile(direct.candidate(0))}, newClock())
	for _, tt := range []struct{ url, origin, referer, want string }{
		{Origin + "/a%2Fb?q=1;2", "", "", direct.addr + "|/a%2Fb?q=1;2||"},
		{"/a", Origin, Origin + "/page", direct.addr + "|/a|https://" + direct.addr + "|https://" + direct.addr + "/page"},
		{"https://" + direct.addr + "/a", "https://reached", "https://reach.example/", direct.addr + "|/a|https://reached|https://reach.example/"},
		{"http://reach/", "", "", ""},
		{"https://evil.example/", "", "", ""},
		{"https://127.0.0.1/", "", "", ""},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, tt.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = "ignored.example"
		if tt.origin != "" {
			req.Header.Set("Origin", tt.origin)
			req.Header.Set("Referer", tt.referer)
		}
		res, err := c.RoundTrip(req)
		if (err == nil) != (tt.want != "") {
			t.Errorf("%s: %v", tt.url, err)
		}
		if err != nil {
			continue
		}
		got, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if string(got) != tt.want || res.Request.URL.Host != direct.addr {
			t.Errorf("%s: %s, sent to %v; want %s", tt.url, got, res.Request.URL, tt.want)
		}
	}
	if n := direct.count(); n != 1 {
		t.Errorf("%d connections", n)
	}
}

func dialWS(t *testing.T, c *Client, path string) (*websocket.Conn, error) {
	t.Helper()
	ws, _, err := websocket.Dial(t.Context(), "wss://reach"+path, &websocket.DialOptions{HTTPClient: c.HTTPClient()})
	return ws, err
}

// WebSockets and plain connections take the same paths, over HTTP/1.1.
func TestWebSocketAndDial(t *testing.T) {
	h := newHost(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/no" {
			http.Error(w, "no", http.StatusForbidden)
			return
		}
		ws, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer ws.CloseNow()
		ws.Write(r.Context(), websocket.MessageText, []byte(doorOf(r)))
		ws.Read(r.Context())
	}))
	direct, broker := h.door("direct"), h.broker()
	c := newClient(t, Config{Profile: h.profile(direct.candidate(0), broker.candidate(1, direct.addr)), NewBroker: broker.factory}, newClock())
	first, err := dialWS(t, c, "/")
	if err != nil {
		t.Fatal(err)
	}
	defer first.CloseNow()
	if _, text, err := first.Read(t.Context()); string(text) != "direct" {
		t.Errorf("%q, %v", text, err)
	}
	if _, err := dialWS(t, c, "/no"); err == nil {
		t.Error("a refused upgrade passed")
	}
	conn, path, err := c.DialContext(t.Context())
	if err != nil || path.Authority != direct.addr {
		t.Fatalf("%v, %v", path, err)
	}
	conn.Close()
	direct.shut()
	second, err := dialWS(t, c, "/")
	if err != nil {
		t.Fatal(err)
	}
	defer second.CloseNow()
	if _, text, err := second.Read(t.Context()); string(text) != "broker" {
		t.Errorf("%q, %v", text, err)
	}
	conn, path, err = c.DialContext(t.Context())
	if err != nil || path.Broker == "" {
		t.Fatalf("%v, %v", path, err)
	}
	conn.Close()
}

// Many requests share one HTTP/2 connection, and each has its own on HTTP/1.1.
func TestManyAtOnce(t *testing.T) {
	for proto, want := range map[string]int{"h2": 1, "h1": 20} {
		t.Run(proto, func(t *testing.T) {
			all := make(chan struct{})
			var in atomic.Int32
			h := newHost(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if in.Add(1) == 20 {
					close(all)
				}
				<-all
				saysDoor(w, r)
			}))
			if proto == "h1" {
				h.srv.TLSConfig.NextProtos = []string{"http/1.1"}
				h.srv.TLSNextProto = noH2
			}
			direct := h.door("direct")
			c := newClient(t, Config{Profile: h.profile(direct.candidate(0))}, newClock())
			errs := make(chan error)
			for range 20 {
				go func() {
					_, err := get(t, c, "/")
					errs <- err
				}()
			}
			for range 20 {
				if err := <-errs; err != nil {
					t.Error(err)
				}
			}
			if n := direct.count(); n != want {
				t.Errorf("%d connections, want %d", n, want)
			}
		})
	}
}

func TestBodyOfCaller(t *testing.T) {
	for _, proto := range []string{"h2", "h1"} {
		t.Run(proto, func(t *testing.T) { testBodyOfCaller(t, proto == "h1") })
	}
}

func testBodyOfCaller(t *testing.T, h1 bool) {
	h := newHost(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) }))
	if h1 {
		h.srv.TLSConfig.NextProtos = []string{"http/1.1"}
		h.srv.TLSNextProto = noH2
	}
	direct := h.door("direct")
	c := newClient(t, Config{Profile: h.profile(direct.candidate(0))}, newClock())
	if _, err := do(t, c, "POST", "/", io.MultiReader(strings.NewReader("x"), errReader{})); !errors.Is(err, errTest) || errors.Is(err, ErrNotResent) {
		t.Errorf("%v", err)
	}
	if got, err := do(t, c, "POST", "/", strings.NewReader("whole")); got != "whole" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errTest }

func TestClosed(t *testing.T) {
	h := newHost(t, http.HandlerFunc(saysDoor))
	direct := h.door("direct")
	c := newClient(t, Config{Profile: h.profile(direct.candidate(0))}, newClock())
	mustGet(t, c, "/", "direct")
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := get(t, c, "/"); !errors.Is(err, ErrClosed) {
		t.Errorf("request: %v", err)
	}
	if _, _, err := c.DialContext(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("dial: %v", err)
	}
	if _, err := New(Config{}); err == nil {
		t.Error("no profile")
	}
}

// A path that keeps failing is tried less often, and still within 10 s.
func TestRest(t *testing.T) {
	h := newHost(t, nil)
	clk := newClock()
	c := newClient(t, Config{Profile: h.profile(h.direct("127.0.0.1:1", 0))}, clk)
	r := c.routes[0]
	for i, want := range []time.Duration{2, 4, 8, 8, 8} {
		now := clk.now()
		r.note(now, now, errTest)
		r.note(now, now, errTest) // at the same time: once
		if got := r.resting.Sub(now); got != want*time.Second {
			t.Errorf("failure %d: rests %v, want %v s", i, got, int(want))
		}
		clk.advance(want*time.Second - 1)
		if !r.state(clk.now()).resting {
			t.Errorf("failure %d: rests too short", i)
		}
		clk.advance(1)
		if s := r.state(clk.now()); s.resting || !s.failing {
			t.Errorf("failure %d: %+v after the rest", i, s)
		}
	}
	for i, want := range []time.Duration{2, 4, 8} { // opens well, and loses what runs on it
		now := clk.now()
		r.note(now, now, nil)
		r.lost(now, errTest)
		r.lost(now, errTest)
		if got := r.resting.Sub(now); got != want*time.Second {
			t.Errorf("loss %d: rests %v, want %v s", i, got, int(want))
		}
		clk.advance(10 * time.Second)
	}
	r.note(clk.now(), clk.now(), nil)
	r.answered(clk.now())
	r.lost(clk.now(), errTest)
	if got := r.resting.Sub(clk.now()); got != 2*time.Second {
		t.Errorf("after an answer: rests %v", got)
	}
	clk.advance(-time.Hour)
	if r.state(clk.now()).resting {
		t.Error("a clock that was set back keeps the path waiting")
	}
}

// The server name behind a broker, and that of an address, says nothing.
func TestServerName(t *testing.T) {
	h := newHost(t, http.HandlerFunc(saysDoor))
	names := make(chan string, 10)
	inner := h.srv.TLSConfig.GetCertificate
	h.srv.TLSConfig.GetCertificate = func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
		names <- hello.ServerName
		return inner(hello)
	}
	direct, broker := h.door("direct"), h.broker()
	for role, want := range map[endpoints.Role]string{endpoints.RolePluginProxy: "link.invalid", endpoints.RoleOutboundBroker: "link.invalid"} {
		c := newClient(t, Config{Profile: h.profile(direct.candidate(0), broker.candidate(1, direct.addr)), Only: role, NewBroker: broker.factory}, newClock())
		if _, err := get(t, c, "/"); err != nil {
			t.Fatal(err)
		}
		if got := <-names; got != want {
			t.Errorf("%s: server name %q, want %q", role, got, want)
		}
	}
}
