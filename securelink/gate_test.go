package securelink

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestProbes(t *testing.T) {
	lim, _ := Limits{}.withDefaults()
	answer := func(status int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(status); io.WriteString(w, body) }
	}
	up := answer(200, "{}")
	for name, tt := range map[string]struct {
		probe  func(*upstream) func(context.Context) finding
		routes map[string]http.HandlerFunc
		want   string // "" = open
	}{
		"api with a key":         {probeAPI, map[string]http.HandlerFunc{"/health": up, "/v1/models": answer(401, "")}, ""},
		"api forbids":            {probeAPI, map[string]http.HandlerFunc{"/health": up, "/v1/models": answer(403, "")}, ""},
		"api without a key":      {probeAPI, map[string]http.HandlerFunc{"/health": up, "/v1/models": answer(200, "[]")}, "api_unprotected"},
		"api redirects":          {probeAPI, map[string]http.HandlerFunc{"/health": up, "/v1/models": answer(302, "")}, "api_unprotected"},
		"api knows no models":    {probeAPI, map[string]http.HandlerFunc{"/health": up}, "api_unprotected"},
		"api is no API":          {probeAPI, nil, "api_unavailable"},
		"api is ill":             {probeAPI, map[string]http.HandlerFunc{"/health": answer(503, "")}, "api_unavailable"},
		"api is half ill":        {probeAPI, map[string]http.HandlerFunc{"/health": up, "/v1/models": answer(500, "")}, "api_unavailable"},
		"api is busy":            {probeAPI, map[string]http.HandlerFunc{"/health": up, "/v1/models": answer(429, "")}, "api_unavailable"},
		"dashboard":              {probeDashboard, map[string]http.HandlerFunc{"/api/health": answer(200, `{"auth_required":true}`)}, ""},
		"older dashboard":        {probeDashboard, map[string]http.HandlerFunc{"/api/status": answer(200, `{"version":"1","auth_required":true}`)}, ""},
		"dashboard without page": {probeDashboard, map[string]http.HandlerFunc{"/api/health": answer(200, "<html>"), "/api/status": answer(200, `{"auth_required":true}`)}, ""},
		"open dashboard":         {probeDashboard, map[string]http.HandlerFunc{"/api/health": answer(200, `{"auth_required":false}`), "/api/status": answer(200, `{"auth_required":true}`)}, "dashboard_unprotected"},
		"older open dashboard":   {probeDashboard, map[string]http.HandlerFunc{"/api/status": answer(200, `{"auth_required":false}`)}, "dashboard_unprotected"},
		"it says yes in words":   {probeDashboard, map[string]http.HandlerFunc{"/api/health": answer(200, `{"auth_required":"true"}`)}, "dashboard_unprotected"},
		"null":                   {probeDashboard, map[string]http.HandlerFunc{"/api/health": answer(200, `{"auth_required":null}`)}, "dashboard_unprotected"},
		"another member":         {probeDashboard, map[string]http.HandlerFunc{"/api/health": answer(200, `{"Auth_Required":true}`)}, "dashboard_unprotected"},
		"no dashboard":           {probeDashboard, nil, "dashboard_unprotected"},
		"says it with an error":  {probeDashboard, map[string]http.HandlerFunc{"/api/health": answer(404, `{"auth_required":true}`)}, "dashboard_unprotected"},
		"dashboard is ill":       {probeDashboard, map[string]http.HandlerFunc{"/api/health": answer(502, "")}, "dashboard_unavailable"},
		"relay":                  {probeRelay, map[string]http.HandlerFunc{"/health": up}, ""},
		"relay without health":   {probeRelay, nil, ""},
		"relay is ill":           {probeRelay, map[string]http.HandlerFunc{"/health": answer(500, "")}, "relay_unavailable"},
	} {
		t.Run(name, func(t *testing.T) {
			mux := http.NewServeMux()
			for path, h := range tt.routes {
				mux.HandleFunc(path, h)
			}
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				for _, name := range []string{"Authorization", "Cookie", "X-Hermes-Relay-Session", "X-Forwarded-For"} {
					if r.Header.Get(name) != "" {
						t.Errorf("the probe carries %s", name)
					}
				}
				mux.ServeHTTP(w, r)
			}))
			defer srv.Close()
			base := srv.URL
			if strings.Contains(name, "relay") {
				base += "/ws"
			}
			u, err := parseUpstream(base, lim)
			if err != nil {
				t.Fatal(err)
			}
			f := tt.probe(u)(t.Context())
			if f.open != (tt.want == "") || f.code != tt.want || f.unprotected != strings.HasSuffix(tt.want, "unprotected") {
				t.Errorf("found %+v, want %q", f, tt.want)
			}
			if !f.open && f.text == "" {
				t.Error("it does not say what to do")
			}
		})
	}
}

// bench is a gate with a clock and a probe in the hands of the test.
type bench struct {
	*gate
	now    time.Time
	answer finding
	probes atomic.Int32
	work   sync.WaitGroup
}

func newBench(t *testing.T) *bench {
	lim, _ := Limits{}.withDefaults()
	b := &bench{now: time.Unix(1e9, 0)}
	ctx, cancel := context.WithCancel(context.Background())
	b.gate = &gate{ns: nsAPI, lim: lim, now: func() time.Time { return b.now }, log: slog.New(slog.DiscardHandler), base: ctx, work: &b.work}
	b.gate.probe = func(context.Context) finding { b.probes.Add(1); return b.answer }
	b.start()
	t.Cleanup(func() { cancel(); b.work.Wait() })
	return b
}

