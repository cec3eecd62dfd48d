package connector_test

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 20 * time.Second

// A registration is a host's session at a broker that does what a test wants.
type registration struct {
	*wire.Register
	sess *link.Session
	ctl  *link.Control
}

// stub is a broker that registers every host and leaves the rest to serve, which
// ends with the session.
func stub(t *testing.T, serve func(*registration)) (wire.BrokerURL, *tls.Config) {
	t.Helper()
	ca, err := lab.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := ca.Server("localhost")
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	srv := &http.Server{ReadHeaderTimeout: patience, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, err := carrier.Upgrade(w, r)
		if err != nil {
			t.Error(err)
			return
		}
		all.Go(func() { register(t, c, serve) })
	})}
	all.Go(func() { _ = srv.Serve(tls.NewListener(ln, cfg)) })
	t.Cleanup(func() { _ = srv.Close(); all.Wait() })
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	u, err := wire.ParseBrokerURL("wss://localhost:"+port+"/v1/connect", false)
	if err != nil {
		t.Fatal(err)
	}
	return u, ca.Client()
}

func register(t *testing.T, c *carrier.Carrier, serve func(*registration)) {
	sess, err := link.Server(c, link.Config{})
	if err != nil {
		t.Error(err)
		return
	}
	defer sess.Close()
	st, err := sess.AcceptStream(context.Background())
	if err != nil {
		return // the test is over
	}
	m, err := link.ReadHeader(st, patience)
	reg, ok := m.(*wire.Register)
	if !ok {
		t.Errorf("the first message is %T, %v", m, err)
		return
	}
	r := &registration{Register: reg, sess: sess, ctl: sess.StartControl(st)}
	r.ctl.Send(&wire.Registered{SessionID: wire.NewID()})
	serve(r)
}

// messages hands what the host says to handle until the session ends.
func (r *registration) messages(handle func(wire.Message)) {
	for {
		m, err := r.ctl.Receive()
		if err != nil {
			return
		}
		handle(m)
	}
}

