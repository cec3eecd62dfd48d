package reach

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// neutralSNI is the server name of the inner handshake behind a broker, which
// could read it: it says nothing. Where the host is an address, it asks for the
// newest leaf; without a name the host would choose by its own address.
const neutralSNI = "link.invalid"

// Bounds of what a route keeps.
const (
	idleFor       = 90 * time.Second // a pooled connection without requests
	pingAfter     = 10 * time.Second // of silence on an HTTP/2 connection …
	pingTimeout   = 15 * time.Second // … and this long without an answer end it
	maxRest       = 8 * time.Second  // between two tries of a path that keeps failing
	maxHeadStart  = 2 * time.Second
	maxRespHeader = 1 << 20 // bytes
)

// A Path is the way a connection took. It holds no secret.
type Path struct {
	Role      endpoints.Role
	Priority  int
	Authority string // HOST:PORT of the host's Secure Link
	Broker    string // URL of the broker in between; "" = none
}

func pathOf(c endpoints.Candidate) Path {
	p := Path{Role: c.Role, Priority: c.Priority}
	if c.Proxy != nil {
		p.Authority, _ = c.Proxy.Authority() // "" where the candidate is unusable anyway
	}
	if c.Broker != nil {
		p.Broker = c.Broker.URL
	}
	return p
}

// String names role and address, for people.
func (p Path) String() string {
	at := p.Authority
	if p.Broker != "" {
		at = p.Broker
	}
	if at == "" {
		return fmt.Sprintf("%.64s", string(p.Role))
	}
	return fmt.Sprintf("%.64s (%s)", string(p.Role), at)
}

// A BrokerDialer opens opaque streams to one host through one broker, for any
// number of goroutines. *Dialer is one.
type BrokerDialer interface {
	DialContext(ctx context.Context) (net.Conn, error)
	Close() error
}

// BrokerConfig says which host behind which broker. Token is a secret.
type BrokerConfig struct {
	URL    string
	HostID wire.ID
	Kind   wire.Kind
	Token  string
	Agent  string
	Outer  *tls.Config
	Dial   func(ctx context.Context, network, addr string) (net.Conn, error)
	Log    *slog.Logger
}

func newBroker(c BrokerConfig) (BrokerDialer, error) {
	return NewDialer(DialerConfig{URL: c.URL, HostID: c.HostID, Kind: c.Kind, Token: c.Token, Agent: c.Agent, TLS: c.Outer, NetDial: c.Dial, Log: c.Log})
}

// A route is one candidate in use: how to open it, the connections that are
// open, and what is known of it.
type route struct {
	Path
	index   int // in Client.routes
	c       *Client
	open    func(context.Context) (net.Conn, error) // bytes to the host's Secure Link, not yet trusted
	broker  BrokerDialer                            // nil = direct
	timeout time.Duration                           // of one try, handshake included
	pinned  *tls.Config                             // HTTP/1.1 only
	web     *http.Transport                         // dials connections for requests …
	upgrade *http.Transport                         // … and for upgrades; never pools

	mu      sync.Mutex
	obs     endpoints.Observation
	why     error         // of a failed obs
	fails   int           // tries that failed in a row
	losses  int           // connections that died under a request, since one was answered
	resting time.Time     // not tried for its own sake before this
	took    time.Duration // the last handshake, from dial to proof
	oneEach bool          // the host speaks HTTP/1.1 only: one request a connection at a time
	conns   []*pooled     // newest first
	trial   *trial        // that runs, or nil
}

// A trial is one try of a route that all who want it share.
type trial struct {
	started time.Time
	done    chan struct{} // closed when err is set
	err     error
}

// A pooled connection closes by itself when it has been idle for long.
type pooled struct {
	*http.ClientConn
	idle *time.Timer
}

