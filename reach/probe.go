package reach

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/pins"
)

// States of a ProbeResult.
const (
	StateReachable   = "reachable"
	StateUnreachable = "unreachable"
	StateUnhealthy   = "unhealthy" // the host is there and its health page is not right
	StateRefused     = "refused"   // somebody is there whom this device does not trust
	StateUnusable    = "unusable"  // nothing was tried
)

const maxHealth = 64 << 10 // bytes of a health page that are read

// A ProbeResult is what a probe found out about one candidate.
type ProbeResult struct {
	Role      endpoints.Role             `json:"role"`
	Priority  int                        `json:"priority"`
	Authority string                     `json:"authority"`
	Broker    string                     `json:"broker,omitempty"`
	Surfaces  map[endpoints.Surface]bool `json:"surfaces"` // what the host says is available
	State     string                     `json:"state"`
	Reason    string                     `json:"reason"` // of the state, or why chosen or not
	RTT       float64                    `json:"rtt_ms"` // from dial to the proved pin, milliseconds; 0 = not measured
	Security  string                     `json:"security"`
	Chosen    bool                       `json:"chosen"`
}

// Probe tries every candidate at once, on a connection of its own, and asks the
// host's health page. It sends no credential. What it learns counts for the
// requests that follow. The results stand in the order of the profile, those
// that cannot be used last.
func (c *Client) Probe(ctx context.Context) []ProbeResult {
	out := make([]ProbeResult, len(c.routes))
	var all sync.WaitGroup
	for i, r := range c.routes {
		out[i] = newResult(r.Path)
		out[i].Security = c.cands[i].SecurityOf("")
		all.Go(func() { r.probe(ctx, &out[i]) })
	}
	all.Wait()
	d := c.decide()
	for i := range out {
		out[i].Chosen = d.Proved && d.Chosen == i
		if out[i].State == StateReachable {
			out[i].Reason = d.Reasons[i]
		}
	}
	for _, a := range c.unused {
		r := newResult(a.Path)
		r.State, r.Reason = StateUnusable, a.Err.Error()
		out = append(out, r)
	}
	return out
}

func newResult(p Path) ProbeResult {
	return ProbeResult{Role: p.Role, Priority: p.Priority, Authority: p.Authority, Broker: p.Broker, Surfaces: map[endpoints.Surface]bool{}}
}

// decide asks which candidate would be taken now, and why.
func (c *Client) decide() endpoints.Decision {
	now := c.now()
	obs := make([]endpoints.Observation, len(c.routes))
	for i, r := range c.routes {
		obs[i] = r.state(now).obs
	}
	return endpoints.Choose(now, c.cands, obs, c.want())
}

// probe fills in one result.
func (r *route) probe(ctx context.Context, res *ProbeResult) {
	start := time.Now()
	cc, err := r.web.NewClientConn(ctx, "https", r.Authority)
	if err != nil {
		res.State, res.Reason = StateUnreachable, err.Error()
		if pins.IsTrust(err) {
			res.State = StateRefused
		}
		return
	}
	res.RTT = float64(time.Since(start).Microseconds()) / 1000
	surfaces, err := health(ctx, cc, r.Authority)
	if err != nil {
		res.State, res.Reason = StateUnhealthy, err.Error()
		r.lost(r.c.now(), err)
		cc.Close() // nothing of worth is lost with it
		return
	}
	res.State, res.Surfaces = StateReachable, surfaces
	r.answered(r.c.now())
	r.keep(cc)
}

// health reads which surfaces the host says are available.
func health(ctx context.Context, rt http.RoundTripper, authority string) (map[endpoints.Surface]bool, error) {
	url := "https://" + strings.TrimSuffix(authority, ":443") + "/relay/health"
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	res, err := rt.RoundTrip(req)
	if err != nil {
		return nil, fmt.Errorf("ask /relay/health: %w", err)
	}
	defer res.Body.Close()
	if res.StatusCode/100 != 2 {
		return nil, fmt.Errorf("/relay/health answered %s", res.Status)
	}
	text, err := io.ReadAll(io.LimitReader(res.Body, maxHealth))
	if err != nil {
		return nil, fmt.Errorf("read /relay/health: %w", err)
	}
	var page struct {
		Services map[endpoints.Surface]struct {
			Available bool `json:"available"`
		} `json:"services"`
	}
	if json.Unmarshal(text, &page) != nil {
		return nil, errors.New("/relay/health is not the page of a Secure Link")
	}
	out := map[endpoints.Surface]bool{}
	for _, s := range []endpoints.Surface{endpoints.SurfaceRelay, endpoints.SurfaceAPI, endpoints.SurfaceDashboard} {
		if service, ok := page.Services[s]; ok {
			out[s] = service.Available
		}
	}
	return out, nil
}
