package host_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/internal/host/operator"
	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/profile"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait of these tests; none takes it when all is well.
const patience = 20 * time.Second

// until waits for something that another goroutine or process brings about.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	late := time.After(patience)
	for !is() {
		select {
		case <-tick.C:
		case <-late:
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *logBuffer) logger() *slog.Logger {
	return slog.New(slog.NewJSONHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// A testBroker is a broker on loopback that can be stopped, started again at
// the same place, and robbed of its disk.
type testBroker struct {
	t     *testing.T
	ca    *lab.CA
	dir   string
	disks int
	line  wire.HostLine
	addr  string
	store *store.Store
	stop  func()
}

func newBroker(t *testing.T, ca *lab.CA) *testBroker {
	t.Helper()
	b := &testBroker{t: t, ca: ca, dir: t.TempDir(), addr: "127.0.0.1:0", line: wire.HostLine{HostID: wire.NewID(), Token: wire.NewToken()}}
	b.start()
	t.Cleanup(func() { b.stop() })
	return b
}

// start runs the broker with the disk it has.
func (b *testBroker) start() {
	b.t.Helper()
	var err error
	if b.store, err = store.Open(filepath.Join(b.dir, fmt.Sprintf("broker%d.db", b.disks)), nil); err != nil {
		b.t.Fatal(err)
	}
	if _, known, _ := b.store.Host(b.line.HostID); !known {
		if err := b.store.AddHost("home", b.line.HostID, wire.DigestOf(b.line.Token)); err != nil {
			b.t.Fatal(err)
		}
	}
	cert, err := b.ca.Server("localhost")
	if err != nil {
		b.t.Fatal(err)
	}
	srv, err := broker.New(broker.Config{Store: b.store, TLS: cert, Limits: broker.Limits{Drain: 100 * time.Millisecond}})
	if err != nil {
		b.t.Fatal(err)
	}
	ln, err := net.Listen("tcp", b.addr)
	if err != nil {
		b.t.Fatal(err)
	}
	b.addr = ln.Addr().String()
	_, port, _ := net.SplitHostPort(b.addr)
	if b.line.URL, err = wire.ParseBrokerURL("wss://localhost:"+port, false); err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ctx, ln) }()
	db := b.store
	b.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			b.t.Errorf("broker: %v", err)
		}
		_ = db.Close()
	})
}

// loseDisk stops the broker; the next start begins with an empty disk.
func (b *testBroker) loseDisk() { b.stop(); b.disks++ }

// has says whether the broker holds a live credential of this kind and id.
func (b *testBroker) has(kind wire.Kind, id string) bool {
	creds, err := b.store.Credentials(b.line.HostID)
	if err != nil {
		b.t.Fatal(err)
	}
	for _, c := range creds {
		if c.Kind == kind && c.ID == id && !c.Used {
			return true
		}
	}
	return false
}

// A site is a state folder with a host that comes and goes, and the CA of its
// brokers.
type site struct {
	t    *testing.T
	ca   *lab.CA
	dir  string
	log  *logBuffer
	cfg  host.Config
	host *host.Host
	op   *operator.Operator
	stop func() error
}

func newSite(t *testing.T) *site {
	t.Helper()
	ca, err := lab.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	s := &site{t: t, ca: ca, dir: t.TempDir(), log: &logBuffer{}}
	s.cfg = host.Config{Dir: s.dir, Listen: []string{"127.0.0.1:0"}, Roots: ca.Client().RootCAs, Version: "test", Log: s.log.logger()}
	return s
}

func (s *site) enroll(b *testBroker) {
	s.t.Helper()
	e, err := host.OpenEnrolled(s.dir)
	if err != nil {
		s.t.Fatal(err)
	}
	if _, err := e.Add(b.line); err != nil {
		s.t.Fatal(err)
	}
}

// start runs the host until the test ends or stop is called.
func (s *site) start() {
	s.t.Helper()
	h, err := host.New(s.cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- h.Run(ctx) }()
	s.host = h
	s.stop = sync.OnceValue(func() error { cancel(); return <-done })
	stop := s.stop
	s.t.Cleanup(func() {
		if err := stop(); err != nil {
			s.t.Errorf("the host ended with %v", err)
		}
	})
	if s.op, err = operator.New(s.t.Context(), s.dir); err != nil {
		s.t.Fatal(err)
	}
}

// connected waits until the host is registered at n brokers.
func (s *site) connected(n int) {
	s.t.Helper()
	until(s.t, fmt.Sprintf("registration at %d brokers", n), func() bool {
		st, err := s.op.Status(s.t.Context())
		if err != nil {
			s.t.Fatal(err)
		}
		up := 0
		for _, b := range st.Brokers {
			if b.State == "connected" {
				up++
			}
		}
		return up == n
	})
}

func (s *site) pair(req host.PairRequest) *host.Invite {
	s.t.Helper()
	inv, err := s.op.Pair(s.t.Context(), req)
	if err != nil {
		s.t.Fatal(err)
	}
	return inv
}

// A device is paired with the host of a site.
type device struct {
	s       *site
	profile *profile.Profile
	path    reach.Path
}

var laptop = reach.Device{Name: "laptop", Platform: "test", FormFactor: "desktop", Surface: "desktop"}

func (s *site) config() reach.Config { return reach.Config{Outer: s.ca.Client(), Agent: "test/1"} }

// join pairs a fresh device with an invite, over one kind of path or over any.
func (s *site) join(inv *host.Invite, only endpoints.Role) *device {
	s.t.Helper()
	d, err := s.tryJoin(inv, only)
	if err != nil {
		s.t.Fatal(err)
	}
	return d
}

func (s *site) tryJoin(inv *host.Invite, only endpoints.Role) (*device, error) {
	s.t.Helper()
	st, err := profile.Open(s.t.TempDir())
	if err != nil {
		s.t.Fatal(err)
	}
	defer func() { _ = st.Close() }()
	cfg := s.config()
	cfg.Only = only
	j, err := reach.Join(s.t.Context(), st, inv.Text, reach.JoinOptions{Device: laptop, Client: cfg})
	if err != nil {
		return nil, err
	}
	return &device{s: s, profile: j.Profile, path: j.Path}, nil
}

// client reaches the host over one kind of path, or over any.
func (d *device) client(only endpoints.Role) *reach.Client {
	d.s.t.Helper()
	cfg := d.s.config()
	cfg.Profile, cfg.Only = d.profile, only
	c, err := reach.New(cfg)
	if err != nil {
		d.s.t.Fatal(err)
	}
	d.s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// signIn proves the session on a client of its own: the whole way, once.
func (d *device) signIn(only endpoints.Role) error {
	d.s.t.Helper()
	ctx, cancel := context.WithTimeout(d.s.t.Context(), patience)
	defer cancel()
	c := d.client(only)
	defer func() { _ = c.Close() }()
	_, _, err := reach.SignIn(ctx, c, d.profile, laptop)
	return err
}

// id is the device's id at the host: the only one it has.
func (s *site) id() string {
	s.t.Helper()
	devices, err := s.op.Devices(s.t.Context())
	if err != nil || len(devices) != 1 {
		s.t.Fatalf("devices = %+v, %v; want one", devices, err)
	}
	return devices[0].ID
}

func get(ctx context.Context, c *reach.Client, path string) (int, string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, reach.Origin+path, nil)
	if err != nil {
		return 0, "", err
	}
	res, err := c.HTTPClient().Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	return res.StatusCode, string(body), err
}

// files gives the names and contents of all plain files below a folder.
func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		found[path] = string(data)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}
