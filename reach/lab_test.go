package reach

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach/profile"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A clock stands still until a test moves it, and fires timers when it does.
type clock struct {
	mu     sync.Mutex
	t      time.Time
	timers []*alarm
	set    chan time.Duration // each timer that is set, for tests that wait for one
}

type alarm struct {
	at time.Time
	f  func()
}

func newClock() *clock { return &clock{t: time.Now(), set: make(chan time.Duration, 1000)} }

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.t
}

func (c *clock) after(d time.Duration, f func()) func() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	a := &alarm{c.t.Add(d), f}
	c.timers = append(c.timers, a)
	c.set <- d
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		for i, b := range c.timers {
			if a == b {
				c.timers = append(c.timers[:i:i], c.timers[i+1:]...)
				return true
			}
		}
		return false
	}
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	c.t = c.t.Add(d)
	var due, rest []*alarm
	for _, a := range c.timers {
		if a.at.After(c.t) {
			rest = append(rest, a)
		} else {
			due = append(due, a)
		}
	}
	c.timers = rest
	c.mu.Unlock()
	for _, a := range due {
		a.f()
	}
}

// forget makes await wait for timers that are set from now on.
func (c *clock) forget() {
	for len(c.set) > 0 {
		<-c.set
	}
}

// await waits until a timer of that length is set.
func (c *clock) await(t *testing.T, d time.Duration) {
	t.Helper()
	for {
		select {
		case got := <-c.set:
			if got == d {
				return
			}
		case <-t.Context().Done():
			t.Fatal("no such timer was set")
		}
	}
}

// A host is a pinned HTTP server with any number of doors.
type host struct {
	t   *testing.T
	id  *pins.Identity
	srv *http.Server
	wg  sync.WaitGroup
}

type doorKey struct{}

// newHost serves handler, which finds the door of a request with doorOf.
func newHost(t *testing.T, handler http.Handler) *host {
	t.Helper()
	id, err := pins.New([]string{"127.0.0.1"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, id: id}
	h.srv = &http.Server{
		Handler: handler, TLSConfig: id.ServerConfig(), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			nc := c.(interface{ NetConn() net.Conn }).NetConn()
			return context.WithValue(ctx, doorKey{}, nc.(*doorConn).door.name)
		},
	}
	t.Cleanup(func() { h.srv.Close(); h.wg.Wait() })
	return h
}

func doorOf(r *http.Request) string { return r.Context().Value(doorKey{}).(string) }

// A door is one way into a host.
type door struct {
	name string
	h    *host
	addr string

	mu     sync.Mutex
	ln     net.Listener
	conns  map[*doorConn]bool
	dialed int
	held   chan struct{} // not nil: bytes wait until it is closed
}

type doorConn struct {
	net.Conn
	door *door
}

func (c *doorConn) Close() error {
	c.door.mu.Lock()
	delete(c.door.conns, c)
	c.door.mu.Unlock()
	return c.Conn.Close()
}

// Read holds what comes in while the door is held: the peer sees silence.
func (c *doorConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.door.mu.Lock()
	held := c.door.held
	c.door.mu.Unlock()
	if held != nil && err == nil {
		<-held
	}
	return n, err
}

func (h *host) door(name string) *door {
	d := &door{name: name, h: h, conns: map[*doorConn]bool{}, addr: "127.0.0.1:0"}
	d.open()
	return d
}

// open listens, at the same port as before.
func (d *door) open() {
	d.h.t.Helper()
	ln, err := net.Listen("tcp", d.addr)
	if err != nil {
		d.h.t.Fatal(err)
	}
	d.addr = ln.Addr().String()
	d.serve(ln)
}

func (d *door) serve(ln net.Listener) {
	d.mu.Lock()
	d.ln = ln
	d.mu.Unlock()
	d.h.wg.Go(func() {
		d.h.srv.ServeTLS(doorListener{ln, d}, "", "") // ends with the listener
	})
}

type doorListener struct {
	net.Listener
	d *door
}

func (l doorListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	dc := &doorConn{c, l.d}
	l.d.mu.Lock()
	l.d.conns[dc] = true
	l.d.dialed++
	l.d.mu.Unlock()
	return dc, nil
}

// shut refuses new connections and cuts those that are open.
func (d *door) shut() {
	d.mu.Lock()
	ln := d.ln
	d.mu.Unlock()
	ln.Close()
	d.cut()
}

func (d *door) cut() {
	d.mu.Lock()
	var open []*doorConn
	for c := range d.conns {
		open = append(open, c)
	}
	d.mu.Unlock()
	for _, c := range open {
		c.Close()
	}
}

