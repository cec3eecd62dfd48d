package link

import (
	"errors"
	"io"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// TestManyStreamsEndWithTheirSession: when a link is cut, every call that waits
// on one of its streams returns at once. yamux would let them spin until it has
// told each stream, which took seconds of every processor.
func TestManyStreamsEndWithTheirSession(t *testing.T) {
	a, b := tcpPair(t)
	e := connect(t, a, b)
	var waiting, done sync.WaitGroup
	wait := func(call func() error) {
		waiting.Add(1)
		done.Go(func() {
			waiting.Done()
			if err := call(); !errors.Is(err, ErrSessionClosed) {
				t.Errorf("a call on a stream of a session that was cut: %v, want ErrSessionClosed", err)
			}
		})
	}
	for range 500 {
		c, s := e.open(t)
		wait(func() error { _, err := c.Read(make([]byte, 1)); return err })
		wait(func() error { _, err := s.Read(make([]byte, 1)); return err })
	}
	waiting.Wait()
	start := time.Now()
	_ = e.server.carrier.Close()
	done.Wait()
	e.close()
	if took := time.Since(start); took > time.Second {
		t.Errorf("the end of a session with 500 streams took %v, want milliseconds", took)
	}
}

// TestEndedStreamsAreForgotten: the session remembers no stream whose directions
// are both over, in whatever way they ended.
func TestEndedStreamsAreForgotten(t *testing.T) {
	a, b := tcpPair(t)
	e := connect(t, a, b)
	for i := range 60 {
		c, s := e.open(t)
		id := wire.NewID()
		c.Bind(id)
		s.Bind(id)
		switch i % 4 {
		case 0:
			c.Abort(wire.CodeRevoked)
		case 1:
			_ = c.CloseWrite()
			_, _ = io.ReadAll(s)
		case 2:
			c.CloseRead()
		}
		_ = s.Close()
		_ = c.Close()
	}
	c, s := e.open(t) // what came before it on the control stream may be late: wait for all
	_ = c.Close()
	_ = s.Close()
	for e.client.NumStreams() > 2 || e.server.NumStreams() > 2 {
		runtime.Gosched()
	}
	e.close()
	// The control stream and the one that connect opened are left.
	if n, m := len(e.client.live), len(e.server.live); n > 2 || m > 2 {
		t.Errorf("client remembers %d streams, server %d; want 2", n, m)
	}
}

// TestIdleStreamsHoldLittle: what streams needed for a burst is given back while
// they are idle, without anybody asking.
func TestIdleStreamsHoldLittle(t *testing.T) {
	const streams, burst = 40, 256 << 10
	a, b := tcpPair(t)
	e := connectWith(t, carrier.NewCarrier(a, carrier.TLS), carrier.NewCarrier(b, carrier.TLS), Config{DeadAfter: 7 * time.Second})
	defer e.close()
	held := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // what pools hold goes with the second
		runtime.ReadMemStats(&m)
		return int64(m.HeapInuse) //nolint:gosec // a few megabytes
	}
	before := held()
	for range streams {
		cs, ss := e.open(t)
		c, s := NewConn(cs, nil, nil), NewConn(ss, nil, nil)
		defer c.Close()
		defer s.Close()
		if _, err := s.Write(make([]byte, burst)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, burst)); err != nil {
			t.Fatal(err)
		}
	}
	most := before + streams*burst/8
	for end := time.Now().Add(5 * time.Second); held() > most; {
		if time.Now().After(end) {
			t.Fatalf("%d idle streams hold %d KiB, want at most %d", streams, (held()-before)>>10, (most-before)>>10)
		}
	}
}

// TestEmptyReadWaits: a splice asks with an empty buffer whether there is
// something to read, so that it holds none until then.
func TestEmptyReadWaits(t *testing.T) {
	a, b := tcpPair(t)
	e := connect(t, a, b)
	defer e.close()
	came := make(chan error)
	go func() {
		_, err := e.cstream.Read(nil)
		came <- err
	}()
	select {
	case err := <-came:
		t.Fatalf("Read(nil) = %v before anything was sent, want it to wait", err)
	case <-time.After(20 * time.Millisecond):
	}
	if _, err := e.sstream.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := <-came; err != nil {
		t.Errorf("Read(nil) = %v with a byte there, want nil", err)
	}
	if err := e.sstream.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(e.cstream); string(got) != "x" || err != nil {
		t.Errorf("then read %q, %v; want the byte and the end", got, err)
	}
	if _, err := e.cstream.Read(nil); !errors.Is(err, io.EOF) {
		t.Errorf("Read(nil) at the end = %v, want io.EOF", err)
	}
}
