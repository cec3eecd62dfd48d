package forward

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/profile"
)

// secureLink is a pinned host on loopback that says what it saw.
func secureLink(t *testing.T) (id *pins.Identity, addr string, requests *atomic.Int32) {
	t.Helper()
	id, err := pins.New([]string{"127.0.0.1"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	requests = new(atomic.Int32)
	srv := &http.Server{
		TLSConfig: id.ServerConfig(), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			requests.Add(1)
			w.Header().Set("Location", "https://"+r.Host+"/dashboard/next")
			if r.URL.Path == "/api/cut" {
				io.WriteString(w, "begun")
				http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}
			fmt.Fprintf(w, "%s %s %s", r.Proto, r.Host, r.Header.Get("Origin"))
		}),
	}
	done := make(chan struct{})
	go func() { defer close(done); srv.ServeTLS(ln, "", "") }()
	t.Cleanup(func() { srv.Close(); <-done })
	return id, ln.Addr().String(), requests
}

func client(t *testing.T, pin pins.Pin, addr string) *reach.Client {
	t.Helper()
	c, err := reach.New(reach.Config{Profile: &profile.Profile{Name: "home", Pin: pin, Candidates: []endpoints.Candidate{
		{Role: endpoints.RolePluginProxy, Proxy: &endpoints.Proxy{URL: "https://" + addr, PinSHA256: pin.String()}}}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// The forwarder over a real Client: what the host says of its own authority is
// mapped back, and a cut answer is seen as cut.
func TestOverClient(t *testing.T) {
	id, addr, _ := secureLink(t)
	f := start(t, Config{Transport: client(t, id.Pin(), addr)})
	header := map[string]string{keyHeader: f.Key(), "Origin": "http://home.localhost:@"}
	res := ask(t, f, "GET", "/api/x", header)
	if got, want := text(t, res), "HTTP/2.0 "+addr+" https://"+addr; got != want || res.Header.Get("Location") != "/dashboard/next" {
		t.Errorf("%q, Location %q; want %q", got, res.Header.Get("Location"), want)
	}
	res = ask(t, f, "GET", "/api/cut", header)
	if got, err := io.ReadAll(res.Body); err == nil {
		t.Errorf("a cut answer passed for whole: %q", got)
	}
}

func TestOverClientToStranger(t *testing.T) {
	id, _, _ := secureLink(t)
	_, addr, requests := secureLink(t)
	f := start(t, Config{Transport: client(t, id.Pin(), addr)})
	res := ask(t, f, "POST", "/api/x", map[string]string{keyHeader: f.Key(), "Authorization": "Bearer secret"})
	if body := text(t, res); res.StatusCode != 502 || !strings.Contains(body, "trust_refused") || requests.Load() != 0 {
		t.Errorf("%s %s, the stranger saw %d requests", res.Status, body, requests.Load())
	}
}
