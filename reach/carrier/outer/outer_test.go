package outer

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/internal/lab"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// counter counts the writes that reach the network.
type counter struct {
	net.Conn
	mu     sync.Mutex
	writes int
	fail   error
}

func (c *counter) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writes++
	if c.fail != nil {
		return 0, c.fail
	}
	return c.Conn.Write(p)
}

func (c *counter) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.writes
}

// handshaken is both ends of an outer connection over TCP, and what counts the
// client's writes.
func handshaken(t *testing.T) (client, server *tls.Conn, writes *counter) {
	t.Helper()
	ca, err := lab.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := ca.Server("localhost")
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln := NewListener(tcp, cfg)
	defer ln.Close()
	raw, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	writes = &counter{Conn: raw}
	trust := ca.Client()
	trust.ServerName = "localhost"
	client = Client(writes, trust)
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	server = accepted.(*tls.Conn)
	done := make(chan error)
	go func() { done <- server.Handshake() }()
	if err := errors.Join(client.Handshake(), <-done); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = raw.Close(); _ = server.NetConn().Close() })
	return client, server, writes
}

// TestRecordsLeaveTogether: however many records a write makes, the network sees
// one call, and the bytes arrive as they were.
func TestRecordsLeaveTogether(t *testing.T) {
	client, server, writes := handshaken(t)
	if client.ConnectionState().NegotiatedProtocol != "http/1.1" {
		t.Errorf("negotiated %q, want http/1.1", client.ConnectionState().NegotiatedProtocol)
	}
	sent := make([]byte, 100<<10)
	for i := range sent {
		sent[i] = byte(i * i >> 3)
	}
	before := writes.count()
	k := Under(client)
	k.Hold()
	if _, err := client.Write(sent); err != nil {
		t.Fatal(err)
	}
	if n := writes.count() - before; n != 0 {
		t.Errorf("%d writes while the cork was held", n)
	}
	go func() { _ = k.Release() }()
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(server, got); err != nil || string(got) != string(sent) {
		t.Fatalf("what arrived is not what was sent: %v", err)
	}
	if n := writes.count() - before; n != 1 {
		t.Errorf("100 KiB left in %d writes, want 1", n)
	}
	if _, err := client.Write([]byte("x")); err != nil || writes.count()-before != 2 {
		t.Errorf("after Release: %v, %d writes; want that they go straight through", err, writes.count()-before)
	}
	if Under(server) == nil {
		t.Error("the accepting end has no cork")
	}
}

func TestReleaseTellsTheError(t *testing.T) {
	broken := errors.New("the cable is out")
	k := NewCork(&counter{fail: broken})
	k.Hold()
	if _, err := k.Write([]byte("x")); err != nil {
		t.Fatalf("Write = %v, want it held", err)
	}
	if err := k.Release(); !errors.Is(err, broken) {
		t.Errorf("Release = %v, want the connection's error", err)
	}
}

// TestNoCork: connections that have none below them are left as they are.
func TestNoCork(t *testing.T) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	k := Under(a)
	if k != nil {
		t.Fatal("a pipe has a cork")
	}
	k.Hold()
	if err := k.Release(); err != nil {
		t.Errorf("Release of no cork = %v", err)
	}
}
