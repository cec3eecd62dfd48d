package reach_test

import (
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/profile"
	"github.com/hermes-reach/hermes-reach/securelink"
	"github.com/hermes-reach/hermes-reach/securelink/session"
)

// The whole device against the whole host, on a direct path: pair, ask, sign in
// again, be revoked.
func TestAgainstRealHost(t *testing.T) {
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/health":
		case r.Header.Get("Authorization") != "Bearer key":
			w.WriteHeader(http.StatusUnauthorized)
		default:
			w.Write([]byte("models"))
		}
	}))
	defer api.Close()
	id, err := pins.New([]string{"127.0.0.1"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	sessions, err := session.Open(t.TempDir(), session.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer sessions.Close()
	srv, err := securelink.New(securelink.Config{Identity: id, Sessions: sessions, Upstreams: securelink.Upstreams{API: api.URL}})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	defer func() { srv.Close(); <-served }()

	code, _, err := sessions.MintCode(session.Mint{})
	if err != nil {
		t.Fatal(err)
	}
	text, err := endpoints.Encode(&endpoints.Payload{
		Host: "127.0.0.1", Port: 8642, Relay: &endpoints.PayloadRelay{URL: "wss://" + ln.Addr().String(), Code: code},
		Endpoints: []endpoints.Candidate{{Role: endpoints.RolePluginProxy, Proxy: &endpoints.Proxy{
			URL: "https://" + ln.Addr().String(), PinSHA256: id.Pin().String(), Surfaces: []endpoints.Surface{endpoints.SurfaceAPI}}}},
	}, endpoints.FormInvite)
	if err != nil {
		t.Fatal(err)
	}
	invite := endpoints.InviteURL(text)
	store, err := profile.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	device := reach.Device{Name: "laptop", Platform: "linux", FormFactor: "desktop", Surface: "desktop"}
	j, err := reach.Join(t.Context(), store, invite, reach.JoinOptions{Device: device})
	if err != nil {
		t.Fatal(err)
	}
	devices := sessions.Devices()
	if len(devices) != 1 || devices[0].Name != "laptop" || j.Profile.Session == "" || j.Profile.Refresh == "" {
		t.Fatalf("%+v, %+v", devices, j.Profile)
	}
	if _, err := reach.Join(t.Context(), store, invite, reach.JoinOptions{Device: device}); err == nil {
		t.Error("the code works twice")
	}

	c, err := reach.New(reach.Config{Profile: j.Profile})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for bearer, want := range map[string]int{"Bearer key": http.StatusOK, "": http.StatusUnauthorized} {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, reach.Origin+"/api/v1/models", nil)
		req.Header.Set("Authorization", bearer)
		res, err := c.HTTPClient().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != want || res.ProtoMajor != 2 {
			t.Errorf("bearer %q: %s %s", bearer, res.Proto, res.Status)
		}
	}
	if p := c.Probe(t.Context()); len(p) != 1 || !p[0].Chosen || !p[0].Surfaces["relay"] || !p[0].Surfaces["api"] || p[0].Surfaces["dashboard"] {
		t.Errorf("%+v", p)
	}
	again, _, err := reach.SignIn(t.Context(), c, j.Profile, device)
	if err != nil || again.Session != j.Profile.Session {
		t.Errorf("sign in: %v", err)
	}
	if _, err := sessions.Revoke(devices[0].ID); err != nil {
		t.Fatal(err)
	}
	_, _, err = reach.SignIn(t.Context(), c, j.Profile, device)
	if no, ok := errors.AsType[*reach.AuthError](err); !ok || !strings.Contains(no.Reason, "Invalid") {
		t.Errorf("after revocation: %v", err)
	}
}
