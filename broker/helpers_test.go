package broker_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait for something that should come soon.
const patience = 20 * time.Second

// site is a broker on loopback with one host enrolled.
type site struct {
	t      testing.TB
	ca     *lab.CA
	cfg    broker.Config
	store  *store.Store
	path   string
	url    wire.BrokerURL
	addr   string
	hostID wire.ID
	token  string
	log    *bytes.Buffer
	logMu  sync.Mutex
	broker *broker.Broker
	stop   func()
}

type lockedWriter struct{ s *site }

func (w lockedWriter) Write(p []byte) (int, error) {
	w.s.logMu.Lock()
	defer w.s.logMu.Unlock()
	return w.s.log.Write(p)
}

func newSite(t testing.TB, limits broker.Limits) *site {
	t.Helper()
	return newSiteWith(t, broker.Config{Limits: limits})
}

func newSiteWith(t testing.TB, cfg broker.Config) *site {
	t.Helper()
	s := &site{
		t: t, cfg: cfg, hostID: wire.NewID(), token: wire.NewToken(),
		path: filepath.Join(t.TempDir(), "broker.db"), log: &bytes.Buffer{},
	}
	var err error
	if s.ca, err = lab.NewCA(); err != nil {
		t.Fatal(err)
	}
	s.open()
	s.start("127.0.0.1:0")
	t.Cleanup(func() { s.stop(); _ = s.store.Close() })
	return s
}

// open opens the state file and sees to it that the host is in it.
func (s *site) open() {
	s.t.Helper()
	var err error
	if s.store, err = store.Open(s.path, nil); err != nil {
		s.t.Fatal(err)
	}
	if err := s.store.AddHost("home", s.hostID, wire.DigestOf(s.token)); err != nil && !errors.Is(err, store.ErrHostName) {
		s.t.Fatal(err)
	}
}

// start runs a broker on addr until stop.
func (s *site) start(addr string) {
	s.t.Helper()
	cfg := s.cfg
	var err error
	if cfg.TLS, err = s.ca.Server("localhost"); err != nil {
		s.t.Fatal(err)
	}
	cfg.Store, cfg.Limits.Drain = s.store, cmp.Or(cfg.Limits.Drain, time.Second)
	cfg.Log = slog.New(slog.NewJSONHandler(lockedWriter{s}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	b, err := broker.New(cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.broker, s.addr = b, ln.Addr().String()
	_, port, _ := net.SplitHostPort(s.addr)
	if s.url, err = wire.ParseBrokerURL("wss://localhost:"+port+"/v1/connect", false); err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- b.Serve(ctx, ln) }()
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			s.t.Errorf("Serve = %v", err)
		}
	})
}

// host runs a connector and answers every stream with serve.
func (s *site) host(adjust func(*connector.Config), serve func(net.Conn)) *connector.Connector {
	s.t.Helper()
	cfg := connector.Config{URL: s.url, HostID: s.hostID, Token: s.token, TLS: s.ca.Client(), Instance: wire.NewID(), Epoch: 1, Agent: "test/1"}
	if adjust != nil {
		adjust(&cfg)
	}
	c, err := connector.New(cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() { _ = c.Run(ctx) })
	all.Go(func() {
		for {
			conn, err := c.Accept()
			if err != nil {
				return
			}
			all.Go(func() { serve(conn) })
		}
	})
	s.t.Cleanup(func() { cancel(); all.Wait() })
	return c
}

func echo(c net.Conn) {
	_, _ = io.Copy(c, c)
	_ = c.Close()
}

// route publishes a route credential and gives a dialer that uses it.
func (s *site) route(c *connector.Connector, id string, adjust func(*reach.DialerConfig)) *reach.Dialer {
	s.t.Helper()
	token := wire.NewToken()
	s.publish(c, connector.Publication{Kind: wire.KindRoute, ID: id, Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Hour)})
	return s.dialer(wire.KindRoute, token, adjust)
}

// stored puts a credential into the broker's file without a host's doing.
func (s *site) stored(kind wire.Kind, id string) (token string) {
	s.t.Helper()
	token = wire.NewToken()
	err := s.store.Publish(store.Credential{Host: s.hostID, Kind: kind, ID: id, Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Hour)})
	if err != nil {
		s.t.Fatal(err)
	}
	return token
}

func (s *site) publish(c *connector.Connector, pub connector.Publication) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := c.Publish(ctx, pub)
	for errors.Is(err, connector.ErrOffline) && ctx.Err() == nil {
		err = c.Publish(ctx, pub)
	}
	if err != nil {
		s.t.Fatal(err)
	}
}

func (s *site) dialer(kind wire.Kind, token string, adjust func(*reach.DialerConfig)) *reach.Dialer {
	s.t.Helper()
	cfg := reach.DialerConfig{URL: s.url.String(), HostID: s.hostID, Kind: kind, Token: token, TLS: s.ca.Client(), Agent: "test/1"}
	if adjust != nil {
		adjust(&cfg)
	}
	d, err := reach.NewDialer(cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = d.Close() })
	return d
}

func (s *site) dial(d *reach.Dialer) net.Conn {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := d.DialContext(ctx)
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

func (s *site) refusal(d *reach.Dialer) wire.Code {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := d.DialContext(ctx)
	if err == nil {
		_ = c.Close()
		return ""
	}
	if r, ok := errors.AsType[*wire.RefusedError](err); ok {
		return r.Code
	}
	s.t.Fatalf("dial: %v, want a refusal with a code", err)
	return ""
}

// eventually waits until a condition holds that no event tells of.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(patience)
	for !holds() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("it never came that %s", what)
		}
	}
}

