package admin_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/admin"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/internal/localsock"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// running is a broker with its administration, on one state file.
type running struct {
	t      *testing.T
	state  string
	ca     *lab.CA
	url    wire.BrokerURL
	store  *store.Store
	broker *broker.Broker
	stop   func()
}

func run(t *testing.T, state string) *running {
	t.Helper()
	r := &running{t: t, state: state}
	var err error
	if r.ca, err = lab.NewCA(); err != nil {
		t.Fatal(err)
	}
	cfg, err := r.ca.Server("localhost")
	if err != nil {
		t.Fatal(err)
	}
	if r.store, err = store.Open(state, nil); err != nil {
		t.Fatal(err)
	}
	if r.broker, err = broker.New(broker.Config{Store: r.store, TLS: cfg, Limits: broker.Limits{Drain: time.Second}}); err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	if r.url, err = wire.ParseBrokerURL("wss://localhost:"+port+"/v1/connect", false); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	all.Go(func() {
		if err := r.broker.Serve(ctx, ln); err != nil {
			t.Errorf("broker: %v", err)
		}
	})
	all.Go(func() {
		if err := admin.Serve(ctx, state, r.broker, r.store); err != nil {
			t.Errorf("administration: %v", err)
		}
	})
	r.stop = sync.OnceFunc(func() { cancel(); all.Wait(); _ = r.store.Close() })
	t.Cleanup(r.stop)
	if err := localsock.Wait(t.Context(), state+".sock"); err != nil {
		t.Fatal(err)
	}
	return r
}

func open(t *testing.T, state string) *admin.Admin {
	t.Helper()
	a, err := admin.Open(state)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	return a
}

// host runs a connector with the line's token and tells its states.
func (r *running) host(line wire.HostLine) (*connector.Connector, <-chan connector.SlotStatus) {
	r.t.Helper()
	states := make(chan connector.SlotStatus, 100)
	c, err := connector.New(connector.Config{
		URL: r.url, HostID: line.HostID, Token: line.Token, TLS: r.ca.Client(), Instance: wire.NewID(), Sessions: 1,
		OnState: func(_ int, s connector.SlotStatus) { states <- s },
	})
	if err != nil {
		r.t.Fatal(err)
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
			all.Go(func() { _, _ = io.Copy(conn, conn); _ = conn.Close() })
		}
	})
	r.t.Cleanup(func() { cancel(); all.Wait() })
	return c, states
}

// await waits for a state that matches.
func await(t *testing.T, states <-chan connector.SlotStatus, what string, match func(connector.SlotStatus) bool) {
	t.Helper()
	limit := time.After(20 * time.Second)
	for {
		select {
		case s := <-states:
			if match(s) {
				return
			}
		case <-limit:
			t.Fatalf("the host's session never was %s", what)
		}
	}
}

func connected(s connector.SlotStatus) bool { return s.State == "connected" }

func endedWith(code wire.Code) func(connector.SlotStatus) bool {
	return func(s connector.SlotStatus) bool { return wire.CodeOf(s.Err) == code }
}

// TestBothModes: the same answers beside a running broker and without one.
func TestBothModes(t *testing.T) {
	for mode, start := range map[string]func(t *testing.T, state string){
		"running": func(t *testing.T, state string) { run(t, state) },
		"stopped": func(*testing.T, string) {},
	} {
		t.Run(mode, func(t *testing.T) {
			state := filepath.Join(t.TempDir(), "broker.db")
			start(t, state)
			a, ctx := open(t, state), t.Context()
			if a.Running() != (mode == "running") {
				t.Fatalf("Running = %v", a.Running())
			}
			line, err := a.Add(ctx, "home", wire.ID{})
			if err != nil || line.Name != "home" || line.HostID.IsZero() || wire.CheckToken(line.Token) != nil {
				t.Fatalf("Add = %v, %v", line, err)
			}
			id := wire.NewID()
			if l, err := a.Add(ctx, "python", id); err != nil || l.HostID != id {
				t.Fatalf("Add with an id = %v, %v", l, err)
			}
			if _, err := a.Add(ctx, "home", wire.ID{}); !errors.Is(err, store.ErrHostName) || !strings.Contains(err.Error(), `"home"`) {
				t.Errorf("Add again = %v, want ErrHostName and the name", err)
			}
			if _, err := a.Add(ctx, "third", id); !errors.Is(err, store.ErrHostID) {
				t.Errorf("Add with a taken id = %v, want ErrHostID", err)
			}
			if _, err := a.Add(ctx, "line\nbreak", wire.ID{}); err == nil {
				t.Error("a name with a line break is taken")
			}
			if err := a.AddDigest(ctx, "no token", wire.NewID(), wire.Digest{}); err == nil {
				t.Error("a host without a token is taken")
			}
			next, err := a.Rotate(ctx, "home", time.Hour)
			if err != nil || next.HostID != line.HostID || next.Token == line.Token {
				t.Fatalf("Rotate = %v, %v", next, err)
			}
			for _, overlap := range []time.Duration{-1, admin.MaxOverlap + 1} {
				if _, err := a.Rotate(ctx, "home", overlap); err == nil {
					t.Errorf("an overlap of %v is taken", overlap)
				}
			}
			hosts, err := a.List(ctx)
			if err != nil || len(hosts) != 2 {
				t.Fatalf("List = %+v, %v", hosts, err)
			}
			for _, h := range hosts {
				if h.Name == "home" && (h.ID != line.HostID || h.OldTokenUntil.IsZero() || h.Created.IsZero()) {
					t.Errorf("home is listed as %+v", h)
				}
			}
			if err := a.Remove(ctx, "python"); err != nil {
				t.Error(err)
			}
			if err := a.Remove(ctx, "python"); !errors.Is(err, store.ErrNoHost) {
				t.Errorf("Remove again = %v, want ErrNoHost", err)
			}
			if _, err := a.Rotate(ctx, "python", 0); !errors.Is(err, store.ErrNoHost) {
				t.Errorf("Rotate of nobody = %v, want ErrNoHost", err)
			}
		})
	}
}

