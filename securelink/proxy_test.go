package securelink

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"
	"time"
)

// each runs a test over both protocols.
func (l *link) each(t *testing.T, test func(t *testing.T, c *http.Client)) {
	t.Run("h1", func(t *testing.T) { test(t, l.h1) })
	t.Run("h2", func(t *testing.T) { test(t, l.h2) })
}

func TestBytesOfTheTargetSurvive(t *testing.T) {
	rec := record(t)
	l := start(t, Config{Upstreams: Upstreams{API: "http://" + rec.addr, Dashboard: "http://" + rec.addr + "/base/"}})
	for in, want := range map[string]string{
		"/api/v1/a%3Ab?q=%3A%7e+x&y=a;b&%zz": "/v1/a%3Ab?q=%3A%7e+x&y=a;b&%zz",
		"/api/x?":                            "/x?",
		"/api/":                              "/",
		"/api/~a!$&'()*+,;=:@%C3%A9":         "/~a!$&'()*+,;=:@%C3%A9",
		"/api/\xc3\xa9":                      "/\xc3\xa9",
		"/api/x?a=/../%2e%2e/":               "/x?a=/../%2e%2e/",
		"/dashboard/a%3ab":                   "/base/a%3ab",
	} {
		resp, body := l.raw(t, "GET "+in+" HTTP/1.1\r\nHost: home.example\r\nConnection: close\r\n\r\n")
		if resp.StatusCode != 200 {
			t.Errorf("%s: %d %s", in, resp.StatusCode, body)
			continue
		}
		if line, _, _ := strings.Cut(rec.next(t), "\r\n"); line != "GET "+want+" HTTP/1.1" {
			t.Errorf("%s arrived as %q", in, line)
		}
	}
}

