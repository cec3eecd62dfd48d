package securelink

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Each row of the header table, in each namespace.
func TestForwardHeaders(t *testing.T) {
	for name, want := range map[string][3]bool{ // crosses to relay, api, dashboard
		"Authorization":            {false, true, true},
		"Accept":                   {false, true, true},
		"X-Custom":                 {false, true, true},
		"User-Agent":               {false, true, true},
		"Range":                    {false, true, true},
		"Idempotency-Key":          {false, true, true},
		"Origin":                   {false, true, true}, // checked and mapped by the caller
		"X-Hermes-Relay-Session":   {},
		"X_hermes_relay_session":   {},
		"X-Hermes-Proxy-Secret":    {},
		"X-Hermes-Proxy-Peer":      {},
		"X_Hermes_Proxy_Secret":    {},
		"Connection":               {},
		"Proxy-Connection":         {},
		"Keep-Alive":               {},
		"Proxy-Authenticate":       {},
		"Proxy-Authorization":      {},
		"Te":                       {},
		"Trailer":                  {},
		"Transfer-Encoding":        {},
		"Upgrade":                  {},
		"Host":                     {},
		"Forwarded":                {},
		"X-Forwarded-For":          {},
		"X-Forwarded-Host":         {},
		"X-Forwarded-Proto":        {},
		"X-Forwarded-Prefix":       {},
		"X-Forwarded-Anything":     {},
		"X_Forwarded_For":          {},
		"X-Real-Ip":                {},
		"Tailscale-User-Login":     {},
		"Tailscale-Headers-Info":   {},
		"X-Hermes-Relay-Session-2": {false, true, true},
	} {
		for i, ns := range everywhere {
			got := forwardHeaders(ns, http.Header{name: {"x=1"}})
			if _, crosses := got[name]; crosses != want[i] {
				t.Errorf("%s towards %s: crosses = %v, want %v", name, ns, crosses, want[i])
			}
		}
	}
	if got := forwardHeaders(nsAPI, http.Header{"Cookie": {"a=b"}}); len(got) > 0 {
		t.Errorf("cookies reach the API: %v", got)
	}
	got := forwardHeaders(nsDashboard, http.Header{
		"Connection": {"X-One, close", "x-two"}, "X-One": {"1"}, "X-Two": {"2"}, "X-Three": {"3"}, "Te": {"trailers, deflate"},
	})
	if want := (http.Header{"X-Three": {"3"}, "Te": {"trailers"}}); !cmp.Equal(got, want) {
		t.Errorf("nominated headers: %v, want %v", got, want)
	}
}

func TestReturnHeaders(t *testing.T) {
	in := http.Header{
		"Set-Cookie": {"a=b", gateCookie + "=stolen; Path=/; Secure"}, "Alt-Svc": {`h3=":9119"`},
		"X-Hermes-Proxy-Secret": {"s"}, "Content-Encoding": {"gzip"}, "Etag": {`"x"`},
	}
	for ns, want := range map[string]http.Header{
		nsAPI:       {"Content-Encoding": {"gzip"}, "Etag": {`"x"`}},
		nsDashboard: {"Content-Encoding": {"gzip"}, "Etag": {`"x"`}, "Set-Cookie": {"a=b; Secure"}},
	} {
		h := in.Clone()
		if returnHeaders(ns, h); !cmp.Equal(h, want) {
			t.Errorf("%s: %s", ns, cmp.Diff(want, h))
		}
	}
}

func TestForwardCookies(t *testing.T) {
	for in, want := range map[string]string{
		"a=b":                         "a=b",
		"a=b; c=d":                    "a=b; c=d",
		"a=b;c=d ;  e=f":              "a=b; c=d; e=f",
		"a=b=c; d=\"x\"":              "a=b=c; d=\"x\"",
		"__Secure-hd-s=1":             "__Host-s=1",
		"__secure-HD-s=1":             "__Host-s=1",
		"__Host-s=forged; a=b":        "a=b",
		"__host-s=forged":             "",
		gateCookie + "=secret; a=b":   "a=b",
		" " + gateCookie + " =secret": "",
		"__Secure-s=1":                "__Secure-s=1",
		"nameless; =x; a=b":           "a=b",
		"":                            "",
		"__Host-s=forged; __Secure-hd-s=real; x=y":   "__Host-s=real; x=y",
		"a=b; __HOST-hermes-gate=secret; __Host-x=1": "a=b",
	} {
		if got := forwardCookies([]string{in}); got != want {
			t.Errorf("%q becomes %q, want %q", in, got, want)
		}
	}
	if got := forwardCookies([]string{"a=b", gateCookie + "=x", "c=d"}); got != "a=b; c=d" {
		t.Errorf("several lines become %q", got)
	}
}

