// Package reach is the device: it pairs with a host (Join), reaches it over the
// best of its paths (Client) and through a broker (Dialer).
//
// A profile lists candidates, ways to one and the same host. Whichever is taken,
// what leaves the device runs inside TLS 1.3 to a host that has proved the paired
// key and name: a candidate has no other way to be dialled, so no setting and no
// failure can send a request, a token or a pairing code to anybody else. A broker
// sees ciphertext; the credential that opens it opens nothing at the host.
//
// Which path is taken is decided by endpoints.Choose from what was seen of each.
// This package makes the observations, gives better paths a head start over
// worse ones, and moves to the next when one dies.
package reach

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/reach/profile"
)

// Requests to a Client name this host: which authority stands in its place is
// known only when a path has been chosen.
const (
	OriginHost = "reach"
	Origin     = "https://" + OriginHost
)

// Defaults of Config.
const (
	HeadStart     = 300 * time.Millisecond // of a better path before the next is tried as well
	directTimeout = 5 * time.Second        // TCP and the pinned handshake
	brokerTimeout = 15 * time.Second       // the same through a broker, whose own session may come first
	doubtAfter    = 3 * time.Second        // without an answer, before the path is proved anew
)

// Errors a caller acts on. A path whose host was reached and not trusted is a
// pins.TrustError somewhere in the tree: ask pins.IsTrust first.
var (
	// ErrUnreachable says that no path led to the host. See UnreachableError.
	ErrUnreachable = errors.New("the host is not reachable")

	// ErrNotResent says that a path died under a request that must not be sent
	// twice: the host may have acted on it or not.
	ErrNotResent = errors.New("the path was lost before an answer came, and the request was not sent again")

	// ErrClosed says that the Client is closed.
	ErrClosed = errors.New("reach: the client is closed")
)

// Config says whom a Client talks to. Only Profile is required.
type Config struct {
	Profile *profile.Profile

	// Outer holds the roots for brokers' own certificates; nil = the system's.
	// It has no part in trusting the host.
	Outer *tls.Config

	// Only restricts the Client to the candidates of one role; "" = all.
	Only endpoints.Role

	// Agent is what brokers are told of this program: "hermes-reach/1.2.3".
	Agent string

	// Dial opens TCP connections, to hosts and brokers; nil = a net.Dialer
	// with keep-alives.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)

	// NewBroker makes the dialer of a candidate behind a broker; nil = NewDialer.
	NewBroker func(BrokerConfig) (BrokerDialer, error)

	Log *slog.Logger     // nil = discard
	Now func() time.Time // nil = time.Now
}

// A Client reaches one paired host over the best of its paths. It is an
// http.RoundTripper for requests to https://reach/…, and gives plain pinned
// connections with DialContext. Nothing a caller hands it leaves the device
// before the host at the other end has proved the paired key and name.
//
// Paths are taken by strict priority: a better one is used whenever it is known
// to work, and tried again when it is not; what runs on a worse one stays there.
//
// Its methods may be called from any goroutine. Close it after use.
type Client struct {
	log    *slog.Logger
	now    func() time.Time
	timer  func(time.Duration, func()) (stop func() bool) // time.AfterFunc, but for tests
	cands  []endpoints.Candidate                          // the usable ones, with their broker tokens
	routes []*route                                       // routes[i] belongs to cands[i]
	unused []Attempt                                      // candidates that cannot be used, and why
	hosts  []string                                       // authorities that requests may name

	current atomic.Pointer[route] // the last that answered

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	mu     sync.Mutex // guards closed and the Add of wg
	closed bool
	wg     sync.WaitGroup
}

// New checks the profile's candidates and opens nothing yet. It fails when none
// of them can be used, and says why for each.
func New(cfg Config) (*Client, error) {
	if cfg.Profile == nil {
		return nil, errors.New("reach: no profile")
	}
	c := &Client{log: cfg.Log, now: cfg.Now, timer: afterFunc}
	if c.log == nil {
		c.log = slog.New(slog.DiscardHandler)
	}
	if c.now == nil {
		c.now = time.Now
	}
	if cfg.Dial == nil {
		cfg.Dial = (&net.Dialer{KeepAliveConfig: net.KeepAliveConfig{
			Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 4,
		}}).DialContext
	}
	if cfg.NewBroker == nil {
		cfg.NewBroker = newBroker
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	if err := c.addRoutes(cfg); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func afterFunc(d time.Duration, f func()) func() bool { return time.AfterFunc(d, f).Stop }

func (c *Client) addRoutes(cfg Config) error {
	var roles []string
	for _, cand := range cfg.Profile.Candidates {
		if !slices.Contains(roles, string(cand.Role)) {
			roles = append(roles, string(cand.Role))
		}
		if cfg.Only != "" && !strings.EqualFold(string(cand.Role), string(cfg.Only)) {
			continue
		}
		r, err := newRoute(c, cfg, &cand)
		if err != nil {
			c.unused = append(c.unused, Attempt{pathOf(cand), fmt.Errorf("not usable: %w", err)})
			continue
		}
		r.index = len(c.routes)
		c.cands, c.routes = append(c.cands, cand), append(c.routes, r)
		c.hosts = append(c.hosts, r.Authority)
	}
	switch {
	case len(c.routes) > 0:
		return nil
	case cfg.Only != "" && len(c.unused) == 0:
		return fmt.Errorf("%w: the profile has no candidate %q; it has %s", ErrUnreachable, string(cfg.Only), strings.Join(roles, ", "))
	default:
		return &UnreachableError{Attempts: c.unused}
	}
}

// Close ends the pooled connections and the brokers' sessions, and waits for
// what it started. Connections of DialContext and of WebSockets are their
// owners' to close; those that run through a broker end here.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel()
	var errs []error
	for _, r := range c.routes {
		errs = append(errs, r.close())
	}
	c.wg.Wait()
	for _, r := range c.routes { // what a dial that was under way brought in
		errs = append(errs, r.close())
	}
	return errors.Join(errs...)
}

// spawn runs f in a goroutine that Close waits for, or reports that the Client
// is closed.
func (c *Client) spawn(f func()) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.wg.Go(f)
	return true
}

