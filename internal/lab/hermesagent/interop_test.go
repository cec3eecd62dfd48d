//go:build interop && linux

package hermesagent

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
)

func TestMain(m *testing.M) { os.Exit(Main(unleaked{m})) }

// TestRealAgent asks the agent directly what the tests of the path in front of
// it take for granted, and what a new version may change.
func TestRealAgent(t *testing.T) {
	started := time.Now()
	agent, err := Start(t.Context(), t.TempDir(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := agent.Stop(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			logs, err := agent.Logs()
			t.Log(logs, err)
		}
	})
	t.Logf("the API server and two Dashboards answer after %v", time.Since(started).Round(10*time.Millisecond))

	t.Run("API gate", func(t *testing.T) { apiGate(t, agent) })
	t.Run("chat completion", func(t *testing.T) { chatCompletion(t, agent) })
	t.Run("run", func(t *testing.T) { runWithEvents(t, agent) })
	t.Run("Dashboard login", func(t *testing.T) { dashboardLogin(t, agent) })
	t.Run("Dashboard behind a prefix", func(t *testing.T) { dashboardPrefix(t, agent) })
	t.Run("Dashboard WebSocket", func(t *testing.T) { dashboardWebSocket(t, agent) })
	t.Run("open Dashboard", func(t *testing.T) { openDashboard(t, agent) })
	t.Run("path", func(t *testing.T) { throughThePath(t, agent) })
	t.Run("model", func(t *testing.T) {
		if got := agent.Model.Unexpected(); len(got) > 0 {
			t.Logf("the agent asked the model server for what it does not have: %q", got)
		}
	})
	t.Run("offline", func(t *testing.T) { nothingOutside(t, agent) })
}

// call makes one request with a client of its own and returns status, headers
// and body. A bearer of "" sends none.
func call(t *testing.T, client *http.Client, method, target, bearer, body string, header ...string) (int, http.Header, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, target, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if bearer != "" {
		req.Header.Set("Authorization", "Bearer "+bearer)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: %v", method, target, err)
	}
	return resp.StatusCode, resp.Header, string(b)
}

// browser keeps cookies if it is given a jar, and follows no redirect.
func browser(t *testing.T, jar http.CookieJar) *http.Client {
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Jar: jar, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}
}

func apiGate(t *testing.T, a *Agent) {
	client := browser(t, nil)
	for name, tt := range map[string]struct {
		path, bearer string
		want         int
		has          string
	}{
		"health":                     {"health", "", 200, `"version": "` + Version() + `"`},
		"models without a bearer":    {"v1/models", "", 401, `"invalid_api_key"`},
		"models with a wrong bearer": {"v1/models", a.Password, 401, `"invalid_api_key"`},
		"models with the bearer":     {"v1/models", a.Key, 200, `"hermes-agent"`},
	} {
		status, _, body := call(t, client, http.MethodGet, a.API.JoinPath(tt.path).String(), tt.bearer, "")
		if status != tt.want || !strings.Contains(body, tt.has) {
			t.Errorf("%s: %d %.200s, want %d with %s", name, status, body, tt.want, tt.has)
		}
	}
}

// stream makes a request, reads its events to the end and returns them.
func stream(t *testing.T, client *http.Client, method string, u *url.URL, bearer, body string) []Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, u.String(), strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+bearer)
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if kind := resp.Header.Get("Content-Type"); resp.StatusCode != 200 || kind != "text/event-stream" {
		b, _ := io.ReadAll(resp.Body)
		t.Fatalf("%s %s: %s, %s, %.300s", method, u, resp.Status, kind, b)
	}
	var seen []Event
	for e, err := range ReadEvents(resp.Body) {
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, e)
	}
	return seen
}

func chatCompletion(t *testing.T, a *Agent) {
	tap, err := StartTap(t.Context(), a.API.Host)
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close()
	seen := stream(t, browser(t, nil), http.MethodPost, tap.URL().JoinPath("v1/chat/completions"), a.Key,
		`{"model":"hermes-agent","stream":true,"messages":[{"role":"user","content":"Say your tokens."}]}`)
	judge(t, a, tap, "/v1/chat/completions", seen)
	if last := seen[len(seen)-1].Text; last != "data: [DONE]" {
		t.Errorf("the stream ends with %q", last)
	}
}

func runWithEvents(t *testing.T, a *Agent) {
	tap, err := StartTap(t.Context(), a.API.Host)
	if err != nil {
		t.Fatal(err)
	}
	defer tap.Close()
	status, _, body := call(t, browser(t, nil), http.MethodPost, tap.URL().JoinPath("v1/runs").String(), a.Key, `{"input":"Say your tokens."}`)
	var run struct {
		ID string `json:"run_id"`
	}
	if err := json.Unmarshal([]byte(body), &run); err != nil || status != http.StatusAccepted || run.ID == "" {
		t.Fatalf("start a run: %d %.200s", status, body)
	}
	path := "/v1/runs/" + run.ID + "/events"
	seen := stream(t, browser(t, nil), http.MethodGet, tap.URL().JoinPath(path), a.Key, "")
	judge(t, a, tap, path, seen)
	if !slices.ContainsFunc(seen, func(e Event) bool { return strings.Contains(e.Text, `"run.completed"`) }) {
		t.Errorf("no run.completed among %d events, the last is %.200s", len(seen), seen[len(seen)-1].Text)
	}
}

