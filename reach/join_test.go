package reach

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/coder/websocket/wsjson"
	"github.com/google/go-cmp/cmp"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach/profile"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

const (
	code       = "ABC123"
	routeToken = "HRwbGhkYFxYVFBMSERAPDg0MCwoJCAcGBQQDAgEAHx4"
)

// relay is the host's end of the first-frame exchange.
type relay struct {
	field  bool   // only /relay/ws is there
	answer string // type of the answer; "" = hang up after the frame
	ok     map[string]any
	status int // answer the upgrade with this instead

	mu   sync.Mutex
	seen []map[string]any // first frames' payloads
	door []string
}

func (rl *relay) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case rl.status != 0:
		http.Error(w, "no", rl.status)
		return
	case rl.field && r.URL.Path == "/relay/ws", !rl.field && r.URL.Path == "/relay/session":
	default:
		http.NotFound(w, r)
		return
	}
	ws, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	defer ws.CloseNow()
	var env envelope
	if wsjson.Read(r.Context(), ws, &env) != nil {
		return
	}
	var payload map[string]any
	json.Unmarshal(env.Payload, &payload)
	rl.mu.Lock()
	rl.seen, rl.door = append(rl.seen, payload), append(rl.door, doorOf(r))
	answer, ok := rl.answer, any(rl.ok)
	if payload["session_token"] == "dead" {
		answer = "auth.fail"
	}
	rl.mu.Unlock()
	if answer == "" {
		return
	}
	if answer == "auth.fail" {
		ok = map[string]any{"reason": "Invalid pairing code or session token"}
	}
	ws.Write(r.Context(), websocket.MessageText, []byte("not json"))
	wsjson.Write(r.Context(), ws, map[string]any{"channel": "pairing", "type": "profiles.updated", "profiles": []any{}})
	wsjson.Write(r.Context(), ws, map[string]any{"channel": "system", "type": answer, "id": env.ID, "payload": ok})
	ws.Read(r.Context())
}

func (rl *relay) frames() []map[string]any {
	rl.mu.Lock()
	defer rl.mu.Unlock()
	return rl.seen
}

func goodAnswer() *relay {
	return &relay{answer: "auth.ok", ok: map[string]any{
		"session_token": "session-1", "refresh_token": "refresh-1", "server_version": "1.9.0", "profiles": []any{map[string]any{"name": "x"}},
		"expires_at": 1790000000.5, "grants": map[string]any{"chat": nil, "terminal": 1780000000.25}, "transport_hint": "wss",
		"route_credential": credential(brokerURL, hostID),
	}}
}

func credential(url, id string) map[string]any {
	return map[string]any{"kind": "broker_route", "broker_url": url, "host_id": id, "credential_id": "cred-1", "token": routeToken, "expires_at": 1790000000}
}

func invite(t *testing.T, change func(*endpoints.Payload), cands ...endpoints.Candidate) string {
	t.Helper()
	p := &endpoints.Payload{Host: "127.0.0.1", Port: 8642, Key: "sk-api-key", Relay: &endpoints.PayloadRelay{URL: "wss://127.0.0.1:9443", Code: code}, Endpoints: cands}
	if change != nil {
		change(p)
	}
	text, err := endpoints.Encode(p, endpoints.FormInvite)
	if err != nil {
		t.Fatal(err)
	}
	return "Pair with this: " + endpoints.InviteURL(text)
}

func bootstrap(c endpoints.Candidate, expires time.Time) endpoints.Candidate {
	b := *c.Broker
	b.CredentialKind, b.Token, b.ExpiresAt = endpoints.KindBootstrap, token, wire.ExpiryAt(expires)
	c.Broker = &b
	return c
}

func in10min() time.Time { return time.Now().Add(10 * time.Minute) }

