package forward

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"
)

// Who may use the origin. Nothing is dialled for anybody else.
func TestGate(t *testing.T) {
	h := newHost(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "answer") })
	f := start(t, Config{Transport: h})
	key := f.Key()
	with := func(kv ...string) map[string]string {
		m := map[string]string{keyHeader: key}
		for i := 0; i < len(kv); i += 2 {
			m[kv[i]] = kv[i+1]
		}
		return m
	}
	for name, tt := range map[string]struct {
		method, path string
		header       map[string]string
		want         int
	}{
		"key":                      {"GET", "/api/x", with(), 200},
		"key, POST":                {"POST", "/api/x", with(), 200},
		"no key":                   {"GET", "/api/x", nil, 401},
		"wrong key":                {"GET", "/api/x", map[string]string{keyHeader: key + "x"}, 401},
		"empty key":                {"GET", "/api/x", map[string]string{keyHeader: ""}, 401},
		"wrong cookie":             {"GET", "/api/x", map[string]string{"Cookie": "reach_@=x"}, 401},
		"key as a cookie":          {"GET", "/api/x", map[string]string{"Cookie": "reach_@=" + key}, 401},
		"key in the URL":           {"GET", "/api/x?k=" + key, nil, 401},
		"unknown path":             {"GET", "/", nil, 401},
		"own page":                 {"GET", "/.reach/", nil, 401},
		"own page with key":        {"GET", "/.reach/", with(), 200},
		"no such page":             {"GET", "/.reach/x", with(), 404},
		"own page is only read":    {"POST", "/.reach/", with(), 405},
		"open without k":           {"GET", "/.reach/open", nil, 401},
		"open with a wrong k":      {"GET", "/.reach/open?k=x", nil, 401},
		"open with the script key": {"GET", "/.reach/open?k=" + key, nil, 401},
		"open by HEAD":             {"HEAD", "/.reach/open?k=x", nil, 405},

		"name":                {"GET", "/", with("Host", "home.localhost:@"), 200},
		"localhost":           {"GET", "/", with("Host", "localhost:@"), 200},
		"rebound name":        {"GET", "/", with("Host", "evil.example:@"), 421},
		"other profile":       {"GET", "/", with("Host", "work.localhost:@"), 421},
		"no port":             {"GET", "/", with("Host", "localhost"), 421},
		"other port":          {"GET", "/", with("Host", "localhost:1"), 421},
		"other loopback":      {"GET", "/", with("Host", "127.0.0.2:@"), 421},
		"final dot":           {"GET", "/", with("Host", "localhost.:@"), 421},
		"rebound, no key":     {"GET", "/", map[string]string{"Host": "evil.example:@"}, 421},
		"rebound opening":     {"GET", "/.reach/open?k=x", map[string]string{"Host": "evil.example:@"}, 421},
		"capitals":            {"GET", "/", with("Host", "LOCALHOST:@"), 421},
		"own origin":          {"POST", "/", with("Origin", "http://home.localhost:@"), 200},
		"own alias":           {"POST", "/", with("Origin", "http://127.0.0.1:@"), 200},
		"other origin":        {"POST", "/", with("Origin", "http://evil.example"), 403},
		"other port's origin": {"POST", "/", with("Origin", "http://localhost:3000"), 403},
		"https origin":        {"POST", "/", with("Origin", "https://localhost:@"), 403},
		"null origin":         {"POST", "/", with("Origin", "null"), 403},
		"preflight":           {"OPTIONS", "/", with("Origin", "http://evil.example", "Access-Control-Request-Method", "PUT"), 403},
		"socket of a page": {"GET", "/relay/ws", with("Origin", "http://evil.example", "Connection", "Upgrade", "Upgrade", "websocket",
			"Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "AAAAAAAAAAAAAAAAAAAAAA=="), 403},

		"same origin":         {"GET", "/", with("Sec-Fetch-Site", "same-origin"), 200},
		"typed":               {"GET", "/", with("Sec-Fetch-Site", "none"), 200},
		"cross site":          {"GET", "/", with("Sec-Fetch-Site", "cross-site"), 403},
		"cross-site link":     {"GET", "/", with("Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"), 403},
		"neighbour's image":   {"GET", "/", with("Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "no-cors", "Sec-Fetch-Dest", "image"), 403},
		"neighbour's link":    {"GET", "/", with("Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"), 200},
		"neighbour's frame":   {"GET", "/", with("Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "iframe"), 403},
		"neighbour's form":    {"POST", "/", with("Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"), 403},
		"unknown site":        {"GET", "/", with("Sec-Fetch-Site", "same-planet"), 403},
		"opening from a chat": {"GET", "/.reach/open?k=x", map[string]string{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 401},
		"opening as an image": {"GET", "/.reach/open?k=x", map[string]string{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}, 403},
		"trace":               {"TRACE", "/", with(), 405},
	} {
		before := len(h.requests())
		res := ask(t, f, tt.method, tt.path, tt.header)
		if res.StatusCode != tt.want {
			t.Errorf("%s: %s, want %d", name, res.Status, tt.want)
		}
		if dialled := len(h.requests()) - before; dialled != 0 && (tt.want != 200 || strings.HasPrefix(tt.path, ownPrefix)) {
			t.Errorf("%s: the host was asked", name)
		}
		if body := text(t, res); tt.want >= 400 && tt.method != "HEAD" {
			var e struct {
				Error struct{ Code, Message string }
			}
			if json.Unmarshal([]byte(body), &e) != nil || e.Error.Code == "" || e.Error.Message == "" || strings.Contains(body, key) {
				t.Errorf("%s: body %q", name, body)
			}
		}
	}
}

// Targets that are no paths, and doubled headers, which no client library sends.
func TestRawRequests(t *testing.T) {
	h := newHost(t, func(w http.ResponseWriter, r *http.Request) {})
	f := start(t, Config{Transport: h})
	host := "Host: 127.0.0.1:" + f.port() + "\r\n"
	key := keyHeader + ": " + f.Key() + "\r\n"
	for name, tt := range map[string]struct{ in, want string }{
		"good":            {"GET / HTTP/1.1\r\n" + host + key, "200"},
		"absolute":        {"GET http://127.0.0.1:" + f.port() + "/ HTTP/1.1\r\n" + host + key, "400"},
		"absolute, other": {"GET http://evil.example/ HTTP/1.1\r\n" + host + key, "400"},
		"connect":         {"CONNECT 127.0.0.1:1 HTTP/1.1\r\n" + host + key, "405"},
		"star":            {"OPTIONS * HTTP/1.1\r\n" + host + key, "400"},
		"two hosts":       {"GET / HTTP/1.1\r\n" + host + host + key, "400"},
		"no host":         {"GET / HTTP/1.0\r\n" + key, "421"},
		"two origins":     {"GET / HTTP/1.1\r\n" + host + key + "Origin: http://127.0.0.1:" + f.port() + "\r\nOrigin: http://evil.example\r\n", "403"},
		"two keys":        {"GET / HTTP/1.1\r\n" + host + key + keyHeader + ": x\r\n", "401"},
		"two sites":       {"GET / HTTP/1.1\r\n" + host + key + "Sec-Fetch-Site: none\r\nSec-Fetch-Site: cross-site\r\n", "403"},
	} {
		c, err := net.Dial("tcp", "127.0.0.1:"+f.port())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(c, tt.in, "Connection: close\r\n\r\n")
		line, err := bufio.NewReader(c).ReadString('\n')
		c.Close()
		if err != nil || !strings.Contains(line, " "+tt.want+" ") {
			t.Errorf("%s: %q, %v; want %s", name, line, err, tt.want)
		}
	}
	if n := len(h.requests()); n != 1 {
		t.Errorf("the host was asked %d times", n)
	}
}

// The printed link works once, in any browser; the cookie works after that.
func TestOpen(t *testing.T) {
	h := newHost(t, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Header.Get("Cookie")) })
	for ns, home := range map[string]string{"": "/.reach/", "dashboard": "/"} {
		f := start(t, Config{Transport: h, Namespace: ns})
		link, err := url.Parse(f.OpenURL())
		if err != nil || link.Host != "home.localhost:"+f.port() || len(link.Query().Get("k")) < 26 {
			t.Fatalf("%v, %v", link, err)
		}
		if res := ask(t, f, "HEAD", link.RequestURI(), nil); res.StatusCode != 405 {
			t.Errorf("HEAD: %s", res.Status)
		}
		res := ask(t, f, "GET", link.RequestURI(), map[string]string{"Host": link.Host})
		if res.StatusCode != 303 || res.Header.Get("Location") != home || res.Header.Get("Cache-Control") != "no-store" || res.Header.Get("Referrer-Policy") != "no-referrer" {
			t.Errorf("%s %v", res.Status, res.Header)
		}
		c := res.Cookies()
		if len(c) != 1 || c[0].Name != "reach_"+f.port() || !c[0].HttpOnly || c[0].SameSite != http.SameSiteStrictMode || c[0].Path != "/" ||
			c[0].Domain != "" || c[0].MaxAge != 0 || strings.Contains(c[0].Value, link.Query().Get("k")) {
			t.Fatalf("cookies %v", c)
		}
		if res := ask(t, f, "GET", link.RequestURI(), nil); res.StatusCode != 401 {
			t.Errorf("the link works twice: %s", res.Status)
		}
		// Another port's page may have set a cookie of our name before ours.
		res = ask(t, f, "GET", "/x", map[string]string{"Cookie": "a=1; reach_@=tossed; reach_@=" + c[0].Value + "; reach_1=other; b=2"})
		if got := text(t, res); res.StatusCode != 200 || got != "a=1; b=2" {
			t.Errorf("%s, the host saw cookies %q", res.Status, got)
		}
		if res := ask(t, f, "GET", "/.reach/", map[string]string{"Cookie": "reach_@=" + c[0].Value}); res.StatusCode != 200 || !strings.Contains(text(t, res), "home") {
			t.Errorf("own page: %s", res.Status)
		}
		other := start(t, Config{Transport: h})
		if res := ask(t, other, "GET", "/x", map[string]string{"Cookie": "reach_@=" + c[0].Value}); res.StatusCode != 401 {
			t.Errorf("another forwarder took the cookie: %s", res.Status)
		}
	}
}

func TestLinksAreBounded(t *testing.T) {
	g := newGate("reach_1")
	first := g.mint()
	last := ""
	for range maxLinks {
		last = g.mint()
	}
	if _, ok := g.spend(first); ok {
		t.Error("the oldest link outlived its place")
	}
	if _, ok := g.spend(""); ok {
		t.Error("no key opened")
	}
	if _, ok := g.spend(last); !ok || len(g.links) != maxLinks-1 {
		t.Errorf("the newest did not open; %d left", len(g.links))
	}
	for range 2 * maxBrowsers {
		g.spend(g.mint())
	}
	if len(g.browsers) != maxBrowsers {
		t.Errorf("%d browsers are remembered", len(g.browsers))
	}
}

func TestNoLocalAuth(t *testing.T) {
	h := newHost(t, func(w http.ResponseWriter, r *http.Request) {})
	f := start(t, Config{Transport: h, NoLocalAuth: true})
	for header, want := range map[string]int{"Origin": 403, "Host": 421} {
		if res := ask(t, f, "GET", "/", map[string]string{header: "evil.example"}); res.StatusCode != want {
			t.Errorf("%s: %s", header, res.Status)
		}
	}
	if res := ask(t, f, "GET", "/", nil); res.StatusCode != 200 {
		t.Error(res.Status)
	}
	if page := text(t, ask(t, f, "GET", "/.reach/", nil)); !strings.Contains(page, "off") {
		t.Error("the page does not say that authentication is off")
	}
}
