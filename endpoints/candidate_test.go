package endpoints

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestProxyValid(t *testing.T) {
	for url, want := range map[string]string{ // url → authority, "" = refused
		"https://192.168.1.10:9443": "192.168.1.10:9443", "https://h": "h:443", "https://h/": "h:443", "https://h:443": "h:443", "https://[2001:db8::7]:9443": "[2001:db8::7]:9443",
		"https://[2001:db8::7]/": "[2001:db8::7]:443", "HTTPS://H:1": "H:1",
		"http://h": "", "wss://h": "", "h:9443": "", "": "", "https://": "", "https:h": "", "https://:9443": "", "https://u@h": "", "https://@h": "", "https://u:p@h": "", "https://h?": "", "https://h?a=b": "",
		"https://h#": "", "https://h/#x": "", "https://h/relay": "", "https://h//": "", "https://h:": "", "https://h:0": "", "https://h:65536": "", "https://h:x": "", "https://h h": "", " https://h": "", "https://h/%2f": "",
		"https://" + strings.Repeat("h", 3000): "",
	} {
		p := testProxy(url)
		got, err := p.Authority()
		if got != want || (err == nil) != (want != "") || (p.Valid() == nil) != (want != "") {
			t.Errorf("%q: authority %q, %v, valid %v; want %q", url, got, err, p.Valid(), want)
		}
		c := Candidate{Role: RolePluginProxy, Proxy: p}
		if (c.ProxyValid() == nil) != (want != "") {
			t.Errorf("%q: ProxyValid = %v", url, c.ProxyValid())
		}
	}
	bare := strings.TrimPrefix(testPin, "sha256/")
	for _, pin := range []string{"", bare, "sha256/", "SHA256/" + bare, "sha256/" + bare[:43], "sha256/" + strings.Replace(bare, "A=", "B=", 1), testPin + "=", testPin + "\n", "sha1/" + bare} {
		p := testProxy("https://h")
		p.PinSHA256 = pin
		if p.Valid() == nil {
			t.Errorf("pin %q is valid", pin)
		}
	}
	if (Candidate{Role: RolePluginProxy}).ProxyValid() == nil {
		t.Error("a candidate without proxy is valid")
	}
}

func TestProxyURLs(t *testing.T) {
	p := testProxy("https://h:443/")
	p.Surfaces = []Surface{"API"}
	for s, want := range map[Surface]string{SurfaceRelay: "https://h/relay", SurfaceAPI: "https://h/api", SurfaceDashboard: "", "other": ""} {
		if got, err := p.Base(s); got != want || (err == nil) != (want != "") {
			t.Errorf("Base(%s) = %q, %v", s, got, err)
		}
	}
	for url, want := range map[string]string{"https://h:443": "wss://h/relay/ws", "https://h": "wss://h/relay/ws", "https://[::1]:9443": "wss://[::1]:9443/relay/ws", "http://h": ""} {
		if got, err := testProxy(url).WebSocketURL(); got != want || (err == nil) != (want != "") {
			t.Errorf("WebSocketURL of %s = %q, %v", url, got, err)
		}
	}
}

func TestSurfaces(t *testing.T) {
	for in, want := range map[string]string{"": "relay", "RELAY,Api": "relay,api", "api,api,API": "api", "ftp": "relay", "dashboard,ftp,relay": "dashboard,relay"} {
		var list, out []string
		if in != "" {
			list = strings.Split(in, ",")
		}
		p := &Proxy{}
		for _, s := range list {
			p.Surfaces = append(p.Surfaces, Surface(s))
		}
		for _, s := range normalSurfaces(p.Surfaces) {
			out = append(out, string(s))
		}
		if strings.Join(out, ",") != want {
			t.Errorf("%q reads as %v, want %s", in, out, want)
		}
		if !p.Has(SurfaceRelay) || p.Has(SurfaceAPI) != slices.Contains(out, "api") {
			t.Errorf("%q: Has disagrees", in)
		}
	}
}

