package reach

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// matchTimeout bounds the wait for the host's consent to a stream; the broker
// itself gives the host 5 s.
const matchTimeout = 15 * time.Second

// DialerConfig says which host is reached through which broker.
type DialerConfig struct {
	URL    string // wss://…/v1/connect, as in the candidate
	HostID wire.ID
	Kind   wire.Kind // wire.KindBootstrap or wire.KindRoute
	// Token proves the credential. It is a secret.
	Token string
	// TLS checks the broker's certificate; nil means the system's roots.
	TLS *tls.Config
	// NetDial opens TCP connections; nil means a net.Dialer.
	NetDial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Transports, in order; nil means all.
	Transports []carrier.Transport
	// Agent is shown by the broker: "hermes-reach/1.2.3".
	Agent string
	// Link adjusts sessions; the zero value is right.
	Link link.Config
	// Log gets what happens, never a token; nil discards.
	Log *slog.Logger
}

// Dialer opens streams to one host through one broker: opaque bytes, in which
// the caller runs TLS against the host's pin. It keeps one session for all of
// them, made at the first dial and again when it was lost. Its methods may be
// called by any number of goroutines.
type Dialer struct {
	cfg      DialerConfig
	link     carrier.Dialer
	instance wire.ID
	log      *slog.Logger
	life     context.Context // ends with Close
	end      context.CancelFunc

	mu      sync.Mutex
	current *clientSession              // what new dials use
	all     map[*clientSession]struct{} // those that drain too
	closed  bool
	tasks   sync.WaitGroup
}

// clientSession is a session that is there or being made.
type clientSession struct {
	ready chan struct{} // closed when sess or err is set
	sess  *link.Session
	err   error
}

// NewDialer checks cfg. It connects nowhere before the first dial.
func NewDialer(cfg DialerConfig) (*Dialer, error) {
	u, err := wire.ParseBrokerURL(cfg.URL, true)
	if err != nil {
		return nil, err
	}
	if cfg.Kind != wire.KindBootstrap && cfg.Kind != wire.KindRoute {
		return nil, fmt.Errorf("a device's credential is a bootstrap or a route, not %q", string(cfg.Kind))
	}
	if err := wire.CheckToken(cfg.Token); err != nil {
		return nil, err
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.Link.Log = cfg.Log
	life, end := context.WithCancel(context.Background())
	return &Dialer{
		life: life, end: end,
		cfg:      cfg,
		link:     carrier.Dialer{URL: u, TLS: cfg.TLS, NetDial: cfg.NetDial, Transports: cfg.Transports},
		instance: wire.NewID(),
		all:      make(map[*clientSession]struct{}),
		log:      cfg.Log.With("broker", u.HostPort()),
	}, nil
}

// DialContext opens one stream to the host. A broker's or the host's no is a
// *wire.RefusedError. A session that died, or takes no new streams any more, is
// replaced once within a call.
func (d *Dialer) DialContext(ctx context.Context) (net.Conn, error) {
	conn, fresh, err := d.dial(ctx)
	again := errors.Is(err, link.ErrSessionClosed) || wire.CodeOf(err) == wire.CodeDraining
	if again && !fresh && ctx.Err() == nil {
		conn, _, err = d.dial(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("reach the host through broker %s: %w", d.link.URL.HostPort(), err)
	}
	return conn, nil
}

// dial opens a stream on the current session; fresh says that it was made for
// this call.
func (d *Dialer) dial(ctx context.Context) (conn net.Conn, fresh bool, err error) {
	cs, fresh, err := d.session(ctx)
	if err != nil {
		return nil, fresh, err
	}
	conn, err = d.open(ctx, cs.sess)
	if errors.Is(err, link.ErrSessionClosed) || wire.CodeOf(err) == wire.CodeDraining || err != nil && cs.sess.Err() != nil {
		d.forget(cs) // also one that only begins to close
	}
	return conn, fresh, err
}

// session gives the current session, or makes one that all who ask share.
func (d *Dialer) session(ctx context.Context) (*clientSession, bool, error) {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil, false, net.ErrClosed
	}
	cs := d.current
	fresh := false
	if cs == nil || cs.over() {
		fresh = true
		cs = &clientSession{ready: make(chan struct{})}
		d.current = cs
		d.all[cs] = struct{}{}
		d.tasks.Go(func() { d.connect(cs) })
	}
	d.mu.Unlock()
	select {
	case <-cs.ready:
	case <-ctx.Done():
		return nil, fresh, context.Cause(ctx)
	}
	if cs.err != nil {
		d.forget(cs)
		return nil, fresh, cs.err
	}
	return cs, fresh, nil
}

// over says that a session was there and has ended.
func (cs *clientSession) over() bool {
	select {
	case <-cs.ready:
		return cs.err != nil || cs.sess.Err() != nil
	default:
		return false
	}
}

func (d *Dialer) forget(cs *clientSession) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.current == cs {
		d.current = nil
	}
}

