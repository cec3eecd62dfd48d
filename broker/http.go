package broker

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/carrier"
)

// server is the HTTP side of a broker. Sessions it lets in run under live and
// are counted in sessions.
func (b *Broker) server(live context.Context, sessions *group) *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", b.health)
	mux.HandleFunc(carrier.ConnectPath, func(w http.ResponseWriter, r *http.Request) {
		b.connect(live, sessions, w, r)
	})
	return &http.Server{
		Handler:           mux,
		ReadHeaderTimeout: b.limits.Register,
		ReadTimeout:       b.limits.Register,
		WriteTimeout:      b.limits.Register, // of /health; sessions lift it
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    8 << 10,
		ErrorLog:          slog.NewLogLogger(b.log.Handler(), slog.LevelDebug),
	}
}

// health answers what peers of both protocols look for.
func (b *Broker) health(w http.ResponseWriter, _ *http.Request) {
	st := b.Status()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{
		"ok": true, "service": "hermes_reach", "protocol_version": 2, "protocol_versions": []int{2},
		"hosts_online": st.Hosts, "active_streams": st.Streams,
	})
}

// connect lets a session in and runs it in a goroutine of its own.
func (b *Broker) connect(live context.Context, sessions *group, w http.ResponseWriter, r *http.Request) {
	if r.URL.RawQuery != "" || r.URL.ForceQuery || r.Header.Get("Authorization") != "" {
		http.Error(w, "credentials belong into the first message, not into the request", http.StatusBadRequest)
		return
	}
	if !sessions.enter() {
		http.Error(w, "the broker is about to stop", http.StatusServiceUnavailable)
		return
	}
	defer sessions.leave()
	src := source(r.RemoteAddr)
	if wait := b.sources.wait(src); wait > 0 {
		refuseFor(w, wait, "too many failed registrations from this address")
		return
	}
	select {
	case b.slots <- struct{}{}:
	default:
		refuseFor(w, time.Minute, "the broker is full")
		return
	}
	if !b.sources.enter(src) {
		<-b.slots
		refuseFor(w, time.Second, "too many sessions from this address have not registered yet")
		return
	}
	c, err := carrier.Upgrade(w, r)
	if err != nil {
		b.sources.leave(src)
		<-b.slots
		b.log.Debug("upgrade refused", "peer", r.RemoteAddr, "err", err)
		return
	}
	sessions.enter() // cannot fail: this request is still inside
	go func() {
		defer sessions.leave()
		defer func() { <-b.slots }()
		b.serveSession(live, c, src)
	}()
}

// group counts what Serve waits for. Unlike a WaitGroup alone it may be entered
// while somebody waits, until it is empty.
type group struct {
	mu     sync.Mutex
	n      int
	empty  chan struct{} // not nil once somebody waits
	closed bool
}

// enter counts one more, or says that the group is over.
func (g *group) enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return false
	}
	g.n++
	return true
}

func (g *group) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n--
	g.settle()
}

// settle closes a group that is waited for and empty. The lock is held.
func (g *group) settle() {
	if g.empty != nil && g.n == 0 && !g.closed {
		g.closed = true
		close(g.empty)
	}
}

// wait waits until the group is empty, and closes it.
func (g *group) wait() {
	g.mu.Lock()
	g.empty = make(chan struct{})
	g.settle()
	g.mu.Unlock()
	<-g.empty
}

func refuseFor(w http.ResponseWriter, wait time.Duration, why string) {
	w.Header().Set("Retry-After", seconds(wait))
	http.Error(w, why, http.StatusTooManyRequests)
}

// source is the address that limits go by: the /32, or the /64 of IPv6. What is
// no address counts as one source.
func source(remoteAddr string) netip.Prefix {
	ap, err := netip.ParseAddrPort(remoteAddr)
	if err != nil {
		return netip.Prefix{}
	}
	return masked(ap.Addr().Unmap().WithZone(""), 32, 64)
}

func masked(a netip.Addr, bits4, bits6 int) netip.Prefix {
	bits := bits6
	if a.Is4() {
		bits = bits4
	}
	p, _ := a.Prefix(bits) // fails for no address only, and is zero then
	return p
}

// seconds writes a Retry-After: whole seconds, at least one.
func seconds(d time.Duration) string {
	return strconv.Itoa(max(1, int((d+time.Second-1)/time.Second)))
}
