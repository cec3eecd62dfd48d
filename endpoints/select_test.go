package endpoints

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func secure(role Role, priority int) Candidate {
	return Candidate{Role: role, Priority: priority, Proxy: testProxy("https://h:9443")}
}

func TestOrder(t *testing.T) {
	legacy := secure("broker", -5)
	cands := []Candidate{
		secure("lan", 3), legacy, secure("tailscale", 0), {Role: "x", Priority: -1, Experimental: true}, secure("a", 3), secure("b", 0),
	}
	if got := fmt.Sprint(Order(cands)); got != "[[2 5] [0 4] [1] [3]]" {
		t.Errorf("got %s", got)
	}
	if got := Order(nil); got != nil {
		t.Errorf("nothing orders as %v", got)
	}
}

func TestChoose(t *testing.T) {
	ok := func(ago, rtt time.Duration) Observation {
		return Observation{Health: Healthy, At: testNow.Add(-ago), RTT: rtt}
	}
	bad := func(ago time.Duration, class string) Observation {
		return Observation{Health: Failed, At: testNow.Add(-ago), Class: class}
	}
	second, one := time.Second, 1
	tiers012 := []Candidate{secure("a", 0), secure("b", 1), secure("c", 2)}
	equals := []Candidate{secure("a", 0), secure("b", 0), secure("c", 1)}
	plain := []Candidate{{Role: RoleLAN, API: &API{Host: "h", Port: 1}}, secure("b", 1)}
	for name, tt := range map[string]struct {
		cands   []Candidate
		obs     []Observation
		want    Want
		chosen  int
		proved  bool
		reasons string
		probe   string
		retry   time.Duration // after testNow, 0 = never
	}{
		"nothing known":          {cands: tiers012, chosen: 0, reasons: "chosen|unproved|unproved", probe: "[0 1 2]"},
		"no candidates":          {chosen: -1, probe: "[]"},
		"the best is healthy":    {cands: tiers012, obs: []Observation{ok(second, second), ok(second, 1)}, chosen: 0, proved: true, reasons: "chosen|worse than chosen|worse than chosen", probe: "[]", retry: 59 * second},
		"a better one is failed": {cands: tiers012, obs: []Observation{bad(second, "timeout"), ok(0, 0)}, chosen: 1, proved: true, reasons: "unreachable: timeout|chosen|worse than chosen", probe: "[]", retry: second},
		"a better one unproved":  {cands: tiers012, obs: []Observation{{}, ok(0, 0)}, chosen: 1, proved: true, reasons: "unproved|chosen|worse than chosen", probe: "[0]", retry: HealthyFor},
		"a failure gets old":     {cands: tiers012, obs: []Observation{bad(FailedFor, "timeout"), ok(0, 0)}, chosen: 1, proved: true, reasons: "unproved|chosen|worse than chosen", probe: "[0]", retry: HealthyFor},
		"a success gets old":     {cands: tiers012, obs: []Observation{ok(HealthyFor, 0), bad(0, "")}, chosen: 0, reasons: "chosen|unreachable|unproved", probe: "[0 2]", retry: FailedFor},
		"from the future":        {cands: tiers012, obs: []Observation{ok(-1, 0), ok(0, 0)}, chosen: 1, proved: true, reasons: "unproved|chosen|worse than chosen", probe: "[0]", retry: HealthyFor},
		"all failed":             {cands: tiers012, obs: []Observation{bad(0, "x"), bad(second, "y"), bad(0, "z")}, chosen: -1, reasons: "unreachable: x|unreachable: y|unreachable: z", probe: "[]", retry: second},
		"some failed":            {cands: tiers012, obs: []Observation{bad(0, "x")}, chosen: 1, reasons: "unreachable: x|chosen|unproved", probe: "[1 2]", retry: FailedFor},
		"faster among equals":    {cands: equals, obs: []Observation{ok(0, 3), ok(0, 2), ok(0, 1)}, chosen: 1, proved: true, reasons: "worse than chosen|chosen|worse than chosen", probe: "[]", retry: HealthyFor},
		"unmeasured is slower":   {cands: equals, obs: []Observation{ok(0, 0), ok(0, 2)}, chosen: 1, proved: true, reasons: "worse than chosen|chosen|worse than chosen", probe: "[]", retry: HealthyFor},
		"first among the same":   {cands: equals, obs: []Observation{ok(0, 2), ok(0, 2)}, chosen: 0, proved: true, reasons: "chosen|worse than chosen|worse than chosen", probe: "[]", retry: HealthyFor},
		"current among equals":   {cands: equals, obs: []Observation{ok(0, 1), ok(0, 9)}, want: Want{Current: &one}, chosen: 1, proved: true, reasons: "worse than chosen|chosen|worse than chosen", probe: "[]", retry: HealthyFor},
		"current is worse":       {cands: tiers012, obs: []Observation{ok(0, 9), ok(0, 1)}, want: Want{Current: &one}, chosen: 0, proved: true, reasons: "chosen|worse than chosen|worse than chosen", probe: "[]", retry: HealthyFor},
		"an equal is unproved":   {cands: equals, obs: []Observation{{}, ok(0, 1)}, chosen: 1, proved: true, reasons: "unproved|chosen|worse than chosen", probe: "[]", retry: HealthyFor},
		"plain without consent":  {cands: plain, obs: []Observation{ok(0, 1), ok(0, 1)}, chosen: 1, proved: true, reasons: "not usable: it is not encrypted and plaintext is not allowed for this host|chosen", probe: "[]", retry: HealthyFor},
		"plain with consent":     {cands: plain, obs: []Observation{ok(0, 1), ok(0, 1)}, want: Want{AllowPlaintext: true}, chosen: 0, proved: true, reasons: "chosen|worse than chosen", probe: "[]", retry: HealthyFor},
		"other surface":          {cands: plain, want: Want{Surface: SurfaceDashboard, AllowPlaintext: true}, chosen: 1, reasons: "not usable: it does not offer the dashboard|chosen", probe: "[1]"},
		"more observations":      {cands: tiers012[:1], obs: []Observation{{}, ok(0, 1)}, chosen: 0, reasons: "chosen", probe: "[0]"},
	} {
		d := Choose(testNow, tt.cands, tt.obs, tt.want)
		if d.Chosen != tt.chosen || d.Proved != tt.proved {
			t.Errorf("%s: chosen %d proved %v, want %d %v", name, d.Chosen, d.Proved, tt.chosen, tt.proved)
		}
		if got := strings.Join(d.Reasons, "|"); got != tt.reasons {
			t.Errorf("%s: %s\nwant %s", name, got, tt.reasons)
		}
		if got := fmt.Sprint(d.Probe); got != tt.probe {
			t.Errorf("%s: probe %s, want %s", name, got, tt.probe)
		}
		wantRetry := time.Time{}
		if tt.retry != 0 {
			wantRetry = testNow.Add(tt.retry)
		}
		if !d.Retry.Equal(wantRetry) {
			t.Errorf("%s: retry in %v, want %v", name, d.Retry.Sub(testNow), tt.retry)
		}
	}
}