func TestRefusedRequests(t *testing.T) {
	rec := record(t)
	l := start(t, Config{Upstreams: Upstreams{API: "http://" + rec.addr, Dashboard: "http://" + rec.addr}, Limits: Limits{HeaderBytes: 4 << 10, BodyBytes: 1000}})
	const host = "Host: home.example:9443\r\n"
	for name, tt := range map[string]struct {
		request string
		status  int
		code    string // "" = the answer is net/http's own
	}{
		"dot segments":        {"GET /api/../relay/ws HTTP/1.1\r\n" + host, 400, "bad_path"},
		"encoded slash":       {"GET /api/%2F.. HTTP/1.1\r\n" + host, 400, "bad_path"},
		"twice encoded":       {"GET /api/%252e%252e/x HTTP/1.1\r\n" + host, 400, "bad_path"},
		"backslash":           {"GET /api\\x HTTP/1.1\r\n" + host, 400, "bad_path"},
		"absolute form":       {"GET https://home.example/api/x HTTP/1.1\r\n" + host, 400, "bad_target"},
		"asterisk":            {"OPTIONS * HTTP/1.1\r\n" + host, 400, "bad_target"},
		"other namespace":     {"GET /v1/models HTTP/1.1\r\n" + host, 404, "not_found"},
		"bare namespace":      {"GET /api HTTP/1.1\r\n" + host, 404, "not_found"},
		"encoded namespace":   {"GET /%61pi/v1 HTTP/1.1\r\n" + host, 404, "not_found"},
		"login is for later":  {"GET /relay/login HTTP/1.1\r\n" + host, 404, "not_found"},
		"TRACE":               {"TRACE /api/x HTTP/1.1\r\n" + host, 405, "method_not_allowed"},
		"CONNECT":             {"CONNECT home.example:443 HTTP/1.1\r\n" + host, 405, "method_not_allowed"},
		"POST health":         {"POST /relay/health HTTP/1.1\r\n" + host + "Content-Length: 0\r\n", 405, "method_not_allowed"},
		"POST relay":          {"POST /relay/ws HTTP/1.1\r\n" + host + "Content-Length: 0\r\n", 405, "method_not_allowed"},
		"wrong host":          {"GET /relay/health HTTP/1.1\r\nHost: away.example\r\n", 421, "wrong_host"},
		"no host":             {"GET /relay/health HTTP/1.1\r\n", 400, ""},
		"empty host":          {"GET /relay/health HTTP/1.1\r\nHost:\r\n", 400, "bad_host"},
		"no host, 1.0":        {"GET /relay/health HTTP/1.0\r\n", 400, "bad_host"},
		"two hosts":           {"GET /relay/health HTTP/1.1\r\n" + host + host, 400, ""},
		"long headers":        {"GET /api/x HTTP/1.1\r\n" + host + "X: " + strings.Repeat("x", 5<<10) + "\r\n", 431, "headers_too_large"},
		"longer headers":      {"GET /api/x HTTP/1.1\r\n" + host + "X: " + strings.Repeat("x", 20<<10) + "\r\n", 431, ""},
		"large body":          {"POST /api/x HTTP/1.1\r\n" + host + "Content-Length: 1001\r\n", 413, "body_too_large"},
		"upgrade half lost":   {"GET /api/ws HTTP/1.1\r\n" + host + "Upgrade: websocket\r\nSec-WebSocket-Key: x\r\n", 400, "bad_upgrade"},
		"foreign origin":      {"GET /api/ws HTTP/1.1\r\n" + host + handshakeLines + "Origin: https://evil.example\r\n", 403, "foreign_origin"},
		"origin of http":      {"GET /dashboard/ws HTTP/1.1\r\n" + host + handshakeLines + "Origin: http://home.example:9443\r\n", 403, "foreign_origin"},
		"two origins":         {"GET /dashboard/ws HTTP/1.1\r\n" + host + handshakeLines + "Origin: https://home.example:9443\r\nOrigin: null\r\n", 403, "foreign_origin"},
		"relay needs upgrade": {"GET /relay/ws HTTP/1.1\r\n" + host, 400, "upgrade_required"},
		"relay, origin":       {"GET /relay/ws HTTP/1.1\r\n" + host + handshakeLines + "Origin: https://evil.example\r\n", 403, "foreign_origin"},
		"NUL in a value":      {"GET /api/x HTTP/1.1\r\n" + host + "X: a\x00b\r\n", 400, ""},
		"CR in a value":       {"GET /api/x HTTP/1.1\r\n" + host + "X: a\rb\r\n", 400, ""},
		"blank in a name":     {"GET /api/x HTTP/1.1\r\n" + host + "X-Y : a\r\n", 400, ""},
		"two lengths":         {"POST /api/x HTTP/1.1\r\n" + host + "Content-Length: 1\r\nContent-Length: 2\r\n", 400, ""},
		"signed length":       {"POST /api/x HTTP/1.1\r\n" + host + "Content-Length: +1\r\n", 400, ""},
		"unknown coding":      {"POST /api/x HTTP/1.1\r\n" + host + "Transfer-Encoding: gzip, chunked\r\n", 501, ""},
	} {
		t.Run(name, func(t *testing.T) {
			resp, body := l.raw(t, tt.request+"\r\n")
			if resp.StatusCode != tt.status || tt.code != "" && !strings.Contains(body, `{"error":{"code":"`+tt.code+`"`) {
				t.Errorf("%d %s; want %d %s", resp.StatusCode, body, tt.status, tt.code)
			}
			select {
			case head := <-rec.head:
				t.Errorf("the upstream saw %q", head)
			default:
			}
		})
	}
}

const handshakeLines = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"

// What two parsers may read in two ways reaches the upstream in one way only.
func TestAmbiguityEndsHere(t *testing.T) {
	rec := record(t)
	l := start(t, Config{Upstreams: Upstreams{API: "http://" + rec.addr}})
	const host = "Host: home.example\r\n"
	for name, tt := range map[string]struct{ request, has, hasNot string }{
		"length and chunks": {"POST /api/x HTTP/1.1\r\n" + host + "Content-Length: 60\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /api/smuggled HTTP/1.1\r\n" + host + "\r\n",
			"Transfer-Encoding: chunked", "Content-Length"},
		"same length twice":  {"POST /api/x HTTP/1.1\r\n" + host + "Content-Length: 1\r\nContent-Length: 1\r\n\r\na", "Content-Length: 1", "Content-Length: 1\r\nContent-Length"},
		"folded line":        {"GET /api/x HTTP/1.1\r\n" + host + "X-Folded: a\r\n b\r\n\r\n", "X-Folded: a b\r\n", "a\r\n b"},
		"bare line feeds":    {"GET /api/x HTTP/1.1\nHost: home.example\nX-Y: z\n\n", "X-Y: z\r\n", "z\n\n"},
		"nominated identity": {"GET /api/x HTTP/1.1\r\n" + host + "Connection: X-Secret, close\r\nX-Secret: s\r\nX-Kept: k\r\n\r\n", "X-Kept: k", "X-Secret"},
	} {
		t.Run(name, func(t *testing.T) {
			c := l.dial(t)
			io.WriteString(c, tt.request)
			head := rec.next(t)
			if !strings.Contains(head, tt.has) || strings.Contains(head, tt.hasNot) {
				t.Errorf("the upstream saw %q", head)
			}
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(tt.request, "chunked") {
				if !resp.Close {
					t.Error("the connection stays open")
				}
				io.Copy(io.Discard, c) // until it is closed
				select {
				case head := <-rec.head:
					t.Errorf("the upstream saw %q", head)
				default:
				}
			}
		})
	}
}