// hold keeps what arrives from the host until the returned function is called.
func (d *door) hold() (release func()) {
	held := make(chan struct{})
	d.mu.Lock()
	d.held = held
	d.mu.Unlock()
	return sync.OnceFunc(func() {
		d.mu.Lock()
		d.held = nil
		d.mu.Unlock()
		close(held)
	})
}

func (d *door) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.dialed
}

func (d *door) candidate(priority int) endpoints.Candidate {
	return endpoints.Candidate{Role: endpoints.RolePluginProxy, Priority: priority, Proxy: &endpoints.Proxy{
		URL: "https://" + d.addr, PinSHA256: d.h.id.Pin().String(),
		Surfaces: []endpoints.Surface{endpoints.SurfaceRelay, endpoints.SurfaceAPI, endpoints.SurfaceDashboard},
	}}
}

const (
	brokerURL = "wss://broker.invalid/v1/connect"
	hostID    = "AAECAwQFBgcICQoLDA0ODw"
	token     = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
)

// memBroker leads into a host by a door of its own, as a broker's dialer does.
type memBroker struct {
	d   *door
	cfg BrokerConfig

	mu  sync.Mutex
	no  error // what dials answer, if set
	hit int
}

func (h *host) broker() *memBroker { return &memBroker{d: h.door("broker")} }

func (b *memBroker) factory(cfg BrokerConfig) (BrokerDialer, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.cfg = cfg
	return b, nil
}

func (b *memBroker) refuse(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.no = err
}

func (b *memBroker) dials() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.hit
}

func (b *memBroker) DialContext(ctx context.Context) (net.Conn, error) {
	b.mu.Lock()
	b.hit++
	no := b.no
	b.mu.Unlock()
	if no != nil {
		return nil, no
	}
	return new(net.Dialer).DialContext(ctx, "tcp", b.d.addr)
}

func (b *memBroker) Close() error { return nil }

func (b *memBroker) candidate(priority int, authority string) endpoints.Candidate {
	return endpoints.Candidate{
		Role: endpoints.RoleOutboundBroker, Priority: priority, Experimental: true,
		Broker: &endpoints.Broker{ProtocolVersion: 1, URL: brokerURL, HostID: hostID},
		Proxy: &endpoints.Proxy{URL: "https://" + authority, PinSHA256: b.d.h.id.Pin().String(),
			Surfaces: []endpoints.Surface{endpoints.SurfaceRelay, endpoints.SurfaceAPI}},
	}
}

func (h *host) profile(cands ...endpoints.Candidate) *profile.Profile {
	return &profile.Profile{
		Name: "home", Pin: h.id.Pin(), Candidates: cands, DeviceID: hostID,
		Routes: []profile.Route{{BrokerURL: brokerURL, HostID: hostID, Kind: endpoints.KindRoute, Token: token}},
	}
}

// newClient makes a Client that the test owns; clk may be nil for real time.
func newClient(t *testing.T, cfg Config, clk *clock) *Client {
	t.Helper()
	if clk != nil {
		cfg.Now = clk.now
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if clk != nil {
		c.timer = clk.after
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return c
}

// get asks for path and returns the body.
func get(t *testing.T, c *Client, path string) (string, error) {
	t.Helper()
	return do(t, c, http.MethodGet, path, nil)
}

func do(t *testing.T, c *Client, method, path string, body io.Reader) (string, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, Origin+path, body)
	if err != nil {
		t.Fatal(err)
	}
	res, err := c.RoundTrip(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	return string(text), err
}

func mustGet(t *testing.T, c *Client, path, want string) {
	t.Helper()
	got, err := get(t, c, path)
	if err != nil || got != want {
		t.Fatalf("GET %s = %q, %v; want %q", path, got, err, want)
	}
}

// settled waits for the trial of a route that may be under way.
func (r *route) settled(t *testing.T) {
	t.Helper()
	r.mu.Lock()
	running := r.trial
	r.mu.Unlock()
	if running == nil {
		return
	}
	select {
	case <-running.done:
	case <-t.Context().Done():
		t.Fatal("trial does not end")
	}
}

// silence accepts TCP connections and never says a word.
func silence(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln.Addr().String()
}

// nothing is an address where nobody listens.
func nothing(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func (h *host) direct(addr string, priority int) endpoints.Candidate {
	return endpoints.Candidate{Role: endpoints.RolePluginProxy, Priority: priority,
		Proxy: &endpoints.Proxy{URL: "https://" + addr, PinSHA256: h.id.Pin().String()}}
}

// saysDoor answers with the door that the request came through.
func saysDoor(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, doorOf(r)) }

var errTest = errors.New("a test's own error")

func tempStore(t *testing.T) *profile.Store {
	t.Helper()
	s, err := profile.Open(t.TempDir() + string(os.PathSeparator) + "state")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}
