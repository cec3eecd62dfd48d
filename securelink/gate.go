package securelink

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"sync"
	"time"
)

// A verdict is what a gate says of its upstream.
type verdict struct {
	open bool
	code string // why not: NAMESPACE_unavailable or NAMESPACE_unprotected
	text string // what to do about it
}

// A finding is what one probe found.
type finding struct {
	verdict
	unprotected bool // it answers, and lets in who should not come in
	nobody      bool // nothing listens there
}

// gate keeps one namespace closed unless its upstream proves again and again
// that it asks for a login of its own. One probe runs at a time, whatever the
// traffic; its answer holds for a while. While requests are under way the gate
// probes by itself, to end them when the upstream loses its lock.
type gate struct {
	ns    string
	probe func(context.Context) finding // nil: the verdict never changes
	lim   Limits
	now   func() time.Time
	log   *slog.Logger
	base  context.Context // ends with the server
	work  *sync.WaitGroup // of the server; its methods are called inside it

	mu      sync.Mutex
	last    verdict
	until   time.Time     // how long last holds
	flight  chan struct{} // closed when the running probe is done
	misses  int           // probes in a row that found the upstream unavailable
	streams context.Context
	cut     context.CancelCauseFunc // ends streams
	active  int
	unwatch context.CancelFunc
}

// retryProbe is when a probe that failed is made again: soon enough for a
// second opinion, and for a service that comes back to be noticed.
const retryProbe = time.Second

func (g *gate) start() {
	g.streams, g.cut = context.WithCancelCause(g.base)
}

// check gives the verdict, after a probe if the last one is too old. It waits
// for that probe no longer than ctx.
func (g *gate) check(ctx context.Context) verdict {
	g.mu.Lock()
	if g.probe == nil || g.now().Before(g.until) {
		defer g.mu.Unlock()
		return g.last
	}
	if g.flight == nil {
		g.flight = make(chan struct{})
		g.work.Go(g.fly)
	}
	done := g.flight
	g.mu.Unlock()
	select {
	case <-done:
	case <-ctx.Done():
		return verdict{code: g.ns + "_unavailable", text: "the request ended before its upstream was checked"}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.last
}

// fly makes one probe and takes its finding.
func (g *gate) fly() {
	ctx, cancel := context.WithTimeout(g.base, g.lim.ProbeTime)
	defer cancel()
	f := g.probe(context.WithValue(ctx, impatient{}, true))
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.flight)
	g.flight = nil
	before := g.last
	hold := g.lim.ProbeEvery
	switch {
	case f.open:
		g.misses, g.last = 0, f.verdict
	case f.unprotected:
		g.misses, g.last = 0, f.verdict
		g.cut(refusing(http.StatusServiceUnavailable, f.code, f.text))
		g.streams, g.cut = context.WithCancelCause(g.base)
	default:
		g.misses++
		if g.last.open && g.misses < 2 {
			hold = retryProbe
			break
		}
		g.last = f.verdict
		if f.nobody {
			hold = retryProbe
		}
	}
	g.until = g.now().Add(min(hold, g.lim.ProbeEvery))
	if g.last.open != before.open || g.last.code != before.code {
		g.log.Info("namespace gate", "namespace", g.ns, "open", g.last.open, "code", g.last.code)
	}
}

// hold takes part in the gate for the time of one request: the context ends
// when the upstream turns out to be unprotected.
func (g *gate) hold() (streams context.Context, release func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.active++; g.active == 1 && g.probe != nil {
		ctx, cancel := context.WithCancel(g.base)
		g.unwatch = cancel
		g.work.Go(func() { g.watch(ctx) })
	}
	return g.streams, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.active--; g.active == 0 && g.unwatch != nil {
			g.unwatch()
			g.unwatch = nil
		}
	}
}

// watch keeps the verdict fresh. Its pace leaves room for the probe itself, so
// that a lock that is gone is noticed within ProbeEvery.
func (g *gate) watch(ctx context.Context) {
	pace := time.NewTicker(max((g.lim.ProbeEvery-g.lim.ProbeTime)*4/5, time.Millisecond))
	defer pace.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-pace.C:
		}
		g.mu.Lock()
		g.until = time.Time{}
		g.mu.Unlock()
		g.check(ctx)
	}
}