func TestHeadersOnTheWire(t *testing.T) {
	rec := record(t)
	up := "http://" + rec.addr
	l := start(t, Config{Upstreams: Upstreams{API: up, Dashboard: up}, Authority: "home.example:9443"})
	const client = "Host: home.example\r\nAuthorization: Bearer b\r\nCookie: a=b; __Secure-hd-s=1; __Host-hermes-gate=g\r\nX-Forwarded-For: 127.0.0.1\r\n" +
		"X-Forwarded-Prefix: /evil\r\nForwarded: for=127.0.0.1\r\nTailscale-User-Login: root\r\nX-Hermes-Relay-Session: s\r\nX-Hermes-Proxy-Secret: p\r\n" +
		"Origin: https://home.example\r\nAccept-Encoding: br\r\nX-Mine: 1\r\n"
	for path, want := range map[string][]string{
		"/api/x": {"Accept-Encoding: br", "Authorization: Bearer b", "Host: " + rec.addr, "X-Mine: 1", "Origin: http://" + rec.addr},
		"/dashboard/x": {"Accept-Encoding: br", "Authorization: Bearer b", "Host: " + rec.addr, "X-Mine: 1", "Origin: http://" + rec.addr,
			"Cookie: a=b; __Host-s=1", "X-Forwarded-For: 127.0.0.1", "X-Forwarded-Host: home.example:9443",
			"X-Forwarded-Prefix: /dashboard", "X-Forwarded-Proto: https"},
	} {
		l.raw(t, "GET "+path+" HTTP/1.1\r\n"+client+"\r\n")
		lines := strings.Split(strings.TrimSuffix(rec.next(t), "\r\n\r\n"), "\r\n")[1:]
		if got, want := sorted(lines), sorted(want); got != want {
			t.Errorf("%s: the upstream saw\n%s\nwant\n%s", path, got, want)
		}
	}
	// Another origin than the one that was asked is the upstream's to judge.
	l.raw(t, "GET /dashboard/x HTTP/1.1\r\nHost: home.example:9443\r\nOrigin: https://home.example\r\n\r\n")
	if head := rec.next(t); !strings.Contains(head, "Origin: https://home.example\r\n") {
		t.Errorf("the upstream saw %q", head)
	}
}

func sorted(lines []string) string {
	b := append([]string(nil), lines...)
	for i := range b {
		for j := range i {
			if b[i] < b[j] {
				b[i], b[j] = b[j], b[i]
			}
		}
	}
	return strings.Join(b, "\n")
}

// Each event is seen before the next one is written: nothing may wait for more.
func TestEventsArriveOneByOne(t *testing.T) {
	next, ended := make(chan bool), make(chan bool)
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) // net/http looks for a client's going away only then
		w.Header().Set("Content-Type", r.Header.Get("X-Type"))
		if r.Header.Get("X-Type") == "image/png" { // a download of known size may be slow, too
			w.Header().Set("Content-Length", "1000000")
		}
		w.WriteHeader(200)
		rc := http.NewResponseController(w)
		rc.Flush()
		for i := 0; ; i++ {
			select {
			case <-next:
			case <-r.Context().Done():
				ended <- true
				return
			}
			fmt.Fprintf(w, "data: %d\n\n", i)
			rc.Flush()
		}
	})
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL}})
	l.each(t, func(t *testing.T, c *http.Client) {
		for _, kind := range []string{"text/event-stream", "text/event-stream; charset=utf-8", "application/x-ndjson", "application/json", "text/plain", "image/png"} {
			for _, method := range []string{"GET", "POST"} {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				req, _ := http.NewRequestWithContext(ctx, method, l.url("/api/stream"), strings.NewReader("{}"))
				req.Header.Set("X-Type", kind)
				resp, err := c.Do(req) // the headers come before the first event
				if err != nil {
					t.Fatal(err)
				}
				for i := range 20 {
					next <- true
					want := fmt.Sprintf("data: %d\n\n", i)
					if got := make([]byte, len(want)); true {
						if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != want {
							t.Fatalf("%s %s: event %d is %q, %v", method, kind, i, got, err)
						}
					}
				}
				cancel()
				resp.Body.Close()
				await(t, ended, "the upstream to be told")
			}
		}
	})
}

