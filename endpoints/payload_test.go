package endpoints

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const (
	testPin    = "sha256/AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
	testHostID = "AAECAwQFBgcICQoLDA0ODw"
	testToken  = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
	testKey    = "sk-0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	testCode   = "Z9Y8X7"
)

var testNow = time.Unix(1_789_999_000, 0)

func testProxy(url string) *Proxy {
	return &Proxy{URL: url, TransportHint: "https", PinSHA256: testPin, Surfaces: []Surface{SurfaceRelay, SurfaceAPI, SurfaceDashboard}}
}

func testBroker() *Broker {
	return &Broker{ProtocolVersion: 1, URL: "wss://reach.example.com/v1/connect", HostID: testHostID,
		CredentialKind: KindBootstrap, Token: testToken, ExpiresAt: 1_790_000_000}
}

// full is a payload like the ones a host mints: every kind of candidate, and
// the parts that only invites carry.
func full() *Payload {
	ttl := int64(604800)
	direct := testProxy("https://192.168.1.10:9443")
	direct.CertDER = strings.Repeat("QUJD", 130)
	direct.Services = map[string]Service{"relay": {Supported: true, BasePath: "/relay", HealthPath: "/relay/health", WebSocketPath: "/relay/ws", Authentication: "relay_session"}}
	return &Payload{
		Host: "192.168.1.10", Port: 8642, Key: testKey,
		Relay: &PayloadRelay{URL: "ws://192.168.1.10:8767", Code: testCode, TTLSeconds: &ttl, Grants: map[string]int64{"terminal": 86400, "bridge": 0}, TransportHint: "ws"},
		Endpoints: []Candidate{
			{Role: RolePluginProxy, Priority: 0, Security: SecurityPinned, DisplayName: "Hermes Secure Link", Description: "pinned", Capabilities: []string{"relay", "api", "dashboard"}, Proxy: direct},
			{Role: RoleTailscale, Priority: 1, Security: SecurityPinned, Proxy: testProxy("https://home-server.tail1234.ts.net:9443")},
			{Role: RolePublic, Priority: 2, API: &API{Host: "hermes.example.com", Port: 443, TLS: true},
				Relay: &Relay{URL: "wss://hermes.example.com:8767", TransportHint: "wss"}, Dashboard: &Dashboard{URL: "https://hermes.example.com/dashboard"}},
			{Role: RoleOutboundBroker, Priority: 3, Experimental: true, Security: SecurityE2E, Broker: testBroker(), Proxy: direct},
		},
		DashboardURL: "https://192.168.1.10:9119/",
	}
}

func mustParse(t testing.TB, text string) *Payload {
	t.Helper()
	p, err := ParsePayload([]byte(text))
	if err != nil {
		t.Fatalf("ParsePayload: %v", err)
	}
	return p
}

func TestEncodeParse(t *testing.T) {
	secret, _ := vectors(t)
	for _, form := range []Form{FormField, FormInvite} {
		text, err := EncodeSigned(full(), form, secret)
		if err != nil {
			t.Fatal(err)
		}
		if !Verify(secret, text) {
			t.Error("the signature does not verify")
		}
		p := mustParse(t, string(text))
		if !bytes.Equal(p.Raw, text) || len(p.Skipped) != 0 || len(p.Endpoints) != 4 || p.Hermes != 3 {
			t.Errorf("read back: version %d, %d candidates, skipped %v", p.Hermes, len(p.Endpoints), p.Skipped)
		}
		again, err := Encode(p, form)
		if err != nil || !bytes.Equal(again, text) {
			t.Errorf("printed again: %v\n%s\n%s", err, again, text)
		}
		for i, c := range p.Endpoints {
			if err := c.Usable(testNow, Want{}); err != nil {
				t.Errorf("candidate %d: %v", i, err)
			}
		}
		if invite := form == FormInvite; strings.Contains(string(text), "cert_der") != invite ||
			strings.Contains(string(text), "services") != invite || strings.Contains(string(text), `"recommended":true`) != invite {
			t.Errorf("form %d has the wrong members: %s", form, text)
		}
	}
}

