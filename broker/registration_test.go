package broker_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// ended waits for the broker to end a session.
func ended(t testing.TB, sess *link.Session) {
	t.Helper()
	select {
	case <-sess.Done():
	case <-time.After(patience):
		t.Fatal("the session goes on")
	}
}

func open(t testing.TB, sess *link.Session) *link.Stream {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	st, err := sess.OpenStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func TestRegistrationHasALimit(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{Register: 200 * time.Millisecond, Failures: 3})
	for name, begin := range map[string]func(*link.Session){
		"silence":      func(*link.Session) {},
		"empty stream": func(sess *link.Session) { open(t, sess) },
		"half a message": func(sess *link.Session) {
			_, _ = open(t, sess).Write(frame(written(t, s.asHost(0, 1, wire.NewID())))[:50])
		},
	} {
		t.Run(name, func(t *testing.T) {
			sess := s.session()
			start := time.Now()
			begin(sess)
			ended(t, sess)
			if took := time.Since(start); took < 150*time.Millisecond {
				t.Errorf("the session ended after %v, before the limit", took)
			}
		})
	}
	if res := s.get(t, carrier.ConnectPath, "Connection: Upgrade", "Upgrade: "+carrier.UpgradeToken); res.StatusCode != http.StatusTooManyRequests {
		t.Errorf("after three of them: %s, want 429: they count as failures", res.Status)
	}
	eventually(t, "the broker forgets them", func() bool { return s.broker.Status() == broker.Status{} })
}

// TestFirstMessageMustBeARegistration: anything else is answered with a code
// that tells nothing, ends that session, and disturbs no other.
func TestFirstMessageMustBeARegistration(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{})
	c := s.host(nil, echo)
	conn := s.dial(s.route(c, "device", nil))
	defer conn.Close()
	host := written(t, s.asHost(0, 1, wire.NewID()))
	client := written(t, s.asClient(wire.NewToken()))
	change := func(text, from, to string) []byte {
		if !strings.Contains(text, from) {
			t.Fatalf("%s is not in %s", from, text)
		}
		return frame(strings.Replace(text, from, to, 1))
	}
	for name, tt := range map[string]struct {
		first []byte
		want  wire.Code
	}{
		"garbage":           {frame("\x16\x03\x01 no JSON at all"), wire.CodeUnauthorized},
		"nothing":           {frame(""), wire.CodeUnauthorized},
		"oversized":         {[]byte("\xff\xff{"), wire.CodeUnauthorized},
		"other version":     {change(host, `"protocol_version":2`, `"protocol_version":3`), wire.CodeUnsupportedVersion},
		"version 1":         {change(host, `"protocol_version":2`, `"protocol_version":1`), wire.CodeUnsupportedVersion},
		"unknown role":      {change(host, `"role":"host"`, `"role":"admin"`), wire.CodeUnauthorized},
		"client as host":    {change(client, `"credential_kind":"route"`, `"credential_kind":"host"`), wire.CodeUnauthorized},
		"host as client":    {change(host, `"credential_kind":"host"`, `"credential_kind":"route"`), wire.CodeUnauthorized},
		"unknown type":      {frame(`{"type":"hello"}`), wire.CodeUnauthorized},
		"another message":   {frame(written(t, &wire.Dial{})), wire.CodeUnauthorized},
		"no instance":       {frame(written(t, s.asHost(0, 1, wire.ID{}))), wire.CodeUnauthorized},
		"wrong host token":  {change(host, s.token, wire.NewToken()), wire.CodeUnauthorized},
		"a host not of us":  {change(host, s.hostID.String(), wire.NewID().String()), wire.CodeUnauthorized},
		"a client's random": {frame(client), wire.CodeUnauthorized},
	} {
		t.Run(name, func(t *testing.T) {
			sess := s.session()
			st := open(t, sess)
			_, _ = st.Write(tt.first) // the answer may be faster than its return
			m, err := link.ReadHeader(st, patience)
			if e, ok := m.(*wire.Error); !ok || e.Code != tt.want {
				t.Errorf("answered %T %v, %v; want the error %s", m, m, err, tt.want)
			}
			if name == "garbage" { // a second later even if we do nothing
				ended(t, sess)
			}
			_ = sess.Close()
		})
	}
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Error(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Errorf("a stream beside all this: %v", err)
	}
}

// TestStrangersGetNoStreams: who has not registered cannot make the broker hold
// what comes on further streams.
func TestStrangersGetNoStreams(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{})
	sess := s.session()
	start := time.Now()
	open(t, sess)
	open(t, sess)
	ended(t, sess)
	if took := time.Since(start); took > 8*time.Second {
		t.Errorf("the session ended after %v, by its limit for the registration", took)
	}
}

