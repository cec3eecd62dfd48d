package host_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/internal/host/operator"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/wire"
	"github.com/hermes-reach/hermes-reach/securelink"
)

const throughBroker = endpoints.RoleOutboundBroker

// TestComesBackThroughTheBroker: a paired device needs no new pairing after a
// restart of its host or of the broker, nor after the broker lost its disk.
func TestComesBackThroughTheBroker(t *testing.T) {
	s := newSite(t)
	b := newBroker(t, s.ca)
	s.enroll(b)
	s.start()
	d := s.join(s.pair(host.PairRequest{}), throughBroker) // without waiting for the broker: Pair does
	if d.path.Role != throughBroker {
		t.Fatalf("paired over %s", d.path)
	}
	restart := func() {
		if err := s.stop(); err != nil {
			t.Fatal(err)
		}
		s.start()
	}
	for _, step := range []struct {
		name string
		do   func()
	}{
		{"at once", func() {}},
		{"after the host's restart", restart},
		{"after the broker's restart", func() { b.stop(); s.connected(0); b.start() }},
		{"after the broker lost its disk", func() { b.loseDisk(); s.connected(0); b.start() }},
		{"after both restarted and the broker lost its disk", func() { b.loseDisk(); b.start(); restart() }},
	} {
		step.do()
		s.connected(1)
		until(t, "the route at the broker "+step.name, func() bool { return b.has(wire.KindRoute, d.route()) })
		if err := d.signIn(throughBroker); err != nil {
			t.Errorf("%s: %v", step.name, err)
		}
	}
}

// route is the credential id of the device's session.
func (d *device) route() string {
	sum := wire.DigestOf(d.profile.Session.Reveal())
	var id wire.ID
	copy(id[:], sum[:])
	return id.String()
}

// TestNewBrokerKnowsTheDevices: a broker that is enrolled later is told the
// routes of the devices that are paired already.
func TestNewBrokerKnowsTheDevices(t *testing.T) {
	s := newSite(t)
	s.start()
	d := s.join(s.pair(host.PairRequest{}), "")
	b := newBroker(t, s.ca)
	s.enroll(b)
	if err := s.op.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.connected(1)
	until(t, "the route of the device at the new broker", func() bool { return b.has(wire.KindRoute, d.route()) })
	if _, err := s.op.Revoke(t.Context(), s.id()); err != nil {
		t.Fatal(err)
	}
	until(t, "its withdrawal", func() bool { return !b.has(wire.KindRoute, d.route()) })
}

// TestWithdrawnWhenTheBrokerIsBack: what a broker could not be told while it
// was away, it is told as soon as it is back, also by a host that restarted.
func TestWithdrawnWhenTheBrokerIsBack(t *testing.T) {
	s := newSite(t)
	b := newBroker(t, s.ca)
	s.enroll(b)
	s.start()
	d := s.join(s.pair(host.PairRequest{}), throughBroker)
	if !b.has(wire.KindRoute, d.route()) {
		t.Fatal("the broker has no route of the device")
	}
	b.stop()
	if _, err := s.op.Revoke(t.Context(), s.id()); err != nil {
		t.Fatal(err)
	}
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	b.start()
	s.start()
	until(t, "the withdrawal", func() bool { return !b.has(wire.KindRoute, d.route()) })
}

// TestRevokeEndsALiveSocket: within two seconds, whatever the broker does.
func TestRevokeEndsALiveSocket(t *testing.T) {
	for name, role := range map[string]endpoints.Role{"direct": endpoints.RolePluginProxy, "through the broker": throughBroker, "with the broker down": endpoints.RolePluginProxy} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			b := newBroker(t, s.ca)
			s.enroll(b)
			s.start()
			s.connected(1)
			d := s.join(s.pair(host.PairRequest{}), role)
			c := d.client(role)
			ws := d.relay(c)
			if name == "with the broker down" {
				b.stop()
			}
			began := time.Now()
			if _, err := s.op.Revoke(t.Context(), s.id()); err != nil {
				t.Fatal(err)
			}
			_, _, err := ws.Read(t.Context())
			if took := time.Since(began); err == nil || took > 2*time.Second {
				t.Errorf("the socket ended after %v with %v, want within 2 s", took, err)
			}
			if err := d.signIn(role); err == nil {
				t.Error("the revoked device came back")
			}
		})
	}
}