// An answer that is cut is seen as cut, whatever was announced.
func TestCutIsSeen(t *testing.T) {
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		body := strings.Repeat("x", 10<<10)
		switch r.URL.Path {
		case "/sized":
			fmt.Fprintf(rw, "HTTP/1.1 200 OK\r\nContent-Length: 20480\r\n\r\n%s", body)
		case "/chunked":
			fmt.Fprintf(rw, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2800\r\n%s\r\n", body)
		case "/headers":
			fmt.Fprintf(rw, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
		case "/bad-chunk":
			fmt.Fprintf(rw, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2800\r\n%s\r\nzz\r\n", body)
		case "/hint":
			fmt.Fprintf(rw, "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
		}
		rw.Flush()
	})
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL}})
	l.each(t, func(t *testing.T, c *http.Client) {
		for path, sent := range map[string]int{"/sized": 10 << 10, "/chunked": 10 << 10, "/bad-chunk": 10 << 10, "/headers": 0} {
			resp, err := c.Get(l.url("/api" + path))
			if err != nil {
				if sent > 0 {
					t.Errorf("%s: %v", path, err)
				}
				continue // cut before a byte of the body: an error as well
			}
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err == nil || resp.StatusCode != 200 || len(body) > sent || strings.Trim(string(body), "x") != "" {
				t.Errorf("%s: %d with %d bytes of %d, %v", path, resp.StatusCode, len(body), sent, err)
			}
		}
		for _, path := range []string{"/nothing", "/hint"} { // no answer at all: there, and only there, is room for one of ours
			if resp, body := get(t, c, l.url("/api"+path)); resp.StatusCode != 502 || !strings.Contains(body, `"upstream_failed"`) {
				t.Errorf("%s: %d %s", path, resp.StatusCode, body)
			}
		}
	})
}

func TestUploads(t *testing.T) {
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprintf(w, "%d %v %v", n, err, r.TransferEncoding)
	})
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL}, Limits: Limits{BodyBytes: 1 << 20}})
	l.each(t, func(t *testing.T, c *http.Client) {
		for _, tt := range []struct {
			path  string
			size  int
			sized bool
			want  int
			text  string
		}{
			{"/take", 1 << 20, true, 200, "1048576 <nil> []"},
			{"/take", 1 << 20, false, 200, "1048576 <nil> [chunked]"},
			{"/take", 1<<20 + 1, true, 413, "1 MiB"},
			{"/take", 1<<20 + 1, false, 413, "1 MiB"},
			{"/take", 0, true, 200, "0 <nil> []"},
		} {
			var body io.Reader = bytes.NewReader(make([]byte, tt.size))
			if !tt.sized {
				body = struct{ io.Reader }{body}
			}
			resp, err := c.Post(l.url("/api"+tt.path), "application/octet-stream", body)
			if err != nil {
				t.Errorf("%+v: %v", tt, err)
				continue
			}
			text, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != tt.want || !strings.Contains(string(text), tt.text) {
				t.Errorf("%+v: %d %s", tt, resp.StatusCode, text)
			}
		}
	})
}

