package link

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/nettest"

	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// ends is a session with one stream open between its two ends.
type ends struct {
	client, server   *Session
	cstream, sstream *Stream
}

// connect runs a session over a and b, with control streams, and opens a stream.
func connect(t testing.TB, a, b net.Conn) *ends {
	t.Helper()
	return connectWith(t, carrier.NewCarrier(a, carrier.TLS), carrier.NewCarrier(b, carrier.TLS), Config{})
}

func connectWith(t testing.TB, a, b *carrier.Carrier, cfg Config) *ends {
	t.Helper()
	e := &ends{}
	var err error
	if e.client, err = Client(a, cfg); err != nil {
		t.Fatal(err)
	}
	if e.server, err = Server(b, cfg); err != nil {
		t.Fatal(err)
	}
	cctl, sctl := e.open(t)
	for _, c := range []*Control{e.client.StartControl(cctl), e.server.StartControl(sctl)} {
		c.st.s.spawn(func() { serveResets(c) })
	}
	e.cstream, e.sstream = e.open(t)
	id := wire.NewID()
	e.cstream.Bind(id)
	e.sstream.Bind(id)
	return e
}

// open opens one stream from the client and makes sure that it has arrived.
func (e *ends) open(t testing.TB) (*Stream, *Stream) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := e.client.OpenStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	s, err := e.server.AcceptStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return c, s
}

func (e *ends) close() {
	_ = e.client.Close()
	_ = e.server.Close()
}

// serveResets is what every end does with its control stream.
func serveResets(c *Control) {
	for {
		if _, err := c.Receive(); err != nil {
			return
		}
	}
}

func tcpPair(t testing.TB) (net.Conn, net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	ch := make(chan net.Conn, 1)
	go func() {
		c, err := ln.Accept()
		if err != nil {
			t.Error(err)
		}
		ch <- c
	}()
	a, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return a, <-ch
}

// TestConnContract is the row conn-adapter of the failure kinds: a Conn is a
// net.Conn in every respect, whatever carries it and from either side.
func TestConnContract(t *testing.T) {
	carriers := map[string]func() (net.Conn, net.Conn){
		"pipe": func() (net.Conn, net.Conn) { return net.Pipe() },
		"tcp":  func() (net.Conn, net.Conn) { return tcpPair(t) },
	}
	for name, carrier := range carriers {
		for _, reversed := range []bool{false, true} {
			t.Run(name+map[bool]string{true: " reversed"}[reversed], func(t *testing.T) {
				nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
					a, b := carrier()
					e := connect(t, a, b)
					c1 = NewConn(e.cstream, a.LocalAddr(), a.RemoteAddr())
					c2 = NewConn(e.sstream, b.LocalAddr(), b.RemoteAddr())
					if reversed {
						c1, c2 = c2, c1
					}
					return c1, c2, func() { _ = c1.Close(); _ = c2.Close(); e.close() }, nil
				})
			})
		}
	}
}

func conns(t testing.TB) (*ends, *Conn, *Conn) {
	a, b := tcpPair(t)
	e := connect(t, a, b)
	t.Cleanup(e.close)
	return e, NewConn(e.cstream, a.LocalAddr(), a.RemoteAddr()), NewConn(e.sstream, b.LocalAddr(), b.RemoteAddr())
}

func TestHalfCloseKeepsTheOtherDirection(t *testing.T) {
	_, c, s := conns(t)
	if _, err := c.Write([]byte("question")); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(s)
	if err != nil || string(got) != "question" {
		t.Fatalf("read %q, %v; want the question and its end", got, err)
	}
	go func() {
		_, _ = s.Write([]byte("answer"))
		_ = s.Close()
	}()
	got, err = io.ReadAll(c)
	if err != nil || string(got) != "answer" {
		t.Fatalf("read %q, %v; want the answer after our half-close", got, err)
	}
	if _, err := c.Write([]byte("x")); err == nil {
		t.Error("a write after CloseWrite was taken")
	}
}

// TestCloseDeliversWhatWasWritten is what a server relies on that answers and
// closes: nothing of the answer may be lost, however large it is.
func TestCloseDeliversWhatWasWritten(t *testing.T) {
	_, c, s := conns(t)
	sent := make([]byte, 3*Window+123)
	_, _ = rand.Read(sent)
	go func() {
		_, _ = s.Write(sent)
		_ = s.Close()
	}()
	got, err := io.ReadAll(c)
	if err != nil || string(got) != string(sent) {
		t.Fatalf("read %d bytes, %v; want %d and the end", len(got), err, len(sent))
	}
}

// TestCloseStopsTheWriter: who closes without having read to the end must not
// leave the other end waiting for a window for ever.
func TestCloseStopsTheWriter(t *testing.T) {
	e, c, s := conns(t)
	failed := make(chan error)
	go func() {
		buf := make([]byte, 64<<10)
		for {
			if _, err := s.Write(buf); err != nil {
				failed <- err
				return
			}
		}
	}()
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	err := <-failed
	var reset *ResetError
	if !errors.As(err, &reset) || reset.Code != wire.CodeClosed {
		t.Errorf("writer got %v, want a reset with code closed", err)
	}
	_ = s.Close()
	waitStreams(t, e, 1) // the control stream is left
}

// waitStreams waits until both ends hold n streams: nothing is kept of the
// others. It is woken by opening and closing streams, not by time.
func waitStreams(t *testing.T, e *ends, n int) {
	t.Helper()
	for range 1000 {
		if e.client.NumStreams() == n && e.server.NumStreams() == n {
			return
		}
		c, s := e.open(t)
		_ = c.CloseWrite()
		_ = s.CloseWrite()
		_, _ = io.ReadAll(c)
		_, _ = io.ReadAll(s)
	}
	t.Fatalf("client holds %d streams, server %d; want %d", e.client.NumStreams(), e.server.NumStreams(), n)
}

