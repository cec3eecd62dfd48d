package securelink

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/pins"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a test waits for what must happen; it never passes in a
// good run.
const patience = 20 * time.Second

// link is a running server with clients that trust it.
type link struct {
	*Server
	id   *pins.Identity
	addr string
	h1   *http.Client
	h2   *http.Client

	serving sync.WaitGroup
}

// start runs a server on loopback until the test ends.
func start(t testing.TB, c Config) *link {
	t.Helper()
	id, err := pins.New([]string{"home.example", "127.0.0.1"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	if c.Identity == nil {
		c.Identity = id
	}
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	l := &link{Server: s, id: c.Identity}
	l.addr = l.listen(t)
	l.h1, l.h2 = l.client(t, false), l.client(t, true)
	t.Cleanup(func() {
		l.h1.CloseIdleConnections()
		l.h2.CloseIdleConnections()
		if err := s.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		l.serving.Wait()
	})
	return l
}

// listen gives the server one more TCP listener and returns its address.
func (l *link) listen(t testing.TB) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.serve(t, ln)
	return ln.Addr().String()
}

func (l *link) serve(t testing.TB, ln net.Listener) {
	l.serving.Go(func() {
		if err := l.Serve(ln); err != nil && !errors.Is(err, ErrClosed) { // a short test may be over before this begins
			t.Errorf("Serve: %v", err)
		}
	})
}

func (l *link) tls() *tls.Config {
	return pins.ClientConfig(pins.Client{Pin: l.id.Pin(), Host: "127.0.0.1"})
}

func (l *link) client(t testing.TB, h2 bool) *http.Client {
	cfg := l.tls()
	if !h2 {
		cfg.NextProtos = []string{"http/1.1"}
	}
	tr := &http.Transport{TLSClientConfig: cfg, ForceAttemptHTTP2: h2, DisableCompression: true}
	return &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func (l *link) url(path string) string { return "https://" + l.addr + path }

// dial opens a connection that speaks HTTP/1.1, for raw requests.
func (l *link) dial(t testing.TB) *tls.Conn {
	t.Helper()
	cfg := l.tls()
	cfg.NextProtos = []string{"http/1.1"}
	c, err := tls.Dial("tcp", l.addr, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

// raw sends bytes as they stand and reads one answer.
func (l *link) raw(t testing.TB, request string) (*http.Response, string) {
	t.Helper()
	c := l.dial(t)
	if _, err := io.WriteString(c, request); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatalf("answer to %q: %v", request, err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("answer to %q: %v", request, err)
	}
	return resp, string(body)
}

func get(t testing.TB, c *http.Client, url string) (*http.Response, string) {
	t.Helper()
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(body)
}

// service is a stand-in upstream: it passes the probe of its gate, and hands
// everything else to h.
func service(t testing.TB, h http.HandlerFunc) *httptest.Server {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{"status":"ok"}`) })
	mux.HandleFunc("GET /api/health", func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{"auth_required":true}`) })
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer key" {
			w.WriteHeader(http.StatusUnauthorized)
		}
	})
	if h != nil {
		mux.Handle("/", h)
	}
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	return srv
}

// recorder is an upstream that keeps the very bytes of each request's head.
type recorder struct {
	addr string
	head chan string
}

func record(t testing.TB) *recorder {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	rec := &recorder{addr: ln.Addr().String(), head: make(chan string, 64)}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			all.Go(func() { rec.serve(c) })
		}
	})
	t.Cleanup(func() { ln.Close(); all.Wait() })
	return rec
}

func (rec *recorder) serve(c net.Conn) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	var head strings.Builder
	for r := bufio.NewReader(c); !strings.HasSuffix(head.String(), "\r\n\r\n"); {
		line, err := r.ReadString('\n')
		if err != nil {
			return
		}
		head.WriteString(line)
	}
	status := "200 OK"
	switch path := strings.Fields(head.String())[1]; path {
	case "/health":
	case "/v1/models":
		status = "401 Unauthorized"
	case "/api/health", "/base/api/health":
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 22\r\nConnection: close\r\n\r\n{\"auth_required\":true}")
		return
	default:
		rec.head <- head.String()
	}
	io.WriteString(c, "HTTP/1.1 "+status+"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
}

// next is the head of the next request that is no probe.
func (rec *recorder) next(t testing.TB) string {
	t.Helper()
	select {
	case head := <-rec.head:
		return head
	case <-time.After(patience):
		t.Fatal("no request reached the upstream")
		return ""
	}
}

// await takes the next value of a channel.
func await[T any](t testing.TB, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("waited in vain for %s", what)
		panic("unreachable")
	}
}

// tlsClient finishes a handshake on c.
func tlsClient(t testing.TB, c net.Conn, cfg *tls.Config) *tls.Conn {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(patience))
	client := tls.Client(c, cfg)
	if err := client.Handshake(); err != nil {
		t.Fatal(err)
	}
	return client
}
