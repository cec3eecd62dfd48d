package broker_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// pair is a device, and the host's end of each stream that it dials.
func (s *site) pair(adjust func(*connector.Config)) (*connector.Connector, *reach.Dialer, <-chan net.Conn) {
	s.t.Helper()
	accepted := make(chan net.Conn, 64)
	c := s.host(adjust, func(c net.Conn) { accepted <- c })
	return c, s.route(c, "device", nil), accepted
}

func closeWrite(t testing.TB, c net.Conn) {
	t.Helper()
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Error(err)
	}
}

func wantReset(t testing.TB, who string, err error, want wire.Code) {
	t.Helper()
	var reset *link.ResetError
	if !errors.As(err, &reset) || reset.Code != want {
		t.Errorf("the %s gets %v, want the code %s", who, err, want)
	}
}

// TestIdleStreamsEnd with a code at both ends; bytes in either direction keep a
// stream.
func TestIdleStreamsEnd(t *testing.T) {
	t.Parallel()
	const idle = 800 * time.Millisecond
	s := newSite(t, broker.Limits{Idle: idle})
	_, d, accepted := s.pair(nil)
	silent := s.dial(d)
	silentHost := <-accepted
	up := s.dial(d)
	upHost := <-accepted
	down := s.dial(d)
	downHost := <-accepted
	for _, c := range []net.Conn{silent, silentHost, up, upHost, down, downHost} {
		defer c.Close()
	}
	start := time.Now()
	trickle := func(from, to net.Conn) error {
		tick := time.NewTicker(idle / 16)
		defer tick.Stop()
		for time.Since(start) < 2*idle {
			<-tick.C
			if _, err := from.Write([]byte("x")); err != nil {
				return err
			}
			if _, err := io.ReadFull(to, make([]byte, 1)); err != nil {
				return err
			}
		}
		return nil
	}
	var all sync.WaitGroup
	all.Go(func() {
		if err := trickle(up, upHost); err != nil {
			t.Errorf("a stream that only the device writes to: %v", err)
		}
	})
	all.Go(func() {
		if err := trickle(downHost, down); err != nil {
			t.Errorf("a stream that only the host writes to: %v", err)
		}
	})
	for who, c := range map[string]net.Conn{"device": silent, "host": silentHost} {
		_, err := c.Read(make([]byte, 1))
		wantReset(t, who, err, wire.CodeIdleTimeout)
	}
	if took := time.Since(start); took < idle/2 {
		t.Errorf("a silent stream ended after %v", took)
	}
	all.Wait()
}

// TestHalfCloseIsKept: an end in one direction crosses the broker and leaves
// the other one open, from either side.
func TestHalfCloseIsKept(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{})
	_, d, accepted := s.pair(nil)
	for _, first := range []string{"device", "host"} {
		t.Run(first, func(t *testing.T) {
			a := s.dial(d)
			b := <-accepted
			if first == "host" {
				a, b = b, a
			}
			defer a.Close()
			defer b.Close()
			_, _ = io.WriteString(a, "the question")
			closeWrite(t, a)
			if got, err := io.ReadAll(b); err != nil || string(got) != "the question" {
				t.Fatalf("the other end reads %q, %v", got, err)
			}
			answer := bytes.Repeat([]byte("a long answer "), 100_000)
			go func() {
				_, _ = b.Write(answer)
				_ = b.Close()
			}()
			if got, err := io.ReadAll(a); err != nil || !bytes.Equal(got, answer) {
				t.Errorf("after its own end it reads %d of %d bytes, %v", len(got), len(answer), err)
			}
		})
	}
}

// TestAbortsPassWithTheirCode from either end to the other.
func TestAbortsPassWithTheirCode(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{})
	_, d, accepted := s.pair(nil)
	for _, code := range []wire.Code{wire.CodeRevoked, "from_the_future"} {
		device := s.dial(d)
		host := <-accepted
		device.(*link.Conn).Abort(code)
		_, err := host.Read(make([]byte, 1))
		wantReset(t, "host", err, code)

		device = s.dial(d)
		host = <-accepted
		host.(*link.Conn).Abort(code)
		_, err = device.Read(make([]byte, 1))
		wantReset(t, "device", err, code)
	}
	eventually(t, "the broker forgets the streams", func() bool { return s.broker.Status().Streams == 0 })
}