func TestJoin(t *testing.T) {
	for name, tt := range map[string]struct {
		field, direct bool
	}{"direct": {false, true}, "broker": {false, false}, "field host, direct": {true, true}, "field host, broker": {true, false}} {
		t.Run(name, func(t *testing.T) {
			rl := goodAnswer()
			rl.field = tt.field
			h := newHost(t, rl)
			direct, broker := h.door("direct"), h.broker()
			if !tt.direct {
				direct.shut()
			}
			first := direct.candidate(0)
			first.Proxy.CertDER = base64.StdEncoding.EncodeToString(h.id.LeafDER())
			s := tempStore(t)
			var log bytes.Buffer
			j, err := Join(t.Context(), s, invite(t, nil, first, bootstrap(broker.candidate(1, direct.addr), in10min())), JoinOptions{
				Profile: "home", Device: Device{Name: "Ann's laptop", Platform: "linux", FormFactor: "desktop", Surface: "desktop"},
				Client: Config{NewBroker: broker.factory, Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))},
			})
			if err != nil {
				t.Fatal(err)
			}
			text := log.String() + fmt.Sprintf("%v %+v", j, *j)
			for _, secret := range []string{code, token, routeToken, "session-1", "refresh-1", "sk-api-key"} {
				if strings.Contains(text, secret) {
					t.Errorf("%.4s… shows in %s", secret, text)
				}
			}
			if (j.Path.Broker == "") != tt.direct || j.Host != "127.0.0.1" || j.Again || len(j.Notes) != 0 {
				t.Errorf("%+v", j)
			}
			want := map[string]any{"pairing_code": code, "device_id": j.Profile.DeviceID, "device_name": "Ann's laptop", "device_platform": "linux",
				"device_form_factor": "desktop", "client_surface": "desktop", "supports": map[string]any{"typed_stream_events": true, "event_schema_version": 1.0}}
			if d := cmp.Diff([]map[string]any{want}, rl.frames()); d != "" {
				t.Error(d)
			}
			if !tt.direct && (broker.dials() != 1 || broker.cfg.Kind != wire.KindBootstrap) {
				t.Errorf("%d dials as %s: a bootstrap is good for one", broker.dials(), broker.cfg.Kind)
			}
			checkStored(t, s, h)
		})
	}
}

func checkStored(t *testing.T, s *profile.Store, h *host) {
	t.Helper()
	p, err := s.Get("")
	if err != nil {
		t.Fatal(err)
	}
	if p.Name != "home" || !p.Pin.Equal(h.id.Pin()) || p.Session.Reveal() != "session-1" || p.Refresh.Reveal() != "refresh-1" ||
		p.APIKey.Reveal() != "sk-api-key" || p.Expires.Unix() != 1790000000 || p.ServerVersion != "1.9.0" || len(p.Candidates) != 2 {
		t.Errorf("stored %+v", p)
	}
	if end, ok := p.Grants["chat"]; !ok || !end.IsZero() || p.Grants["terminal"].Unix() != 1780000000 {
		t.Errorf("grants %v", p.Grants)
	}
	want := profile.Route{BrokerURL: brokerURL, HostID: hostID, Kind: endpoints.KindRoute, CredentialID: "cred-1", Token: routeToken, Expires: time.Unix(1790000000, 0).UTC()}
	if len(p.Routes) != 1 || p.Routes[0] != want {
		t.Errorf("routes %+v (%s)", p.Routes, p.Routes[0].Token.Reveal())
	}
	if b := p.Candidates[1].Broker; b == nil || b.Token != "" || b.CredentialKind != "" {
		t.Errorf("the bootstrap was stored: %v", b)
	}
}

// Only a durable credential for a broker of the invite keeps that broker's
// candidate; credentials for elsewhere are not taken.
func TestJoinCredentials(t *testing.T) {
	bad := credential(brokerURL, hostID)
	bad["token"] = "short"
	for name, tt := range map[string]struct {
		one  any
		many []any
		kept bool
	}{
		"none":              {nil, nil, false},
		"one":               {credential(brokerURL, hostID), nil, true},
		"tidied URL":        {credential("wss://BROKER.invalid:443", hostID), nil, true},
		"in the list":       {nil, []any{credential("wss://x.invalid/v1/connect", hostID), credential(brokerURL, hostID)}, true},
		"of another broker": {credential("wss://evil.invalid/v1/connect", hostID), nil, false},
		"other base path":   {credential("wss://broker.invalid/x/v1/connect", hostID), nil, false},
		"of another host":   {credential(brokerURL, "AQECAwQFBgcICQoLDA0ODw"), nil, false},
		"malformed":         {bad, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			rl := goodAnswer()
			rl.ok["route_credential"], rl.ok["route_credentials"] = tt.one, tt.many
			h := newHost(t, rl)
			direct, broker := h.door("direct"), h.broker()
			s := tempStore(t)
			j, err := Join(t.Context(), s, invite(t, nil, direct.candidate(0), bootstrap(broker.candidate(1, direct.addr), in10min())),
				JoinOptions{Client: Config{NewBroker: broker.factory}})
			if err != nil {
				t.Fatal(err)
			}
			if got := len(j.Profile.Routes) == 1 && len(j.Profile.Candidates) == 2; got != tt.kept || (len(j.Notes) == 0) != tt.kept {
				t.Errorf("kept: %v, notes %v", got, j.Notes)
			}
			if !tt.kept && len(j.Profile.Routes) != 0 {
				t.Errorf("a credential that opens nothing was stored")
			}
			for _, r := range j.Profile.Routes {
				if r.BrokerURL != brokerURL {
					t.Errorf("a credential for %s was stored", r.BrokerURL)
				}
			}
			if j.Profile.Name != "hermes" { // an address makes no name
				t.Errorf("named %q", j.Profile.Name)
			}
		})
	}
}