func drawCandidate(t *rapid.T) Candidate {
	c := Candidate{
		Role:         rapid.SampledFrom([]Role{RolePluginProxy, RoleOutboundBroker, "broker", RoleLAN, RoleTailscale, RolePublic, "vpn"}).Draw(t, "role"),
		Priority:     rapid.IntRange(0, 3).Draw(t, "priority"),
		Experimental: rapid.Bool().Draw(t, "experimental"),
		Security:     rapid.SampledFrom([]string{"", SecurityPinned, SecurityTLS}).Draw(t, "claim"),
	}
	if rapid.Bool().Draw(t, "proxy") {
		c.Proxy = testProxy(rapid.SampledFrom([]string{"https://h:9443", "https://g", "http://h", "https://u@h"}).Draw(t, "url"))
		c.Proxy.PinSHA256 = rapid.SampledFrom([]string{testPin, testPin, "", testPin[7:]}).Draw(t, "pin")
		c.Proxy.Surfaces = rapid.SampledFrom([][]Surface{nil, {SurfaceAPI}, {SurfaceDashboard, SurfaceAPI}}).Draw(t, "surfaces")
	}
	if rapid.Bool().Draw(t, "broker") {
		c.Broker = testBroker()
		if rapid.Bool().Draw(t, "expired") {
			c.Broker.ExpiresAt = 1
		}
	}
	if rapid.Bool().Draw(t, "api") {
		c.API = &API{Host: "h", Port: 1, TLS: rapid.Bool().Draw(t, "tls")}
	}
	if rapid.Bool().Draw(t, "relay") {
		c.Relay = &Relay{URL: rapid.SampledFrom([]string{"ws://h", "wss://h", "nonsense"}).Draw(t, "relay url")}
	}
	return c
}