// DialContext gives a pinned connection over the best path, for one HTTP/1.1
// exchange or a WebSocket. The caller owns it.
func (c *Client) DialContext(ctx context.Context) (net.Conn, Path, error) {
	conn, r, err := race(ctx, c, c.plan(), (*route).dialOwn, func(conn *tls.Conn) { conn.Close() })
	if err != nil {
		return nil, Path{}, err
	}
	return pinned{conn}, r.Path, nil
}

// closeGrace bounds how long a connection's Close tries to take leave: on a path
// that takes nothing more, crypto/tls would wait 5 s.
const closeGrace = time.Second

// pinned is a connection that is the caller's.
type pinned struct{ *tls.Conn }

// Close closes the connection, in order where the path takes that at once.
func (c pinned) Close() error {
	hurry := time.AfterFunc(closeGrace, func() { _ = c.NetConn().Close() })
	defer hurry.Stop()
	return c.Conn.Close()
}

// HTTPClient is an http.Client over the best path that follows no redirects. It
// also serves WebSocket libraries: upgrades go over HTTP/1.1 connections of
// their own.
func (c *Client) HTTPClient() *http.Client {
	return &http.Client{
		Transport:     c,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

type pathKey struct{}

// PathOf says which path a response of a Client came over.
func PathOf(res *http.Response) (Path, bool) {
	if res == nil || res.Request == nil {
		return Path{}, false
	}
	p, ok := res.Request.Context().Value(pathKey{}).(Path)
	return p, ok
}

// RoundTrip sends a request to the host over the best path. Its URL is
// https://reach/… or names an authority of the host; Host, and an Origin or
// Referer of https://reach, are made those of the authority that is used. The
// Request of the response has the URL as it was sent.
//
// A path that cannot be opened is passed over in silence. One that dies under a
// request before the first byte of an answer costs an idempotent request (net/http's
// rule: GET, HEAD, OPTIONS, TRACE, or an Idempotency-Key) with a body that can
// be had again one more try on the next path; any other fails with ErrNotResent.
func (c *Client) RoundTrip(req *http.Request) (*http.Response, error) {
	if err := c.checkURL(req.URL); err != nil {
		return nil, errors.Join(err, closeBody(req))
	}
	var lost *loss
	for {
		cc, r, err := c.lease(req)
		if err != nil {
			return nil, errors.Join(lost.join(err), closeBody(req))
		}
		res, cut, err := c.send(r, cc, req, lost == nil)
		if err == nil {
			r.answered(c.now())
			c.current.Store(r)
			return res, nil
		}
		if !cut {
			return nil, lost.join(err)
		}
		lost = &loss{r, err}
		if req, err = again(req); err != nil {
			return nil, err
		}
		c.log.DebugContext(req.Context(), "request moves to the next path", "from", r.Path, "method", req.Method)
	}
}

// A loss is the path that a request was on when it was cut.
type loss struct {
	r   *route
	err error
}

func (l *loss) join(err error) error {
	if l == nil {
		return err
	}
	return fmt.Errorf("%w (before that, %v was lost: %w)", err, l.r.Path, l.err)
}

// lease reserves a connection on the best path for a request.
func (c *Client) lease(req *http.Request) (*http.ClientConn, *route, error) {
	p := c.plan()
	if isUpgrade(req) {
		return race(req.Context(), c, p, (*route).leaseUpgrade, func(cc *http.ClientConn) { cc.Close() })
	}
	if cc, r := p.ready(); cc != nil {
		return cc, r, nil
	}
	return race(req.Context(), c, p, (*route).lease, (*http.ClientConn).Release)
}

// errDead ends an exchange on a path that was found dead meanwhile.
var errDead = errors.New("no answer, and the path cannot be opened anew")

// send makes one exchange. cut reports that the path died in a way that allows
// the request to be sent once more, which is never so after the first.
func (c *Client) send(r *route, cc *http.ClientConn, req *http.Request, first bool) (res *http.Response, cut bool, err error) {
	parent := context.WithValue(req.Context(), pathKey{}, r.Path)
	ctx, cancel := context.WithCancelCause(parent)
	var f flight
	out := r.address(httptrace.WithClientTrace(ctx, f.trace()), req)
	var body *watchedBody
	if out.Body != nil && out.Body != http.NoBody {
		body = &watchedBody{ReadCloser: out.Body}
		out.Body = body
	}
	movable := first && idempotent(req) && replayable(req)
	stop := func() bool { return true }
	if movable && len(c.routes) > 1 {
		stop = c.timer(doubtAfter, func() { c.spawn(func() { c.doubt(r, &f, cancel) }) })
	}
	res, err = cc.RoundTrip(out)
	stop()
	if f.settle() && err == nil {
		context.AfterFunc(parent, func() { cancel(nil) }) // the body needs ctx as long as its reader likes
		return res, false, nil
	}
	if err == nil { // doubt won the race against the answer
		res.Body.Close()
		err = errDead
	}
	dead := errors.Is(context.Cause(ctx), errDead)
	cancel(nil)
	switch {
	case req.Context().Err() != nil:
		return nil, false, context.Cause(req.Context())
	case body.failed() != nil:
		return nil, false, fmt.Errorf("reach: read the body of the request: %w", body.failed())
	case !dead && cc.Err() == nil: // the host reset this one request; the path is fine
		return nil, false, fmt.Errorf("reach: %s over %v: %w", req.Method, r.Path, err)
	}
	r.lost(c.now(), err)
	switch {
	case first && !f.answered.Load() && (idempotent(req) || !f.wrote.Load()) && replayable(req):
		return nil, true, err
	case f.answered.Load(), idempotent(req):
		return nil, false, fmt.Errorf("reach: %s over %v: the connection was lost: %w", req.Method, r.Path, err)
	}
	return nil, false, fmt.Errorf("%w: %s over %v: look whether the host has carried it out: %w", ErrNotResent, req.Method, r.Path, err)
}

// doubt proves the path of an exchange anew, and ends the exchange if that
// fails. An answer that is merely slow is left in peace.
func (c *Client) doubt(r *route, f *flight, cancel context.CancelCauseFunc) {
	t := r.try()
	<-t.done
	if t.err != nil && !f.answered.Load() && f.settle() {
		cancel(errDead)
	}
}

// A flight is how far an exchange got.
type flight struct {
	wrote, answered atomic.Bool // the last header byte left; the first byte of an answer came
	settled         atomic.Bool
}

// settle decides once whether the answer or the doubt comes first.
func (f *flight) settle() bool { return f.settled.CompareAndSwap(false, true) }

func (f *flight) trace() *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		WroteHeaders:         func() { f.wrote.Store(true) },
		GotFirstResponseByte: func() { f.answered.Store(true) },
	}
}

