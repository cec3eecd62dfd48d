// Package securelink is the pinned ingress of a host: one TLS origin with the
// three namespaces /relay, /api and /dashboard, and nothing else.
//
// It serves any number of listeners in the same way, be they TCP sockets, a
// tailnet node or streams that a broker handed on; what it does never depends
// on the path a connection took. Each request passes the same row of checks:
// the connection limit, the method, the target (so that we and the upstream
// read the same path), the host name, the route, the gate. Only then a byte
// goes to a service behind it, and only the headers of the table in headers.go
// go along.
//
// The package fails closed. A namespace is open while its upstream proves that
// it asks for a login of its own (gate.go); upstreams are on this machine
// (upstream.go); an answer that is cut is seen as cut (proxy.go).
package securelink

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/securelink/session"
)

// Sessions is the built-in store of paired devices, as far as this package
// needs it. *session.Store is one.
type Sessions interface {
	// ServeRelay answers a WebSocket upgrade and returns when the socket is
	// over. The caller has checked host and origin.
	ServeRelay(w http.ResponseWriter, r *http.Request, p session.Peer)
}

// Config is what a server is made of. Identity is needed; everything else may
// be left out: a namespace without an upstream answers 503 and says so.
type Config struct {
	Identity  *pins.Identity
	Upstreams Upstreams

	// Sessions serves /relay/session, and /relay/ws when Upstreams.Relay is "".
	Sessions Sessions

	// RelaySecret is the proxy secret of the loopback Relay. With it, that
	// Relay is told the real peer of each socket.
	RelaySecret string

	// Authority is our primary host[:port], told to the Dashboard; "" = the
	// first name of the identity, port 9443.
	Authority string

	// Hosts are names we answer to besides those of the identity, without port.
	Hosts []string

	// Peer tells who is at the other end of a connection, for listeners whose
	// addresses only their maker can read; nil = DefaultPeer.
	Peer func(net.Addr) Peer

	Limits Limits
	Log    *slog.Logger     // nil = none
	Now    func() time.Time // for the age of probes; nil = time.Now
}

// ErrClosed: the server was closed before.
var ErrClosed = errors.New("securelink: server closed")

// keepIdle is how long an idle connection is kept: longer than the five
// minutes for which OkHttp pools one, so that the client closes first and
// never writes into a connection that we are closing.
const keepIdle = 6 * time.Minute

// Server is the ingress. Make one with New, give it listeners with Serve. All
// methods are safe for concurrent use.
type Server struct {
	conf      Config
	hosts     map[string]bool
	api, dash lane
	relay     *upstream // nil: the built-in sessions
	relayGate *gate
	http      *http.Server
	crowd     *crowd
	log       *slog.Logger

	base context.Context // of every request
	stop context.CancelFunc

	mu      sync.Mutex
	closed  bool
	serving sync.WaitGroup // calls of Serve
	conns   sync.WaitGroup // goroutines of net/http
	work    sync.WaitGroup // requests, and what they start
}

// New checks c and makes a server. It opens nothing and starts nothing.
func New(c Config) (*Server, error) {
	if c.Identity == nil {
		return nil, errors.New("securelink: no identity")
	}
	lim, err := c.Limits.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("securelink: %w", err)
	}
	c.Limits = lim
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Peer == nil {
		c.Peer = DefaultPeer
	}
	if c.Authority == "" {
		c.Authority = net.JoinHostPort(c.Identity.Authorities()[0], "9443")
	}
	if _, _, ok := splitHost(c.Authority); !ok {
		return nil, fmt.Errorf("securelink: authority %q is no host[:port]", c.Authority)
	}
	s := &Server{conf: c, hosts: map[string]bool{}, crowd: newCrowd(lim), log: c.Log}
	for _, h := range c.Hosts {
		clean, err := pins.CleanHost(h)
		if err != nil {
			return nil, fmt.Errorf("securelink: further host: %w", err)
		}
		s.hosts[clean] = true
	}
	s.base, s.stop = context.WithCancel(context.Background())
	if err := s.makeLanes(); err != nil {
		s.stop()
		return nil, fmt.Errorf("securelink: %w", err)
	}
	s.http = s.makeHTTP()
	return s, nil
}

