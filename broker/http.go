package broker

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/link"
)

// server is the HTTP side of a broker. Sessions it lets in run under live and
// are counted in sessions.
func (b *Broker) server(live context.Context, sessions *sync.WaitGroup) *http.Server {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", b.health)
	mux.HandleFunc(link.ConnectPath, func(w http.ResponseWriter, r *http.Request) {
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
func (b *Broker) connect(live context.Context, sessions *sync.WaitGroup, w http.ResponseWriter, r *http.Request) {
	if r.URL.RawQuery != "" || r.URL.ForceQuery || r.Header.Get("Authorization") != "" {
		http.Error(w, "credentials belong into the first message, not into the request", http.StatusBadRequest)
		return
	}
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
	c, err := link.Upgrade(w, r)
	if err != nil {
		<-b.slots
		b.log.Debug("upgrade refused", "peer", r.RemoteAddr, "err", err)
		return
	}
	sessions.Go(func() {
		defer func() { <-b.slots }()
		b.serveSession(live, c, src)
	})
}

func refuseFor(w http.ResponseWriter, wait time.Duration, why string) {
	w.Header().Set("Retry-After", seconds(wait))
	http.Error(w, why, http.StatusTooManyRequests)
}

// source is the address that limits go by: the /32, or the /64 of IPv6.
func source(remoteAddr string) string {
	host, _, err := net.SplitHostPort(remoteAddr)
	if err != nil {
		return remoteAddr
	}
	ip := net.ParseIP(host)
	if ip == nil {
		return host
	}
	if v4 := ip.To4(); v4 != nil {
		return v4.String()
	}
	return ip.Mask(net.CIDRMask(64, 128)).String() + "/64"
}

func seconds(d time.Duration) string {
	s := (d + time.Second - 1) / time.Second
	return strings.TrimSuffix((time.Duration(s) * time.Second).String(), "s")
}