// newRoute puts the credential into cand and checks that the candidate can be
// used by this version.
func newRoute(c *Client, cfg Config, cand *endpoints.Candidate) (*route, error) {
	if cand.Proxy == nil {
		return nil, errors.New("it has no pinned Secure Link, and nothing else is trusted with credentials")
	}
	r := &route{Path: pathOf(*cand), c: c}
	if cand.Role.IsBroker() || cand.Broker != nil {
		if err := r.throughBroker(cfg, cand); err != nil {
			return nil, err
		}
	} else {
		if err := cand.ProxyValid(); err != nil {
			return nil, err
		}
		r.timeout = directTimeout
		r.open = func(ctx context.Context) (net.Conn, error) { return cfg.Dial(ctx, "tcp", r.Authority) }
	}
	pin, err := pins.Parse(cand.Proxy.PinSHA256)
	if err != nil {
		return nil, err
	}
	if !pin.Equal(cfg.Profile.Pin) {
		return nil, errors.New("its pin is not that of the paired host: pair again")
	}
	r.prepare(c, pin)
	return r, nil
}

func (r *route) throughBroker(cfg Config, cand *endpoints.Candidate) error {
	if cand.Broker == nil {
		return errors.New("it names no broker")
	}
	cred, ok := cfg.Profile.Route(cand.Broker)
	if !ok {
		return errors.New("this device has no credential for the broker: pair again, or sign in once over another path")
	}
	b := *cand.Broker
	b.CredentialKind, b.Token, b.ExpiresAt = cred.Kind, cred.Token.Reveal(), 0
	if !cred.Expires.IsZero() {
		b.ExpiresAt = wire.Expiry(cred.Expires.Unix())
	}
	cand.Broker = &b
	if err := cand.BrokerValid(r.c.now()); err != nil {
		return err
	}
	host, err := wire.ParseID(b.HostID)
	if err != nil {
		return err
	}
	r.timeout = brokerTimeout
	r.broker, err = cfg.NewBroker(BrokerConfig{
		URL: b.URL, HostID: host, Kind: wire.Kind(b.CredentialKind), Token: b.Token, Agent: cfg.Agent,
		Outer: cfg.Outer, Dial: cfg.Dial, Log: cfg.Log,
	})
	if err != nil {
		return err
	}
	r.open = r.broker.DialContext
	return nil
}

// prepare makes the transports. Both dial through the pinned handshake, and
// cannot dial in any other way.
func (r *route) prepare(c *Client, pin pins.Pin) {
	host, _, _ := net.SplitHostPort(r.Authority) // Authority is made by JoinHostPort
	want := pins.Client{Pin: pin, Host: host, Now: c.now, Resume: true}
	if _, err := netip.ParseAddr(host); err == nil || r.Broker != "" {
		want.SNI = neutralSNI
	}
	r.pinned = pins.ClientConfig(want)
	r.pinned.NextProtos = []string{"http/1.1"}
	both := r.pinned.Clone() // shares the sessions to resume
	both.NextProtos = []string{"h2", "http/1.1"}
	r.web, r.upgrade = r.transport(both, true), r.transport(r.pinned, false)
}

func (r *route) transport(cfg *tls.Config, h2 bool) *http.Transport {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(h2)
	return &http.Transport{
		DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return r.dial(ctx, cfg) },
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			return nil, errors.New("reach: nothing is sent without TLS")
		},
		Protocols:              protocols,
		HTTP2:                  &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout},
		DisableCompression:     true, // bodies pass as they are
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: maxRespHeader,
	}
}

// dial opens the path and proves the host. It notes what it found.
func (r *route) dial(ctx context.Context, cfg *tls.Config) (*tls.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	start := r.c.now()
	conn, err := r.handshake(ctx, cfg)
	if ctx.Err() != nil && errors.Is(context.Cause(ctx), context.Canceled) {
		return conn, err // nobody waits any more: that says nothing about the path
	}
	r.note(start, r.c.now(), err)
	if err == nil && len(cfg.NextProtos) > 1 {
		r.mu.Lock()
		r.oneEach = conn.ConnectionState().NegotiatedProtocol != "h2"
		r.mu.Unlock()
	}
	return conn, err
}