// TestAddedHostRegistersAtOnce and what it does afterwards is seen.
func TestAddedHostRegistersAtOnce(t *testing.T) {
	r := run(t, filepath.Join(t.TempDir(), "broker.db"))
	a := open(t, r.state)
	line, err := a.Add(t.Context(), "home", wire.ID{})
	if err != nil {
		t.Fatal(err)
	}
	_, states := r.host(line)
	await(t, states, "connected", connected)
	hosts, err := a.List(t.Context())
	if err != nil || len(hosts) != 1 || hosts[0].Sessions != 1 {
		t.Errorf("List = %+v, %v; want one session", hosts, err)
	}
}

// TestRemovedHostIsGoneAtOnce: its session, its devices and their streams end,
// and it does not come back.
func TestRemovedHostIsGoneAtOnce(t *testing.T) {
	r := run(t, filepath.Join(t.TempDir(), "broker.db"))
	a := open(t, r.state)
	line, err := a.Add(t.Context(), "home", wire.ID{})
	if err != nil {
		t.Fatal(err)
	}
	c, states := r.host(line)
	await(t, states, "connected", connected)
	token := wire.NewToken()
	err = c.Publish(t.Context(), connector.Publication{Kind: wire.KindRoute, ID: "d", Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	d, err := reach.NewDialer(reach.DialerConfig{URL: r.url.String(), HostID: line.HostID, Kind: wire.KindRoute, Token: token, TLS: r.ca.Client()})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	conn, err := d.DialContext(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Remove(t.Context(), "home"); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("Read on its device's stream = %v, want an abort", err)
	}
	await(t, states, "refused", endedWith(wire.CodeUnauthorized))
	if _, err := d.DialContext(t.Context()); wire.CodeOf(err) != wire.CodeUnauthorized {
		t.Errorf("a new dial = %v, want unauthorized", err)
	}
}

// TestRotationOnARunningBroker: within the overlap the session goes on, and
// ends when the old token does.
func TestRotationOnARunningBroker(t *testing.T) {
	r := run(t, filepath.Join(t.TempDir(), "broker.db"))
	a := open(t, r.state)
	line, err := a.Add(t.Context(), "home", wire.ID{})
	if err != nil {
		t.Fatal(err)
	}
	_, states := r.host(line)
	await(t, states, "connected", connected)
	second, err := a.Rotate(t.Context(), "home", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if r.broker.Host(line.HostID).Sessions != 1 {
		t.Error("the session ended within the overlap")
	}
	await(t, states, "ended with the overlap", endedWith(wire.CodeUnauthorized))
	_, states = r.host(second)
	await(t, states, "connected with the new token", connected)
	if _, err := a.Rotate(t.Context(), "home", 0); err != nil {
		t.Fatal(err)
	}
	await(t, states, "ended at once", endedWith(wire.CodeUnauthorized))
}

func TestConcurrentAdds(t *testing.T) {
	for _, mode := range []string{"running", "stopped"} {
		t.Run(mode, func(t *testing.T) {
			state := filepath.Join(t.TempDir(), "broker.db")
			if mode == "running" {
				run(t, state)
			}
			a := open(t, state)
			var all sync.WaitGroup
			var mu sync.Mutex
			same := 0
			for i := range 20 {
				all.Go(func() {
					if _, err := a.Add(t.Context(), fmt.Sprint("host", i), wire.ID{}); err != nil {
						t.Error(err)
					}
				})
				all.Go(func() {
					_, err := a.Add(t.Context(), "same", wire.ID{})
					mu.Lock()
					defer mu.Unlock()
					if err == nil {
						same++
					} else if !errors.Is(err, store.ErrHostName) {
						t.Error(err)
					}
				})
			}
			all.Wait()
			hosts, err := a.List(t.Context())
			if err != nil || len(hosts) != 21 || same != 1 {
				t.Errorf("%d hosts, %v, and %d of one name were added; want 21 and 1", len(hosts), err, same)
			}
		})
	}
}

// TestTokensStayHere: neither the socket nor the file ever holds one.
func TestTokensStayHere(t *testing.T) {
	state := filepath.Join(t.TempDir(), "broker.db")
	r := run(t, state)
	a := open(t, state)
	line, err := a.Add(t.Context(), "home", wire.ID{})
	if err != nil {
		t.Fatal(err)
	}
	next, err := a.Rotate(t.Context(), "home", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	r.stop()
	file, err := os.ReadFile(state)
	if err != nil {
		t.Fatal(err)
	}
	for _, token := range []string{line.Token, next.Token} {
		if strings.Contains(string(file), token) {
			t.Error("the file holds a token")
		}
	}
	if !strings.Contains(string(file), wire.DigestOf(next.Token).String()) {
		t.Error("the search looked at another file")
	}
}

// TestStoppedAndStarted: an Admin finds whichever is there, also over the
// socket that a killed broker left behind.
func TestStoppedAndStarted(t *testing.T) {
	state := filepath.Join(t.TempDir(), "broker.db")
	addr := &net.UnixAddr{Name: state + ".sock", Net: "unix"}
	left, err := net.ListenUnix("unix", addr)
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	_ = os.Chmod(addr.Name, 0o600)
	_ = left.Close()
	a := open(t, state)
	if a.Running() {
		t.Fatal("the socket of a dead broker passes for a running one")
	}
	if _, err := a.Add(t.Context(), "home", wire.ID{}); err != nil {
		t.Fatal(err)
	}
	_ = a.Close()
	r := run(t, state)
	b := open(t, state)
	if !b.Running() {
		t.Error("a running broker was not found")
	}
	if hosts, err := b.List(t.Context()); err != nil || len(hosts) != 1 {
		t.Errorf("List = %+v, %v; want what was added before", hosts, err)
	}
	info, err := os.Stat(addr.Name)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the socket is %v, %v; want mode 0600", info, err)
	}
	if err := admin.Serve(t.Context(), state, r.broker, r.store); err == nil {
		t.Error("a second Serve took the socket over")
	}
	r.stop()
	if _, err := os.Stat(addr.Name); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there after the broker: %v", err)
	}
	if open(t, state).Running() {
		t.Error("a stopped broker runs")
	}
}

// TestOpenWaitsForAStartingBroker: it holds the file, and does not listen yet.
func TestOpenWaitsForAStartingBroker(t *testing.T) {
	state := filepath.Join(t.TempDir(), "broker.db")
	s, err := store.Open(state, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	opened := make(chan *admin.Admin)
	go func() {
		a, err := admin.Open(state)
		if err != nil {
			t.Error(err)
		}
		opened <- a
	}()
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error)
	go func() { served <- admin.Serve(ctx, state, nil, s) }()
	if a := <-opened; a == nil || !a.Running() {
		t.Error("the broker that was starting was not found")
	} else if _, err := a.List(t.Context()); err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestLongPath(t *testing.T) {
	state := filepath.Join(t.TempDir(), strings.Repeat("long/", 30), "broker.db")
	run(t, state)
	a := open(t, state)
	if _, err := a.Add(t.Context(), "home", wire.ID{}); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(state + ".sock"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a socket of a path that long: %v", err)
	}
}

// TestStateThroughALink: broker and operator may name the folder differently.
func TestStateThroughALink(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	run(t, filepath.Join(dir, "broker.db"))
	if !open(t, filepath.Join(link, "broker.db")).Running() {
		t.Error("the file of a running broker was opened")
	}
}

func TestBrokerThatIsGoneIsAnError(t *testing.T) {
	state := filepath.Join(t.TempDir(), "broker.db")
	r := run(t, state)
	a := open(t, state)
	r.stop()
	if _, err := a.Add(t.Context(), "home", wire.ID{}); err == nil {
		t.Error("Add works without a broker")
	}
}