// tolerated is how much later than the agent sent it an event may be seen.
const tolerated = 50 * time.Millisecond

// judge holds a stream that went through the tap to what was promised: all tokens
// are there, one event each, the agent passes them on while the model is still
// speaking, and between tap and client no event is held up. In this file nothing
// is in between, which shows what the measurement itself costs.
func judge(t *testing.T, a *Agent, tap *Tap, path string, seen []Event) {
	t.Helper()
	exchanges, err := tap.Exchanges()
	if err != nil {
		t.Fatal(err)
	}
	var through []Event
	var added []time.Duration
	for _, x := range exchanges {
		// There may be more than one for the path: the one that was seen counts.
		if x.Path == path && x.Complete {
			if added, err = Delays(x.Events, seen); err == nil {
				through = x.Events
				break
			}
		}
	}
	if len(through) == 0 {
		t.Fatalf("%d events were seen, and no complete exchange at the tap for %s has the same ones: %v", len(seen), path, err)
	}
	if slices.Max(added) > tolerated {
		t.Errorf("events come more than %v late: %s", tolerated, Spread(added))
	}
	sent, own := tokens(t, a, through)
	if !through[0].At.Before(sent[len(sent)-1].At) {
		t.Error("the agent kept its answer back until the model had finished")
	}
	t.Logf("%d events; the agent's own delay, model to wire: %s; tap to client: %s", len(seen), Spread(own), Spread(added))
}

var aToken = regexp.MustCompile(`"a\d+t\d+ "`)

// tokens finds the answer that a stream brought, one event a token.
func tokens(t *testing.T, a *Agent, stream []Event) (sent []Sent, own []time.Duration) {
	t.Helper()
	for _, e := range stream {
		token := strings.Trim(aToken.FindString(e.Text), `" `)
		if token == "" {
			continue
		}
		at, ok := a.Model.SentAt(token)
		if !ok {
			t.Fatalf("the agent says %s, which the model never said", token)
		}
		sent, own = append(sent, Sent{Token: token, At: at}), append(own, e.At.Sub(at))
	}
	if !slices.ContainsFunc(a.Model.Answers(), func(answer []Sent) bool { return slices.Equal(answer, sent) }) {
		t.Fatalf("the %d tokens of the stream are no whole answer of the model", len(sent))
	}
	return sent, own
}

func login(a *Agent, password string) string {
	return fmt.Sprintf(`{"provider":"basic","username":%q,"password":%q}`, User, password)
}

func dashboardLogin(t *testing.T, a *Agent) {
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	client := browser(t, jar)
	at := func(path string) string { return a.Dashboard.JoinPath(path).String() }
	status, _, body := call(t, client, http.MethodGet, at("api/status"), "", "")
	if status != 200 || !strings.Contains(body, `"auth_required":true`) {
		t.Errorf("api/status: %d %.300s, want auth_required true", status, body)
	}
	for _, step := range []struct {
		method, path, body string
		want               int
		has                string
	}{
		{"GET", "api/auth/me", "", 401, "unauthenticated"},
		{"GET", "api/sessions", "", 401, "unauthenticated"},
		{"POST", "auth/password-login", login(a, a.Key), 401, "Invalid credentials"},
		{"GET", "api/auth/me", "", 401, "unauthenticated"},
		{"POST", "auth/password-login", login(a, a.Password), 200, `"ok":true`},
		{"GET", "api/auth/me", "", 200, `"user_id":"` + User + `"`},
		{"GET", "api/sessions", "", 200, `"sessions"`},
		{"GET", "", "", 200, "<html"},
	} {
		status, _, body := call(t, client, step.method, at(step.path), "", step.body)
		if status != step.want || !strings.Contains(body, step.has) {
			t.Errorf("%s %s: %d %.300s, want %d with %s", step.method, step.path, status, body, step.want, step.has)
		}
	}
	status, header, _ := call(t, browser(t, nil), http.MethodGet, at(""), "", "")
	if got := header.Get("Location"); status != http.StatusFound || !strings.HasPrefix(got, "/login") {
		t.Errorf("the first page without a login: %d to %q, want 302 to /login", status, got)
	}
}