// What is wrong with an invite is found before anything is dialled or stored.
func TestBadInvites(t *testing.T) {
	h := newHost(t, goodAnswer())
	other := newHost(t, nil)
	direct, broker := h.door("direct"), h.broker()
	mixed := direct.candidate(1)
	mixed.Proxy.PinSHA256 = other.id.Pin().String()
	forged := direct.candidate(0)
	forged.Proxy.CertDER = base64.StdEncoding.EncodeToString(other.id.LeafDER())
	lan := endpoints.Candidate{Role: "lan", Relay: &endpoints.Relay{URL: "ws://" + direct.addr}}
	for name, text := range map[string]string{
		"nothing":     "",
		"no code":     invite(t, func(p *endpoints.Payload) { p.Relay.Code = "" }, direct.candidate(0)),
		"odd code":    invite(t, func(p *endpoints.Payload) { p.Relay.Code = "ABC-12" }, direct.candidate(0)),
		"no relay":    invite(t, func(p *endpoints.Payload) { p.Relay = nil }, direct.candidate(0)),
		"plain":       invite(t, nil, lan),
		"version 1":   invite(t, nil),
		"expired":     invite(t, nil, bootstrap(broker.candidate(0, direct.addr), time.Now().Add(-time.Minute))),
		"two hosts":   invite(t, nil, direct.candidate(0), mixed),
		"forged cert": invite(t, nil, forged),
	} {
		s := tempStore(t)
		_, err := Join(t.Context(), s, text, JoinOptions{Client: Config{NewBroker: broker.factory}})
		if !errors.Is(err, ErrInvite) || strings.Contains(fmt.Sprint(err), code) || strings.Contains(fmt.Sprint(err), token) {
			t.Errorf("%s: %v", name, err)
		}
		if names, err := s.Names(); err != nil || len(names) > 0 {
			t.Errorf("%s: stored %v, %v", name, names, err)
		}
	}
	if direct.count() != 0 || broker.dials() != 0 {
		t.Errorf("%d and %d dials", direct.count(), broker.dials())
	}
}

// The code goes to the host of the invite's pin or nowhere.
func TestJoinWrongHost(t *testing.T) {
	h := newHost(t, goodAnswer())
	thiefRelay := goodAnswer()
	thief := newHost(t, thiefRelay)
	stolen := thief.door("stolen")
	s := tempStore(t)
	_, err := Join(t.Context(), s, invite(t, nil, h.direct(stolen.addr, 0)), JoinOptions{})
	if !pins.IsTrust(err) || len(thiefRelay.frames()) != 0 || stolen.count() == 0 {
		t.Errorf("%v; the thief saw %v", err, thiefRelay.frames())
	}
	if names, _ := s.Names(); len(names) > 0 {
		t.Errorf("stored %v", names)
	}
}

func TestJoinRefused(t *testing.T) {
	for name, tt := range map[string]struct {
		rl   *relay
		want func(error) bool
		sent int
	}{
		"auth.fail":      {&relay{answer: "auth.fail"}, func(err error) bool { _, ok := errors.AsType[*AuthError](err); return ok }, 1},
		"hangs up":       {&relay{}, func(err error) bool { return errors.Is(err, errAfterCode) }, 1},
		"rate limited":   {&relay{status: 429}, func(err error) bool { return errors.Is(err, ErrRateLimited) }, 0},
		"broken":         {&relay{status: 502}, func(err error) bool { return strings.Contains(err.Error(), "502") }, 0},
		"no session":     {&relay{answer: "auth.ok", ok: map[string]any{"session_token": ""}}, func(error) bool { return true }, 1},
		"wrong types":    {&relay{answer: "auth.ok", ok: map[string]any{"session_token": 7}}, func(error) bool { return true }, 1},
		"something else": {&relay{answer: "auth.later"}, func(error) bool { return true }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t, tt.rl)
			direct, broker := h.door("direct"), h.broker()
			s := tempStore(t)
			clk := newClock()
			text := invite(t, nil, direct.candidate(0), bootstrap(broker.candidate(1, direct.addr), in10min()))
			if tt.rl.answer == "auth.later" {
				go direct.h.hangUp(tt.rl, direct)
			}
			_, err := Join(t.Context(), s, text, JoinOptions{Client: Config{NewBroker: broker.factory, Now: clk.now}})
			if err == nil || !tt.want(err) || strings.Contains(err.Error(), code) {
				t.Errorf("%v", err)
			}
			if n := len(tt.rl.frames()); n != tt.sent {
				t.Errorf("the code was sent %d times", n)
			}
			if names, _ := s.Names(); len(names) > 0 {
				t.Errorf("stored %v", names)
			}
		})
	}
}