func TestEncodeIsWhatFieldClientsRead(t *testing.T) {
	p := full()
	p.Host = "höst 🚀"
	p.Endpoints[2].Role = "тест <a&b>"
	p.Endpoints[3].Role = "relay_broker"
	text, err := Encode(p, FormField)
	if err != nil {
		t.Fatal(err)
	}
	s := string(text)
	for _, c := range text {
		if c < 0x20 || c > 0x7e {
			t.Fatalf("byte %#x in the text", c)
		}
	}
	if !strings.HasPrefix(s, `{"hermes":3,"host":"h\u00f6st \ud83d\ude80","port":8642,"key":"sk-`) {
		t.Errorf("starts %.80s", s)
	}
	if !strings.Contains(s, `"role":"\u0442\u0435\u0441\u0442 <a&b>"`) || !strings.Contains(s, `"role":"outbound_broker"`) || strings.Contains(s, "relay_broker") {
		t.Errorf("roles: %s", s)
	}
	if strings.Contains(s, `9119/"`) || strings.ContainsAny(s, "\n") {
		t.Errorf("dashboard slash or white space: %s", s)
	}
	if p.Endpoints[3].Role != "relay_broker" || p.Hermes != 0 {
		t.Error("Encode changed its argument")
	}
	// Phones reject the whole payload for one float.
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	for tok, err := dec.Token(); err == nil; tok, err = dec.Token() {
		if n, ok := tok.(json.Number); ok && strings.ContainsAny(n.String(), ".eE") {
			t.Errorf("number %s is no integer", n)
		}
	}
}

func TestVersions(t *testing.T) {
	zero := int64(0)
	for name, tt := range map[string]struct {
		change func(*Payload)
		want   int
	}{
		"candidates":   {func(p *Payload) { p.Endpoints = full().Endpoints }, 3},
		"no relay":     {func(p *Payload) { p.Relay = nil }, 1},
		"plain relay":  {func(*Payload) {}, 1},
		"ttl of never": {func(p *Payload) { p.Relay.TTLSeconds = &zero }, 2},
		"grants":       {func(p *Payload) { p.Relay.Grants = map[string]int64{"chat": 0} }, 2},
		"hint":         {func(p *Payload) { p.Relay.TransportHint = "ws" }, 2},
	} {
		p := &Payload{Host: "192.168.1.10", Port: 8642, Relay: &PayloadRelay{URL: "ws://192.168.1.10:8767", Code: testCode}}
		tt.change(p)
		text, err := Encode(p, FormField)
		if got := mustParse(t, string(text)); err != nil || got.Hermes != tt.want {
			t.Errorf("%s: version %d, %v; want %d", name, got.Hermes, err, tt.want)
		}
	}
	if text, err := Encode(&Payload{Host: "h", Port: 8642}, FormField); err != nil || string(text) != `{"hermes":1,"host":"h","port":8642,"key":"","tls":false}` {
		t.Errorf("smallest payload: %s, %v", text, err)
	}
}

func TestEncodeRefuses(t *testing.T) {
	negative := int64(-1)
	for name, change := range map[string]func(*Payload){
		"blank host":        func(p *Payload) { p.Host = " " },
		"no port":           func(p *Payload) { p.Port = 0 },
		"key with a space":  func(p *Payload) { p.Key = "sk secret" },
		"key with umlaut":   func(p *Payload) { p.Key = "ské" },
		"negative ttl":      func(p *Payload) { p.Relay.TTLSeconds = &negative },
		"negative grant":    func(p *Payload) { p.Relay.Grants["chat"] = -1 },
		"too many":          func(p *Payload) { p.Endpoints = make([]Candidate, MaxCandidates+1) },
		"no role":           func(p *Payload) { p.Endpoints[0].Role = "" },
		"no pin":            func(p *Payload) { p.Endpoints[0].Proxy.PinSHA256 = "" },
		"broken token":      func(p *Payload) { p.Endpoints[3].Broker.Token = testToken + "=" },
		"broker alone":      func(p *Payload) { p.Endpoints[3].Proxy = nil },
		"broker of a proxy": func(p *Payload) { p.Endpoints[0].Broker = testBroker() },
		"api without host":  func(p *Payload) { p.Endpoints[2].API.Host = "" },
		"relay without url": func(p *Payload) { p.Endpoints[2].Relay.URL = "" },
		"dashboard no url":  func(p *Payload) { p.Endpoints[2].Dashboard.URL = "" },
		"too long":          func(p *Payload) { p.Endpoints[2].DisplayName = strings.Repeat("é", MaxPayload/6) },
	} {
		p := full()
		change(p)
		if text, err := Encode(p, FormField); err == nil {
			t.Errorf("%s: encoded as %s", name, text)
		} else {
			wantNoSecret(t, name, err.Error())
		}
	}
}