// TestControlStreamForgives: what is not understood is answered once with
// malformed and does no harm.
func TestControlStreamForgives(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{})
	publish := &wire.PublishRoute{RequestID: "r", CredentialID: "d", TokenSHA256: wire.DigestOf("t"), ExpiresAt: wire.ExpiryAt(time.Now().Add(time.Hour))}
	for name, bad := range map[string]struct{ host, client string }{
		"unknown type":     {host: `{"type":"from_the_future","x":[1,2]}`, client: `{"type":"from_the_future"}`},
		"second register":  {host: written(t, s.asHost(0, 1, wire.NewID())), client: written(t, s.asClient(wire.NewToken()))},
		"a broker's words": {host: written(t, &wire.Accept{}), client: written(t, publish)},
	} {
		t.Run(name, func(t *testing.T) {
			host := s.byHand(s.asHost(0, 1, wire.NewID()))
			client := s.byHand(s.asClient(s.stored(wire.KindRoute, name)))
			for _, end := range []struct {
				who   string
				st    *link.Stream
				bad   string
				fence string // is answered with want, after everything before it
				want  wire.Message
			}{
				{"host", host, bad.host, written(t, publish), &wire.Published{RequestID: "r", CredentialKind: wire.KindRoute, CredentialID: "d"}},
				{"client", client, bad.client, written(t, &wire.Ping{T: 7}), &wire.Pong{T: 7}},
			} {
				for _, out := range [][]byte{
					frame(`{"type":"error","code":"malformed"}`), // is never answered
					frame(end.bad), frame(end.fence),
				} {
					if _, err := end.st.Write(out); err != nil {
						t.Fatal(err)
					}
				}
				for _, want := range []wire.Message{&wire.Error{Code: wire.CodeMalformed}, end.want} {
					m, err := link.ReadHeader(end.st, patience)
					if err != nil || written(t, m) != written(t, want) {
						t.Errorf("the %s gets %T %v, %v; want %v", end.who, m, m, err, want)
					}
				}
			}
		})
	}
}

func (s *site) get(t testing.TB, path string, header ...string) *http.Response {
	t.Helper()
	tr := &http.Transport{TLSClientConfig: s.ca.Client()}
	t.Cleanup(tr.CloseIdleConnections)
	_, port, _ := strings.Cut(s.addr, ":")
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://localhost:"+port+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range header {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Set(name, value)
	}
	res, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = res.Body.Close() })
	return res
}

func TestUpgradeTakesNoCredentials(t *testing.T) {
	s := newSite(t, broker.Limits{})
	tls := []string{"Connection: Upgrade", "Upgrade: " + carrier.UpgradeToken}
	for name, tt := range map[string]struct {
		path   string
		header []string
		want   int
	}{
		"a query":          {carrier.ConnectPath + "?token=x", tls, 400},
		"an empty query":   {carrier.ConnectPath + "?", tls, 400},
		"a header":         {carrier.ConnectPath, append([]string{"Authorization: Bearer x"}, tls...), 400},
		"no upgrade":       {carrier.ConnectPath, nil, 426},
		"no subprotocol":   {carrier.ConnectPath, []string{"Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="}, 400},
		"another path":     {"/v2/tunnel", tls, 404},
		"as it should be":  {carrier.ConnectPath, tls, 101},
		"health is there":  {"/health", nil, 200},
		"health, no query": {"/health?x", nil, 200},
	} {
		t.Run(name, func(t *testing.T) {
			if res := s.get(t, tt.path, tt.header...); res.StatusCode != tt.want {
				t.Errorf("answered %s, want %d", res.Status, tt.want)
			}
		})
	}
}

func TestHealthCounts(t *testing.T) {
	s := newSite(t, broker.Limits{})
	c := s.host(nil, echo)
	conn := s.dial(s.route(c, "device", nil))
	defer conn.Close()
	var got struct {
		OK       bool   `json:"ok"`
		Service  string `json:"service"`
		Versions []int  `json:"protocol_versions"`
		Hosts    int    `json:"hosts_online"`
		Streams  int    `json:"active_streams"`
	}
	if err := json.NewDecoder(s.get(t, "/health").Body).Decode(&got); err != nil {
		t.Fatal(err)
	}
	if !got.OK || got.Service != "hermes_reach" || len(got.Versions) == 0 || got.Hosts != 1 || got.Streams != 1 {
		t.Errorf("health = %+v", got)
	}
}

// TestGuessingIsSlowedDown: failures are counted, successes are not, and the
// answer says how long to wait.
func TestGuessingIsSlowedDown(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{Failures: 3})
	token := s.stored(wire.KindRoute, "device")
	for range 10 {
		_ = s.mustRegister(s.asClient(token)).sess.Close()
	}
	for i := range 3 {
		if _, err := s.register(s.asClient(wire.NewToken())); wire.CodeOf(err) != wire.CodeUnauthorized {
			t.Fatalf("guess %d: %v, want unauthorized", i+1, err)
		}
	}
	res := s.get(t, carrier.ConnectPath, "Connection: Upgrade", "Upgrade: "+carrier.UpgradeToken)
	wait, err := strconv.Atoi(res.Header.Get("Retry-After"))
	if res.StatusCode != http.StatusTooManyRequests || err != nil || wait < 1 || wait > 60 {
		t.Errorf("after three guesses: %s, Retry-After %q; want 429 and 1 to 60 seconds", res.Status, res.Header.Get("Retry-After"))
	}
	_, err = (&carrier.Dialer{URL: s.url, TLS: s.ca.Client()}).Dial(t.Context())
	if r, ok := errors.AsType[*wire.RefusedError](err); !ok || r.Code != wire.CodeRateLimited || r.RetryAfter <= 0 {
		t.Errorf("our own dialer makes of it %v, want rate_limited and a wait", err)
	}
	if res := s.get(t, "/health"); res.StatusCode != http.StatusOK {
		t.Errorf("health: %s", res.Status)
	}
}