func drawObservation(t *rapid.T) Observation {
	return Observation{
		Health: Health(rapid.IntRange(0, 2).Draw(t, "health")),
		At:     testNow.Add(-time.Duration(rapid.IntRange(-2_000, 70_000).Draw(t, "age")) * time.Millisecond),
		RTT:    time.Duration(rapid.IntRange(0, 3).Draw(t, "rtt")),
		Class:  rapid.SampledFrom([]string{"", "timeout"}).Draw(t, "class"),
	}
}

// before is the rule in its own words, not the code's.
func before(a, b Candidate) bool {
	last := func(c Candidate) bool { return c.Experimental || c.Role == RoleOutboundBroker || c.Role == "broker" }
	if last(a) != last(b) {
		return last(b)
	}
	return a.Priority < b.Priority
}

func TestChooseInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		cands := rapid.SliceOfN(rapid.Custom(drawCandidate), 0, 8).Draw(t, "candidates")
		obs := rapid.SliceOfN(rapid.Custom(drawObservation), 0, 8).Draw(t, "observations")
		want := Want{Surface: rapid.SampledFrom([]Surface{"", SurfaceRelay, SurfaceAPI, SurfaceDashboard}).Draw(t, "surface"), AllowPlaintext: rapid.Bool().Draw(t, "consent")}
		if len(cands) > 0 && rapid.Bool().Draw(t, "has current") {
			current := rapid.IntRange(0, len(cands)-1).Draw(t, "current")
			want.Current = &current
		}
		keepCands, keepObs := fmt.Sprintf("%v", cands), slices.Clone(obs)
		d := Choose(testNow, cands, obs, want)
		if again := Choose(testNow, cands, obs, want); !reflect.DeepEqual(d, again) {
			t.Fatal("not a function of its arguments")
		}
		if fmt.Sprintf("%v", cands) != keepCands || !slices.Equal(obs, keepObs) {
			t.Fatal("Choose changed its arguments")
		}
		checkDecision(t, d, cands, obs, want)
	})
}

func checkDecision(t *rapid.T, d Decision, cands []Candidate, obs []Observation, want Want) {
	state := func(i int) Health {
		if i >= len(obs) || obs[i].At.After(testNow) {
			return Unknown
		}
		age := testNow.Sub(obs[i].At)
		if obs[i].Health == Healthy && age < 60*time.Second || obs[i].Health == Failed && age < 2*time.Second {
			return obs[i].Health
		}
		return Unknown
	}
	if len(d.Reasons) != len(cands) || slices.Contains(d.Reasons, "") {
		t.Fatalf("reasons %q for %d candidates", d.Reasons, len(cands))
	}
	unknown := false
	for i, c := range cands {
		usable := !strings.HasPrefix(d.Reasons[i], ReasonNotUsable)
		if usable != (c.Usable(testNow, want) == nil) || usable != slices.Contains(slices.Concat(d.Tiers...), i) {
			t.Fatalf("candidate %d: usable in one place and not in another", i)
		}
		if (d.Reasons[i] == ReasonChosen) != (i == d.Chosen) {
			t.Fatalf("candidate %d: %s, chosen is %d", i, d.Reasons[i], d.Chosen)
		}
		unknown = unknown || usable && state(i) == Unknown
		if !usable || d.Chosen < 0 {
			continue
		}
		if state(i) == Healthy && before(c, cands[d.Chosen]) {
			t.Fatalf("chosen %d while the better %d is known healthy", d.Chosen, i)
		}
		if state(i) == Healthy && !d.Proved {
			t.Fatalf("an unproved one is chosen while %d is known healthy", i)
		}
	}
	if d.Chosen < 0 {
		if unknown {
			t.Fatal("nothing chosen although one could be tried")
		}
		return
	}
	c := cands[d.Chosen]
	if d.Proved != (state(d.Chosen) == Healthy) || state(d.Chosen) == Failed {
		t.Fatalf("chosen %d, proved %v, but it is %v", d.Chosen, d.Proved, state(d.Chosen))
	}
	plain := c.Proxy == nil && (c.API != nil && !c.API.TLS && want.Surface != SurfaceRelay || c.Relay != nil && c.Relay.URL != "wss://h" && want.Surface != SurfaceAPI)
	if plain && !want.AllowPlaintext {
		t.Fatalf("plaintext without consent: %+v", c)
	}
	if needs := c.Proxy != nil || c.Broker != nil || c.Role == RolePluginProxy || c.Role.IsBroker(); needs && c.ProxyValid() != nil {
		t.Fatalf("Secure Link without a valid pin: %+v", c)
	}
	for _, i := range d.Probe {
		if state(i) != Unknown || d.Proved && !before(cands[i], c) {
			t.Fatalf("probe %d is pointless", i)
		}
	}
}