// start runs a connector and waits until n of its sessions are up.
func start(t *testing.T, u wire.BrokerURL, cfg *tls.Config, n int) *connector.Connector {
	t.Helper()
	up := make(chan struct{}, 1000)
	c, err := connector.New(connector.Config{
		URL: u, HostID: wire.NewID(), Token: wire.NewToken(), TLS: cfg, Instance: wire.NewID(), Sessions: n,
		OnState: func(_ int, s connector.SlotStatus) {
			if s.State == "connected" {
				up <- struct{}{}
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = c.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	for range n {
		select {
		case <-up:
		case <-time.After(patience):
			t.Fatal("the sessions do not come up")
		}
	}
	return c
}

// TestRequestsMoveToAnotherSession: what was asked over a session that ends is
// asked again over one that lives, and its caller notices nothing.
func TestRequestsMoveToAnotherSession(t *testing.T) {
	var asked atomic.Int32
	u, cfg := stub(t, func(r *registration) {
		r.messages(func(m wire.Message) {
			if p, ok := m.(*wire.PublishRoute); ok {
				if asked.Add(1) == 1 {
					r.sess.CloseSoon() // instead of an answer
					return
				}
				r.ctl.Send(&wire.Published{RequestID: p.RequestID, CredentialKind: wire.KindRoute, CredentialID: p.CredentialID})
			}
		})
	})
	c := start(t, u, cfg, 2)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	err := c.Publish(ctx, connector.Publication{Kind: wire.KindRoute, ID: "d", Digest: wire.DigestOf("t"), Expires: time.Now().Add(time.Hour)})
	if err != nil || asked.Load() < 2 {
		t.Errorf("Publish = %v, asked %d times; want an answer from the other session", err, asked.Load())
	}
}

// TestRevocationWinsOverARepetition: a session that comes up repeats what was
// published, and that must not undo what is taken back meanwhile over another.
func TestRevocationWinsOverARepetition(t *testing.T) {
	var mu sync.Mutex
	known := false // whether the broker has the credential
	var repeated sync.Once
	reached, release := make(chan struct{}), make(chan struct{})
	drop := make(chan *link.Session, 10)
	u, cfg := stub(t, func(r *registration) {
		drop <- r.sess
		r.messages(func(m wire.Message) {
			switch m := m.(type) {
			case *wire.PublishRoute:
				mu.Lock()
				again := known
				mu.Unlock()
				if again { // the repetition takes its time
					repeated.Do(func() { close(reached); <-release })
				}
				mu.Lock()
				known = true
				mu.Unlock()
				r.ctl.Send(&wire.Published{RequestID: m.RequestID, CredentialKind: wire.KindRoute, CredentialID: m.CredentialID})
			case *wire.Revoke:
				mu.Lock()
				known = false
				mu.Unlock()
				r.ctl.Send(&wire.Revoked{RequestID: m.RequestID, CredentialKind: wire.KindRoute, CredentialID: m.CredentialID})
			}
		})
	})
	c := start(t, u, cfg, 2)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := c.Publish(ctx, connector.Publication{Kind: wire.KindRoute, ID: "d", Digest: wire.DigestOf("t"), Expires: time.Now().Add(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	(<-drop).CloseSoon() // its slot comes back and repeats
	<-reached
	revoked := make(chan error, 1)
	go func() { revoked <- c.Revoke(ctx, wire.KindRoute, "d") }()
	close(release)
	if err := <-revoked; err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for quiet := 0; quiet < 20; quiet++ { // until nothing more is said
		<-tick.C
		mu.Lock()
		if known {
			quiet = 0
		}
		mu.Unlock()
		if ctx.Err() != nil {
			t.Fatal("the broker knows a credential that was taken back")
		}
	}
}

// TestOpenIsForItsRegistrationOnly: an open that names another one is refused.
func TestOpenIsForItsRegistrationOnly(t *testing.T) {
	got := make(chan wire.Message, 2)
	u, cfg := stub(t, func(r *registration) {
		for _, connection := range []wire.ID{wire.NewID(), r.ConnectionID} {
			st, err := r.sess.OpenStream(context.Background())
			if err != nil {
				t.Error(err)
				return
			}
			_ = wire.WriteMessage(st, &wire.Open{
				StreamID: wire.NewID(), HostConnectionID: connection, CredentialKind: wire.KindRoute, CredentialID: "d",
			})
			m, err := link.ReadHeader(st, patience)
			if err != nil {
				t.Error(err)
			}
			got <- m
		}
		r.messages(func(wire.Message) {})
	})
	c := start(t, u, cfg, 1)
	if m, ok := (<-got).(*wire.Refuse); !ok || m.Code != wire.CodeMalformed {
		t.Errorf("an open for another registration is answered with %v, want a refusal", m)
	}
	if m, ok := (<-got).(*wire.Accept); !ok {
		t.Errorf("an open for this one is answered with %v", m)
	}
	conn, err := c.Accept()
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
}

// TestBrokerThatOpensStreams for no client cannot fill the host's memory: the
// session ends.
func TestBrokerThatOpensStreams(t *testing.T) {
	opened := make(chan int, 10)
	u, cfg := stub(t, func(r *registration) {
		n := 0
		for ; r.sess.Err() == nil; n++ {
			if _, err := r.sess.OpenStream(context.Background()); err != nil {
				break
			}
		}
		opened <- n
	})
	start(t, u, cfg, 1)
	select {
	case n := <-opened:
		if n > 2048 {
			t.Errorf("%d streams were taken", n)
		}
	case <-time.After(2 * patience):
		t.Error("the session goes on")
	}
}

func TestOfflineIsSaid(t *testing.T) {
	u, cfg := stub(t, func(*registration) {})
	c, err := connector.New(connector.Config{URL: u, HostID: wire.NewID(), Token: wire.NewToken(), TLS: cfg})
	if err != nil {
		t.Fatal(err)
	}
	err = c.Publish(t.Context(), connector.Publication{Kind: wire.KindRoute, ID: "d", Digest: wire.DigestOf("t"), Expires: time.Now().Add(time.Hour)})
	if !errors.Is(err, connector.ErrOffline) {
		t.Errorf("Publish = %v, want ErrOffline", err)
	}
}
