package hermesagent

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Addresses of the product. They are always free: the namespace is ours.
const (
	apiAddr = "127.0.0.1:8642"
	// The Dashboard of this version has no switch for its login: it asks for
	// one exactly if its bind address is none of 127.0.0.1, ::1 and localhost.
	// 127.0.0.2 is loopback all the same.
	dashboardAddr = "127.0.0.2:9119"
	// What most hosts run: a Dashboard that lets everybody in who reaches it.
	openAddr = "127.0.0.1:9119"
)

// Time to start, on two busy cores. It takes five seconds on two idle ones.
const startTimeout = 2 * time.Minute

// User is the name for the Dashboard's login.
const User = "lab"

// configuration is the agent's config.yaml: what makes it think with our model,
// and what it would otherwise look for on the internet when it starts (the size
// of the model's context, and a program that judges shell commands).
const configuration = `model:
  provider: custom
  base_url: %s
  default: %s
  api_key: %s
  context_length: 131072
security:
  tirith_enabled: false
`

// Options says how the agent is run; the zero value is good.
type Options struct {
	Model ModelOptions
}

// Agent is a running Hermes Agent. Its fields do not change until Stop.
type Agent struct {
	API           *url.URL // http://127.0.0.1:8642
	Dashboard     *url.URL // http://127.0.0.2:9119, asks for User and Password
	OpenDashboard *url.URL // http://127.0.0.1:9119, asks for nothing
	Key           string   // the bearer of the API server
	Password      string   // of the Dashboard
	Model         *Model   // what the agent thinks with

	home      string
	modelKey  string
	processes []*process
}

// Start runs the API server and both Dashboards with home, an existing empty
// folder, as their HERMES_HOME, and returns when all three answer. The caller
// stops them, also before the folder is removed. An error holds the last lines
// of what the program in question said.
func Start(ctx context.Context, home string, o Options) (*Agent, error) {
	venv := os.Getenv(envInside)
	if venv == "" {
		return nil, errors.New("start Hermes Agent: the test's TestMain must call hermesagent.Main")
	}
	if err := offline(); err != nil {
		return nil, fmt.Errorf("start Hermes Agent: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	model, err := StartModel(ctx, o.Model)
	if err != nil {
		return nil, err
	}
	a := &Agent{
		API:           &url.URL{Scheme: "http", Host: apiAddr},
		Dashboard:     &url.URL{Scheme: "http", Host: dashboardAddr},
		OpenDashboard: &url.URL{Scheme: "http", Host: openAddr},
		Key:           rand.Text(), Password: rand.Text(), modelKey: rand.Text(),
		Model: model, home: home,
	}
	if err := a.start(ctx, filepath.Join(venv, "bin", "hermes")); err != nil {
		return nil, errors.Join(err, a.Stop())
	}
	return a, nil
}

func (a *Agent) start(ctx context.Context, hermes string) error {
	config := fmt.Appendf(nil, configuration, a.Model.URL(), ModelName, a.modelKey)
	if err := os.WriteFile(filepath.Join(a.home, "config.yaml"), config, 0o600); err != nil {
		return err
	}
	// The Dashboard's WebSocket looks for a newer version, with no switch to
	// stop it; an answer that is not old yet, it believes.
	newest := fmt.Appendf(nil, `{"ts":%d,"behind":0,"rev":null,"ver":%q}`, time.Now().Unix(), Version())
	if err := os.WriteFile(filepath.Join(a.home, ".update_check"), newest, 0o600); err != nil {
		return err
	}
	for _, program := range []struct {
		name string
		args []string
		env  []string
	}{
		{"gateway", []string{"gateway", "run", "-v"}, []string{"API_SERVER_ENABLED=true", "API_SERVER_KEY=" + a.Key}},
		{"dashboard", dashboard(a.Dashboard), []string{
			"HERMES_DASHBOARD_BASIC_AUTH_USERNAME=" + User, "HERMES_DASHBOARD_BASIC_AUTH_PASSWORD=" + a.Password}},
		{"open-dashboard", dashboard(a.OpenDashboard), nil},
	} {
		p, err := start(a.home, program.name, append(a.env(), program.env...), append([]string{hermes}, program.args...)...)
		if err != nil {
			return err
		}
		a.processes = append(a.processes, p)
	}
	for i, ready := range []*url.URL{a.API.JoinPath("health"), a.Dashboard.JoinPath("api/status"), a.OpenDashboard.JoinPath("api/status")} {
		if err := answers(ctx, a.processes[i], ready.String()); err != nil {
			return err
		}
	}
	return nil
}

func dashboard(u *url.URL) []string {
	// The wheel brings the pages built: --skip-build keeps npm out of it.
	return []string{"dashboard", "--host", u.Hostname(), "--port", u.Port(), "--no-open", "--skip-build"}
}

// env is all that the agent gets to see of our environment.
func (a *Agent) env() []string {
	return []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + a.home, "HERMES_HOME=" + a.home, "LANG=C.UTF-8",
		// The agent runs pip for what it misses. It could not succeed here,
		// but should not try.
		"HERMES_DISABLE_LAZY_INSTALLS=1", "PIP_NO_INDEX=1",
	}
}

// answers returns when the URL is answered with 200.
func answers(ctx context.Context, p *process, target string) error {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	pace := time.NewTicker(100 * time.Millisecond)
	defer pace.Stop()
	var last error
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			if err == nil && resp.StatusCode == http.StatusOK {
				return nil
			}
			err = errors.Join(err, fmt.Errorf("GET %s: %s", target, resp.Status))
		}
		if ctx.Err() == nil {
			last = err // the end of the wait tells nothing
		}
		select {
		case <-pace.C:
		case <-p.ended:
			return fmt.Errorf("%s ended before it answered: %s; it said:\n%s", p.name, p.exit, p.said(30))
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer: %w; it said:\n%s", p.name, errors.Join(ctx.Err(), last), p.said(30))
		}
	}
}

// Secrets are the credentials in use, for tests that look for them in logs and
// captures.
func (a *Agent) Secrets() []string { return []string{a.Key, a.Password, a.modelKey} }

// Logs returns what the agent has written so far: the output of its programs and
// its own log files.
func (a *Agent) Logs() (string, error) {
	var names []string
	for _, pattern := range []string{"*.log", "logs/*.log"} {
		found, err := filepath.Glob(filepath.Join(a.home, pattern))
		if err != nil {
			return "", err
		}
		names = append(names, found...)
	}
	var out strings.Builder
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			return "", fmt.Errorf("read the agent's logs: %w", err)
		}
		fmt.Fprintf(&out, "== %s\n%s\n", filepath.Base(name), b)
	}
	return out.String(), nil
}

// Stop ends everything and returns when nothing is left, with an error if
// something had to be killed. Further calls do nothing.
func (a *Agent) Stop() error {
	var errs []error
	for _, p := range a.processes {
		errs = append(errs, p.stop())
	}
	a.processes = nil
	return errors.Join(append(errs, a.Model.Close())...)
}
