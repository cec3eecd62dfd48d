package reach

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// What happens to a request whose path dies before the answer begins.
func TestCutBeforeAnswer(t *testing.T) {
	type body struct{ io.Reader } // hides what makes a body replayable
	for name, tt := range map[string]struct {
		method string
		body   func() io.Reader
		key    bool
		again  bool
	}{
		"GET":                      {method: "GET", again: true},
		"HEAD":                     {method: "HEAD", again: true},
		"GET with a body":          {method: "GET", body: func() io.Reader { return bytes.NewReader([]byte("x")) }, again: true},
		"GET with a stream":        {method: "GET", body: func() io.Reader { return body{strings.NewReader("x")} }},
		"POST":                     {method: "POST", body: func() io.Reader { return strings.NewReader("x") }},
		"POST without a body":      {method: "POST"},
		"PUT":                      {method: "PUT", body: func() io.Reader { return strings.NewReader("x") }},
		"POST with a key":          {method: "POST", body: func() io.Reader { return strings.NewReader("x") }, key: true, again: true},
		"POST stream with its key": {method: "POST", body: func() io.Reader { return body{strings.NewReader("x")} }, key: true},
	} {
		t.Run(name, func(t *testing.T) {
			var direct *door
			var seen atomic.Int32
			h := newHost(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				if r.URL.Path == "/cut" {
					seen.Add(1)
					if doorOf(r) == "direct" {
						direct.cut()
						<-r.Context().Done()
						return
					}
				}
				saysDoor(w, r)
			}))
			direct = h.door("direct")
			broker := h.broker()
			c := newClient(t, Config{Profile: h.profile(direct.candidate(0), broker.candidate(1, direct.addr)), NewBroker: broker.factory}, newClock())
			mustGet(t, c, "/", "direct")
			var r io.Reader
			if tt.body != nil {
				r = tt.body()
			}
			req, _ := http.NewRequestWithContext(t.Context(), tt.method, Origin+"/cut", r)
			if tt.key {
				req.Header.Set("Idempotency-Key", "1")
			}
			res, err := c.RoundTrip(req)
			if tt.again {
				if err != nil || seen.Load() != 2 {
					t.Fatalf("%v after %d tries, want an answer after 2", err, seen.Load())
				}
				res.Body.Close()
				if p, ok := PathOf(res); !ok || p.Broker == "" {
					t.Errorf("answered over %v", p)
				}
				return
			}
			if err == nil || seen.Load() != 1 {
				t.Fatalf("%v after %d tries, want an error after 1", err, seen.Load())
			}
			if idem := tt.method == "GET" || tt.key; errors.Is(err, ErrNotResent) == idem {
				t.Errorf("%v", err)
			}
			mustGet(t, c, "/", "broker") // the path that was lost rests
		})
	}
}

// With one path only, the request goes over it again; twice is enough.
func TestCutOnTheOnlyPath(t *testing.T) {
	var direct *door
	var seen atomic.Int32
	h := newHost(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n := seen.Add(1); n == 1 || r.URL.Path == "/always" {
			direct.cut()
			<-r.Context().Done()
			return
		}
		saysDoor(w, r)
	}))
	direct = h.door("direct")
	c := newClient(t, Config{Profile: h.profile(direct.candidate(0))}, newClock())
	mustGet(t, c, "/", "direct")
	seen.Store(0)
	if _, err := get(t, c, "/always"); err == nil || seen.Load() != 2 {
		t.Errorf("%v after %d tries, want an error after 2", err, seen.Load())
	}
}

// One request that the host itself ends is not the path's fault.
func TestResetByHost(t *testing.T) {
	var seen atomic.Int32
	h := newHost(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/abort" {
			seen.Add(1)
			panic(http.ErrAbortHandler)
		}
		saysDoor(w, r)
	}))
	direct, broker := h.door("direct"), h.broker()
	c := newClient(t, Config{Profile: h.profile(direct.candidate(0), broker.candidate(1, direct.addr)), NewBroker: broker.factory}, newClock())
	mustGet(t, c, "/", "direct")
	if _, err := get(t, c, "/abort"); err == nil || seen.Load() != 1 {
		t.Errorf("%v after %d tries", err, seen.Load())
	}
	mustGet(t, c, "/", "direct")
	if direct.count() != 1 {
		t.Errorf("%d connections: the healthy one was given up", direct.count())
	}
}