// errDeaf: the upstream did not answer as a service does.
var errDeaf = errors.New("no answer")

// ask sends one probe: no credential, no header of any client, no redirect
// followed. The body is cut at 64 KiB.
func ask(ctx context.Context, u *upstream, path string) (status int, body []byte, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+u.base.Host, nil)
	if err != nil {
		return 0, nil, err
	}
	r.URL = upstreamURL(u.base, path, target{})
	r.Header.Set("User-Agent", "hermes-reach")
	r.Header.Set("Accept", "application/json")
	resp, err := u.fresh.RoundTrip(r)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 500 || resp.StatusCode == http.StatusTooManyRequests {
		return resp.StatusCode, nil, fmt.Errorf("%w: status %d", errDeaf, resp.StatusCode)
	}
	body, err = io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	return resp.StatusCode, body, err
}

func ok2xx(status int) bool { return status/100 == 2 }

func unavailable(ns, service string, err error) finding {
	how := "does not answer"
	if errors.Is(err, errDeaf) {
		how = "answers with an error"
	}
	nobody := nobodyListens(err)
	if nobody {
		how = "is not running"
	}
	return finding{nobody: nobody, verdict: verdict{code: ns + "_unavailable", text: "the " + service + " on this host " + how}}
}

// probeAPI: it is up, and refuses to list its models to somebody without a
// bearer.
func probeAPI(u *upstream) func(context.Context) finding {
	return func(ctx context.Context) finding {
		status, _, err := ask(ctx, u, "/health")
		if err == nil && !ok2xx(status) {
			err = fmt.Errorf("%w: status %d", errDeaf, status)
		}
		if err != nil {
			return unavailable(nsAPI, "API server", err)
		}
		if status, _, err = ask(ctx, u, "/v1/models"); err != nil {
			return unavailable(nsAPI, "API server", err)
		}
		if status == http.StatusUnauthorized || status == http.StatusForbidden {
			return finding{verdict: verdict{open: true}}
		}
		return finding{unprotected: true, verdict: verdict{code: "api_unprotected",
			text: "the API server on this host answers without a bearer: set API_SERVER_KEY for it and restart it"}}
	}
}

// probeDashboard: it says that it asks for a login.
func probeDashboard(u *upstream) func(context.Context) finding {
	return func(ctx context.Context) finding {
		answered := error(nil)
		for _, path := range []string{"/api/health", "/api/status"} { // older builds know the second only
			status, body, err := ask(ctx, u, path)
			if err != nil {
				answered = err
				break
			}
			if required, says := authRequired(status, body); says && required {
				return finding{verdict: verdict{open: true}}
			} else if says {
				break
			}
		}
		if answered != nil {
			return unavailable(nsDashboard, "Dashboard", answered)
		}
		return finding{unprotected: true, verdict: verdict{code: "dashboard_unprotected",
			text: "the Dashboard on this host does not ask for a login: set HERMES_DASHBOARD_BASIC_AUTH_USERNAME and " +
				"HERMES_DASHBOARD_BASIC_AUTH_PASSWORD for it and, because it asks nobody on 127.0.0.1, start it with " +
				"--host 127.0.0.2 and name it here with --dashboard http://127.0.0.2:9119"}}
	}
}

// authRequired reads the member of that exact name; says is false when there
// is none.
func authRequired(status int, body []byte) (required, says bool) {
	var members map[string]json.RawMessage
	if !ok2xx(status) || json.Unmarshal(body, &members) != nil {
		return false, false
	}
	var value *bool
	if json.Unmarshal(members["auth_required"], &value) != nil || value == nil {
		return false, false
	}
	return *value, true
}

// probeRelay: it answers something. Its sessions are its own lock, so this
// closes nothing; it makes the health answer true.
func probeRelay(u *upstream) func(context.Context) finding {
	at := &upstream{base: &url.URL{Scheme: "http", Host: u.base.Host}, fresh: u.fresh}
	return func(ctx context.Context) finding {
		if _, _, err := ask(ctx, at, relayHealthPath(u.base.Path)); err != nil {
			return unavailable(nsRelay, "Relay", err)
		}
		return finding{verdict: verdict{open: true}}
	}
}