// A watchedBody tells a caller's broken body from a broken path.
type watchedBody struct {
	io.ReadCloser
	err atomic.Pointer[error]
}

func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.err.Store(&err)
	}
	return n, err
}

func (b *watchedBody) failed() error {
	if b == nil || b.err.Load() == nil {
		return nil
	}
	return *b.err.Load()
}

func isUpgrade(req *http.Request) bool {
	if req.Header.Get("Upgrade") == "" {
		return false
	}
	for _, line := range req.Header.Values("Connection") {
		for token := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(token), "upgrade") {
				return true
			}
		}
	}
	return false
}

// idempotent is net/http's own rule for sending a request again.
func idempotent(req *http.Request) bool {
	switch req.Method {
	case "", http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return req.Header["Idempotency-Key"] != nil || req.Header["X-Idempotency-Key"] != nil
}

func replayable(req *http.Request) bool {
	return req.Body == nil || req.Body == http.NoBody || req.GetBody != nil
}

// again prepares a replayable request to be sent once more.
func again(req *http.Request) (*http.Request, error) {
	if req.Body == nil || req.Body == http.NoBody {
		return req, nil
	}
	body, err := req.GetBody()
	if err != nil {
		return nil, fmt.Errorf("reach: the body of a request that has to be sent again: %w", err)
	}
	out := *req
	out.Body = body
	return &out, nil
}

func closeBody(req *http.Request) error {
	if req.Body == nil {
		return nil
	}
	return req.Body.Close()
}

// checkURL keeps requests, and the credentials in them, from going anywhere but
// to the paired host: also after a redirect to elsewhere.
func (c *Client) checkURL(u *url.URL) error {
	if u == nil {
		return errors.New("reach: the request has no URL")
	}
	if u.Scheme != "" && u.Scheme != "https" {
		return fmt.Errorf("reach: scheme %.20q: requests to the host are https://%s/…", u.Scheme, OriginHost)
	}
	if u.Host == "" || u.Host == OriginHost {
		return nil
	}
	port := u.Port()
	if port == "" {
		port = "443"
	}
	want := net.JoinHostPort(u.Hostname(), port)
	if slices.ContainsFunc(c.hosts, func(h string) bool { return strings.EqualFold(h, want) }) {
		return nil
	}
	return fmt.Errorf("reach: %.80q is not the paired host: it is not asked on its behalf", u.Host)
}