// TestAbortNamesItsReason: an abort is never taken for an orderly end, however
// the two messages of it and the reader's goroutine race, and whichever
// directions had ended before.
func TestAbortNamesItsReason(t *testing.T) {
	e, _, _ := conns(t)
	for i := range 300 {
		cs, ss := e.open(t)
		id := wire.NewID()
		cs.Bind(id)
		ss.Bind(id)
		c, s := NewConn(cs, nil, nil), NewConn(ss, nil, nil)
		if i%2 == 0 { // the other end has nothing more to say: nothing answers the reset
			_ = s.CloseWrite()
			_, _ = io.ReadAll(c)
		}
		c.Abort(wire.CodeRevoked)
		var reset *ResetError
		if _, err := s.Read(make([]byte, 1)); !errors.As(err, &reset) || reset.Code != wire.CodeRevoked {
			t.Fatalf("round %d: the other end got %v, want a reset with code revoked", i, err)
		}
		if _, err := s.Write([]byte("x")); err == nil {
			t.Errorf("round %d: a write to an aborted stream was taken", i)
		}
		_ = s.Close()
	}
}

// TestResetBeforeBind: an abort that crosses the message which names the stream
// is not lost.
func TestResetBeforeBind(t *testing.T) {
	e, _, _ := conns(t)
	cs, ss := e.open(t)
	id := wire.NewID()
	ss.Bind(id)
	ss.Abort(wire.CodeRevoked)
	for e.client.early1(id) == "" { // the reset is there
		runtime.Gosched()
	}
	cs.Bind(id)
	var reset *ResetError
	if _, err := cs.Read(make([]byte, 1)); !errors.As(err, &reset) || reset.Code != wire.CodeRevoked {
		t.Errorf("Read = %v, want a reset with code revoked", err)
	}
	for range 3 * earlyResets { // resets of streams that never were hold little
		e.client.Reset(wire.NewID(), wire.CodeRevoked)
	}
	if n := len(e.client.early); n > earlyResets {
		t.Errorf("%d early resets are kept", n)
	}
	_ = cs.Close()
}

func (s *Session) early1(id wire.ID) wire.Code {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.early[id]
}

func TestSessionDeathIsNoOrderlyEnd(t *testing.T) {
	e, c, s := conns(t)
	if _, err := s.Write([]byte("part")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
		t.Fatal(err)
	}
	_ = e.server.carrier.Close()
	if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("Read = %v, want an error that is not EOF: a cut stream must be seen as cut", err)
	}
	if _, err := e.client.OpenStream(t.Context()); !errors.Is(err, ErrSessionClosed) {
		t.Errorf("OpenStream = %v, want ErrSessionClosed", err)
	}
}

// frozen is a connection whose writes hang until it is closed.
type frozen struct {
	net.Conn
	stop   chan struct{}
	freeze chan struct{}
}

func (f *frozen) Write(p []byte) (int, error) {
	select {
	case <-f.freeze:
		<-f.stop
		return 0, net.ErrClosed
	default:
		return f.Conn.Write(p)
	}
}

func (f *frozen) Close() error {
	close(f.stop)
	return f.Conn.Close()
}

// TestFrozenLink: on a link that hangs, deadlines hold and Close returns.
func TestFrozenLink(t *testing.T) {
	a, b := tcpPair(t)
	f := &frozen{Conn: a, stop: make(chan struct{}), freeze: make(chan struct{})}
	e := connect(t, f, b)
	c := NewConn(e.cstream, a.LocalAddr(), a.RemoteAddr())
	close(f.freeze)
	if err := c.SetWriteDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(make([]byte, 8<<20)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Write = %v, want its deadline", err)
	}
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read = %v, want its deadline", err)
	}
	start := time.Now()
	_ = c.Close()
	if took := time.Since(start); took > time.Second {
		t.Errorf("Close of the conn took %v", took)
	}
	_ = e.client.Close()
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("Close of the session took %v, want less than 5 s", took)
	}
	_ = e.server.Close()
}

func TestDeadLinkIsNoticed(t *testing.T) {
	a, b := net.Pipe()
	c, err := Client(carrier.NewCarrier(a, carrier.TLS), Config{DeadAfter: 70 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.Copy(io.Discard, b) }() // takes everything, says nothing
	<-c.Done()
	if !errors.Is(c.Err(), ErrDead) || !errors.Is(c.Err(), ErrSessionClosed) {
		t.Errorf("Err = %v, want ErrDead and ErrSessionClosed", c.Err())
	}
	_ = c.Close()
	_ = b.Close()
}

func TestUnreadBytesAreBoundedByTheWindow(t *testing.T) {
	e, c, s := conns(t)
	wrote := make(chan int)
	go func() {
		n := 0
		_ = s.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
		for {
			m, err := s.Write(make([]byte, 32<<10))
			n += m
			if err != nil {
				wrote <- n
				return
			}
		}
	}()
	// Nobody reads c. Another stream is not disturbed.
	c2, s2 := e.open(t)
	for range 50 {
		if _, err := c2.Write([]byte("ping")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(s2, make([]byte, 4)); err != nil {
			t.Fatal(err)
		}
	}
	if n := <-wrote; n > Window+2*sendBuffer {
		t.Errorf("a stopped reader took %d bytes, want at most its window and a send buffer", n)
	}
	_, _ = c.Close(), s.Close()
}