// A response that is cut is seen as cut.
func TestTruncation(t *testing.T) {
	for _, proto := range []string{"h2", "h1"} {
		for _, sized := range []bool{false, true} {
			t.Run(fmt.Sprint(proto, sized), func(t *testing.T) {
				var direct *door
				h := newHost(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if sized {
						w.Header().Set("Content-Length", "20000")
					}
					w.Write(make([]byte, 10000))
					http.NewResponseController(w).Flush()
					direct.cut()
					<-r.Context().Done()
				}))
				if proto == "h1" {
					h.srv.TLSConfig.NextProtos = []string{"http/1.1"}
					h.srv.TLSNextProto = noH2
				}
				direct = h.door("direct")
				c := newClient(t, Config{Profile: h.profile(direct.candidate(0))}, newClock())
				if text, err := get(t, c, "/"); err == nil {
					t.Errorf("%d bytes passed for a whole answer", len(text))
				}
			})
		}
	}
}

// A connection that has gone silent is found out by a new one, and the request
// moves on; an answer that is merely slow is waited for.
func TestDeadPath(t *testing.T) {
	slow := make(chan struct{})
	h := newHost(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			<-slow
		}
		saysDoor(w, r)
	}))
	direct, broker := h.door("direct"), h.broker()
	clk := newClock()
	c := newClient(t, Config{Profile: h.profile(direct.candidate(0), broker.candidate(1, direct.addr)), NewBroker: broker.factory}, clk)
	mustGet(t, c, "/", "direct")
	ask := func(path string) chan error {
		done := make(chan error, 1)
		clk.forget()
		go func() {
			got, err := get(t, c, path)
			done <- errors.Join(err, errors.New(got))
		}()
		clk.await(t, doubtAfter)
		return done
	}
	waits := ask("/slow")
	before := direct.count()
	clk.advance(doubtAfter)
	for direct.count() == before { // the doubt runs in a goroutine of its own
		runtime.Gosched()
	}
	c.routes[0].settled(t)
	close(slow)
	if err := <-waits; err.Error() != "direct" {
		t.Errorf("a slow answer: %v", err)
	}

	release := direct.hold()
	defer release()
	c.routes[0].timeout = 50 * time.Millisecond
	waits = ask("/")
	clk.advance(doubtAfter)
	if err := <-waits; err.Error() != "broker" {
		t.Errorf("a dead path: %v", err)
	}
	mustGet(t, c, "/", "broker")
	// Its connection is still open, and not used before the path is proved anew.
	broker.d.shut()
	if _, err := get(t, c, "/"); !errors.Is(err, ErrUnreachable) {
		t.Errorf("both paths dead: %v", err)
	}
}

// An HTTP/2 connection on which nothing comes back is given up, also under a
// request that cannot move.
func TestSilentConnection(t *testing.T) {
	h := newHost(t, http.HandlerFunc(saysDoor))
	direct := h.door("direct")
	c := newClient(t, Config{Profile: h.profile(direct.candidate(0))}, newClock())
	if cfg := c.routes[0].web.HTTP2; cfg.SendPingTimeout+cfg.PingTimeout > 30*time.Second {
		t.Errorf("a dead link is noticed after %v and %v", cfg.SendPingTimeout, cfg.PingTimeout)
	}
	c.routes[0].web.HTTP2.SendPingTimeout, c.routes[0].web.HTTP2.PingTimeout = 20*time.Millisecond, 20*time.Millisecond
	mustGet(t, c, "/", "direct")
	release := direct.hold()
	defer release()
	if _, err := do(t, c, "POST", "/", strings.NewReader("x")); !errors.Is(err, ErrNotResent) {
		t.Errorf("%v", err)
	}
	release()
	mustGet(t, c, "/", "direct")
}

// Proving a path anew does not pile up connections.
func TestIdleConnectionsAreReplaced(t *testing.T) {
	h := newHost(t, http.HandlerFunc(saysDoor))
	direct := h.door("direct")
	c := newClient(t, Config{Profile: h.profile(direct.candidate(0))}, newClock())
	for range 5 {
		<-c.routes[0].try().done
		mustGet(t, c, "/", "direct")
	}
	if n := len(c.routes[0].conns); n != 1 {
		t.Errorf("%d connections are kept", n)
	}
}