// hangUp cuts the connection once the relay has seen a frame.
func (h *host) hangUp(rl *relay, d *door) {
	for len(rl.frames()) == 0 {
		if h.t.Context().Err() != nil {
			return
		}
	}
	d.cut()
}

func TestJoinAgain(t *testing.T) {
	rl := goodAnswer()
	h := newHost(t, rl)
	direct := h.door("direct")
	s := tempStore(t)
	text := invite(t, nil, direct.candidate(0))
	join := func(name string) (*Joined, error) {
		return Join(t.Context(), s, text, JoinOptions{Profile: name})
	}
	if _, err := join("home"); err != nil {
		t.Fatal(err)
	}
	rl.ok["session_token"] = "session-2"
	if j, err := join(""); err != nil || !j.Again || j.Profile.Name != "home" {
		t.Errorf("%+v, %v", j, err)
	}
	if p, err := s.Get("home"); err != nil || p.Session.Reveal() != "session-2" {
		t.Errorf("%v, %v", p, err)
	}
	if _, err := join("other"); err == nil {
		t.Error("one host has two profiles")
	}
	other := newHost(t, goodAnswer())
	text = invite(t, nil, other.door("direct").candidate(0))
	if _, err := join("home"); !errors.Is(err, profile.ErrExists) {
		t.Errorf("another host took the name: %v", err)
	}
	if _, err := join("../x"); !errors.Is(err, profile.ErrName) {
		t.Errorf("%v", err)
	}
	if len(rl.frames()) != 2 {
		t.Errorf("%d codes were spent", len(rl.frames()))
	}
}

func TestSignIn(t *testing.T) {
	rl := goodAnswer()
	h := newHost(t, rl)
	direct, broker := h.door("direct"), h.broker()
	p := h.profile(direct.candidate(0), broker.candidate(1, direct.addr))
	p.Session, p.Refresh = "alive", "refresh-0"
	c := newClient(t, Config{Profile: p, NewBroker: broker.factory}, newClock())
	delete(rl.ok, "refresh_token")
	got, path, err := SignIn(t.Context(), c, p, Device{})
	if err != nil || path.Broker != "" || got.Session.Reveal() != "session-1" || got.Refresh.Reveal() != "refresh-0" ||
		got.Routes[0].Token.Reveal() != routeToken || p.Routes[0].Token.Reveal() != token {
		t.Errorf("%+v, %v, %v", got, path, err)
	}
	p.Session = "dead"
	rl.ok["refresh_token"] = "refresh-1"
	got, _, err = SignIn(t.Context(), c, p, Device{})
	if err != nil || got.Refresh.Reveal() != "refresh-1" {
		t.Errorf("%+v, %v", got, err)
	}
	frames := rl.frames()
	if len(frames) != 3 || frames[1]["session_token"] != "dead" || frames[1]["refresh_token"] != nil ||
		frames[2]["refresh_token"] != "refresh-0" || frames[2]["session_token"] != nil {
		t.Errorf("a host counts each proof: %v", frames)
	}
	p.Refresh = ""
	if _, _, err = SignIn(t.Context(), c, p, Device{}); err == nil {
		t.Error("a dead session passed")
	} else if _, ok := errors.AsType[*AuthError](err); !ok {
		t.Errorf("%v", err)
	}
}

func FuzzAuthOK(f *testing.F) {
	good, err := json.Marshal(goodAnswer().ok)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"session_token":"x","expires_at":1e300,"grants":{"a":-1},"route_credentials":[{}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		ok, err := parseAuthOK(text)
		if err != nil {
			return
		}
		p := &profile.Profile{Candidates: []endpoints.Candidate{{Role: "broker", Broker: &endpoints.Broker{URL: brokerURL, HostID: hostID}}}}
		ok.apply(p)
		if p.Session == "" {
			t.Error("no session")
		}
		for _, r := range p.Routes {
			if r.BrokerURL != brokerURL || wire.CheckToken(r.Token.Reveal()) != nil {
				t.Errorf("%+v", r)
			}
		}
	})
}