func TestBrokerValid(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*Candidate)
		ok     bool
	}{
		"good":              {func(*Candidate) {}, true},
		"legacy role":       {func(c *Candidate) { c.Role = "broker" }, true},
		"other legacy":      {func(c *Candidate) { c.Role = "relay_broker" }, true},
		"no path":           {func(c *Candidate) { c.Broker.URL = "wss://b" }, true},
		"route":             {func(c *Candidate) { c.Broker.CredentialKind, c.Broker.ExpiresAt = KindRoute, 1 }, true},
		"no expiry":         {func(c *Candidate) { c.Broker.ExpiresAt = 0 }, true},
		"expires now":       {func(c *Candidate) { c.Broker.ExpiresAt = 1_789_999_000 }, false},
		"expires next":      {func(c *Candidate) { c.Broker.ExpiresAt = 1_789_999_001 }, true},
		"other role":        {func(c *Candidate) { c.Role = "outbound-broker" }, false},
		"no broker":         {func(c *Candidate) { c.Broker = nil }, false},
		"no proxy":          {func(c *Candidate) { c.Proxy = nil }, false},
		"no pin":            {func(c *Candidate) { c.Proxy.PinSHA256 = "" }, false},
		"version 2":         {func(c *Candidate) { c.Broker.ProtocolVersion = 2 }, false},
		"ws":                {func(c *Candidate) { c.Broker.URL = "ws://b/v1/connect" }, false},
		"query":             {func(c *Candidate) { c.Broker.URL = "wss://b/v1/connect?" }, false},
		"user":              {func(c *Candidate) { c.Broker.URL = "wss://u@b/v1/connect" }, false},
		"other path":        {func(c *Candidate) { c.Broker.URL = "wss://b/connect" }, false},
		"host id stray bit": {func(c *Candidate) { c.Broker.HostID = testHostID[:21] + "x" }, false},
		"host id padded":    {func(c *Candidate) { c.Broker.HostID += "==" }, false},
		"token stray bit":   {func(c *Candidate) { c.Broker.Token = testToken[:42] + "9" }, false},
		"token short":       {func(c *Candidate) { c.Broker.Token = testToken[:42] }, false},
		"token empty":       {func(c *Candidate) { c.Broker.Token = "" }, false},
		"kind":              {func(c *Candidate) { c.Broker.CredentialKind = "Bootstrap" }, false},
	} {
		c := Candidate{Role: RoleOutboundBroker, Broker: testBroker(), Proxy: testProxy("https://h:9443")}
		tt.change(&c)
		err := c.BrokerValid(testNow)
		if (err == nil) != tt.ok {
			t.Errorf("%s: %v", name, err)
		}
		if usable := c.Usable(testNow, Want{AllowPlaintext: true}) == nil; usable && !tt.ok {
			t.Errorf("%s: usable although not valid", name)
		}
		if err != nil {
			wantNoSecret(t, name, err.Error())
		}
	}
}

func TestIsBroker(t *testing.T) {
	for role, want := range map[Role]bool{"outbound_broker": true, "broker": true, "relay_broker": true, "Outbound_Broker": true, "": false, "plugin_proxy": false, "brokers": false, " broker": false} {
		if role.IsBroker() != want {
			t.Errorf("%q: %v", role, !want)
		}
		if (Candidate{Role: role}).IsExperimental() != want || !(Candidate{Role: role, Experimental: true}).IsExperimental() {
			t.Errorf("%q: IsExperimental disagrees", role)
		}
	}
}

func TestSecurityOf(t *testing.T) {
	plain := func(role Role) Candidate {
		return Candidate{Role: role, Security: SecurityPinned, API: &API{Host: "h", Port: 1}, Relay: &Relay{URL: "ws://h:1"}}
	}
	mixed := Candidate{Role: RolePublic, API: &API{Host: "h", Port: 443, TLS: true}, Relay: &Relay{URL: "ws://h:1"}, Dashboard: &Dashboard{URL: "HTTPS://h"}}
	noPin := Candidate{Role: RolePluginProxy, Security: SecurityPinned, Proxy: &Proxy{URL: "https://h"}, API: &API{Host: "h", Port: 1}}
	for name, tt := range map[string]struct {
		c       Candidate
		surface Surface
		want    string
		usable  bool
	}{
		"secure link":                {Candidate{Role: RolePluginProxy, Proxy: testProxy("https://h")}, "", SecurityPinned, true},
		"secure link by other role":  {Candidate{Role: RoleTailscale, Proxy: testProxy("https://h")}, SurfaceAPI, SecurityPinned, true},
		"reach":                      {Candidate{Role: "broker", Broker: testBroker(), Proxy: testProxy("https://h")}, SurfaceRelay, SecurityE2E, true},
		"a broker of another role":   {Candidate{Role: RoleLAN, Broker: testBroker(), Proxy: testProxy("https://h")}, "", SecurityE2E, false},
		"plain LAN":                  {plain(RoleLAN), "", SecurityPlaintext, false},
		"plain with the tailnet's":   {plain(RoleTailscale), SurfaceRelay, SecurityPlaintext, false},
		"plain called secure link":   {plain(RolePluginProxy), "", "", false},
		"plain called reach":         {plain(RoleOutboundBroker), "", "", false},
		"no pin, plain API besides":  {noPin, SurfaceAPI, "", false},
		"mixed as a whole":           {mixed, "", SecurityPlaintext, false},
		"mixed, API":                 {mixed, SurfaceAPI, SecurityTLS, true},
		"mixed, relay":               {mixed, SurfaceRelay, SecurityPlaintext, false},
		"mixed, dashboard":           {mixed, SurfaceDashboard, SecurityTLS, true},
		"nothing":                    {Candidate{Role: RoleLAN}, "", "", false},
		"not offered":                {plain(RoleLAN), SurfaceDashboard, "", false},
		"unknown surface":            {mixed, "other", "", false},
		"relay url that is no url":   {Candidate{Role: RolePublic, Relay: &Relay{URL: "wss:"}}, "", SecurityPlaintext, false},
		"dashboard at a bare scheme": {Candidate{Role: RolePublic, Dashboard: &Dashboard{URL: "https"}}, "", SecurityPlaintext, false},
	} {
		if got := tt.c.SecurityOf(tt.surface); got != tt.want {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
		if err := tt.c.Usable(time.Unix(1, 0), Want{Surface: tt.surface}); (err == nil) != tt.usable {
			t.Errorf("%s: Usable = %v", name, err)
		}
		allowed := tt.usable || tt.want == SecurityPlaintext
		if err := tt.c.Usable(time.Unix(1, 0), Want{Surface: tt.surface, AllowPlaintext: true}); (err == nil) != allowed {
			t.Errorf("%s: Usable with consent = %v", name, err)
		}
	}
}