func TestParseLeniently(t *testing.T) {
	p := mustParse(t, `{"hermes":3.0,"host":" h ","port":8642.0,"key":"\tk \t","tls":"yes","future":{"x":[1.5]},"dashboardUrl":"https://d",
		"relay":{"url":"ws://h:8767","code":"ABC123","ttl_seconds":2592000.0,"grants":{"terminal":604800.0,"bridge":0,"chat":1.5,"tui":"x","voice:stt":-1},"transport_hint":null},
		"endpoints":[{"role":"lan","priority":2.0,"recommended":"x","experimental":null,"api":{"host":"h"},"relay":{"url":"ws://h:8767"},"dashboard":null,"capabilities":["a",1]}]}`)
	ttl := int64(2592000)
	want := &Payload{Hermes: 3, Host: "h", Port: 8642, Key: "k", DashboardURL: "https://d", Raw: p.Raw,
		Relay:     &PayloadRelay{URL: "ws://h:8767", Code: "ABC123", TTLSeconds: &ttl, Grants: map[string]int64{"terminal": 604800, "bridge": 0}},
		Endpoints: []Candidate{{Role: "lan", Priority: 2, API: &API{Host: "h", Port: 8642}, Relay: &Relay{URL: "ws://h:8767"}, Capabilities: []string{"a"}}},
	}
	if diff := cmp.Diff(want, p); diff != "" {
		t.Error(diff)
	}
	small := mustParse(t, `{"host":"h","hermes":"x","port":null,"relay":{"code":"ABC123"},"endpoints":{}}`)
	if small.Hermes != 1 || small.Port != 8642 || small.Key != "" || small.TLS || small.Relay != nil || small.Endpoints != nil {
		t.Errorf("defaults: %#v", *small)
	}
	for _, ttl := range []string{"-1", "1.5", `"1"`, "null", "1e300"} {
		if p := mustParse(t, `{"host":"h","relay":{"url":"ws://h","ttl_seconds":`+ttl+`}}`); p.Relay.TTLSeconds != nil {
			t.Errorf("ttl_seconds %s reads as %d", ttl, *p.Relay.TTLSeconds)
		}
	}
	if p := mustParse(t, `{"hermes":99,"host":"h"}`); p.Hermes != 99 {
		t.Error("a later version is not read")
	}
}

func TestParseRefuses(t *testing.T) {
	for name, text := range map[string]string{
		"not JSON": `{"host":"h","key":"` + testKey + `"`, "array": `[]`, "no host": `{"hermes":1,"key":"` + testKey + `"}`, "blank host": `{"host":"  "}`, "host is a number": `{"host":1}`,
		"version 0": `{"hermes":0,"host":"h"}`, "version -3": `{"hermes":-3.0,"host":"h"}`, "port 0": `{"host":"h","port":0}`, "port 70000": `{"host":"h","port":70000}`,
		"key with a space": `{"host":"h","key":"sk hunter2"}`, "key with an umlaut": `{"host":"h","key":"hunter2é"}`, "NaN": `{"host":"h","port":NaN}`,
		"too many":  `{"host":"h","endpoints":[` + strings.Repeat(`{"role":"lan"},`, MaxCandidates) + `{"role":"lan"}]}`,
		"too long":  `{"host":"h","x":"` + strings.Repeat("x", MaxPayload) + `"}`,
		"too deep":  `{"host":"h","x":` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + `}`,
		"two texts": `{"host":"h"}{"host":"h"}`,
	} {
		_, err := ParsePayload([]byte(text))
		if !errors.Is(err, ErrPayload) {
			t.Errorf("%s: %v", name, err)
			continue
		}
		wantNoSecret(t, name, err.Error())
		if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: the error holds the key: %v", name, err)
		}
	}
}

