package demo

import (
	"crypto/subtle"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/coder/websocket"
)

// service is a small Hermes of the demo's own: an API that wants a bearer and
// a Dashboard that wants a login, on one loopback port.
type service struct {
	ln     net.Listener
	srv    *http.Server
	bearer string
	done   chan struct{}
}

const (
	reply  = "the quick brown agent answers from behind the router"
	page   = "<title>the dashboard of the demo</title>"
	secret = "a body that only host and device may read"
)

func startService(bearer string) (*service, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start the demo's service: %w", err)
	}
	s := &service{ln: ln, bearer: bearer, done: make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, map[string]string{"status": "ok"}) })
	mux.HandleFunc("GET /v1/models", s.guarded(func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, map[string]any{"data": []map[string]string{{"id": reply}}})
	}))
	mux.HandleFunc("POST /v1/echo", s.guarded(echoBody))
	mux.HandleFunc("GET /v1/events", s.guarded(streamEvents))
	mux.HandleFunc("GET /v1/socket", s.guarded(echoSocket))
	mux.HandleFunc("GET /api/health", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, map[string]bool{"auth_required": true})
	})
	mux.HandleFunc("GET /login", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = w.Write([]byte(page))
	})
	s.srv = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go func() { defer close(s.done); _ = s.srv.Serve(ln) }()
	return s, nil
}

func (s *service) url() string { return "http://" + s.ln.Addr().String() }

func (s *service) close() {
	_ = s.srv.Close()
	<-s.done
}

func (s *service) guarded(next http.HandlerFunc) http.HandlerFunc {
	want := []byte("Bearer " + s.bearer)
	return func(w http.ResponseWriter, r *http.Request) {
		if subtle.ConstantTimeCompare([]byte(r.Header.Get("Authorization")), want) != 1 {
			http.Error(w, "a bearer is needed", http.StatusUnauthorized)
			return
		}
		next(w, r)
	}
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

func echoBody(w http.ResponseWriter, r *http.Request) {
	var v any
	if err := json.NewDecoder(r.Body).Decode(&v); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	writeJSON(w, v)
}

// streamEvents sends n events, each with the time it left, a few milliseconds
// apart as a model sends tokens.
func streamEvents(w http.ResponseWriter, r *http.Request) {
	n, err := strconv.Atoi(r.URL.Query().Get("n"))
	if err != nil || n < 1 || n > 10000 {
		http.Error(w, "n must be 1 to 10000", http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	out := http.NewResponseController(w)
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for i := range n {
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
		_, err := fmt.Fprintf(w, "data: {\"token\":\"word%d\",\"sent\":%d}\n\n", i, time.Since(start).Nanoseconds())
		if err != nil || out.Flush() != nil {
			return
		}
	}
}

// start is the zero of the monotonic times that events carry: sender and
// receiver are one process, so their difference is the delay.
var start = time.Now()

func echoSocket(w http.ResponseWriter, r *http.Request) {
	c, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	defer func() { _ = c.CloseNow() }()
	for {
		typ, msg, err := c.Read(r.Context())
		if err != nil || c.Write(r.Context(), typ, msg) != nil {
			return
		}
	}
}