// A client that is refused while it still sends learns why: neither the reset
// of the upstream nor one of ours overtakes the answer.
func TestEarlyRefusalIsSeen(t *testing.T) {
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusUnauthorized) // without a look at the body
		io.WriteString(w, "no")
	})
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL}, Limits: Limits{BodyBytes: 8 << 20}})
	chunk := "4000\r\n" + strings.Repeat("x", 0x4000) + "\r\n"
	for name, tt := range map[string]struct {
		request string
		want    int
	}{
		"upstream, chunked": {"POST /api/x HTTP/1.1\r\nHost: home.example\r\nTransfer-Encoding: chunked\r\n\r\n", 401},
		"upstream, sized":   {"POST /api/x HTTP/1.1\r\nHost: home.example\r\nContent-Length: 8000000\r\n\r\n", 401},
		"ours, size":        {"POST /api/x HTTP/1.1\r\nHost: home.example\r\nContent-Length: 9000000\r\n\r\n", 413},
		"ours, host":        {"POST /api/x HTTP/1.1\r\nHost: away.example\r\nTransfer-Encoding: chunked\r\n\r\n", 421},
		"ours, namespace":   {"POST /dashboard/x HTTP/1.1\r\nHost: home.example\r\nTransfer-Encoding: chunked\r\n\r\n", 503},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for range 2 {
				c := l.dial(t)
				io.WriteString(c, tt.request)
				for range 400 { // 6 MiB, whatever becomes of it
					if _, err := io.WriteString(c, chunk); err != nil {
						t.Fatalf("the connection broke while the client was sending: %v", err)
					}
				}
				resp, err := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != tt.want {
					t.Fatalf("%d, %v; want %d", resp.StatusCode, err, tt.want)
				}
				c.Close()
			}
		})
	}
}

// The body is asked for only when the upstream wants it.
func TestExpectContinue(t *testing.T) {
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/take" {
			io.Copy(w, r.Body)
			return
		}
		w.WriteHeader(http.StatusForbidden)
	})
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL}})
	const rest = " HTTP/1.1\r\nHost: home.example\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
	c := l.dial(t)
	r := bufio.NewReader(c)
	io.WriteString(c, "POST /api/take"+rest)
	if line, err := textproto.NewReader(r).ReadLine(); err != nil || line != "HTTP/1.1 100 Continue" {
		t.Fatalf("%q, %v", line, err)
	}
	io.WriteString(c, "hi")
	r.ReadString('\n')
	if resp, err := http.ReadResponse(r, nil); err != nil || resp.StatusCode != 200 {
		t.Errorf("%+v, %v", resp, err)
	}
	if resp, _ := l.raw(t, "POST /api/refuse"+rest); resp.StatusCode != 403 {
		t.Errorf("refused upload: %d", resp.StatusCode)
	}
}

func TestTrailersAndHints(t *testing.T) {
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Link", "</x>; rel=preload")
		w.Header().Set("Set-Cookie", "early=1")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Link")
		w.Header().Set("Trailer", "X-Sum, Set-Cookie")
		w.Write(nil)
		http.NewResponseController(w).Flush()
		fmt.Fprint(w, r.Trailer)
		w.Header().Set("X-Sum", "42")
		w.Header().Set("Set-Cookie", "late=1")
	})
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL}})
	l.each(t, func(t *testing.T, c *http.Client) {
		var hints []string
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			hints = append(hints, fmt.Sprint(code, h))
			return nil
		}})
		req, _ := http.NewRequestWithContext(ctx, "POST", l.url("/api/x"), struct{ io.Reader }{strings.NewReader("body")})
		req.Trailer = http.Header{"X-Digest": {"d"}, "Cookie": {"smuggled=1"}, "X-Forwarded-For": {"127.0.0.1"}}
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil || string(body) != "map[X-Digest:[d]]" {
			t.Errorf("the upstream saw trailers %s, %v", body, err)
		}
		if got := fmt.Sprint(resp.Trailer); got != "map[X-Sum:[42]]" {
			t.Errorf("trailers %v", got)
		}
		if got := strings.Join(hints, " "); got != "103 map[Link:[</x>; rel=preload]]" {
			t.Errorf("hints %q", got)
		}
		if resp.Header["Set-Cookie"] != nil {
			t.Error("a cookie came from the API")
		}
	})
}

// A client that goes away takes its upstream request along, at once.
func TestClientGoesAway(t *testing.T) {
	begun, ended := make(chan bool, 1), make(chan bool, 1)
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/stream" {
			w.WriteHeader(200)
			http.NewResponseController(w).Flush()
		}
		begun <- true
		<-r.Context().Done()
		ended <- true
	})
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL}})
	l.each(t, func(t *testing.T, c *http.Client) {
		for _, path := range []string{"/stream", "/silent"} {
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan bool)
			go func() {
				defer close(done)
				req, _ := http.NewRequestWithContext(ctx, "GET", l.url("/api"+path), nil)
				if resp, err := c.Do(req); err == nil {
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			}()
			await(t, begun, "the request")
			cancel()
			await(t, ended, "the upstream to be told")
			await(t, done, "the client")
		}
	})
}