func TestMapSetCookie(t *testing.T) {
	for in, want := range map[string]string{
		"a=b":                                       "a=b; Secure",
		"a=b; Path=/":                               "a=b; Path=/dashboard; Secure",
		"a=b; path=/auth; HttpOnly":                 "a=b; Path=/dashboard/auth; HttpOnly; Secure",
		"a=b; Path=/dashboard":                      "a=b; Path=/dashboard; Secure", // minds X-Forwarded-Prefix already
		"a=b; Path=/dashboard/auth":                 "a=b; Path=/dashboard/auth; Secure",
		"a=b; Path=/dashboards":                     "a=b; Path=/dashboard/dashboards; Secure",
		"a=b; Path=auth":                            "a=b; Secure",
		"a=b; Path=; Max-Age=0":                     "a=b; Max-Age=0; Secure",
		"a=b; Domain=127.0.0.1; SameSite=Lax":       "a=b; SameSite=Lax; Secure",
		"a=b; DOMAIN = .example.com":                "a=b; Secure",
		"a=b; secure; HttpOnly":                     "a=b; secure; HttpOnly",
		"__Host-s=1; Path=/; Secure; HttpOnly":      "__Secure-hd-s=1; Path=/dashboard; Secure; HttpOnly",
		"__host-s=1; Path=/; Secure":                "__Secure-hd-s=1; Path=/dashboard; Secure",
		"__Secure-s=1; Path=/dashboard; Secure":     "__Secure-s=1; Path=/dashboard; Secure",
		"a=; Expires=Thu, 01 Jan 1970 00:00:00 GMT": "a=; Expires=Thu, 01 Jan 1970 00:00:00 GMT; Secure",
		"a=b=c;;":                       "a=b=c; Secure",
		"a=\"x y\"; Path=/":             "a=\"x y\"; Path=/dashboard; Secure",
		gateCookie + "=x":               "",
		"__HOST-Hermes-Gate=x; Path=/":  "",
		"__Secure-hd-s=1":               "",
		"nameless":                      "",
		"=x":                            "",
		"":                              "",
		"a=b; Path=/x; Path=/y; Secure": "a=b; Path=/dashboard/x; Path=/dashboard/y; Secure",
	} {
		if got, _ := mapSetCookie(in); got != want {
			t.Errorf("%q becomes %q, want %q", in, got, want)
		}
	}
}

// A cookie that the Dashboard set comes back to it as it was set.
func FuzzCookies(f *testing.F) {
	f.Add("__Host-s=1; Path=/; Secure")
	f.Add("a=b; Path=/x")
	f.Add("__Secure-hd-x=1")
	f.Fuzz(func(t *testing.T, line string) {
		out, ok := mapSetCookie(line)
		if !ok {
			return
		}
		pair, _, _ := strings.Cut(out, ";")
		if _, host := cutFold(pair, hostPrefix); host {
			t.Errorf("%q is sent out as %q", line, out)
		}
		for attr := range strings.SplitSeq(out, ";") {
			key, value, _ := strings.Cut(strings.TrimSpace(attr), "=")
			if attr != pair && (strings.EqualFold(key, "domain") || strings.EqualFold(key, "path") && !strings.HasPrefix(value, "/dashboard")) {
				t.Errorf("%q is sent out as %q", line, out)
			}
		}
		name, value, _ := strings.Cut(line, "=")
		value, _, _ = strings.Cut(value, ";")
		want := strings.Trim(name, " \t") + "=" + strings.Trim(value, " \t")
		got := forwardCookies([]string{pair})
		if rest, host := cutFold(want, hostPrefix); host {
			want = hostPrefix + rest
		}
		if got != want {
			t.Errorf("%q was set, %q comes back", want, got)
		}
	})
}