func TestSessionsLimit(t *testing.T) {
	s := newSite(t, broker.Limits{Sessions: 2})
	first, _ := s.session(), s.session()
	res := s.get(t, carrier.ConnectPath, "Connection: Upgrade", "Upgrade: "+carrier.UpgradeToken)
	if res.StatusCode != http.StatusTooManyRequests || res.Header.Get("Retry-After") != "60" {
		t.Errorf("the third session: %s, Retry-After %q; want 429 and 60", res.Status, res.Header.Get("Retry-After"))
	}
	_ = first.Close()
	eventually(t, "its place comes free", func() bool {
		c, err := (&carrier.Dialer{URL: s.url, TLS: s.ca.Client()}).Dial(t.Context())
		return err == nil && c.Close() == nil
	})
}

// TestSilentSessionsAreFew: one source cannot take all the places by saying
// nothing; those that register make room.
func TestSilentSessionsAreFew(t *testing.T) {
	s := newSite(t, broker.Limits{Pending: 2})
	token := s.stored(wire.KindRoute, "device")
	s.mustRegister(s.asClient(token))
	s.mustRegister(s.asHost(0, 1, wire.NewID()))
	s.session()
	silent := s.session()
	res := s.get(t, carrier.ConnectPath, "Connection: Upgrade", "Upgrade: "+carrier.UpgradeToken)
	if res.StatusCode != http.StatusTooManyRequests || res.Header.Get("Retry-After") != "1" {
		t.Errorf("the third that says nothing: %s, Retry-After %q; want 429 and 1", res.Status, res.Header.Get("Retry-After"))
	}
	_ = silent.Close()
	eventually(t, "its place comes free", func() bool {
		c, err := (&carrier.Dialer{URL: s.url, TLS: s.ca.Client()}).Dial(t.Context())
		return err == nil && c.Close() == nil
	})
}

func TestConnectionIDsAreUsedOnce(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{})
	client, host := s.asClient(s.stored(wire.KindRoute, "device")), s.asHost(0, 1, wire.NewID())
	for name, reg := range map[string]*wire.Register{"client": client, "host": host} {
		p := s.mustRegister(reg)
		_ = p.sess.Close()
		if _, err := s.register(reg); wire.CodeOf(err) != wire.CodeReplayed {
			t.Errorf("the %s's registration again: %v, want replayed", name, err)
		}
		again := *reg
		again.ConnectionID = wire.NewID()
		if _, err := s.register(&again); err != nil {
			t.Errorf("the %s with a fresh id: %v", name, err)
		}
	}
}

// TestBrokenDiskCostsNoCredential: a broker that cannot look a token up does
// not call it wrong: devices throw such tokens away.
func TestBrokenDiskCostsNoCredential(t *testing.T) {
	s := newSite(t, broker.Limits{Failures: 1})
	token := s.stored(wire.KindRoute, "device")
	p := s.mustRegister(s.asClient(token))
	if err := s.store.Close(); err != nil {
		t.Fatal(err)
	}
	if _, m := p.dial(); written(t, m) != written(t, &wire.Error{Code: wire.CodeHostOffline}) {
		t.Errorf("a dial is answered with %v, want host_offline", m)
	}
	for range 2 { // nor is it counted as a guess
		if _, err := s.register(s.asClient(token)); wire.CodeOf(err) != wire.CodeHostOffline {
			t.Errorf("a registration: %v, want host_offline", err)
		}
	}
}

// TestBootstrapWithoutAHost: the attempt costs nothing, not even the connection
// id.
func TestBootstrapWithoutAHost(t *testing.T) {
	s := newSite(t, broker.Limits{})
	reg := s.asClient(s.stored(wire.KindBootstrap, "pairing"))
	reg.CredentialKind = wire.KindBootstrap
	for range 2 {
		if _, err := s.register(reg); wire.CodeOf(err) != wire.CodeHostOffline {
			t.Fatalf("without a host: %v, want host_offline", err)
		}
	}
	var seen states
	s.host(func(c *connector.Config) { seen = watchStates(c) }, echo)
	seen.await(t, "connected", isConnected)
	p := s.mustRegister(reg)
	if _, m := p.dial(); m == nil {
		t.Error("no answer")
	} else if _, ok := m.(*wire.Matched); !ok {
		t.Errorf("with a host the dial is answered with %T %v", m, m)
	}
}