func TestBadCandidatesAreSkipped(t *testing.T) {
	bad := []string{
		`1`, `null`, `"lan"`, `{}`, `{"role":""}`, `{"role":1}`,
		`{"role":"lan","priority":"0"}`, `{"role":"lan","priority":0.5}`, `{"role":"lan","priority":9999999999}`,
		`{"role":"lan","api":"x"}`, `{"role":"lan","api":{"port":1}}`, `{"role":"lan","api":{"host":"h","port":"1"}}`, `{"role":"lan","api":{"host":"h","port":65536}}`,
		`{"role":"lan","relay":{}}`, `{"role":"lan","dashboard":{"url":1}}`, `{"role":"plugin_proxy","proxy":{}}`,
		`{"role":"broker","broker":{"url":"wss://b","protocol_version":"1"}}`, `{"role":"broker","broker":{"url":"wss://b","expires_at":"soon"}}`,
		`{"role":"broker","broker":{"url":"wss://b","expires_at":-1}}`, `{"role":"broker","broker":{}}`,
	}
	good := `{"role":"LAN ","priority":-2,"api":{"host":"::1","port":1,"tls":true}}`
	p := mustParse(t, `{"host":"h","endpoints":[`+strings.Join(bad, ",")+`,`+good+`]}`)
	if len(p.Endpoints) != 1 || len(p.Skipped) != len(bad) {
		t.Fatalf("%d candidates, %d skipped of %d", len(p.Endpoints), len(p.Skipped), len(bad))
	}
	for i, s := range p.Skipped {
		if s.Index != i || s.Reason == "" {
			t.Errorf("skip %d: %+v", i, s)
		}
	}
	want := Candidate{Role: "LAN ", Priority: -2, API: &API{Host: "::1", Port: 1, TLS: true}}
	if diff := cmp.Diff(want, p.Endpoints[0]); diff != "" {
		t.Error(diff)
	}
	none := mustParse(t, `{"host":"h","endpoints":[1]}`)
	if got := none.Candidates(); len(got) != 0 {
		t.Errorf("a payload whose candidates are all bad is taken for an old one: %v", got)
	}
}

func TestBrokerExpiry(t *testing.T) {
	for in, want := range map[string]int64{`1790000000`: 1790000000, `1790000000.0`: 1790000000, `1790000000.9`: 1790000000, `1.79e9`: 1790000000,
		`"2026-09-21T14:13:20Z"`: 1790000000, `"2026-09-21T16:13:20.5+02:00"`: 1790000000, `null`: 0} {
		p := mustParse(t, `{"host":"h","endpoints":[{"role":"broker","broker":{"url":"wss://b","expires_at":`+in+`}}]}`)
		if len(p.Endpoints) != 1 || int64(p.Endpoints[0].Broker.ExpiresAt) != want || p.Endpoints[0].Broker.ProtocolVersion != 1 {
			t.Errorf("%s: %+v, skipped %v", in, p.Endpoints, p.Skipped)
		}
	}
}

func TestOldPayloads(t *testing.T) {
	for host, role := range map[string]Role{"192.168.1.2": RoleLAN, "box.tail12.TS.net": RoleTailscale, "100.100.1.2": RoleTailscale, "100.2.3.4": RoleLAN, "box": RoleLAN} {
		p := mustParse(t, `{"hermes":2,"host":"`+host+`","port":1234,"tls":true,"relay":{"url":"wss://r:8767","transport_hint":"wss"},"dashboard_url":"https://d"}`)
		want := []Candidate{{Role: role, API: &API{Host: host, Port: 1234, TLS: true}, Relay: &Relay{URL: "wss://r:8767", TransportHint: "wss"}, Dashboard: &Dashboard{URL: "https://d"}}}
		if diff := cmp.Diff(want, p.Candidates()); diff != "" {
			t.Error(diff)
		}
	}
}

// A profile keeps candidates as JSON: encoding/json must give back what it took.
func TestCandidateJSON(t *testing.T) {
	cands := full().Endpoints
	cands = append(cands, Candidate{Role: "odd \xed\xa0\xbd role", API: &API{Host: "h", Port: 1}})
	text, err := json.Marshal(cands)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(text), `"role":"odd \ud83d role"`) {
		t.Errorf("a lone surrogate is lost: %s", text)
	}
	var got []Candidate
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(cands, got); diff != "" {
		t.Error(diff)
	}
	var p Payload
	if err := json.Unmarshal([]byte(`{"host":"h","port":1.0}`), &p); err != nil || p.Port != 1 || string(p.Raw) == "" {
		t.Errorf("%+v, %v", p, err)
	}
	if json.Unmarshal([]byte(`{"host":""}`), &p) == nil || json.Unmarshal([]byte(`{}`), &got[0]) == nil {
		t.Error("a payload without host or a candidate without role is read")
	}
}

