package carrier_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// place is a broker's front door: a TLS server that upgrades, or what stands in
// its way.
func place(t *testing.T, handler http.HandlerFunc) (*lab.CA, wire.BrokerURL) {
	t.Helper()
	ca, err := lab.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := ca.Server("localhost")
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, ErrorLog: log.New(io.Discard, "", 0)}
	done := make(chan struct{})
	go func() { _ = srv.Serve(tls.NewListener(ln, cfg)); close(done) }()
	t.Cleanup(func() { _ = srv.Close(); <-done })
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	u, err := wire.ParseBrokerURL("wss://localhost:"+port, false)
	if err != nil {
		t.Fatal(err)
	}
	return ca, u
}

// echoCarrier upgrades and sends everything back.
func echoCarrier(tasks *sync.WaitGroup) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		c, err := carrier.Upgrade(w, r)
		if err != nil {
			return
		}
		tasks.Go(func() { _, _ = io.Copy(c, c); _ = c.Close() })
	}
}

func roundTrip(t *testing.T, c *carrier.Carrier) {
	t.Helper()
	defer func() { _ = c.Close() }()
	sent := strings.Repeat("opaque bytes ", 20000)
	go func() { _, _ = io.WriteString(c, sent) }()
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != sent {
		t.Errorf("the bytes did not come back: %v", err)
	}
}

func TestTransports(t *testing.T) {
	var tasks sync.WaitGroup
	defer tasks.Wait()
	ca, u := place(t, echoCarrier(&tasks))
	for _, transport := range []carrier.Transport{carrier.TLS, carrier.WSS} {
		d := &carrier.Dialer{URL: u, TLS: ca.Client(), Transports: []carrier.Transport{transport}}
		c, err := d.Dial(t.Context())
		if err != nil {
			t.Fatalf("%s: %v", transport, err)
		}
		if c.Transport() != transport {
			t.Errorf("dialled %s, got %s", transport, c.Transport())
		}
		roundTrip(t, c)
	}
}

// TestFallsBackToWebSocket: a proxy that knows only WebSockets does not stop us.
func TestFallsBackToWebSocket(t *testing.T) {
	var tasks sync.WaitGroup
	defer tasks.Wait()
	echo := echoCarrier(&tasks)
	ca, u := place(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" {
			http.Error(w, "<html>what is that?</html>", http.StatusBadGateway)
			return
		}
		echo(w, r)
	})
	c, err := (&carrier.Dialer{URL: u, TLS: ca.Client()}).Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if c.Transport() != carrier.WSS {
		t.Errorf("transport = %s, want wss", c.Transport())
	}
	roundTrip(t, c)
}

func TestDialRefusals(t *testing.T) {
	dials := make(chan struct{}, 16)
	ca, u := place(t, func(w http.ResponseWriter, r *http.Request) {
		dials <- struct{}{}
		w.Header().Set("Retry-After", "17")
		http.Error(w, "slow down", http.StatusTooManyRequests)
	})
	_, err := (&carrier.Dialer{URL: u, TLS: ca.Client()}).Dial(t.Context())
	refused, ok := errors.AsType[*wire.RefusedError](err)
	if !ok || refused.Code != wire.CodeRateLimited || refused.RetryAfter != 17*time.Second {
		t.Errorf("429: %v, want rate_limited with the wait", err)
	}
	before := len(dials)
	stranger, err := lab.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	_, err = (&carrier.Dialer{URL: u, TLS: stranger.Client()}).Dial(t.Context())
	var cert *tls.CertificateVerificationError
	if !errors.As(err, &cert) {
		t.Errorf("another authority: %v, want the certificate's error", err)
	}
	if len(dials) != before {
		t.Error("a request was sent to a broker whose certificate does not hold")
	}
}

func TestOldBrokerIsNamed(t *testing.T) {
	ca, u := place(t, http.NotFound)
	if _, err := (&carrier.Dialer{URL: u, TLS: ca.Client()}).Dial(t.Context()); !errors.Is(err, carrier.ErrNoProtocol2) {
		t.Errorf("a place without protocol 2: %v, want ErrNoProtocol2", err)
	}
}

func TestDialEndsWithItsContext(t *testing.T) {
	stop := make(chan struct{})
	ca, u := place(t, func(_ http.ResponseWriter, r *http.Request) {
		select { // answers nobody
		case <-stop:
		case <-r.Context().Done():
		}
	})
	defer close(stop)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := (&carrier.Dialer{URL: u, TLS: ca.Client()}).Dial(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Dial = %v, want its context's end", err)
	}
}

// TestUpgradeRefusals: what is no session is told what is spoken here.
func TestUpgradeRefusals(t *testing.T) {
	var tasks sync.WaitGroup
	defer tasks.Wait()
	ca, u := place(t, echoCarrier(&tasks))
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: ca.Client()}}
	defer client.CloseIdleConnections()
	for name, tt := range map[string]struct {
		header http.Header
		status int
	}{
		"a plain GET":             {nil, http.StatusUpgradeRequired},
		"another upgrade":         {http.Header{"Connection": {"Upgrade"}, "Upgrade": {"h2c"}}, http.StatusUpgradeRequired},
		"a WebSocket of others":   {wsHeader("chat", ""), http.StatusBadRequest},
		"a browser's WebSocket":   {wsHeader(carrier.Subprotocol, "https://evil.example"), http.StatusForbidden},
		"a WebSocket of no proto": {wsHeader("", ""), http.StatusBadRequest},
	} {
		req, err := http.NewRequest(http.MethodGet, "https://"+u.HostPort()+carrier.ConnectPath, nil)
		if err != nil {
			t.Fatal(err)
		}
		if tt.header != nil {
			req.Header = tt.header
		}
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != tt.status {
			t.Errorf("%s: status %d, want %d", name, res.StatusCode, tt.status)
		}
	}
}

func wsHeader(protocol, origin string) http.Header {
	h := http.Header{
		"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"},
		"Sec-Websocket-Key": {"AAAAAAAAAAAAAAAAAAAAAA=="},
	}
	if protocol != "" {
		h.Set("Sec-Websocket-Protocol", protocol)
	}
	if origin != "" {
		h.Set("Origin", origin)
	}
	return h
}

// TestTextMessageEndsTheCarrier: only binary messages carry a session.
func TestTextMessageEndsTheCarrier(t *testing.T) {
	ended := make(chan error, 1)
	ca, u := place(t, func(w http.ResponseWriter, r *http.Request) {
		c, err := carrier.Upgrade(w, r)
		if err != nil {
			ended <- err
			return
		}
		_, err = c.Read(make([]byte, 10))
		ended <- err
		_ = c.Close()
	})
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: ca.Client()}}
	defer client.CloseIdleConnections()
	ws, _, err := websocket.Dial(t.Context(), "https"+strings.TrimPrefix(u.V2(), "wss"), &websocket.DialOptions{
		HTTPClient: client, Subprotocols: []string{carrier.Subprotocol},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ws.CloseNow() }()
	if err := ws.Write(t.Context(), websocket.MessageText, []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "text message") {
		t.Errorf("Read = %v, want that a text message came", err)
	}
}