// relay opens the relay socket and proves the session on it.
func (d *device) relay(c *reach.Client) *websocket.Conn {
	t := d.s.t
	t.Helper()
	ws, _, err := websocket.Dial(t.Context(), reach.Origin+"/relay/session", &websocket.DialOptions{HTTPClient: c.HTTPClient()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ws.CloseNow() })
	auth := `{"channel":"system","type":"auth","id":"1","payload":{"session_token":"` + d.profile.Session.Reveal() +
		`","device_id":"` + d.profile.DeviceID + `"}}`
	if err := ws.Write(t.Context(), websocket.MessageText, []byte(auth)); err != nil {
		t.Fatal(err)
	}
	if _, got, err := ws.Read(t.Context()); err != nil || !strings.Contains(string(got), "auth.ok") {
		t.Fatalf("signed in with %v", err)
	}
	return ws
}

// TestStopLeavesNothing: goleak looks for goroutines when all tests are over.
func TestStopLeavesNothing(t *testing.T) {
	s := newSite(t)
	b := newBroker(t, s.ca)
	s.enroll(b)
	s.start()
	s.connected(1)
	addr := s.host.Addrs()[0].String()
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(host.ControlPath(s.dir)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the control socket is still there: %v", err)
	}
	if c, err := net.Dial("tcp", addr); err == nil {
		_ = c.Close()
		t.Error("the port is still open")
	}
	if operator.Running(t.Context(), s.dir) {
		t.Error("an operator is still answered")
	}
	s.start() // and all of it is free again
}

// TestRequestsEndInOrder: a stop lets what is under way end, on every path.
func TestRequestsEndInOrder(t *testing.T) {
	for _, role := range []endpoints.Role{endpoints.RolePluginProxy, throughBroker} {
		t.Run(string(role), func(t *testing.T) {
			asked, answer := make(chan struct{}), make(chan struct{})
			api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				switch r.URL.Path {
				case "/health":
				case "/v1/models":
					w.WriteHeader(http.StatusUnauthorized)
				default:
					_, _ = io.WriteString(w, "begun ")
					_ = http.NewResponseController(w).Flush()
					close(asked)
					<-answer
					_, _ = io.WriteString(w, "and ended")
				}
			}))
			defer api.Close()
			s := newSite(t)
			b := newBroker(t, s.ca)
			s.enroll(b)
			s.cfg.Upstreams = securelink.Upstreams{API: api.URL}
			s.start()
			c := s.join(s.pair(host.PairRequest{}), role).client(role)
			type result struct {
				body string
				err  error
			}
			got := make(chan result, 1)
			go func() {
				_, body, err := get(t.Context(), c, "/api/slow")
				got <- result{body, err}
			}()
			<-asked
			stopped := make(chan error, 1)
			go func() { stopped <- s.stop() }()
			until(t, "the host begins to stop", func() bool { _, err := s.op.Devices(t.Context()); return err != nil })
			if _, err := host.New(s.cfg); err == nil || !strings.Contains(err.Error(), "still stopping") {
				t.Errorf("a host that starts while the old one drains: %v, want a refusal", err)
			}
			close(answer)
			if r := <-got; r.err != nil || r.body != "begun and ended" {
				t.Errorf("the request under way got %q, %v", r.body, r.err)
			}
			if err := <-stopped; err != nil {
				t.Error(err)
			}
		})
	}
}

// TestSecondProcessChangesNothing: it is refused before it writes anything.
func TestSecondProcessChangesNothing(t *testing.T) {
	s := newSite(t)
	s.start()
	before := files(t, s.dir)
	cfg := s.cfg
	cfg.QRSecret, cfg.Advertise = filepath.Join(s.dir, "other-secret"), []string{"other.example.com"}
	_, err := host.New(cfg)
	if err == nil || !strings.Contains(err.Error(), s.dir) || !strings.Contains(err.Error(), "runs already") {
		t.Errorf("a second host on one state folder: %v, want a refusal that names the folder", err)
	}
	if diff := cmp.Diff(before, files(t, s.dir)); diff != "" {
		t.Errorf("it changed the state: %s", diff)
	}
	if _, err := s.op.Status(t.Context()); err != nil {
		t.Errorf("the first host after that: %v", err)
	}
}

// TestPortTaken: the error names the address and what to do.
func TestPortTaken(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	s := newSite(t)
	s.cfg.Listen = []string{ln.Addr().String()}
	_, err = host.New(s.cfg)
	if err == nil || !strings.Contains(err.Error(), ln.Addr().String()) || !strings.Contains(err.Error(), "--listen") {
		t.Errorf("a taken port: %v", err)
	}
	if _, bad := errors.AsType[*host.ConfigError](err); bad {
		t.Error("a taken port is called wrong usage")
	}
	s.cfg.Listen = []string{"127.0.0.1:0"}
	s.start() // the failed start left nothing locked
}

