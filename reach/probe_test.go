package reach

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

const healthPage = `{"status":"ok","services":{"relay":{"available":true},"api":{"available":false},"other":{"available":true}}}`

func TestProbe(t *testing.T) {
	var seen http.Header
	h := newHost(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case doorOf(r) == "ill":
			http.Error(w, "no", http.StatusBadGateway)
		case doorOf(r) == "odd":
			fmt.Fprint(w, "<html>sign in to this network</html>")
		case r.Method == http.MethodGet && r.URL.Path == "/relay/health":
			seen = r.Header
			fmt.Fprint(w, healthPage)
		default:
			saysDoor(w, r)
		}
	}))
	thief := newHost(t, nil)
	ill, odd, direct, broker := h.door("ill"), h.door("odd"), h.door("direct"), h.broker()
	broker.refuse(&wire.RefusedError{Code: wire.CodeRevoked})
	gone := nothing(t)
	c := newClient(t, Config{NewBroker: broker.factory, Profile: h.profile(
		broker.candidate(9, direct.addr), h.direct(gone, 0), h.direct(thief.door("stolen").addr, 1), ill.candidate(2), odd.candidate(3),
		direct.candidate(4), endpoints.Candidate{Role: "lan", Priority: 5, Relay: &endpoints.Relay{URL: "ws://192.0.2.1"}})}, newClock())
	got := c.Probe(t.Context())
	for i, want := range []struct{ state, reason, security string }{
		{StateUnreachable, "revoked", endpoints.SecurityE2E},
		{StateUnreachable, "connection refused", endpoints.SecurityPinned},
		{StateRefused, "another key", endpoints.SecurityPinned},
		{StateUnhealthy, "502", endpoints.SecurityPinned},
		{StateUnhealthy, "not the page", endpoints.SecurityPinned},
		{StateReachable, endpoints.ReasonChosen, endpoints.SecurityPinned},
		{StateUnusable, "no pinned Secure Link", ""},
	} {
		if i >= len(got) {
			t.Fatalf("%d results", len(got))
		}
		g := got[i]
		if g.State != want.state || !strings.Contains(g.Reason, want.reason) || g.Security != want.security || g.Chosen != (i == 5) {
			t.Errorf("%d: %+v, want %v", i, g, want)
		}
		if proved := want.state == StateReachable || want.state == StateUnhealthy; (g.RTT > 0) != proved {
			t.Errorf("%d: handshake took %v ms", i, g.RTT)
		}
	}
	if s := got[5].Surfaces; len(s) != 2 || !s["relay"] || s["api"] {
		t.Errorf("surfaces %v", s)
	}
	for name := range seen {
		if name != "User-Agent" {
			t.Errorf("the probe sent %s: %v", name, seen[name])
		}
	}
	mustGet(t, c, "/", "direct")
	if n := direct.count(); n != 1 {
		t.Errorf("the probe's connection was not used again: %d", n)
	}
	text, err := json.Marshal(got)
	if err != nil || strings.Contains(string(text), token) || !strings.Contains(string(text), `"rtt_ms":`) {
		t.Errorf("%s, %v", text, err)
	}
}
