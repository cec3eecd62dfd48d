package securelink

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// Upstreams are the services of this machine, each an http URL of a loopback
// address ("localhost" is one) or unix:/path/of/socket, "" for none. Anything
// else is refused: what goes there is not encrypted.
type Upstreams struct {
	Relay     string // usually http://127.0.0.1:8767/ws; "" = the built-in sessions
	API       string // usually http://127.0.0.1:8642
	Dashboard string // usually http://127.0.0.1:9119
}

// upstream is one of them.
type upstream struct {
	base    *url.URL // Host is what it sees as its own authority
	network string   // tcp or unix
	address string   // host:port or socket path

	// A connection that was used before may be closed by the upstream in the
	// moment we write to it. What may be sent twice is; what may not gets a
	// connection of its own, which on loopback costs next to nothing.
	reuse, fresh *http.Transport
}

// staleAfter is below the 5 s after which common servers (uvicorn) close an
// idle connection.
const staleAfter = 4 * time.Second

// dialPatience is how long a connection is tried again while nobody listens,
// so that a service that restarts is not noticed. An answer of ours must still
// come within a second.
const dialPatience = 700 * time.Millisecond

// parseUpstream reads one URL of Upstreams.
func parseUpstream(text string, l Limits) (*upstream, error) {
	u := &upstream{network: "tcp"}
	if path, ok := strings.CutPrefix(text, "unix:"); ok {
		if !filepath.IsAbs(path) {
			return nil, fmt.Errorf("upstream %q: a socket is named by its whole path, as in unix:/run/hermes/api.sock", text)
		}
		u.network, u.address = "unix", path
		u.base = &url.URL{Scheme: "http", Host: "localhost"}
	} else {
		base, err := url.Parse(text)
		if err != nil {
			return nil, errors.New("upstream: not a URL") // the text may hold a password: do not quote it
		}
		if base.User != nil {
			return nil, errors.New("upstream: user info does not belong into the URL of an upstream")
		}
		if base.RawQuery != "" || base.ForceQuery || strings.Contains(text, "#") {
			return nil, fmt.Errorf("upstream %s://%s: a query or fragment does not belong into the URL of an upstream", base.Scheme, base.Host)
		}
		if base.Scheme != "http" || !isLoopbackName(base.Hostname()) {
			return nil, fmt.Errorf("upstream %q is not http on a loopback address: what goes there is not encrypted, so it must not leave this machine; "+
				"a service in a container needs host networking or a network namespace shared with this process, or a unix: socket on a shared volume", text)
		}
		if t, bad := parseTarget("/" + strings.TrimPrefix(base.EscapedPath(), "/")); bad != nil {
			return nil, fmt.Errorf("upstream %q: %s", text, bad.message)
		} else if base.Opaque != "" || t.path != "/"+strings.TrimPrefix(base.Path, "/") {
			return nil, fmt.Errorf("upstream %q: its path may hold plain characters only", text)
		}
		u.base = base
		u.address = base.Host
		if base.Port() == "" {
			u.address = net.JoinHostPort(base.Hostname(), "80")
		}
	}
	u.reuse = &http.Transport{
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return u.dial(ctx, l.ConnectTime) },
		IdleConnTimeout:        staleAfter,
		MaxIdleConnsPerHost:    32,
		DisableCompression:     true, // what the upstream sends is what the client gets
		ExpectContinueTimeout:  time.Second,
		ResponseHeaderTimeout:  l.Idle,
		MaxResponseHeaderBytes: 256 << 10,
		WriteBufferSize:        16 << 10,
		ReadBufferSize:         16 << 10,
	}
	u.fresh = u.reuse.Clone()
	u.fresh.DisableKeepAlives = true
	return u, nil
}

func isLoopbackName(host string) bool {
	if ip, err := netip.ParseAddr(host); err == nil {
		return ip.IsLoopback()
	}
	return strings.EqualFold(host, "localhost")
}

// RoundTrip sends a request on a connection that suits it.
func (u *upstream) RoundTrip(r *http.Request) (*http.Response, error) {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		if r.Body == nil && r.Header.Get("Upgrade") == "" {
			return u.reuse.RoundTrip(r)
		}
	}
	return u.fresh.RoundTrip(r)
}

func (u *upstream) close() {
	u.reuse.CloseIdleConnections()
	u.fresh.CloseIdleConnections()
}

// dial connects, trying again for a moment while nobody listens.
func (u *upstream) dial(ctx context.Context, limit time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	patience := time.NewTimer(min(dialPatience, limit))
	defer patience.Stop()
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	for {
		c, err := u.dialOnce(ctx)
		if err == nil || !nobodyListens(err) || ctx.Value(impatient{}) != nil {
			return c, err
		}
		select {
		case <-again.C:
		case <-patience.C:
			return nil, err
		case <-ctx.Done():
			return nil, err
		}
	}
}

// impatient marks the context of a probe: it wants to know how things are now.
type impatient struct{}

// errNotLoopback: a name that should mean this machine meant another one.
var errNotLoopback = errors.New("the address is not a loopback address")

func (u *upstream) dialOnce(ctx context.Context) (net.Conn, error) {
	d := net.Dialer{
		// The last word before a connection is opened: what localhost resolves
		// to is the hosts file's choice, not ours.
		ControlContext: func(_ context.Context, network, address string, _ syscall.RawConn) error {
			if strings.HasPrefix(network, "unix") {
				return nil
			}
			ap, err := netip.ParseAddrPort(address)
			if err != nil || !ap.Addr().Unmap().IsLoopback() {
				return errNotLoopback
			}
			return nil
		},
	}
	c, err := d.DialContext(ctx, u.network, u.address)
	if err != nil {
		return nil, err
	}
	return &patient{Conn: c}, nil
}

// patient is a connection to an upstream that keeps listening when it is no
// longer heard. An upstream that refuses an upload answers and closes while we
// are still writing; net/http would drop the answer for the failed write. Here
// such a write counts as done, and the read tells how it ended.
type patient struct {
	net.Conn
	deaf atomic.Bool
}

func (c *patient) Write(b []byte) (int, error) {
	if c.deaf.Load() {
		return len(b), nil
	}
	n, err := c.Conn.Write(b)
	if errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		c.deaf.Store(true)
		return len(b), nil
	}
	return n, err
}

// CloseWrite keeps half-close working.
func (c *patient) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}

func nobodyListens(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist)
}