// connect makes a session and serves its control stream until it ends. It goes
// on when the caller that started it gives up: others may wait for it too.
func (d *Dialer) connect(cs *clientSession) {
	dialing, cancel := context.WithTimeout(d.life, matchTimeout)
	defer cancel()
	sess, ctl, err := d.register(dialing)
	cs.sess, cs.err = sess, err
	close(cs.ready)
	defer d.drop(cs)
	if err != nil {
		return
	}
	err = d.control(ctl)
	d.log.Debug("broker session over", "err", err)
	d.forget(cs)
	_ = sess.Close()
}

func (d *Dialer) drop(cs *clientSession) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.all, cs)
}

func (d *Dialer) register(ctx context.Context) (*link.Session, *link.Control, error) {
	carrier, err := d.link.Dial(ctx)
	if err != nil {
		return nil, nil, err
	}
	sess, err := link.Client(carrier, d.cfg.Link)
	if err != nil {
		return nil, nil, err
	}
	ctl, _, err := sess.Register(ctx, &wire.Register{
		Role: wire.RoleClient, HostID: d.cfg.HostID, ConnectionID: wire.NewID(), CredentialKind: d.cfg.Kind,
		Token: d.cfg.Token, Agent: d.cfg.Agent, InstanceID: d.instance,
	})
	if err != nil {
		return nil, nil, errors.Join(err, sess.Close())
	}
	d.log.Debug("broker session up", "transport", carrier.Transport())
	return sess, ctl, nil
}

// control serves the broker's messages until the session ends.
func (d *Dialer) control(ctl *link.Control) error {
	for {
		m, err := ctl.Receive()
		if err != nil {
			return err
		}
		switch m := m.(type) {
		case *wire.Drain:
			d.drain(ctl.Session())
		case *wire.Error:
			if m.Code != wire.CodeMalformed {
				return m.Refused()
			}
		}
	}
}

// drain makes the next dial open a new session; streams of this one go on.
func (d *Dialer) drain(sess *link.Session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.current != nil && d.current.sess == sess {
		d.current = nil
	}
}

// open asks for a match on a new stream.
func (d *Dialer) open(ctx context.Context, sess *link.Session) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, matchTimeout)
	defer cancel()
	st, err := sess.OpenStream(ctx)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { st.Abort(wire.CodeClosed) })
	defer stop()
	if err := wire.WriteMessage(st, &wire.Dial{}); err != nil {
		return nil, errors.Join(err, st.Close())
	}
	m, err := link.ReadHeader(st, matchTimeout)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, errors.Join(err, st.Close())
	}
	switch m := m.(type) {
	case *wire.Matched:
		st.Bind(m.StreamID)
		if !stop() {
			st.Abort(wire.CodeClosed) // now with its name
			return nil, context.Cause(ctx)
		}
		return link.NewConn(st, sess.Carrier().LocalAddr(), Addr{Broker: d.link.URL.HostPort(), StreamID: m.StreamID}), nil
	case *wire.Error:
		return nil, errors.Join(m.Refused(), st.Close())
	}
	st.Abort(wire.CodeMalformed)
	return nil, errors.New("the broker answered the dial with something else")
}

// Close ends the session and every stream, and waits for what it started.
func (d *Dialer) Close() error {
	d.mu.Lock()
	d.closed = true
	all := slices.Collect(maps.Keys(d.all))
	d.mu.Unlock()
	d.end() // of what still connects
	for _, cs := range all {
		<-cs.ready
		if cs.sess != nil {
			cs.sess.CloseSoon()
		}
	}
	d.tasks.Wait()
	return nil
}

// Addr names the host's end of a stream: the broker and the stream, no secret.
type Addr struct {
	Broker   string
	StreamID wire.ID
}

// Network is the path's role.
func (Addr) Network() string { return "outbound_broker" }

func (a Addr) String() string { return a.Broker + "/" + a.StreamID.String() }
