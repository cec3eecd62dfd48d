package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/internal/lab"
)

// asProgram makes the test binary behave as hermes-reach itself, so that tests
// run real processes of exactly this code.
const asProgram = "HERMES_REACH_TEST_AS_PROGRAM"

// world is some machines' worth of processes on this one: each has a home of
// its own, and everything they log is kept.
type world struct {
	t    *testing.T
	ca   string // file
	logs *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// command prepares a process with its home; every log line goes to the world.
func (w *world) command(ctx context.Context, home string, args ...string) *exec.Cmd {
	args = append(args, "--debug", "--log-format", "json")
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = []string{asProgram + "=1", "HERMES_REACH_HOME=" + home, "SSL_CERT_FILE=" + w.ca, "HOME=" + home,
		"GORACE=atexit_sleep_ms=0"} // or each process would end a second late
	cmd.Stderr = w.logs
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	return cmd
}

// run runs a command to its end and gives its exit code and output.
func (w *world) run(home, stdin string, args ...string) (int, string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := w.command(ctx, home, args...)
	cmd.Stdin = strings.NewReader(stdin)
	began := time.Now()
	out, err := cmd.Output()
	w.t.Logf("%.1f s  %v", time.Since(began).Seconds(), args)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		w.t.Fatalf("%v: %v", args, err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// want runs a command that has to succeed, and decodes its JSON.
func (w *world) want(v any, home, stdin string, args ...string) {
	w.t.Helper()
	code, out := w.run(home, stdin, args...)
	if code != cli.Done {
		w.t.Fatalf("%v: exit code %d\n%s\n%s", args, code, out, w.logs)
	}
	if v != nil {
		if err := json.Unmarshal([]byte(out), v); err != nil {
			w.t.Fatalf("%v printed %q: %v", args, out, err)
		}
	}
}

// start runs a command in the background until the test ends, and decodes the
// first line it prints.
func (w *world) start(v any, home string, args ...string) (stop func()) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := w.command(ctx, home, args...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	stop = sync.OnceFunc(func() {
		began := time.Now()
		cancel()
		_ = cmd.Wait()
		w.t.Logf("%.1f s  to stop %v", time.Since(began).Seconds(), args)
		if code := cmd.ProcessState.ExitCode(); code != cli.Done {
			w.t.Errorf("%v ended with exit code %d after SIGTERM\n%s", args, code, w.logs)
		}
	})
	w.t.Cleanup(stop)
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	if !lines.Scan() {
		w.t.Fatalf("%v printed nothing\n%s", args, w.logs)
	}
	if err := json.Unmarshal(lines.Bytes(), v); err != nil {
		w.t.Fatalf("%v printed %q: %v", args, lines.Text(), err)
	}
	return stop
}

// hermes is a stand-in for the API server of a Hermes host.
func hermes(t *testing.T) string {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/health":
			_, _ = io.WriteString(w, `{"status":"ok"}`)
		case r.Header.Get("Authorization") != "Bearer KEY":
			w.WriteHeader(http.StatusUnauthorized)
		case r.URL.Path == "/v1/models":
			_, _ = io.WriteString(w, `{"data":["hermes"]}`)
		case r.URL.Path == "/v1/socket":
			c, err := websocket.Accept(w, r, nil)
			if err != nil {
				return
			}
			typ, m, err := c.Read(r.Context())
			if err == nil {
				_ = c.Write(r.Context(), typ, m)
			}
			_ = c.Close(websocket.StatusNormalClosure, "")
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(srv.Close)
	return srv.URL
}

func freePort(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func newWorld(t *testing.T) (*world, string) {
	t.Helper()
	dir := t.TempDir()
	ca, err := lab.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	if err := ca.WriteFiles(dir, "localhost"); err != nil {
		t.Fatal(err)
	}
	return &world{t: t, ca: filepath.Join(dir, "ca.pem"), logs: &lockedBuffer{}}, dir
}

// TestProcesses is the run by script of the command line's design: broker,
// host and device as separate processes, then revocation, and no secret of it
// all in any of their complete debug logs.
func TestProcesses(t *testing.T) {
	w, dir := newWorld(t)
	hostHome, deviceHome := filepath.Join(dir, "H"), filepath.Join(dir, "D")
	api := hermes(t)

	var broker struct{ Listening string }
	state := filepath.Join(dir, "B", "broker.db")
	w.start(&broker, dir, "broker", "--listen", "127.0.0.1:0", "--tls-cert", filepath.Join(dir, "cert.pem"),
		"--tls-key", filepath.Join(dir, "key.pem"), "--state", state, "--json")
	_, port, _ := net.SplitHostPort(broker.Listening)
	var added struct{ Enroll string }
	w.want(&added, dir, "", "broker", "host", "add", "home", "--state", state, "--url", "wss://localhost:"+port, "--json")
	w.want(nil, hostHome, added.Enroll, "enroll", "-")

	var up struct{ Listeners []string }
	w.start(&up, hostHome, "up", "--listen", "127.0.0.1:0", "--api", api, "--dashboard", "http://127.0.0.1:1", "--json")
	w.awaitBroker(hostHome)
	var invite struct{ Invite string }
	w.want(&invite, hostHome, "", "pair", "--no-wait", "--json")
	var joined struct{ Host, Profile, Path string }
	w.want(&joined, deviceHome, invite.Invite, "join", "-", "--json")
	if joined.Path != "plugin_proxy" || joined.Profile == "" || joined.Host != "127.0.0.1" {
		t.Errorf("join = %+v, want the direct path, a profile and the host", joined)
	}
	w.requests(deviceHome)
	w.probe(deviceHome)
	w.forward(deviceHome)

	var list struct {
		Devices []struct{ ID, Name, Path string }
	}
	w.want(&list, hostHome, "", "devices", "list", "--json")
	if len(list.Devices) != 1 {
		t.Fatalf("devices = %+v, want the one that joined", list)
	}
	w.want(nil, hostHome, "", "devices", "revoke", list.Devices[0].ID)
	if code, _ := w.run(deviceHome, "", "get", "/relay/health", "--path", "outbound_broker"); code != cli.NotReachable {
		t.Errorf("a revoked device through the broker: exit code %d, want %d", code, cli.NotReachable)
	}
	w.noSecrets(deviceHome, added.Enroll, invite.Invite)
}

// awaitBroker waits until the host is registered.
func (w *world) awaitBroker(home string) {
	w.t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for time.Now().Before(deadline) {
		var st struct {
			Brokers    []struct{ State, Transport string }
			Namespaces map[string]struct {
				Open   bool
				Reason string
			}
		}
		w.want(&st, home, "", "status", "--json")
		if len(st.Brokers) == 1 && st.Brokers[0].State == "connected" {
			if !st.Namespaces["api"].Open || st.Namespaces["dashboard"].Open || st.Namespaces["dashboard"].Reason != "dashboard_unavailable" {
				w.t.Errorf("namespaces = %+v, want api open and dashboard_unavailable", st.Namespaces)
			}
			return
		}
	}
	w.t.Fatalf("the host did not register\n%s", w.logs)
}

func (w *world) requests(home string) {
	w.t.Helper()
	bearer := []string{"--header", "Authorization: Bearer KEY"}
	for _, tt := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"get", "/relay/health"}, cli.Done, "hermes_secure_proxy"},
		{append([]string{"get", "/api/v1/models"}, bearer...), cli.Done, "hermes"},
		{append([]string{"get", "/api/v1/models", "--path", "outbound_broker"}, bearer...), cli.Done, "hermes"},
		{append([]string{"get", "/api/v1/models", "--path", "plugin_proxy"}, bearer...), cli.Done, "hermes"},
		{[]string{"get", "/api/v1/models"}, cli.Failed, ""},
		{[]string{"get", "/dashboard/"}, cli.Failed, "dashboard_unavailable"},
		{[]string{"get", "/api/v1/models", "--path", "tailscale"}, cli.NotReachable, ""},
		{[]string{"get", "no-slash"}, cli.WrongUsage, ""},
	} {
		if code, out := w.run(home, "", tt.args...); code != tt.code || !strings.Contains(out, tt.want) {
			w.t.Errorf("%v: exit code %d, %q; want %d and %q", tt.args, code, out, tt.code, tt.want)
		}
	}
}

func (w *world) probe(home string) {
	w.t.Helper()
	var v struct {
		Chosen     string
		Candidates []struct {
			Role, State, Security string
			RTT                   float64 `json:"rtt_ms"`
		}
	}
	w.want(&v, home, "", "probe", "--json")
	if v.Chosen != "plugin_proxy" || len(v.Candidates) != 2 || v.Candidates[1].Role != "outbound_broker" {
		w.t.Errorf("probe = %+v, want both ways and the direct one chosen", v)
	}
	for _, c := range v.Candidates {
		if c.State != "reachable" || c.RTT <= 0 {
			w.t.Errorf("probe: %+v, want reachable with a time", c)
		}
	}
}

func (w *world) forward(home string) {
	w.t.Helper()
	var v struct{ URL, Open, Key string }
	stop := w.start(&v, home, "forward", "--listen", freePort(w.t), "--json")
	defer stop()
	base := strings.Replace(v.URL, v.URL[len("http://"):strings.LastIndex(v.URL, ":")], "127.0.0.1", 1)
	for _, tt := range []struct {
		key    string
		status int
	}{{"", http.StatusUnauthorized}, {v.Key, http.StatusOK}} {
		req, err := http.NewRequest(http.MethodGet, base+"/api/v1/models", nil)
		if err != nil {
			w.t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer KEY")
		if tt.key != "" {
			req.Header.Set("X-Reach-Key", tt.key)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			w.t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != tt.status {
			w.t.Errorf("forwarded with key %v: %d, want %d", tt.key != "", res.StatusCode, tt.status)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}

// noSecrets searches all logs for what was secret in the run.
func (w *world) noSecrets(deviceHome, line, invite string) {
	w.t.Helper()
	log := w.logs.String()
	for _, proof := range []string{"host registered", "device paired", "client registered"} {
		if !strings.Contains(log, proof) {
			w.t.Errorf("the logs are not complete: nothing says %q", proof)
		}
	}
	_, token, _ := strings.Cut(line, "token=")
	token, _, _ = strings.Cut(token, "&")
	_, payload, _ := strings.Cut(invite, "payload=")
	secrets := map[string]string{"host token": token, "invite": payload, "bearer": "Bearer KEY"}
	files, err := filepath.Glob(filepath.Join(deviceHome, "profiles", "*.json"))
	if err != nil || len(files) != 1 {
		w.t.Fatalf("profiles: %v, %v", files, err)
	}
	text, err := os.ReadFile(files[0])
	if err != nil {
		w.t.Fatal(err)
	}
	var p struct {
		Session, Refresh string
		Routes           []struct{ Token string }
	}
	if err := json.Unmarshal(text, &p); err != nil {
		w.t.Fatal(err)
	}
	secrets["session token"], secrets["refresh token"] = p.Session, p.Refresh
	for _, r := range p.Routes {
		secrets["route token"] = r.Token
	}
	for name, s := range secrets {
		if len(s) < 8 {
			w.t.Errorf("the %s is %d characters long: nothing to search for", name, len(s))
		}
		if strings.Contains(log, s) {
			w.t.Errorf("a log holds the %s", name)
		}
	}
}
