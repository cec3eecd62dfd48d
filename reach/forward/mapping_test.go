package forward

import (
	"maps"
	"net/http"
	"testing"
)

// What the host sees of a request.
func TestRequestMapping(t *testing.T) {
	h := newHost(t, func(w http.ResponseWriter, r *http.Request) {})
	for name, tt := range map[string]struct {
		ns, path string
		header   map[string]string
		wantPath string
		want     map[string]string // "" = absent
	}{
		"as it is":       {"", "/api/v1/models?a=1", nil, "/api/v1/models?a=1", nil},
		"byte for byte":  {"", "/api/a%2Fb%3a/%7e;x?q=a;b&c=%zz&+", nil, "/api/a%2Fb%3a/%7e;x?q=a;b&c=%zz&+", nil},
		"namespace":      {"dashboard", "/x/y?q", nil, "/dashboard/x/y?q", nil},
		"namespace root": {"api", "/", nil, "/api/", nil},
		"namespace, raw": {"api", "/a%2Fb?q", nil, "/api/a%2Fb?q", nil},
		"own headers": {"", "/", map[string]string{"X-Hermes-Relay-Session": "s", "X-Forwarded-For": "1.2.3.4", "Forwarded": "for=x", "Authorization": "Bearer k", "X-Other": "o"}, "/",
			map[string]string{keyHeader: "", "X-Hermes-Relay-Session": "", "X-Forwarded-For": "", "Forwarded": "", "Authorization": "Bearer k", "X-Other": "o", "User-Agent": "Go-http-client/1.1"}},
		"origin":              {"", "/", map[string]string{"Origin": "http://home.localhost:@"}, "/", map[string]string{"Origin": "https://reach"}},
		"referer":             {"", "/", map[string]string{"Referer": "http://localhost:@/api/x?y"}, "/", map[string]string{"Referer": "https://reach/api/x?y"}},
		"referer, namespace":  {"api", "/", map[string]string{"Referer": "http://localhost:@/x"}, "/api/", map[string]string{"Referer": "https://reach/api/x"}},
		"referer of others":   {"", "/", map[string]string{"Referer": "http://localhost:3000/secret"}, "/", map[string]string{"Referer": ""}},
		"referer with a link": {"", "/", map[string]string{"Referer": "http://localhost:@/.reach/open?k=x"}, "/", map[string]string{"Referer": ""}},
		"cookies": {"", "/", map[string]string{"Cookie": `a="x y"; reach_@=1; reach_unix=2; reach_x=3; reach-__Host-s=4; __Secure-t=5; reach-b=6; bare`}, "/",
			map[string]string{"Cookie": `a="x y"; reach_x=3; __Host-s=4; reach-b=6; bare`}},
		"only our cookie": {"", "/", map[string]string{"Cookie": "reach_@=1"}, "/", map[string]string{"Cookie": ""}},
	} {
		f := start(t, Config{Transport: h, Namespace: tt.ns})
		header := map[string]string{keyHeader: f.Key()}
		maps.Copy(header, tt.header)
		if res := ask(t, f, "GET", tt.path, header); res.StatusCode != 200 {
			t.Errorf("%s: %s %s", name, res.Status, text(t, res))
			continue
		}
		all := h.requests()
		got := all[len(all)-1]
		if got.URL.RequestURI() != tt.wantPath {
			t.Errorf("%s: path %s, want %s", name, got.URL.RequestURI(), tt.wantPath)
		}
		for k, v := range tt.want {
			if got.Header.Get(k) != v || v == "" && got.Header[k] != nil {
				t.Errorf("%s: %s = %q, want %q", name, k, got.Header[k], v)
			}
		}
	}
}

// What the browser sees of an answer.
func TestResponseMapping(t *testing.T) {
	for name, tt := range map[string]struct{ ns, header, in, want string }{
		"relative":                   {"", "Location", "x/y", "x/y"},
		"path":                       {"", "Location", "/dashboard/x?q#f", "/dashboard/x?q#f"},
		"own authority":              {"", "Location", "https://" + authority + "/dashboard/x?q", "/dashboard/x?q"},
		"own authority, capitals":    {"", "Location", "https://HOST.test:9443/dashboard", "/dashboard"},
		"scheme-relative":            {"", "Location", "//" + authority + "/dashboard", "/dashboard"},
		"placeholder":                {"", "Location", "https://reach/x", "/x"},
		"no path":                    {"", "Location", "https://" + authority, "/"},
		"query only":                 {"", "Location", "https://" + authority + "?q", "/?q"},
		"same host, other port":      {"", "Location", "https://host.test/x", "https://host.test/x"},
		"identity provider":          {"", "Location", "https://id.example/login?back=https://" + authority, "https://id.example/login?back=https://" + authority},
		"plain http":                 {"", "Location", "http://" + authority + "/x", "http://" + authority + "/x"},
		"namespace":                  {"dashboard", "Location", "/dashboard/login?next=/dashboard/x", "/login?next=/dashboard/x"},
		"namespace itself":           {"dashboard", "Location", "/dashboard", "/"},
		"namespace with query":       {"dashboard", "Location", "/dashboard?q", "/?q"},
		"namespace, absolute":        {"dashboard", "Location", "https://" + authority + "/dashboard/login", "/login"},
		"not below the namespace":    {"api", "Location", "/apixyz", "/apixyz"},
		"content location":           {"", "Content-Location", "https://" + authority + "/x", "/x"},
		"cookie":                     {"", "Set-Cookie", "a=b; Path=/dashboard; Secure; HttpOnly; SameSite=Strict; Max-Age=60", "a=b; Path=/dashboard; HttpOnly; SameSite=Strict; Max-Age=60"},
		"cookie, namespace":          {"dashboard", "Set-Cookie", "a=b=c; secure; path=/dashboard/x", "a=b=c; Path=/x"},
		"cookie, namespace root":     {"dashboard", "Set-Cookie", "a=b; Path=/dashboard", "a=b; Path=/"},
		"cookie with domain":         {"", "Set-Cookie", "a=b; Domain=host.test; Path=/", "a=b; Path=/"},
		"cookie for other sites":     {"", "Set-Cookie", "a=b; SameSite=None; Secure; Partitioned", "a=b; SameSite=Lax"},
		"cookie with a prefix":       {"", "Set-Cookie", "__Host-s=v; Secure; Path=/", "reach-__Host-s=v; Path=/"},
		"cookie with another prefix": {"", "Set-Cookie", "__secure-hd-s=v; Secure", "reach-__secure-hd-s=v"},
		"unknown attribute":          {"", "Set-Cookie", "a=b; Priority=High;  Odd", "a=b; Priority=High; Odd"},
		"our cookie":                 {"", "Set-Cookie", "reach_8788=stolen; Path=/", ""},
		"hsts":                       {"", "Strict-Transport-Security", "max-age=1", ""},
		"alt-svc":                    {"", "Alt-Svc", `h3=":9443"`, ""},
		"others":                     {"", "X-Other", "https://" + authority + "/x", "https://" + authority + "/x"},
	} {
		h := newHost(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set(tt.header, tt.in)
			w.WriteHeader(http.StatusFound)
		})
		f := start(t, Config{Transport: h, Namespace: tt.ns})
		res := ask(t, f, "GET", "/x", map[string]string{keyHeader: f.Key()})
		if got := res.Header.Get(tt.header); got != tt.want || res.StatusCode != 302 {
			t.Errorf("%s: %s %q, want %q", name, res.Status, got, tt.want)
		}
	}
}