// TestWhatCannotBeMeant is a ConfigError, and leaves no state behind.
func TestWhatCannotBeMeant(t *testing.T) {
	for name, adjust := range map[string]func(*host.Config){
		"no port":         func(c *host.Config) { c.Listen = []string{"127.0.0.1"} },
		"no such service": func(c *host.Config) { c.Listen = []string{"127.0.0.1:not-a-port"} },
		"advertised URL":  func(c *host.Config) { c.Advertise = []string{"https://home.example.com:9443"} },
		"upstream":        func(c *host.Config) { c.Upstreams.API = "http://192.0.2.1:8642" },
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			adjust(&s.cfg)
			_, err := host.New(s.cfg)
			if _, bad := errors.AsType[*host.ConfigError](err); !bad {
				t.Errorf("New = %v, want a ConfigError", err)
			}
			s.cfg.Listen, s.cfg.Advertise, s.cfg.Upstreams = []string{"127.0.0.1:0"}, nil, securelink.Upstreams{}
			s.start()
		})
	}
}

// TestDamagedListAtTheStart: Run says so, and does not hang.
func TestDamagedListAtTheStart(t *testing.T) {
	s := newSite(t)
	h, err := host.New(s.cfg)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.dir, "brokers.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := h.Run(ctx); err == nil || !strings.Contains(err.Error(), "brokers.json is damaged") {
		t.Errorf("Run = %v, want what is wrong with the list", err)
	}
}

// TestStopBeforeTheStart: a SIGTERM that comes early stops as well as one that
// comes late, and nothing is announced.
func TestStopBeforeTheStart(t *testing.T) {
	s := newSite(t)
	s.cfg.Ready = func(host.Status) { t.Error("announced as ready") }
	h, err := host.New(s.cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.Run(ctx); err != nil {
		t.Errorf("Run = %v", err)
	}
}

// TestListenerDies: the host ends and says which listener it was.
func TestListenerDies(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := newSite(t)
	s.cfg.Listen, s.cfg.Listeners = []string{}, []net.Listener{ln}
	h, err := host.New(s.cfg)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- h.Run(t.Context()) }()
	if _, err := operator.New(t.Context(), s.dir); err != nil {
		t.Fatal(err)
	}
	_ = ln.Close()
	if err := <-done; err == nil || !strings.Contains(err.Error(), ln.Addr().String()) {
		t.Errorf("Run = %v, want an error that names %s", err, ln.Addr())
	}
}

// TestReloadFollowsTheList: brokers come and go while the host runs.
func TestReloadFollowsTheList(t *testing.T) {
	s := newSite(t)
	s.start()
	one, two := newBroker(t, s.ca), newBroker(t, s.ca)
	for n, b := range []*testBroker{one, two} {
		s.enroll(b)
		if err := s.op.Reload(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.connected(n + 1)
	}
	e, err := host.OpenEnrolled(s.dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Remove(one.line.URL.HostPort()); err != nil {
		t.Fatal(err)
	}
	if err := s.op.Reload(t.Context()); err != nil {
		t.Fatal(err)
	}
	st, err := s.op.Status(t.Context())
	if err != nil || len(st.Brokers) != 1 || st.Brokers[0].URL != two.line.URL.V1() {
		t.Errorf("brokers after one was left: %+v, %v", st.Brokers, err)
	}
	if st.Pin != s.host.Identity().Pin().String() || len(st.Listeners) != 1 {
		t.Errorf("status = %+v", st)
	}
}

// TestIdentityStays over restarts, with every name it ever had.
func TestIdentityStays(t *testing.T) {
	s := newSite(t)
	s.cfg.Advertise = []string{"one.example.com"}
	s.start()
	pin := s.host.Identity().Pin()
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	s.cfg.Advertise = []string{"two.example.com:443"}
	s.start()
	if got := s.host.Identity().Pin(); !got.Equal(pin) {
		t.Error("a restart changed the pin")
	}
	id, err := pins.Load(host.IdentityDir(s.dir))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"one.example.com", "two.example.com", "127.0.0.1"} {
		if !id.Covers(name) {
			t.Errorf("the identity does not cover %s: %v", name, id.Authorities())
		}
	}
}
