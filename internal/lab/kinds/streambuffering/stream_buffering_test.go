package streambuffering

import (
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/lab/kinds"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/forward"
	"github.com/hermes-reach/hermes-reach/securelink"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	chunks    = 5
	chunkSize = 20
	// perChunk is how long a chunk may take. Nothing ever takes that long,
	// unless somebody on the way waits for the next.
	perChunk = 5 * time.Second
)

var (
	contentTypes = []string{
		"text/event-stream", "application/x-ndjson", "application/json", "text/plain", "application/octet-stream", "audio/mpeg",
	}
	methods = []string{http.MethodGet, http.MethodPost}

	// forms of the body: of unknown length, of a length that is announced (a
	// proxy knows that more will come, and likes to wait for it), compressed.
	forms = []string{"open", "sized", "gzip"}
)

func chunk(i int) string { return fmt.Sprintf("data: chunk %7d\n\n", i)[:chunkSize] }

// A service is what stands behind the host. It streams by hand-over: one chunk
// for each value of the channel that belongs to the request's id.
type service struct {
	srv   *httptest.Server
	mu    sync.Mutex
	turns map[string]chan struct{}
	ids   atomic.Int64
}

func newService(t *testing.T) *service {
	s := &service{turns: make(map[string]chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) })
	mux.HandleFunc("/stream", s.stream)
	s.srv = httptest.NewServer(mux)
	t.Cleanup(s.srv.Close)
	return s
}

// begin makes room for a request.
func (s *service) begin() (id string, turn chan struct{}) {
	id, turn = strconv.FormatInt(s.ids.Add(1), 10), make(chan struct{})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.turns[id] = turn
	return id, turn
}

func (s *service) stream(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	s.mu.Lock()
	turn := s.turns[q.Get("id")]
	delete(s.turns, q.Get("id"))
	s.mu.Unlock()
	_, _ = io.Copy(io.Discard, r.Body)
	w.Header().Set("Content-Type", q.Get("type"))
	var out io.Writer = w
	flush := func() error { return nil }
	switch q.Get("form") {
	case "sized":
		w.Header().Set("Content-Length", strconv.Itoa(chunks*chunkSize))
	case "gzip":
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		out, flush = z, z.Flush
		defer func() { _ = z.Close() }()
	}
	rc := http.NewResponseController(w)
	_ = rc.Flush() // the headers
	for i := range chunks {
		select {
		case <-turn:
		case <-r.Context().Done():
			return
		}
		_, err := io.WriteString(out, chunk(i))
		if errors.Join(err, flush(), rc.Flush()) != nil {
			return
		}
	}
}

// A path is a way to the service and what it is asked with.
type path struct {
	name   string
	client http.RoundTripper
	base   string // of the URL, up to the namespace
	header http.Header
}

// TestChunks: every chunk of every kind is there before the next is sent, by
// every path.
func TestChunks(t *testing.T) {
	s := newService(t)
	var all sync.WaitGroup
	defer all.Wait()
	for _, p := range paths(t, s) {
		all.Go(func() {
			t.Run(p.name, func(t *testing.T) {
				for _, form := range forms {
					for _, typ := range contentTypes {
						for _, method := range methods {
							if err := p.try(t.Context(), s, method, typ, form); err != nil {
								t.Fatalf("%s %s, %s: %v", method, typ, form, err)
							}
						}
					}
				}
			})
		})
	}
}

// try asks for one stream and sees each chunk before it lets the next be sent.
func (p *path) try(ctx context.Context, s *service, method, typ, form string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	late := time.AfterFunc(perChunk, cancel)
	defer late.Stop()
	id, turn := s.begin()
	query := url.Values{"id": {id}, "type": {typ}, "form": {form}}
	req, err := http.NewRequestWithContext(ctx, method, p.base+"/api/stream?"+query.Encode(), strings.NewReader("{}"))
	if err != nil {
		return err
	}
	maps.Copy(req.Header, p.header)
	req.Header.Set("Accept-Encoding", "gzip")
	res, err := p.client.RoundTrip(req)
	if err != nil {
		return fmt.Errorf("the headers did not come before the first chunk: %w", err)
	}
	defer func() { _ = res.Body.Close() }()
	if res.StatusCode != http.StatusOK || res.Header.Get("Content-Type") != typ || (res.Header.Get("Content-Encoding") == "gzip") != (form == "gzip") {
		return fmt.Errorf("answered %s, %v", res.Status, res.Header)
	}
	body := &plain{from: res.Body, zipped: form == "gzip"}
	for i := range chunks {
		late.Reset(perChunk)
		select {
		case turn <- struct{}{}:
		case <-ctx.Done():
			return fmt.Errorf("the service does not take its turn for chunk %d", i)
		}
		// A longer read than a chunk would show two at once.
		buf := make([]byte, 2*chunkSize)
		n, err := io.ReadAtLeast(body, buf, chunkSize)
		if err != nil || string(buf[:n]) != chunk(i) {
			return fmt.Errorf("chunk %d did not come alone before the next: %q, %w", i, buf[:n], err)
		}
	}
	if rest, err := io.ReadAll(body); err != nil || len(rest) > 0 {
		return fmt.Errorf("after the last chunk came %q, %w", rest, err)
	}
	return nil
}