// TestTruncationIsNoEnd: an end that dies in the middle of a transfer is never
// taken for one that had said all it had to say.
func TestTruncationIsNoEnd(t *testing.T) {
	t.Parallel()
	s := newSite(t, broker.Limits{})
	cut := newCuts()
	var seen states
	_, d, accepted := s.pair(func(c *connector.Config) { c.NetDial, c.Sessions, seen = cut.dial, 1, watchStates(c) })
	seen.await(t, "connected", isConnected)
	for range 3 { // each costs the host a longer wait
		device := s.dial(d)
		host := <-accepted
		_, _ = host.Write(make([]byte, 100<<10))
		if _, err := io.ReadFull(device, make([]byte, 10<<10)); err != nil {
			t.Fatal(err)
		}
		cut.all()
		if _, err := io.Copy(io.Discard, device); err == nil {
			t.Fatal("the host died and the device read a proper end")
		}
		seen.await(t, "connected again", isConnected)
		_ = host.Close()
	}
	_, _, accepted2 := s.pair(func(c *connector.Config) { c.Epoch = 2 })
	token := s.stored(wire.KindRoute, "other")
	for range 10 {
		dying := s.dialer(wire.KindRoute, token, func(c *reach.DialerConfig) { c.NetDial = cut.dial })
		device := s.dial(dying)
		host := <-accepted2
		_, _ = device.Write(make([]byte, 100<<10))
		if _, err := io.ReadFull(host, make([]byte, 10<<10)); err != nil {
			t.Fatal(err)
		}
		cut.all()
		if _, err := io.Copy(io.Discard, host); err == nil {
			t.Fatal("the device died and the host read a proper end")
		}
		_ = host.Close()
	}
}

// TestSlowReadersHarmNobody: forty devices that stopped reading hold no more
// than their windows, are not cut off, and get everything later; meanwhile
// another stream of the same sessions answers as ever.
func TestSlowReadersHarmNobody(t *testing.T) {
	t.Parallel()
	const (
		readers = 40
		window  = 256 << 10
		size    = 5 << 18
		// What may be under way for one reader: a window from host to broker and
		// one on to the device, what the ends' Conns buffer, a copy at the broker.
		bound = 2*window + 4*(64<<10)
	)
	small := link.Config{Window: window}
	s := newSiteWith(t, broker.Config{Link: small, Limits: broker.Limits{CredentialStreams: readers + 1}})
	var taken [readers]atomic.Int64
	var next atomic.Int32
	want := make([]byte, size)
	_, _ = rand.Read(want)
	c := s.host(func(c *connector.Config) { c.Link = small }, func(c net.Conn) {
		defer c.Close()
		me := next.Add(1) - 1
		if me == readers {
			_, _ = io.Copy(c, c)
			return
		}
		for sent := 0; sent < size; sent += 16 << 10 {
			n, err := c.Write(want[sent : sent+16<<10])
			if taken[me].Add(int64(n)); err != nil {
				t.Errorf("writing to a slow reader: %v", err)
				return
			}
		}
	})
	d := s.route(c, "device", func(c *reach.DialerConfig) { c.Link = small })
	conns := make([]net.Conn, readers)
	for i := range conns {
		conns[i] = s.dial(d)
	}
	live := s.dial(d)
	defer live.Close()
	full := func() bool { // every stream holds what it can hold: at least a window
		for i := range taken {
			if taken[i].Load() < window {
				return false
			}
		}
		return true
	}
	for !full() {
		echoes(t, live)
	}
	for range 100 {
		echoes(t, live)
	}
	for i := range taken {
		if n := taken[i].Load(); n > bound {
			t.Errorf("%d bytes were taken for a reader that does not read, at most %d may be", n, bound)
		}
	}
	var all sync.WaitGroup
	for _, conn := range conns {
		all.Go(func() {
			defer conn.Close()
			if got, err := io.ReadAll(conn); err != nil || !bytes.Equal(got, want) {
				t.Errorf("a slow reader gets %d of %d bytes, %v", len(got), size, err)
			}
		})
	}
	all.Wait()
}
