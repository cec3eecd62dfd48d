package securelink

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
)

func TestParseTarget(t *testing.T) {
	for in, ok := range map[string]bool{
		"/":                        true,
		"/api/v1/models":           true,
		"/api/":                    true,
		"/api/x?":                  true,
		"/api/a%3Ab%20c%C3%A9":     true,
		"/api/x?a=../..&b=%2f//\\": true, // the query is nobody's path
		"/api/100%25":              true,
		"/api/a..b/...":            true,
		"/api/%25zz":               true,
		"/api/~;v=1":               true,
		"":                         false,
		"*":                        false,
		"api":                      false,
		"https://host/api/x":       false,
		"//host/api":               false,
		"/api//x":                  false,
		"/api/x//":                 false,
		`/api\x`:                   false,
		"/api/./x":                 false,
		"/api/../relay/ws":         false,
		"/api/..":                  false,
		"/.":                       false,
		"/api/%2e%2e/x":            false,
		"/api/%2E./x":              false,
		"/api/a%2fb":               false,
		"/api/a%2Fb":               false,
		"/api/a%5cb":               false,
		"/api/a%5Cb":               false,
		"/api/%252e%252e/x":        false,
		"/api/a%252fb":             false,
		"/api/a%25252Fb":           false,
		"/api/a%25%32%66b":         false,
		"/api/a%%32fb":             false,
		"/api/%2525252525252541":   false, // deeper than anybody needs
		"/api/%":                   false,
		"/api/%2":                  false,
		"/api/%zz":                 false,
		"/api/x#y":                 false,
		"/api/x?a#b":               false,
		"/api/a b":                 false,
		"/api/a\tb":                false,
		"/api/a\x00b":              false,
		"/api/a\x7fb":              false,
	} {
		got, bad := parseTarget(in)
		if (bad == nil) != ok {
			t.Errorf("parseTarget(%q) = %+v, %v", in, got, bad)
		}
		if bad != nil && bad.status != http.StatusBadRequest {
			t.Errorf("parseTarget(%q): status %d", in, bad.status)
		}
	}
}