// plain takes gzip off. Its header comes with the first chunk, not with the
// answer's.
type plain struct {
	from   io.Reader
	zipped bool
	unzip  *gzip.Reader
}

func (p *plain) Read(b []byte) (n int, err error) {
	if !p.zipped {
		return p.from.Read(b)
	}
	if p.unzip == nil {
		if p.unzip, err = gzip.NewReader(p.from); err != nil {
			return 0, err
		}
	}
	return p.unzip.Read(b)
}

// paths are all ways: straight to the host, through a broker over either
// transport, and through a forwarder; the host is spoken to in both versions of
// HTTP.
func paths(t *testing.T, s *service) []*path {
	site := kinds.NewSite(t, nil)
	id, err := pins.New([]string{"127.0.0.1"}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	host, err := securelink.New(securelink.Config{Identity: id, Upstreams: securelink.Upstreams{API: s.srv.URL}})
	if err != nil {
		t.Fatal(err)
	}
	direct := kinds.Listen(t)
	serve := func(ln net.Listener) { kinds.Run(t, func(context.Context) error { return host.Serve(ln) }) }
	serve(direct)
	profile := site.Profile(id, direct.Addr().String(), site.Route("device"))
	serve(site.Host(func(c *connector.Config) { c.Sessions = 1 }))
	t.Cleanup(func() { _ = host.Close() }) // before what waits for Serve

	client := func(role endpoints.Role, transport carrier.Transport) *reach.Client {
		c, err := reach.New(reach.Config{
			Profile: profile, Outer: site.CA.Client(), Only: role,
			NewBroker: func(b reach.BrokerConfig) (reach.BrokerDialer, error) {
				return reach.NewDialer(reach.DialerConfig{
					URL: b.URL, HostID: b.HostID, Kind: b.Kind, Token: b.Token, TLS: b.Outer, Agent: "kinds/1",
					Transports: []carrier.Transport{transport},
				})
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	var out []*path
	for name, c := range map[string]*reach.Client{
		"direct":          client(endpoints.RolePluginProxy, ""),
		"broker over tls": client(endpoints.RoleOutboundBroker, carrier.TLS),
		"broker over wss": client(endpoints.RoleOutboundBroker, carrier.WSS),
	} {
		h1 := overHTTP1(t, c)
		out = append(out,
			&path{name: name + ", HTTP/2", client: version(t, c, 2), base: reach.Origin},
			&path{name: name + ", HTTP/1.1", client: version(t, h1, 1), base: "https://" + direct.Addr().String()},
		)
		if name == "broker over tls" {
			out = append(out, forwarder(t, version(t, c, 2), "forwarder, HTTP/2"), forwarder(t, onHost(h1, direct.Addr().String()), "forwarder, HTTP/1.1"))
		}
	}
	return out
}

// overHTTP1 speaks HTTP/1.1 on the client's pinned connections.
func overHTTP1(t *testing.T, c *reach.Client) *http.Transport {
	tr := &http.Transport{DisableCompression: true, DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		conn, _, err := c.DialContext(ctx)
		return conn, err
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return tr
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// version holds that the host answers in that version of HTTP.
func version(t *testing.T, rt http.RoundTripper, major int) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		res, err := rt.RoundTrip(r)
		if err == nil && res.ProtoMajor != major {
			t.Errorf("the host answered in %s, want version %d", res.Proto, major)
		}
		return res, err
	})
}

// onHost sends what is meant for the paired host to its authority.
func onHost(rt http.RoundTripper, authority string) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		out := r.Clone(r.Context())
		out.URL.Scheme, out.URL.Host, out.Host = "https", authority, ""
		return rt.RoundTrip(out)
	})
}

// forwarder runs one on loopback.
func forwarder(t *testing.T, rt http.RoundTripper, name string) *path {
	f, err := forward.New(kinds.Listen(t), forward.Config{Profile: "home", Transport: rt})
	if err != nil {
		t.Fatal(err)
	}
	kinds.Run(t, f.Run)
	tr := &http.Transport{DisableCompression: true}
	t.Cleanup(tr.CloseIdleConnections)
	_, port, _ := strings.Cut(strings.TrimPrefix(f.URL(), "http://"), ":")
	return &path{name: name, client: tr, base: "http://127.0.0.1:" + port, header: http.Header{"X-Reach-Key": {f.Key()}}}
}