func (r *route) handshake(ctx context.Context, cfg *tls.Config) (*tls.Conn, error) {
	raw, err := r.open(ctx)
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	conn := tls.Client(raw, cfg)
	if err := conn.HandshakeContext(ctx); err != nil {
		raw.Close() // the handshake's error tells more
		return nil, fmt.Errorf("pinned handshake: %w", err)
	}
	return conn, nil
}

// note records a try that began at start.
func (r *route) note(start, end time.Time, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		r.took = max(end.Sub(start), 0)
		r.obs = endpoints.Observation{Health: endpoints.Healthy, At: start, RTT: r.took}
		r.why, r.fails = nil, 0
		return
	}
	if !end.Before(r.resting) { // tries that fail together count once
		r.fails++
	}
	r.obs = endpoints.Observation{Health: endpoints.Failed, At: end, Class: class(err)}
	r.why, r.resting = err, end.Add(r.rest())
}

// lost records that a connection died under a request. A path that opens well
// and then loses what runs on it earns a growing rest, until one is answered.
func (r *route) lost(now time.Time, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.obs.Health != endpoints.Failed { // requests that are lost together count once
		r.losses++
	}
	r.obs = endpoints.Observation{Health: endpoints.Failed, At: now, Class: class(err)}
	r.why, r.resting = err, now.Add(r.rest())
}

// answered records that the host answered a request.
func (r *route) answered(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.obs = endpoints.Observation{Health: endpoints.Healthy, At: now, RTT: r.took}
	r.why, r.fails, r.losses = nil, 0, 0
}

// rest is how long to leave the path alone: 2 s, then 4, then 8, so that a path
// that comes back is found within 10 s.
func (r *route) rest() time.Duration {
	n := max(r.fails, r.losses, 1) - 1
	return min(endpoints.FailedFor<<min(n, 8), maxRest)
}

// A state is what the planner needs to know of a route.
type state struct {
	obs     endpoints.Observation
	failing bool // the last try or exchange failed
	resting bool
	running bool // a trial is under way
}

func (r *route) state(now time.Time) state {
	r.mu.Lock()
	defer r.mu.Unlock()
	failing := r.obs.Health == endpoints.Failed
	// A clock that was set back must not keep a path waiting.
	return state{r.obs, failing, failing && now.Before(r.resting) && now.After(r.obs.At.Add(-time.Second)), r.trial != nil}
}

// headStart is how long the route may be waited for before the next is tried
// too, from now. A path whose handshake is known to be slow gets more.
func (r *route) headStart(now time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	d := min(max(HeadStart, 2*r.took), maxHeadStart)
	if r.trial != nil {
		d -= now.Sub(r.trial.started)
	}
	return max(d, 0)
}

// reserve takes a slot on an open connection, or nil if there is none.
func (r *route) reserve() *http.ClientConn {
	r.mu.Lock()
	defer r.mu.Unlock()
	alive := r.conns[:0]
	var got *http.ClientConn
	for _, p := range r.conns {
		if p.Err() != nil {
			p.idle.Stop()
			continue
		}
		alive = append(alive, p)
		if got == nil && p.Reserve() == nil {
			got = p.ClientConn
		}
	}
	clear(r.conns[len(alive):])
	r.conns = alive
	return got
}

// keep pools a connection.
func (r *route) keep(cc *http.ClientConn) {
	p := &pooled{ClientConn: cc}
	r.mu.Lock()
	defer r.mu.Unlock()
	p.idle = time.AfterFunc(idleFor, func() { r.retire(p) })
	// The hook runs inside calls that are made under mu: it takes no lock.
	cc.SetStateHook(func(cc *http.ClientConn) {
		if cc.InFlight() == 0 {
			p.idle.Reset(idleFor)
		}
	})
	if !r.oneEach { // the new one serves all: idle ones are of no more use
		for _, old := range r.conns {
			if old.InFlight() == 0 {
				old.Close()
			}
		}
	}
	r.conns = append([]*pooled{p}, r.conns...)
}