func TestNothingPrintsSecrets(t *testing.T) {
	p := full()
	p.Sig = "YT64nY40fOnhaY/HMB56UZ/r5bRUSonrKgJvs1L7N1Y="
	c := p.Endpoints[3]
	var log bytes.Buffer
	for _, h := range []slog.Handler{slog.NewTextHandler(&log, nil), slog.NewJSONHandler(&log, nil)} {
		l := slog.New(h)
		for _, v := range []any{p, *p, c, &c, c.Broker, *c.Broker, p.Relay, *p.Relay} {
			l.Info("value", "v", v)
			for _, verb := range []string{"%v", "%+v", "%#v", "%s"} {
				fmt.Fprintf(&log, verb+"\n", v)
			}
		}
	}
	wantNoSecret(t, "log", log.String())
	if n := strings.Count(log.String(), "reach.example.com"); n == 0 {
		t.Error("the log says nothing at all")
	}
}

func wantNoSecret(t *testing.T, where, text string) {
	t.Helper()
	for _, secret := range []string{testKey, testCode, testToken} {
		if strings.Contains(text, secret) {
			t.Errorf("%s holds the secret %.8s…: %.200s", where, secret, text)
		}
	}
}

// A member added to a type and forgotten in the reader would vanish on the way.
func TestEveryMemberIsRead(t *testing.T) {
	for _, v := range []any{Payload{}, PayloadRelay{}, Candidate{}, API{}, Relay{}, Dashboard{}, Proxy{}, Service{}, Broker{}} {
		typ := reflect.TypeOf(v)
		var seen reflect.Value
		switch v.(type) {
		case Payload:
			seen = reflect.ValueOf(*everything(t))
		case PayloadRelay:
			seen = reflect.ValueOf(*everything(t).Relay)
		case Candidate:
			seen = reflect.ValueOf(everything(t).Endpoints[0])
		case API:
			seen = reflect.ValueOf(*everything(t).Endpoints[0].API)
		case Relay:
			seen = reflect.ValueOf(*everything(t).Endpoints[0].Relay)
		case Dashboard:
			seen = reflect.ValueOf(*everything(t).Endpoints[0].Dashboard)
		case Proxy:
			seen = reflect.ValueOf(*everything(t).Endpoints[0].Proxy)
		case Service:
			seen = reflect.ValueOf(everything(t).Endpoints[0].Proxy.Services["relay"])
		case Broker:
			seen = reflect.ValueOf(*everything(t).Endpoints[0].Broker)
		}
		for i := range typ.NumField() {
			if typ.Field(i).Tag.Get("json") != "-" && seen.Field(i).IsZero() {
				t.Errorf("%s.%s is not read", typ.Name(), typ.Field(i).Name)
			}
		}
	}
}

func everything(t *testing.T) *Payload {
	return mustParse(t, `{"hermes":3,"host":"h","port":1,"key":"k","tls":true,"dashboard_url":"https://d","sig":"s",
		"relay":{"url":"ws://r","code":"c","ttl_seconds":1,"grants":{"chat":1},"transport_hint":"ws"},
		"endpoints":[{"role":"r","priority":1,"recommended":true,"experimental":true,"security":"s","display_name":"n","description":"d","capabilities":["c"],
		"api":{"host":"h","port":1,"tls":true},"relay":{"url":"ws://r","transport_hint":"ws"},"dashboard":{"url":"https://d"},
		"broker":{"protocol_version":1,"url":"wss://b","host_id":"i","credential_kind":"k","token":"t","expires_at":1},
		"proxy":{"url":"https://p","transport_hint":"https","pin_sha256":"p","cert_der":"c","surfaces":["api"],
		"services":{"relay":{"supported":true,"base_path":"b","health_path":"h","websocket_path":"w","authentication":"a"}}}}]}`)
}

// What is read can be written, and reads the same again, or is refused.
func FuzzParsePayload(f *testing.F) {
	_, vs := vectors(f)
	for _, v := range vs {
		f.Add([]byte(v.Input))
	}
	text, err := Encode(full(), FormInvite)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Fuzz(func(t *testing.T, in []byte) {
		p, err := ParsePayload(in)
		if err != nil {
			return
		}
		if !bytes.Equal(p.Raw, in) || len(p.Endpoints) > MaxCandidates {
			t.Error("Raw is not the text, or too many candidates")
		}
		Choose(testNow, p.Candidates(), nil, Want{})
		text, err := Encode(p, FormInvite)
		if err != nil {
			return
		}
		again, err := ParsePayload(text)
		if err != nil || len(again.Skipped) != 0 {
			t.Fatalf("%s reads as %v, skipped %v", text, err, again)
		}
		if twice, err := Encode(again, FormInvite); err != nil || !bytes.Equal(text, twice) {
			t.Errorf("encoded %s, then %s, %v", text, twice, err)
		}
	})
}