var (
	isOpen = finding{verdict: verdict{open: true}}
	isBare = finding{unprotected: true, verdict: verdict{code: "api_unprotected"}}
	isIll  = finding{verdict: verdict{code: "api_unavailable"}}
	isGone = finding{nobody: true, verdict: verdict{code: "api_unavailable"}}
)

func TestGateOverTime(t *testing.T) {
	b := newBench(t)
	for i, step := range []struct {
		pass   time.Duration
		answer finding
		probes int32 // in all, after the step
		open   bool
	}{
		{0, isIll, 1, false},                        // the first answer counts at once
		{14 * time.Second, isOpen, 1, false},        // cached
		{2 * time.Second, isOpen, 2, true},          // 15 s are over
		{14 * time.Second, isBare, 2, true},         // cached
		{2 * time.Second, isIll, 3, true},           // one miss is none
		{500 * time.Millisecond, isIll, 3, true},    //
		{600 * time.Millisecond, isIll, 4, false},   // two are
		{14 * time.Second, isOpen, 4, false},        //
		{2 * time.Second, isOpen, 5, true},          //
		{16 * time.Second, isIll, 6, true},          //
		{2 * time.Second, isOpen, 7, true},          // a miss, then well again
		{16 * time.Second, isIll, 8, true},          // counts from one again
		{16 * time.Second, isBare, 9, false},        // no second opinion about this
		{14 * time.Second, isOpen, 9, false},        //
		{2 * time.Second, isGone, 10, false},        // nobody listens:
		{1100 * time.Millisecond, isOpen, 11, true}, // looked for again at once
	} {
		b.now, b.answer = b.now.Add(step.pass), step.answer
		v := b.check(t.Context())
		if v.open != step.open || b.probes.Load() != step.probes {
			t.Fatalf("step %d: %+v after %d probes; want open = %v after %d", i, v, b.probes.Load(), step.open, step.probes)
		}
	}
}

// A hundred requests make one probe, and a request that is given up does not
// wait for it.
func TestProbesCoalesce(t *testing.T) {
	b := newBench(t)
	b.answer = isOpen
	entered, free := make(chan bool, 100), make(chan bool)
	inner := b.gate.probe
	b.gate.probe = func(ctx context.Context) finding { entered <- true; <-free; return inner(ctx) }
	var all sync.WaitGroup
	for range 100 {
		all.Go(func() {
			if v := b.check(context.Background()); !v.open {
				t.Errorf("verdict %+v", v)
			}
		})
	}
	await(t, entered, "a probe")
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	if v := b.check(gone); v.open {
		t.Error("an abandoned request was let in")
	}
	close(free)
	all.Wait()
	if n := b.probes.Load(); n != 1 || len(entered) != 0 {
		t.Errorf("%d probes", n)
	}
}

func TestClosedNamespaces(t *testing.T) {
	bare := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{"auth_required":false}`) }))
	t.Cleanup(bare.Close)
	gone := httptest.NewServer(nil)
	gone.Close()
	for name, tt := range map[string]struct {
		up        Upstreams
		api, dash string
	}{
		"nothing configured": {Upstreams{}, "api_unavailable", "dashboard_unavailable"},
		"no locks":           {Upstreams{API: bare.URL, Dashboard: bare.URL}, "api_unprotected", "dashboard_unprotected"},
		"not running":        {Upstreams{API: gone.URL, Dashboard: gone.URL}, "api_unavailable", "dashboard_unavailable"},
	} {
		t.Run(name, func(t *testing.T) {
			l := start(t, Config{Upstreams: tt.up})
			for path, code := range map[string]string{"/api/v1/models": tt.api, "/dashboard/": tt.dash} {
				req, _ := http.NewRequest("GET", l.url(path), nil)
				req.Header.Set("Authorization", "Bearer key") // opens no gate
				resp, err := l.h2.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				body, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				if resp.StatusCode != 503 || !strings.Contains(string(body), `"code":"`+code+`"`) || resp.Header.Get("Content-Type") != "application/json" {
					t.Errorf("%s: %d %s", path, resp.StatusCode, body)
				}
			}
			for _, ns := range l.Status(t.Context()).Namespaces {
				if ns.Open || ns.Message == "" {
					t.Errorf("status says %+v", ns)
				}
			}
		})
	}
}

// An upstream that loses its lock has its running streams ended, not only its
// new requests refused.
func TestUnprotectedEndsStreams(t *testing.T) {
	var bare atomic.Bool
	begun, ended := make(chan bool, 2), make(chan bool, 2)
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/v1/models", func(w http.ResponseWriter, r *http.Request) {
		if !bare.Load() {
			w.WriteHeader(401)
		}
	})
	mux.HandleFunc("/stream", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "data: 1\n\n")
		http.NewResponseController(w).Flush()
		begun <- true
		<-r.Context().Done()
		ended <- true
	})
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL}, Limits: Limits{ProbeEvery: 100 * time.Millisecond, ProbeTime: 99 * time.Millisecond}})
	for _, client := range []*http.Client{l.h1, l.h2} {
		bare.Store(false)
		var resp *http.Response
		for resp == nil || resp.StatusCode != 200 { // until the gate has seen the lock again
			var err error
			if resp, err = client.Get(l.url("/api/stream")); err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode != 200 {
				resp.Body.Close()
			}
		}
		await(t, begun, "the stream")
		bare.Store(true)
		if _, err := io.ReadAll(resp.Body); err == nil {
			t.Error("the stream ended as if it were complete")
		}
		resp.Body.Close()
		await(t, ended, "the upstream to be told")
		if resp, body := get(t, client, l.url("/api/stream")); resp.StatusCode != 503 || !strings.Contains(body, "api_unprotected") {
			t.Errorf("then: %d %s", resp.StatusCode, body)
		}
	}
}