// dashboardPrefix shows what the Dashboard makes of the headers that Secure Link
// adds: it puts the prefix into cookies and redirects by itself.
func dashboardPrefix(t *testing.T, a *Agent) {
	forwarded := []string{"X-Forwarded-Proto", "https", "X-Forwarded-Prefix", "/dashboard", "X-Forwarded-Host", "host.example:9443", "X-Forwarded-For", "192.0.2.7"}
	client := browser(t, nil)
	status, header, _ := call(t, client, http.MethodGet, a.Dashboard.String()+"/", "", "", forwarded...)
	if got := header.Get("Location"); status != http.StatusFound || !strings.HasPrefix(got, "/dashboard/login") {
		t.Errorf("the first page: %d to %q, want 302 to /dashboard/login", status, got)
	}
	status, header, _ = call(t, client, http.MethodPost, a.Dashboard.JoinPath("auth/password-login").String(), "", login(a, a.Password), forwarded...)
	cookies := (&http.Response{Header: header}).Cookies()
	if status != 200 || len(cookies) == 0 {
		t.Fatalf("login: %d, %d cookies", status, len(cookies))
	}
	for _, c := range cookies {
		if !strings.HasPrefix(c.Name, "__Secure-hermes_session_") || c.Path != "/dashboard" || !c.Secure || !c.HttpOnly {
			t.Errorf("cookie %s: path %s, secure %t, HttpOnly %t", c.Name, c.Path, c.Secure, c.HttpOnly)
		}
	}
}

// dashboardWebSocket opens the Dashboard's main socket the way its page does:
// with a ticket that the login buys.
func dashboardWebSocket(t *testing.T, a *Agent) {
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	client := browser(t, jar)
	at := func(path string) string { return a.Dashboard.JoinPath(path).String() }
	if status, _, body := call(t, client, http.MethodPost, at("auth/password-login"), "", login(a, a.Password)); status != 200 {
		t.Fatalf("login: %d %.200s", status, body)
	}
	_, _, body := call(t, client, http.MethodPost, at("api/auth/ws-ticket"), "", "")
	var ticket struct {
		Ticket string `json:"ticket"`
	}
	if err := json.Unmarshal([]byte(body), &ticket); err != nil || ticket.Ticket == "" {
		t.Fatalf("no ticket: %.200s", body)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	options := &websocket.DialOptions{HTTPClient: browser(t, nil), HTTPHeader: http.Header{"Origin": {a.Dashboard.String()}}}
	conn, _, err := websocket.Dial(ctx, at("api/ws")+"?ticket="+ticket.Ticket, options)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.CloseNow()
	_, first, err := conn.Read(ctx)
	if err != nil || !json.Valid(first) {
		t.Fatalf("the first message: %.200q, %v", first, err)
	}
	t.Logf("the socket greets with %.200s", first)
	if _, _, err := websocket.Dial(ctx, at("api/ws")+"?ticket="+ticket.Ticket, options); err == nil {
		t.Error("a ticket is good twice")
	}
}

// openDashboard holds what makes Secure Link keep a Dashboard closed.
func openDashboard(t *testing.T, a *Agent) {
	client := browser(t, nil)
	status, _, body := call(t, client, http.MethodGet, a.OpenDashboard.JoinPath("api/status").String(), "", "")
	if status != 200 || !strings.Contains(body, `"auth_required":false`) {
		t.Errorf("api/status: %d %.300s, want auth_required false", status, body)
	}
	for name, u := range map[string]*url.URL{"with a login": a.Dashboard, "without": a.OpenDashboard} {
		// Newer versions than the pinned one answer here with 200; then
		// the README, and what doctor says, have to be brought up to date.
		if status, _, body := call(t, client, http.MethodGet, u.JoinPath("api/health").String(), "", ""); status != 401 {
			t.Errorf("api/health of the Dashboard %s: %d %.200s, want 401: this version has none", name, status, body)
		}
	}
}

var (
	// unreachable matches what Python says of a network that is not there.
	unreachable = regexp.MustCompile(`(?i)failed to resolve|name resolution|name or service not known|network is unreachable|no route to host`)
	// complaint matches what the agent warns of, without the time.
	complaint = regexp.MustCompile(`(WARNING|ERROR|CRITICAL) .*`)
)

// nothingOutside fails if anything tried to reach more than loopback: not because
// it could, but because a host must be known to work without. It logs what the
// agent itself complained of.
func nothingOutside(t *testing.T, a *Agent) {
	logs, err := a.Logs()
	if err != nil {
		t.Fatal(err)
	}
	said := map[string]bool{}
	for line := range strings.Lines(logs) {
		if unreachable.MatchString(line) {
			t.Errorf("the agent tried the internet: %s", line)
		}
		if c := complaint.FindString(line); c != "" && !said[c] {
			said[c] = true
			t.Log(c)
		}
	}
	before, err := Unroutable()
	if err != nil || before != 0 {
		t.Errorf("%d packets had nowhere to go (%v): something tried the internet", before, err)
	}
	// The count is worth something only if it counts: 192.0.2.1 is nobody's.
	if conn, err := new(net.Dialer).DialContext(t.Context(), "udp", "192.0.2.1:9"); err == nil {
		conn.Close()
		t.Error("there is a route to the internet")
	}
	if after, err := Unroutable(); err != nil || after <= before {
		t.Errorf("a packet without a route was not counted: %d before, %d after, %v", before, after, err)
	}
}