func (s *Server) makeHTTP() *http.Server {
	lim := s.conf.Limits
	cfg := s.conf.Identity.ServerConfig()
	cfg.NextProtos = []string{"h2", "http/1.1"}
	return &http.Server{
		Handler:           s,
		TLSConfig:         cfg,
		ReadHeaderTimeout: lim.HeaderTime, // net/http bounds the handshake by it, too
		IdleTimeout:       keepIdle,
		// Twice the limit, so that what is a little too long is answered by us,
		// in JSON; net/http cuts the rest.
		MaxHeaderBytes: int(2 * lim.HeaderBytes),
		ConnContext:    withConn,
		// "OPTIONS *" passes the same checks as everything else.
		DisableGeneralOptionsHandler: true,
		BaseContext:                  func(net.Listener) context.Context { return s.base },
		ConnState: func(_ net.Conn, state http.ConnState) {
			switch state {
			case http.StateNew:
				s.conns.Add(1)
			case http.StateClosed, http.StateHijacked:
				s.conns.Done()
			}
		},
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		HTTP2:    &http.HTTP2Config{SendPingTimeout: 15 * time.Second, PingTimeout: 15 * time.Second},
	}
}

// makeLanes reads the upstreams and sets a gate before each.
func (s *Server) makeLanes() error {
	up := s.conf.Upstreams
	var err error
	if s.api, err = s.makeLane(nsAPI, up.API, probeAPI); err != nil {
		return fmt.Errorf("api %w", err)
	}
	if s.dash, err = s.makeLane(nsDashboard, up.Dashboard, probeDashboard); err != nil {
		return fmt.Errorf("dashboard %w", err)
	}
	relay, err := s.makeLane(nsRelay, up.Relay, probeRelay)
	if err != nil {
		return fmt.Errorf("relay %w", err)
	}
	s.relay, s.relayGate = relay.up, relay.gate
	if s.relay == nil && s.conf.Sessions != nil {
		s.relayGate.last = verdict{open: true}
	}
	return nil
}

func (s *Server) makeLane(ns, text string, probe func(*upstream) func(context.Context) finding) (lane, error) {
	g := &gate{ns: ns, lim: s.conf.Limits, now: s.conf.Now, log: s.log, base: s.base, work: &s.work}
	l := lane{ns: ns, gate: g}
	if text == "" {
		g.last = verdict{code: ns + "_unavailable", text: "no upstream is configured for /" + ns + ": name it on the host with --" + ns}
	} else {
		var err error
		if l.up, err = parseUpstream(text, s.conf.Limits); err != nil {
			return lane{}, err
		}
		g.probe = probe(l.up)
	}
	g.start()
	return l, nil
}

// Serve accepts connections from ln until the server is closed (and returns
// nil) or ln breaks (and says why). It owns ln. TLS is ours: ln gives plain
// connections.
func (s *Server) Serve(ln net.Listener) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return errors.Join(ErrClosed, ln.Close())
	}
	s.serving.Add(1)
	s.mu.Unlock()
	defer s.serving.Done()
	err := s.http.ServeTLS(&door{Listener: ln, crowd: s.crowd, peer: s.conf.Peer, excuseFor: 2 * s.conf.Limits.HeaderTime}, "", "")
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return errors.Join(fmt.Errorf("securelink: serve %v: %w", ln.Addr(), err), ln.Close())
}

// Shutdown closes the listeners, lets requests under way end until ctx does,
// and closes what is left, WebSockets among it. When it returns nothing runs.
// The error is ctx's, when it cut something.
func (s *Server) Shutdown(ctx context.Context) error {
	err := s.http.Shutdown(ctx)
	return errors.Join(err, s.Close())
}

// Close ends everything at once and waits for it.
func (s *Server) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.stop()
	s.crowd.end()
	err := s.http.Close()
	s.serving.Wait()
	s.conns.Wait()
	s.work.Wait()
	for _, up := range []*upstream{s.api.up, s.dash.up, s.relay} {
		if up != nil {
			up.close()
		}
	}
	return err
}

// enter counts a piece of work, which Close waits for.
func (s *Server) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.work.Add(1)
	return true
}

// NamespaceStatus says whether requests to one namespace get through.
type NamespaceStatus struct {
	Name    string `json:"name"`
	Open    bool   `json:"open"`
	Code    string `json:"reason,omitempty"`  // such as api_unprotected
	Message string `json:"message,omitempty"` // what to do about it
}

