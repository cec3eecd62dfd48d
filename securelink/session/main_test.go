package session

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var phone = Peer{Source: Source{Kind: Direct, Key: "192.0.2.7"}, Path: "plugin_proxy"}

// open makes a store that the test closes.
func open(t *testing.T, dir string, o Options) *Store {
	t.Helper()
	s, err := Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func mint(t *testing.T, s *Store, m Mint) string {
	t.Helper()
	code, _, err := s.MintCode(m)
	if err != nil {
		t.Fatal(err)
	}
	return code
}

// pair pairs a device and gives its session and answer.
func pair(t *testing.T, s *Store, id string, m Mint) (Session, AuthOK) {
	t.Helper()
	sess, ok, err := s.Authenticate(AuthRequest{PairingCode: mint(t, s, m), DeviceID: id, DeviceName: "Test " + id}, phone)
	if err != nil {
		t.Fatal(err)
	}
	return sess, ok
}

func refused(t *testing.T, err error) {
	t.Helper()
	if e, ok := errors.AsType[*AuthError](err); !ok || e.Reason != ReasonInvalid {
		t.Errorf("error = %v, want a refusal", err)
	}
}

// syncBuffer is a log that several goroutines write.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func debugLog() (*slog.Logger, *syncBuffer) {
	b := new(syncBuffer)
	return slog.New(slog.NewTextHandler(b, &slog.HandlerOptions{Level: slog.LevelDebug})), b
}

// A relayServer serves the relay socket over pipes, so that it can live in a
// synctest bubble.
type relayServer struct {
	t    *testing.T
	srv  *http.Server
	ln   *pipeListener
	done chan error
}

func serveRelay(t *testing.T, s *Store, peer func() Peer) *relayServer {
	r := &relayServer{t: t, ln: &pipeListener{conns: make(chan net.Conn), closed: make(chan struct{})}, done: make(chan error, 1)}
	r.srv = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		s.ServeRelay(w, req, peer())
	}), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	go func() { r.done <- r.srv.Serve(r.ln) }()
	return r
}

func (r *relayServer) close() {
	_ = r.srv.Close()
	<-r.done
}

// dial opens a socket; the response is for refusals.
func (r *relayServer) dial(h http.Header) (*websocket.Conn, *http.Response, error) {
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		a, b := net.Pipe()
		select {
		case r.ln.conns <- b:
			return a, nil
		case <-r.ln.closed:
			return nil, net.ErrClosed
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}}
	return websocket.Dial(r.t.Context(), "ws://host.test/relay/session", &websocket.DialOptions{HTTPClient: &http.Client{Transport: tr}, HTTPHeader: h})
}

func (r *relayServer) mustDial() *websocket.Conn {
	r.t.Helper()
	c, _, err := r.dial(nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

type pipeListener struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error   { l.once.Do(func() { close(l.closed) }); return nil }
func (l *pipeListener) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)} }

// fakeRoutes is a broker side that remembers, and fails when told to.
type fakeRoutes struct {
	mu        sync.Mutex
	issued    []RouteRequest
	withdrawn []string
	down      error
	stuck     string // an id that is not taken back
	onIssue   func()
}

func (f *fakeRoutes) Issue(_ context.Context, r RouteRequest) ([]RouteCredential, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.down != nil {
		return nil, f.down
	}
	f.issued = append(f.issued, r)
	if f.onIssue != nil {
		f.mu.Unlock()
		f.onIssue()
		f.mu.Lock()
	}
	return []RouteCredential{{BrokerURL: "wss://broker.test/v1/connect", HostID: "AAECAwQFBgcICQoLDA0ODw",
		CredentialID: r.CredentialID, Token: "route-token-secret", Expires: r.Expires}}, nil
}

func (f *fakeRoutes) Withdraw(_ context.Context, id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.down != nil {
		return f.down
	}
	if id == f.stuck {
		return errors.New("one of the brokers is down")
	}
	f.withdrawn = append(f.withdrawn, id)
	return nil
}

func (f *fakeRoutes) setDown(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.down = err
}

func (f *fakeRoutes) setStuck(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stuck = id
}

func (f *fakeRoutes) taken() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.withdrawn...)
}

// clock is a clock that moves when told to.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}
