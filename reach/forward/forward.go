// Package forward gives programs that know nothing of Hermes Reach a plain
// HTTP origin on this machine: what they ask there is sent to the paired host
// over the best path, inside the pinned connection.
//
// A loopback port is not private. Every local user can connect to it, and every
// web page that is open in a browser can make the browser connect to it. So
// nothing is forwarded, and nothing is dialled, before a request has proved
// that it comes from whoever started the forwarder: by a cookie that only the
// printed one-use link sets, or by a key in a header. Pages of other origins
// are kept out by Host, Origin and Sec-Fetch-Site, whatever cookie they ride on.
//
// What the host says about itself (redirects, cookie paths, Secure) is true for
// its own origin and mapped to this one on the way back.
package forward

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Header limits and waits of the loopback server. Bodies and answers have
// none: streams live as long as both ends want them to.
const (
	maxHeaderBytes = 64 << 10
	headerTimeout  = 10 * time.Second
	idleTimeout    = 2 * time.Minute
)

// Namespaces that Config.Namespace may put at the root.
var namespaces = []string{"relay", "api", "dashboard"}

// Config says what to forward and how strict to be. Transport is required.
type Config struct {
	// Profile names the origin: http://PROFILE.localhost:PORT. It must be a
	// lower-case host name label, which profile names are.
	Profile string
	// Transport carries the requests: a *reach.Client. Their URLs are
	// https://reach/…, and a response names the authority that answered in
	// its Request.
	Transport http.RoundTripper
	// Namespace is "relay", "api" or "dashboard" to put that one at the root,
	// or empty to show all three as they are on the host.
	Namespace string
	// NoLocalAuth switches off key and cookie: every local user and program
	// may use the origin. Host, Origin and Sec-Fetch-Site are still checked.
	NoLocalAuth bool
	// Log gets failures. nil discards them.
	Log *slog.Logger
}

// A Forwarder serves one loopback origin. Its methods may be called from any
// goroutine; Run at most once.
type Forwarder struct {
	cfg   Config
	ln    net.Listener
	log   *slog.Logger
	hosts []string // what Host may say, best first; never empty
	gate  *gate
	proxy *httputil.ReverseProxy

	mu     sync.Mutex // guards closed and the Add of busy
	closed bool
	busy   sync.WaitGroup // requests that run, hijacked ones too
}

// New takes over ln, which must be a loopback TCP or a Unix socket listener:
// anything else is closed and refused. Nothing is served before Run.
func New(ln net.Listener, cfg Config) (*Forwarder, error) {
	f, err := newForwarder(ln, cfg)
	if err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	return f, nil
}

func newForwarder(ln net.Listener, cfg Config) (*Forwarder, error) {
	if cfg.Transport == nil {
		return nil, errors.New("forward: no transport to forward to")
	}
	if !label(cfg.Profile) {
		return nil, fmt.Errorf("forward: profile %q is not a lower-case host name label", cfg.Profile)
	}
	if err := checkNamespace(cfg.Namespace); err != nil {
		return nil, err
	}
	hosts, suffix, err := origins(ln.Addr(), cfg.Profile)
	if err != nil {
		return nil, err
	}
	f := &Forwarder{cfg: cfg, ln: ln, hosts: hosts, log: cfg.Log, gate: newGate("reach_" + suffix)}
	if f.log == nil {
		f.log = slog.New(slog.DiscardHandler)
	}
	f.proxy = f.newProxy()
	return f, nil
}

// checkNamespace refuses what the host would not route.
func checkNamespace(name string) error {
	if name == "" {
		return nil
	}
	if slices.Contains(namespaces, name) {
		return nil
	}
	return fmt.Errorf("forward: namespace %q is none of %s", name, strings.Join(namespaces, ", "))
}

// origins lists the Host values of a listener and the suffix of its cookie:
// browsers share cookies between ports, so the name tells them apart.
func origins(addr net.Addr, profile string) (hosts []string, suffix string, err error) {
	names := []string{profile + ".localhost", "127.0.0.1", "localhost"}
	switch a := addr.(type) {
	case *net.UnixAddr:
		return names, "unix", nil
	case *net.TCPAddr:
		if !a.IP.IsLoopback() {
			return nil, "", fmt.Errorf("forward: %s is not a loopback address: this origin is never served to a network", a)
		}
		if a.IP.To4() == nil {
			names = append(names, "[::1]")
		}
		port := strconv.Itoa(a.Port)
		for _, n := range names {
			hosts = append(hosts, n+":"+port)
		}
		if a.Port == 80 { // browsers leave the default port out
			hosts = append(names, hosts...)
		}
		return hosts, port, nil
	default:
		return nil, "", fmt.Errorf("forward: a %s listener is neither loopback TCP nor a Unix socket", addr.Network())
	}
}

// label reports whether s can stand before ".localhost".
func label(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

// URL is the origin as a browser should see it, without a final slash. For a
// Unix socket it is the URL to use with that socket.
func (f *Forwarder) URL() string { return "http://" + f.hosts[0] }

// OpenURL mints a link that signs one browser in, once. It holds a secret: it
// belongs on the screen of the person who started the forwarder, nowhere else.
// The last 16 unused links are good.
func (f *Forwarder) OpenURL() string { return f.URL() + openPath + "?k=" + f.gate.mint() }

// Key is what scripts send in the header X-Reach-Key. It is a secret and good
// as long as the Forwarder lives.
func (f *Forwarder) Key() string { return f.gate.key }

// Run serves until ctx ends (and returns nil) or the listener breaks (and says
// why). It owns the listener; once it returns, no request of its runs.
func (f *Forwarder) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	srv := &http.Server{
		Handler: f,
		// "OPTIONS *" is refused like every target that is no path.
		DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout:            headerTimeout,
		IdleTimeout:                  idleTimeout,
		MaxHeaderBytes:               maxHeaderBytes,
		ErrorLog:                     slog.NewLogLogger(f.log.Handler(), slog.LevelDebug),
		BaseContext:                  func(net.Listener) context.Context { return ctx },
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		<-ctx.Done()
		srv.Close() // the reason is ctx; what it says is of no use to anyone
	}()
	err := srv.Serve(f.ln)
	if ctx.Err() != nil {
		err = nil
	}
	cancel() // ends WebSockets too, which the server no longer knows
	<-stopped
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.busy.Wait()
	if err != nil {
		return fmt.Errorf("forward: serve %s: %w", f.ln.Addr(), err)
	}
	return nil
}

// ServeHTTP checks, then serves our own pages or forwards. It is exported for
// tests of callers; Run is what serves it.
func (f *Forwarder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !f.enter() {
		panic(http.ErrAbortHandler) // the connection is closed already
	}
	defer f.busy.Done()
	if no := f.check(r); no != nil {
		no.write(w)
		return
	}
	if r.URL.Path == openPath {
		f.open(w, r)
		return
	}
	if !f.cfg.NoLocalAuth && !f.gate.admits(r) {
		refuse(http.StatusUnauthorized, "local_auth", "this origin belongs to the person who started `hermes-reach forward`: "+
			"open the link it printed, or send its key in the header X-Reach-Key").write(w)
		return
	}
	if strings.HasPrefix(r.URL.Path, ownPrefix) {
		f.own(w, r)
		return
	}
	f.proxy.ServeHTTP(w, r)
}

// enter counts a request, unless Run waits for the last ones.
func (f *Forwarder) enter() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return false
	}
	f.busy.Add(1)
	return true
}