func TestNothingIsGuessed(t *testing.T) {
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header()["Content-Type"] = nil
		w.Header()["Date"] = nil
		if r.URL.Path == "/redirect" {
			w.Header().Set("Location", "/elsewhere")
			w.WriteHeader(302)
			return
		}
		if r.URL.Path == "/zipped" {
			w.Header().Set("Content-Encoding", "gzip")
		}
		io.WriteString(w, "<html>not gzip at all")
	})
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL, Dashboard: srv.URL}})
	l.each(t, func(t *testing.T, c *http.Client) {
		for path, coding := range map[string]string{"/plain": "", "/zipped": "gzip"} {
			resp, body := get(t, c, l.url("/api"+path))
			if resp.Header["Content-Type"] != nil || resp.Header.Get("Content-Encoding") != coding || body != "<html>not gzip at all" {
				t.Errorf("%s: %v %q", path, resp.Header, body)
			}
		}
		if resp, _ := get(t, c, l.url("/api/redirect")); resp.StatusCode != 302 || resp.Header.Get("Location") != "/elsewhere" {
			t.Errorf("redirect of the API: %d %v", resp.StatusCode, resp.Header)
		}
		if resp, _ := get(t, c, l.url("/dashboard/redirect")); resp.StatusCode != 302 || resp.Header.Get("Location") != "/dashboard/elsewhere" {
			t.Errorf("redirect of the Dashboard: %d %v", resp.StatusCode, resp.Header)
		}
	})
}

// net/http guesses when the first bytes come together with the headers.
func TestNoTypeStaysNoType(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		own := &writer{ResponseWriter: w, rc: http.NewResponseController(w), idle: time.Minute}
		own.WriteHeader(200)
		io.WriteString(own, "<html>")
	}))
	defer srv.Close()
	if resp, _ := get(t, srv.Client(), srv.URL); resp.Header["Content-Type"] != nil {
		t.Errorf("guessed %q", resp.Header["Content-Type"])
	}
}

func TestBadRedirect(t *testing.T) {
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Location", "http://127.0.0.1:22/")
		w.WriteHeader(map[string]int{"/moved": 302, "/made": 201}[r.URL.Path])
	})
	l := start(t, Config{Upstreams: Upstreams{Dashboard: srv.URL}})
	if resp, body := get(t, l.h1, l.url("/dashboard/moved")); resp.StatusCode != 502 || !strings.Contains(body, "bad_redirect") || resp.Header["Location"] != nil {
		t.Errorf("%d %v %s", resp.StatusCode, resp.Header, body)
	}
	if resp, _ := get(t, l.h1, l.url("/dashboard/made")); resp.StatusCode != 201 || resp.Header["Location"] != nil {
		t.Errorf("%d %v", resp.StatusCode, resp.Header)
	}
}

// An answer may take as long as it likes while something moves; it may not
// stand still.
func TestIdleIsNotAge(t *testing.T) {
	const idle, beats = 2 * time.Second, 14
	stop := make(chan bool, 2)
	srv := service(t, func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		beat := time.NewTicker(idle / 8)
		defer beat.Stop()
		for range beats { // longer than the limit in all
			io.WriteString(w, ".")
			rc.Flush()
			<-beat.C
		}
		if r.URL.Path == "/stall" {
			<-r.Context().Done()
			stop <- true
		}
	})
	l := start(t, Config{Upstreams: Upstreams{API: srv.URL}, Limits: Limits{Idle: idle}})
	for name, c := range map[string]*http.Client{"h1": l.h1, "h2": l.h2} {
		t.Run(name+" long", func(t *testing.T) {
			t.Parallel()
			if _, body := get(t, c, l.url("/api/long")); body != strings.Repeat(".", beats) {
				t.Errorf("a long answer was cut: %q", body)
			}
		})
		t.Run(name+" stalled", func(t *testing.T) {
			t.Parallel()
			resp, err := c.Get(l.url("/api/stall"))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if body, err := io.ReadAll(resp.Body); err == nil || len(body) != beats {
				t.Errorf("a stalled answer: %q, %v", body, err)
			}
			await(t, stop, "the upstream to be told")
		})
	}
}