// retire closes a connection if no request uses it. reserve cannot take it
// meanwhile: both hold mu.
func (r *route) retire(p *pooled) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.InFlight() == 0 {
		p.Close() // it was healthy or is closed; reserve drops it
	}
}

func (r *route) close() error {
	r.mu.Lock()
	conns := r.conns
	r.conns = nil
	r.mu.Unlock()
	for _, p := range conns {
		p.idle.Stop()
		p.Close() // its peer hears of it or is gone
	}
	if r.broker == nil {
		return nil
	}
	return r.broker.Close()
}

// try starts a trial, or joins the one that runs. A success is pooled.
func (r *route) try() *trial {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.trial != nil {
		return r.trial
	}
	t := &trial{started: r.c.now(), done: make(chan struct{})}
	r.trial = t
	if !r.c.spawn(func() { r.run(t) }) {
		t.err = ErrClosed
		r.trial = nil
		close(t.done)
	}
	return t
}

func (r *route) run(t *trial) {
	cc, err := r.web.NewClientConn(r.c.ctx, "https", r.Authority)
	if err == nil {
		r.keep(cc)
	}
	r.mu.Lock()
	r.trial = nil
	t.err = err
	r.mu.Unlock()
	close(t.done)
}

// lease reserves a slot on a proved connection. After a failure an open
// connection proves nothing: the path must be opened anew.
func (r *route) lease(ctx context.Context) (*http.ClientConn, error) {
	for range 3 { // a connection may be gone, or taken, before we get to it
		if !r.state(r.c.now()).failing {
			if cc := r.reserve(); cc != nil {
				return cc, nil
			}
		}
		if r.alone() {
			return r.leaseOwn(ctx)
		}
		t := r.try()
		select {
		case <-t.done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		if t.err != nil {
			return nil, t.err
		}
	}
	return nil, errors.New("connections close as soon as they are open")
}

func (r *route) alone() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.oneEach
}

func (r *route) leaseOwn(ctx context.Context) (*http.ClientConn, error) {
	cc, err := r.web.NewClientConn(ctx, "https", r.Authority)
	if err != nil {
		return nil, err
	}
	if err := cc.Reserve(); err != nil {
		return nil, errors.Join(err, cc.Close())
	}
	r.keep(cc)
	return cc, nil
}

// leaseUpgrade opens a connection for one upgrade. It closes after any answer
// but 101; after that it belongs to the body of the response.
func (r *route) leaseUpgrade(ctx context.Context) (*http.ClientConn, error) {
	cc, err := r.upgrade.NewClientConn(ctx, "https", r.Authority)
	if err != nil {
		return nil, err
	}
	if err := cc.Reserve(); err != nil {
		return nil, errors.Join(err, cc.Close())
	}
	cc.SetStateHook(func(cc *http.ClientConn) {
		if cc.InFlight() == 0 {
			cc.Close()
		}
	})
	return cc, nil
}

// dialOwn opens a connection for a caller of Client.DialContext.
func (r *route) dialOwn(ctx context.Context) (*tls.Conn, error) { return r.dial(ctx, r.pinned) }

// address makes a copy of a request that is meant for this path's authority.
func (r *route) address(ctx context.Context, req *http.Request) *http.Request {
	out := req.Clone(ctx)
	host := strings.TrimSuffix(r.Authority, ":443")
	out.URL.Scheme, out.URL.Host, out.Host = "https", host, ""
	if out.Header == nil {
		out.Header = http.Header{}
	}
	for _, name := range []string{"Origin", "Referer"} {
		if rest, ok := strings.CutPrefix(out.Header.Get(name), Origin); ok && (rest == "" || rest[0] == '/') {
			out.Header.Set(name, "https://"+host+rest)
		}
	}
	return out
}