// Whatever passes is forwarded as it came, stays in its namespace for whoever
// decodes it, and cannot leave it.
func FuzzParseTarget(f *testing.F) {
	for _, in := range []string{"/api/x?y", "/api/%252e%252e/x", "/dashboard/a%3Ab?", "/api/a%25%32%66b", `/api\..\x`} {
		f.Add(in)
	}
	base, _ := url.Parse("http://127.0.0.1:8642")
	f.Fuzz(func(t *testing.T, in string) {
		got, bad := parseTarget(in)
		if bad != nil {
			return
		}
		if out := upstreamURL(base, got.path, got).RequestURI(); out != in {
			t.Errorf("%q would be forwarded as %q", in, out)
		}
		for path := got.path; ; {
			for segment := range strings.SplitSeq(path, "/") {
				if segment == "." || segment == ".." {
					t.Errorf("%q decodes to %q", in, path)
				}
			}
			next, err := url.PathUnescape(path)
			if err != nil || next == path {
				break
			}
			if strings.Count(next, "/") != strings.Count(path, "/") || strings.Contains(next, `\`) {
				t.Errorf("%q decodes to %q", in, next)
			}
			path = next
		}
	})
}

func TestRoute(t *testing.T) {
	for path, want := range map[string][2]string{
		"/api/v1/models":     {nsAPI, "/v1/models"},
		"/api/":              {nsAPI, "/"},
		"/dashboard/api/x":   {nsDashboard, "/api/x"},
		"/relay/ws":          {nsRelay, "/ws"},
		"/api":               {},
		"/dashboard":         {},
		"/apix/y":            {},
		"/API/v1":            {},
		"/%61pi/v1":          {},
		"/":                  {},
		"/health":            {},
		"/favicon.ico":       {},
		"/.well-known/x":     {},
		"/dashboardx":        {},
		"/relay/api/v1/x":    {nsRelay, "/api/v1/x"},
		"/dashboard;x=1/api": {},
	} {
		if ns, rest, _ := route(path); ns != want[0] || rest != want[1] {
			t.Errorf("route(%q) = %q, %q; want %q", path, ns, rest, want)
		}
	}
}

func TestCheckHost(t *testing.T) {
	covers := func(h string) bool { return h == "home.example" || h == "192.168.1.10" || h == "2001:db8::7" }
	for host, want := range map[string]int{
		"home.example":           0,
		"home.example:9443":      0,
		"home.example:1":         0,
		"HOME.Example.:9443":     0,
		"home.example:":          0,
		"192.168.1.10:9443":      0,
		"[2001:db8::7]:9443":     0,
		"[2001:0DB8:0::7]":       0,
		"[::ffff:192.168.1.10]":  0,
		"away.example":           421,
		"192.168.1.1":            421,
		"home.example.evil":      421,
		"localhost:9443":         421,
		"":                       400,
		":9443":                  400,
		"home.example:94x3":      400,
		"home.example:999999":    400,
		"home.example:94:43":     400,
		"2001:db8::7":            400,
		"[2001:db8::7]x":         400,
		"[2001:db8::7":           400,
		"user@home.example":      400,
		"home.example/x":         400,
		"home.example, x":        400,
		"home example":           400,
		"home.example\x00.evil":  400,
		"[home.example]:9443":    400,
		"0x7f000001":             400,
		"home.example:9443:9443": 400,
	} {
		bad := checkHost(&http.Request{Host: host, Header: http.Header{}}, covers)
		if got := statusOf(bad); got != want {
			t.Errorf("Host %q: %d, want %d", host, got, want)
		}
	}
	for name, values := range map[string][]string{"another": {"away.example"}, "two": {"home.example", "home.example"}} {
		if bad := checkHost(&http.Request{Host: "home.example", Header: http.Header{"Host": values}}, covers); statusOf(bad) != 400 {
			t.Errorf("%s Host beside :authority: %v", name, bad)
		}
	}
}

func statusOf(r *refusal) int {
	if r == nil {
		return 0
	}
	return r.status
}

func FuzzSplitHost(f *testing.F) {
	f.Add("home.example:9443")
	f.Add("[2001:db8::7]:9443")
	f.Fuzz(func(t *testing.T, in string) {
		host, _, ok := splitHost(in)
		if !ok {
			return
		}
		again := host
		if strings.Contains(host, ":") {
			again = "[" + host + "]"
		}
		if twice, _, ok := splitHost(again); !ok || twice != host {
			t.Errorf("splitHost(%q) = %q, again %q, %v", in, host, twice, ok)
		}
	})
}

func TestSameOrigin(t *testing.T) {
	for origin, want := range map[string]bool{
		"https://home.example:9443":       true,
		"https://HOME.example:9443":       true,
		"https://home.example":            false, // that is port 443
		"http://home.example:9443":        false,
		"https://home.example:8443":       false, // cookies do not know ports: this must
		"https://away.example:9443":       false,
		"https://home.example:9443/":      false,
		"https://x@home.example:9443":     false,
		"https://home.example.evil:9443":  false,
		"null":                            false,
		"":                                false,
		"file://":                         false,
		"https://home.example:9443,x":     false,
		"https://evil?home.example:9443":  false,
		"capacitor://home.example:9443":   false,
		"https://home.example:9443#frag":  false,
		"https://home.example:9443\\evil": false,
	} {
		if got := sameOrigin(origin, "home.example:9443"); got != want {
			t.Errorf("sameOrigin(%q) = %v", origin, got)
		}
	}
	if !sameOrigin("https://home.example", "home.example:443") || !sameOrigin("https://[2001:db8::7]:1", "[2001:DB8:0::7]:1") {
		t.Error("equal origins in another spelling are refused")
	}
}

func TestWantsUpgrade(t *testing.T) {
	full := http.Header{"Upgrade": {"websocket"}, "Connection": {"Upgrade"}, "Sec-Websocket-Key": {"x"}}
	with := func(name string, values ...string) http.Header {
		h := full.Clone()
		if h[name] = values; values == nil {
			delete(h, name)
		}
		return h
	}
	for name, tt := range map[string]struct {
		h          http.Header
		yes, error bool
	}{
		"plain":               {http.Header{}, false, false},
		"h2c is no WebSocket": {http.Header{"Upgrade": {"h2c"}, "Connection": {"Upgrade"}}, false, false},
		"whole":               {full, true, false},
		"many tokens":         {with("Connection", "keep-alive, Upgrade"), true, false},
		"two lines":           {with("Connection", "keep-alive", "upgrade"), true, false},
		"upper case":          {with("Upgrade", "WebSocket"), true, false},
		"Connection lost":     {with("Connection"), false, true},
		"Connection replaced": {with("Connection", "keep-alive"), false, true},
		"Upgrade lost":        {with("Upgrade"), false, true},
		"Upgrade doubled":     {with("Upgrade", "websocket", "websocket"), false, true},
		"two protocols":       {with("Upgrade", "h2c, websocket"), false, true},
		"key lost":            {with("Sec-Websocket-Key"), false, true},
	} {
		r := &http.Request{Method: "GET", ProtoMajor: 1, ProtoMinor: 1, Header: tt.h}
		if yes, bad := wantsUpgrade(r); yes != tt.yes || (bad != nil) != tt.error {
			t.Errorf("%s: %v, %v", name, yes, bad)
		}
	}
	for name, r := range map[string]*http.Request{
		"POST":     {Method: "POST", ProtoMajor: 1, ProtoMinor: 1, Header: full},
		"HTTP/1.0": {Method: "GET", ProtoMajor: 1, ProtoMinor: 0, Header: full},
		"HTTP/2":   {Method: "GET", ProtoMajor: 2, Header: full},
	} {
		if yes, bad := wantsUpgrade(r); yes || bad == nil {
			t.Errorf("%s: taken for a plain request (%v) or an upgrade (%v)", name, bad, yes)
		}
	}
}
