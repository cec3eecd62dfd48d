//go:build interop && linux

package hermesagent

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/profile"
	"github.com/hermes-reach/hermes-reach/reach/wire"
	"github.com/hermes-reach/hermes-reach/securelink"
)

// site is a host in front of the agent, a broker, and a device that has paired:
// the real parts, in one process, over TCP.
type site struct {
	link    *securelink.Server
	profile *profile.Profile
	ca      *lab.CA // of the broker's certificate
	secrets []string
}

// running calls f now, and waits at the end of the test for it to return after
// stop. Its error fails the test.
func running(t *testing.T, what string, f func() error, stop func()) {
	done := make(chan error, 1)
	go func() { done <- f() }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Errorf("%s: %v", what, err)
		}
	})
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// newSite puts a host in front of the upstreams; log is every part's.
func newSite(t *testing.T, u securelink.Upstreams, log *slog.Logger) *site {
	t.Helper()
	id, err := pins.New([]string{"127.0.0.1"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	link, err := securelink.New(securelink.Config{Identity: id, Upstreams: u, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	direct := listen(t)
	running(t, "Secure Link, direct", func() error { return link.Serve(direct) }, func() { link.Close() })

	s := &site{link: link}
	host, url := s.broker(t, log)
	token := wire.NewToken()
	s.secrets = append(s.secrets, token)
	running(t, "Secure Link, behind the broker", func() error { return link.Serve(host) }, func() { link.Close() })
	publish(t, host, connector.Publication{Kind: wire.KindRoute, ID: "lab", Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Hour)})

	proxy := &endpoints.Proxy{URL: "https://" + direct.Addr().String(), PinSHA256: id.Pin().String(),
		Surfaces: []endpoints.Surface{endpoints.SurfaceRelay, endpoints.SurfaceAPI, endpoints.SurfaceDashboard}}
	s.profile = &profile.Profile{
		Name: "lab", Pin: id.Pin(), DeviceID: wire.NewID().String(),
		Candidates: []endpoints.Candidate{
			{Role: endpoints.RolePluginProxy, Priority: 1, Proxy: proxy},
			{Role: endpoints.RoleOutboundBroker, Priority: 2, Experimental: true, Proxy: proxy,
				Broker: &endpoints.Broker{ProtocolVersion: 1, URL: url, HostID: host.HostID().String()}},
		},
		Routes: []profile.Route{{BrokerURL: url, HostID: host.HostID().String(), Kind: endpoints.KindRoute, Token: profile.Secret(token)}},
	}
	return s
}

// broker runs a broker and the host's connector to it.
func (s *site) broker(t *testing.T, log *slog.Logger) (host *connector.Connector, url string) {
	t.Helper()
	ca, err := lab.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	s.ca = ca
	certificate, err := ca.Server("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	state, err := store.Open(filepath.Join(t.TempDir(), "broker.db"), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { state.Close() })
	hostID, token := wire.NewID(), wire.NewToken()
	s.secrets = append(s.secrets, token)
	if err := state.AddHost("home", hostID, wire.DigestOf(token)); err != nil {
		t.Fatal(err)
	}
	b, err := broker.New(broker.Config{Store: state, TLS: certificate, Limits: broker.Limits{Drain: time.Second}, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	ln := listen(t)
	brokerLife, stopBroker := context.WithCancel(context.Background())
	running(t, "broker", func() error { return b.Serve(brokerLife, ln) }, stopBroker)

	url = "wss://" + ln.Addr().String() + "/v1/connect"
	at, err := wire.ParseBrokerURL(url, false)
	if err != nil {
		t.Fatal(err)
	}
	host, err = connector.New(connector.Config{URL: at, HostID: hostID, Token: token, TLS: ca.Client(),
		Instance: wire.NewID(), Epoch: 1, Agent: "hermes-reach/test", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	hostLife, stopHost := context.WithCancel(context.Background())
	running(t, "connector", func() error {
		if err := host.Run(hostLife); hostLife.Err() == nil {
			return err
		}
		return nil
	}, stopHost)
	return host, url
}

// publish waits until the broker knows the credential.
func publish(t *testing.T, host *connector.Connector, pub connector.Publication) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	pace := time.NewTicker(20 * time.Millisecond)
	defer pace.Stop()
	for {
		err := host.Publish(ctx, pub)
		if err == nil {
			return
		}
		if !errors.Is(err, connector.ErrOffline) || ctx.Err() != nil {
			t.Fatal(err)
		}
		<-pace.C
	}
}

// device makes a client that knows one way only.
func (s *site) device(t *testing.T, only endpoints.Role, log *slog.Logger) *reach.Client {
	t.Helper()
	c, err := reach.New(reach.Config{Profile: s.profile, Outer: s.ca.Client(), Only: only, Agent: "hermes-reach/test", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// kept collects a log.
type kept struct {
	mu  sync.Mutex
	all strings.Builder
}

func (k *kept) Write(b []byte) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.all.Write(b)
}

func (k *kept) String() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.all.String()
}

// throughThePath asks of the agent, through Secure Link, what TestRealAgent asks
// of it directly: once over TCP, once over a broker.
func throughThePath(t *testing.T, a *Agent) {
	tap, err := StartTap(t.Context(), a.API.Host)
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close()
	out := new(kept)
	log := slog.New(slog.NewJSONHandler(out, &slog.HandlerOptions{Level: slog.LevelDebug}))
	t.Run("ways", func(t *testing.T) { // has ended before the log is read
		s := newSite(t, securelink.Upstreams{API: tap.URL().String(), Dashboard: a.Dashboard.String()}, log)
		for name, role := range map[string]endpoints.Role{"direct": endpoints.RolePluginProxy, "broker": endpoints.RoleOutboundBroker} {
			t.Run(name, func(t *testing.T) {
				c := s.device(t, role, log)
				t.Run("API gate", func(t *testing.T) { pathGate(t, a, c, role) })
				t.Run("chat completion", func(t *testing.T) { pathChat(t, a, c, tap) })
				t.Run("run", func(t *testing.T) { pathRun(t, a, c, tap) })
				t.Run("Dashboard", func(t *testing.T) { pathDashboard(t, a, c) })
			})
		}
		for _, secret := range append(s.secrets, a.Secrets()...) {
			if strings.Contains(out.String(), secret) {
				t.Errorf("the log holds a secret, %.4s…", secret)
			}
		}
	})
	if n := strings.Count(out.String(), "\n"); n == 0 {
		t.Error("nothing was logged at all: looking for secrets in it shows nothing")
	}
	t.Run("open Dashboard stays closed", func(t *testing.T) {
		s := newSite(t, securelink.Upstreams{Dashboard: a.OpenDashboard.String()}, log)
		c := s.device(t, endpoints.RolePluginProxy, log)
		status, _, body := call(t, outside(c, nil), http.MethodGet, "https://reach/dashboard/", "", "")
		if status != http.StatusServiceUnavailable || !strings.Contains(body, "dashboard_unprotected") {
			t.Errorf("GET /dashboard/: %d %.300s, want 503 dashboard_unprotected", status, body)
		}
		status, _, body = call(t, outside(c, nil), http.MethodGet, "https://reach/api/health", "", "")
		if status != http.StatusServiceUnavailable || !strings.Contains(body, "api_unavailable") {
			t.Errorf("GET /api/health without an API server: %d %.300s, want 503 api_unavailable", status, body)
		}
	})
}

// outside is a client of the device's that follows no redirect.
func outside(c *reach.Client, jar http.CookieJar) *http.Client {
	return &http.Client{Transport: c, Jar: jar, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
}

func pathGate(t *testing.T, a *Agent, c *reach.Client, role endpoints.Role) {
	for _, tt := range []struct {
		path, bearer string
		want         int
		has          string
	}{
		{"health", "", 200, `"version": "` + Version() + `"`},
		{"v1/models", "", 401, `"invalid_api_key"`},
		{"v1/models", a.Password, 401, `"invalid_api_key"`},
		{"v1/models", a.Key, 200, `"hermes-agent"`},
	} {
		status, _, body := call(t, outside(c, nil), http.MethodGet, "https://reach/api/"+tt.path, tt.bearer, "")
		if status != tt.want || !strings.Contains(body, tt.has) {
			t.Errorf("/api/%s: %d %.200s, want %d with %s", tt.path, status, body, tt.want, tt.has)
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://reach/api/health", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if path, ok := reach.PathOf(resp); !ok || path.Role != role || (path.Broker != "") != (role == endpoints.RoleOutboundBroker) {
		t.Errorf("the answer came by %v, want %s", path, role)
	}
}

func pathChat(t *testing.T, a *Agent, c *reach.Client, tap *Tap) {
	seen := stream(t, outside(c, nil), http.MethodPost, &url.URL{Scheme: "https", Host: "reach", Path: "/api/v1/chat/completions"}, a.Key,
		`{"model":"hermes-agent","stream":true,"messages":[{"role":"user","content":"Say your tokens."}]}`)
	judge(t, a, tap, "/v1/chat/completions", seen)
}

func pathRun(t *testing.T, a *Agent, c *reach.Client, tap *Tap) {
	status, _, body := call(t, outside(c, nil), http.MethodPost, "https://reach/api/v1/runs", a.Key, `{"input":"Say your tokens."}`)
	var run struct {
		ID string `json:"run_id"`
	}
	if err := json.Unmarshal([]byte(body), &run); err != nil || status != http.StatusAccepted {
		t.Fatalf("start a run: %d %.200s", status, body)
	}
	path := "/v1/runs/" + run.ID + "/events"
	seen := stream(t, outside(c, nil), http.MethodGet, &url.URL{Scheme: "https", Host: "reach", Path: "/api" + path}, a.Key, "")
	judge(t, a, tap, path, seen)
}

func pathDashboard(t *testing.T, a *Agent, c *reach.Client) {
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	const base = "https://reach/dashboard/"
	client := outside(c, jar)
	status, header, _ := call(t, client, http.MethodGet, base, "", "")
	if got := header.Get("Location"); status != http.StatusFound || !strings.HasPrefix(got, "/dashboard/login?") {
		t.Errorf("the first page: %d to %q, want 302 to /dashboard/login", status, got)
	}
	for _, step := range []struct {
		method, path, body string
		want               int
		has                string
	}{
		{"GET", "login", "", 200, "<html"},
		{"GET", "api/auth/me", "", 401, "unauthenticated"},
		{"POST", "auth/password-login", login(a, a.Key), 401, "Invalid credentials"},
		{"POST", "auth/password-login", login(a, a.Password), 200, `"ok":true`},
		{"GET", "api/auth/me", "", 200, `"user_id":"` + User + `"`},
		{"GET", "", "", 200, "<html"},
	} {
		status, _, body := call(t, client, step.method, base+step.path, "", step.body)
		if status != step.want || !strings.Contains(body, step.has) {
			t.Errorf("%s %s: %d %.300s, want %d with %s", step.method, step.path, status, body, step.want, step.has)
		}
	}
	for _, cookie := range jar.Cookies(&url.URL{Scheme: "https", Host: "reach", Path: "/api/health"}) {
		t.Errorf("the Dashboard's cookie %s would go to the API", cookie.Name)
	}
	_, _, body := call(t, client, http.MethodPost, base+"api/auth/ws-ticket", "", "")
	var ticket struct {
		Ticket string `json:"ticket"`
	}
	if err := json.Unmarshal([]byte(body), &ticket); err != nil || ticket.Ticket == "" {
		t.Fatalf("no ticket: %.200s", body)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	conn, _, err := websocket.Dial(ctx, base+"api/ws?ticket="+ticket.Ticket,
		&websocket.DialOptions{HTTPClient: outside(c, nil), HTTPHeader: http.Header{"Origin": {"https://reach"}}})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.CloseNow()
	if _, first, err := conn.Read(ctx); err != nil || !strings.Contains(string(first), "gateway.ready") {
		t.Errorf("the socket's first message: %.200q, %v", first, err)
	}
}