// a states hears of a connector's sessions.
type states chan connector.SlotStatus

func watchStates(c *connector.Config) states {
	ch := make(states, 1000)
	c.OnState = func(_ int, s connector.SlotStatus) { ch <- s }
	return ch
}

// await gives the next state that matches.
func (ch states) await(t testing.TB, what string, match func(connector.SlotStatus) bool) connector.SlotStatus {
	t.Helper()
	limit := time.After(patience)
	for {
		select {
		case s := <-ch:
			if match(s) {
				return s
			}
		case <-limit:
			t.Fatalf("no session was ever %s", what)
		}
	}
}

func isConnected(s connector.SlotStatus) bool { return s.State == "connected" }

func refusedWith(code wire.Code) func(connector.SlotStatus) bool {
	return func(s connector.SlotStatus) bool { return wire.CodeOf(s.Err) == code }
}

// session makes a session on which nothing was said yet.
func (s *site) session() *link.Session {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	carrier, err := (&carrier.Dialer{URL: s.url, TLS: s.ca.Client()}).Dial(ctx)
	if err != nil {
		s.t.Fatal(err)
	}
	sess, err := link.Client(carrier, s.cfg.Link)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = sess.Close() })
	return sess
}

// A peer speaks the protocol by hand.
type peer struct {
	t        testing.TB
	sess     *link.Session
	ctl      *link.Control
	messages chan wire.Message // of the control stream; closed when the session ends
}

func (s *site) asHost(slot int, epoch int64, instance wire.ID) *wire.Register {
	return &wire.Register{
		Role: wire.RoleHost, HostID: s.hostID, ConnectionID: wire.NewID(), CredentialKind: wire.KindHost,
		Token: s.token, InstanceID: instance, Slot: &slot, Epoch: epoch,
	}
}

func (s *site) asClient(token string) *wire.Register {
	return &wire.Register{
		Role: wire.RoleClient, HostID: s.hostID, ConnectionID: wire.NewID(), CredentialKind: wire.KindRoute,
		Token: token, InstanceID: wire.NewID(),
	}
}

// register registers a peer, or says why it may not.
func (s *site) register(reg *wire.Register) (*peer, error) {
	s.t.Helper()
	sess := s.session()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	ctl, _, err := sess.Register(ctx, reg)
	if err != nil {
		return nil, err
	}
	p := &peer{t: s.t, sess: sess, ctl: ctl, messages: make(chan wire.Message, 1000)}
	read := make(chan struct{})
	go func() {
		defer close(read)
		defer close(p.messages)
		for {
			m, err := ctl.Receive()
			if err != nil {
				return
			}
			p.messages <- m
		}
	}()
	s.t.Cleanup(func() { _ = sess.Close(); <-read })
	return p, nil
}

func (s *site) mustRegister(reg *wire.Register) *peer {
	s.t.Helper()
	p, err := s.register(reg)
	if err != nil {
		s.t.Fatal(err)
	}
	return p
}

// next is the next message on the control stream, nil at its end.
func (p *peer) next() wire.Message {
	p.t.Helper()
	select {
	case m := <-p.messages:
		return m
	case <-time.After(patience):
		p.t.Fatal("no message came")
		return nil
	}
}

// wantError wants the next message to be an error of that code.
func (p *peer) wantError(code wire.Code) *wire.Error {
	p.t.Helper()
	m := p.next()
	e, ok := m.(*wire.Error)
	if !ok || e.Code != code {
		p.t.Fatalf("got %T %v, want the error %s", m, m, code)
	}
	return e
}

// dial asks for a match and gives the stream with the broker's answer.
func (p *peer) dial() (*link.Stream, wire.Message) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	st, err := p.sess.OpenStream(ctx)
	if err != nil {
		p.t.Fatal(err)
	}
	if err := wire.WriteMessage(st, &wire.Dial{}); err != nil {
		p.t.Fatal(err)
	}
	m, err := link.ReadHeader(st, patience)
	if err != nil {
		p.t.Fatal(err)
	}
	if m, ok := m.(*wire.Matched); ok {
		st.Bind(m.StreamID)
	}
	return st, m
}

// accept waits for the broker to open a stream to this host.
func (p *peer) accept() (*link.Stream, *wire.Open) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	st, err := p.sess.AcceptStream(ctx)
	if err != nil {
		p.t.Fatal(err)
	}
	m, err := link.ReadHeader(st, patience)
	open, ok := m.(*wire.Open)
	if err != nil || !ok {
		p.t.Fatalf("the broker opens with %T %v, %v", m, m, err)
	}
	st.Bind(open.StreamID)
	return st, open
}

// byHand registers without the library's help and gives the control stream as
// it is.
func (s *site) byHand(reg *wire.Register) *link.Stream {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	st, err := s.session().OpenStream(ctx)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := wire.WriteMessage(st, reg); err != nil {
		s.t.Fatal(err)
	}
	if m, err := link.ReadHeader(st, patience); err != nil {
		s.t.Fatal(err)
	} else if _, ok := m.(*wire.Registered); !ok {
		s.t.Fatalf("the answer is %T %v", m, m)
	}
	return st
}

// frame is a message of that body.
func frame(body string) []byte {
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(body))), body...)
}

// written is how a message looks on the wire.
func written(t testing.TB, m wire.Message) string {
	t.Helper()
	b, err := wire.AppendMessage(nil, m)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