func TestMapLocation(t *testing.T) {
	base, _ := url.Parse("http://127.0.0.1:9119")
	for in, want := range map[string]string{
		"/":                                     "/dashboard/",
		"/login":                                "/dashboard/login",
		"/login?next=%2Fx":                      "/dashboard/login?next=%2Fx",
		"/?a=b":                                 "/dashboard/?a=b",
		"/login#top":                            "/dashboard/login#top",
		"/dashboard/login":                      "/dashboard/login", // minds X-Forwarded-Prefix already
		"/dashboard":                            "/dashboard",
		"/dashboards":                           "/dashboard/dashboards",
		"/a%3Ab":                                "/dashboard/a%3Ab",
		"http://127.0.0.1:9119/login":           "/dashboard/login",
		"http://127.0.0.1:9119":                 "/dashboard/",
		"http://127.0.0.1:9119?x=y":             "/dashboard/?x=y",
		"http://localhost:9119/login":           "/dashboard/login",
		"http://[::1]:9119/login":               "/dashboard/login",
		"login":                                 "/dashboard/auth/login",
		"./login":                               "/dashboard/auth/login",
		"../login":                              "/dashboard/login",
		"../../../relay/ws":                     "/dashboard/relay/ws",
		"..":                                    "/dashboard/",
		"?a=b":                                  "?a=b",
		"#x":                                    "#x",
		"https://idp.example/auth?x=y":          "https://idp.example/auth?x=y",
		"https://home.example:9443/dashboard/x": "https://home.example:9443/dashboard/x",
		"http://idp.example/auth":               "",
		"http://127.0.0.1:8642/v1":              "",
		"https://127.0.0.1:9119/x":              "",
		"https://localhost/x":                   "",
		"https://a.localhost./x":                "",
		"https://2130706433/x":                  "",
		"https://0/x":                           "",
		"https://[::]/x":                        "",
		"https://u:p@idp.example/":              "",
		"//evil.example/x":                      "",
		"///evil.example":                       "",
		`/\evil.example`:                        "",
		`\\evil.example`:                        "",
		"/a//b":                                 "",
		"/%2e%2e/relay/ws":                      "",
		"javascript:alert(1)":                   "",
		"ftp://idp.example/":                    "",
		"https:idp.example":                     "",
		"https:///x":                            "",
		"/a b":                                  "",
		"/a\x00":                                "",
		"http://127.0.0.1:9119//evil.example/x": "",
		"hermes://127.0.0.1:9119/x":             "",
	} {
		got, err := mapLocation(in, base, "/auth/start")
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q becomes %q (%v), want %q", in, got, err, want)
		}
	}
	socket := &url.URL{Scheme: "http", Host: "localhost"}
	if got, err := mapLocation("http://localhost/login", socket, "/"); got != "/dashboard/login" || err != nil {
		t.Errorf("behind a unix socket: %q, %v", got, err)
	}
}

// Whatever is passed on is either under /dashboard, on the same page, or https
// on another machine.
func FuzzMapLocation(f *testing.F) {
	for _, in := range []string{"/login", "../x", "https://idp.example/", "http://127.0.0.1:9119/x", "//x", "?a"} {
		f.Add(in)
	}
	base, _ := url.Parse("http://127.0.0.1:9119")
	here, _ := url.Parse("https://home.example:9443/dashboard/auth/start")
	f.Fuzz(func(t *testing.T, in string) {
		out, err := mapLocation(in, base, "/auth/start")
		if err != nil {
			return
		}
		u, err := url.Parse(out)
		if err != nil {
			t.Fatalf("%q becomes %q: %v", in, out, err)
		}
		to := here.ResolveReference(u)
		if to.Scheme != "https" || isLoopbackHost(to.Hostname()) {
			t.Errorf("%q leads to %v", in, to)
		}
		if to.Host == here.Host && out != in && to.Path != "/dashboard" && !strings.HasPrefix(to.Path, "/dashboard/") {
			t.Errorf("%q leads to %v", in, to)
		}
	})
}