// Status is the state of the server for people and health answers.
type Status struct {
	Namespaces  []NamespaceStatus `json:"namespaces"`
	Connections int               `json:"connections"`
}

// Status probes what has not been probed for a while, all at once, for no
// longer than ctx.
func (s *Server) Status(ctx context.Context) Status {
	gates := []*gate{s.relayGate, s.api.gate, s.dash.gate}
	st := Status{Namespaces: make([]NamespaceStatus, len(gates)), Connections: s.crowd.size()}
	if !s.enter() {
		for i, g := range gates {
			st.Namespaces[i] = NamespaceStatus{Name: g.ns, Code: g.ns + "_unavailable", Message: "this host is shutting down"}
		}
		return st
	}
	defer s.work.Done()
	var all sync.WaitGroup
	for i, g := range gates {
		all.Go(func() {
			v := g.check(ctx)
			st.Namespaces[i] = NamespaceStatus{Name: g.ns, Open: v.open, Code: v.code, Message: v.text}
		})
	}
	all.Wait()
	return st
}

// ServeHTTP is the row of checks every request passes, whatever it wants.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !s.enter() {
		refuse(w, refusing(http.StatusServiceUnavailable, "closing", "this host is shutting down", "Connection", "close", "Retry-After", "1"))
		return
	}
	defer s.work.Done()
	c := connOf(r.Context())
	if c == nil { // not through one of our listeners: nothing is known of the peer
		refuse(w, refusing(http.StatusInternalServerError, "internal", "the request came on an unknown way"))
		return
	}
	c.unread.Store(r.ProtoMajor == 1 && r.ContentLength != 0)
	t, ns, rest, bad := s.admit(r, c)
	if bad != nil {
		refuse(w, bad)
		return
	}
	switch ns {
	case nsRelay:
		s.serveRelay(w, r, c.peer, rest)
	case nsAPI:
		s.forward(w, r, c.peer, s.api, t, rest)
	case nsDashboard:
		s.forward(w, r, c.peer, s.dash, t, rest)
	}
}

// admit makes every check that needs no upstream.
func (s *Server) admit(r *http.Request, c *conn) (t target, ns, rest string, bad *refusal) {
	if c.excuse {
		return t, "", "", refusing(http.StatusServiceUnavailable, "too_many_connections",
			fmt.Sprintf("too many connections are open: at most %d in all and %d of one peer", s.conf.Limits.Connections, s.conf.Limits.PeerConns),
			"Connection", "close", "Retry-After", "1")
	}
	if r.Method == http.MethodConnect || r.Method == http.MethodTrace {
		return t, "", "", refusing(http.StatusMethodNotAllowed, "method_not_allowed", "CONNECT and TRACE are not served here")
	}
	if n := headerBytes(r); n > s.conf.Limits.HeaderBytes {
		return t, "", "", refusing(http.StatusRequestHeaderFieldsTooLarge, "headers_too_large",
			fmt.Sprintf("the request headers have %d bytes, at most %d are taken", n, s.conf.Limits.HeaderBytes))
	}
	if t, bad = parseTarget(r.RequestURI); bad != nil {
		return t, "", "", bad
	}
	if bad = checkHost(r, s.covers); bad != nil {
		return t, "", "", bad
	}
	ns, rest, ok := route(t.path)
	if !ok {
		return t, "", "", notFound
	}
	return t, ns, rest, nil
}

var notFound = refusing(http.StatusNotFound, "not_found", "only /relay, /api and /dashboard are served here")

func (s *Server) covers(host string) bool {
	return s.hosts[host] || s.conf.Identity.Covers(host)
}

// headerBytes is the size of request line and headers as HTTP/1.1 writes them.
func headerBytes(r *http.Request) int64 {
	n := len(r.Method) + len(r.RequestURI) + len(" ") + len(" HTTP/1.1\r\n") + len("Host: \r\n") + len(r.Host)
	for name, values := range r.Header {
		for _, v := range values {
			n += len(name) + len(": \r\n") + len(v)
		}
	}
	return int64(n)
}

// refuse answers a request ourselves.
func refuse(w http.ResponseWriter, r *refusal) {
	h := w.Header()
	clear(h)
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	for i := 0; i+1 < len(r.headers); i += 2 {
		h.Set(r.headers[i], r.headers[i+1])
	}
	w.WriteHeader(r.status)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]string{"code": r.code, "message": r.message}})
}
