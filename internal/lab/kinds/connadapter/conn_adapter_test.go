package connadapter

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/nettest"

	"github.com/hermes-reach/hermes-reach/internal/lab/kinds"
	"github.com/hermes-reach/hermes-reach/reach/carrier/outer"
	"github.com/hermes-reach/hermes-reach/reach/link"
)

// TestContract: both ends of every way are net.Conns in every respect. What
// crypto/tls itself does not keep is left out, see TestTLSWriteTimeout.
func TestContract(t *testing.T) {
	each(t, func(t *testing.T, w *way) {
		for _, side := range []string{"device", "host"} {
			t.Run(side, func(t *testing.T) {
				round := 0
				nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
					c1, c2 = w.ends(t)
					if side == "host" {
						c1, c2 = c2, c1
					}
					// In this order a full path does not keep TLS from saying goodbye.
					stop = func() { _ = c2.Close(); _ = c1.Close() }
					if round++; w.tls && needsWriteAfterTimeout[round] {
						c1, c2 = bare(c1), bare(c2)
					}
					return c1, c2, stop, nil
				})
				if round != 11 {
					t.Errorf("nettest has %d parts now: look which of them tls.Conn cannot pass", round)
				}
			})
		}
	})
}

// needsWriteAfterTimeout are the parts of nettest.TestConn, in its order, that
// write after a write has timed out. crypto/tls documents that it cannot: half
// a record may have left. These parts run on the connection below TLS, which
// must be able to; TestTLSWriteTimeout shows what holds of TLS instead.
var needsWriteAfterTimeout = map[int]bool{7: true, 9: true, 11: true} // PastTimeout, FutureTimeout, ConcurrentMethods

// TestOuterContract: the connection below a carrier's TLS is one, too.
func TestOuterContract(t *testing.T) {
	ln := kinds.Listen(t)
	accepted := kinds.Accepted(t, ln, nil)
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
		raw, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			return nil, nil, nil, err
		}
		c1, c2 = outer.NewCork(raw), outer.NewCork(<-accepted)
		return c1, c2, func() { _ = c1.Close(); _ = c2.Close() }, nil
	})
}

func bare(c net.Conn) net.Conn { return c.(interface{ NetConn() net.Conn }).NetConn() }

// TestTLSWriteTimeout: after a write that timed out, further writes of a pinned
// connection fail at once with a timeout, and reads go on.
func TestTLSWriteTimeout(t *testing.T) {
	each(t, func(t *testing.T, w *way) {
		if !w.tls {
			return
		}
		c, h := w.pair(t)
		roundTrip(t, c, h)
		_ = c.SetWriteDeadline(time.Unix(1, 0))
		if _, err := c.Write([]byte("x")); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("Write = %v, want its deadline", err)
		}
		_ = c.SetWriteDeadline(time.Time{})
		var timeout net.Error
		if _, err := c.Write([]byte("x")); !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("the next Write = %v, want the same again", err)
		}
		if _, err := h.Write([]byte("still here")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 10)); err != nil {
			t.Errorf("Read = %v, want what the host still says", err)
		}
	})
}

// TestDeadlineWithoutIO: a deadline that passes while nobody reads or writes
// does no harm; it fails calls made under it, and is lifted like any other.
func TestDeadlineWithoutIO(t *testing.T) {
	each(t, func(t *testing.T, w *way) {
		device, host := w.pair(t)
		for _, ends := range [][2]net.Conn{{device, host}, {host, device}} {
			c, other := ends[0], ends[1]
			at := time.Now().Add(20 * time.Millisecond)
			if err := c.SetDeadline(at); err != nil {
				t.Fatal(err)
			}
			<-time.After(time.Until(at) + 20*time.Millisecond)
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("Read = %v, want the deadline that has passed", err)
			}
			if err := c.SetDeadline(time.Time{}); err != nil {
				t.Fatal(err)
			}
			roundTrip(t, c, other)
		}
	})
}

// TestSizes: one Write of 1 byte to 20 MB arrives as it was sent, both ways.
func TestSizes(t *testing.T) {
	each(t, func(t *testing.T, w *way) {
		device, host := w.pair(t)
		sent := make([]byte, 20<<20)
		_, _ = rand.NewChaCha8([32]byte{}).Read(sent)
		for _, n := range []int{1, 2, 16<<10 - 1, 16<<10 + 1, link.Window, link.Window + 1, len(sent)} {
			var both sync.WaitGroup
			for _, dir := range [][2]net.Conn{{device, host}, {host, device}} {
				both.Go(func() {
					if got, err := dir[0].Write(sent[:n]); err != nil || got != n {
						t.Errorf("Write of %d = %d, %v", n, got, err)
					}
				})
				both.Go(func() {
					sum := sha256.New()
					if got, err := io.CopyN(sum, dir[1], int64(n)); err != nil {
						t.Errorf("%d of %d bytes arrived: %v", got, n, err)
						_ = dir[1].Close()
						return
					}
					if want := sha256.Sum256(sent[:n]); string(sum.Sum(nil)) != string(want[:]) {
						t.Errorf("the %d bytes that arrived are not those that were sent", n)
					}
				})
			}
			both.Wait()
		}
	})
}

// A readSpy tells whether a Read is waiting.
type readSpy struct {
	net.Conn
	waits atomic.Int32
}

func (c *readSpy) Read(p []byte) (int, error) {
	c.waits.Add(1)
	defer c.waits.Add(-1)
	return c.Conn.Read(p)
}

type spyListener struct{ net.Listener }

func (l spyListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &readSpy{Conn: c}, nil
}

type spyKey struct{}

// TestHijack: net/http has a read pending while a handler runs, and a hijack
// has to get it out: within a second, and without losing the byte that comes.
func TestHijack(t *testing.T) {
	each(t, func(t *testing.T, w *way) {
		var hijacked sync.WaitGroup
		srv := &http.Server{
			ReadHeaderTimeout: kinds.Patience,
			ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, spyKey{}, c) },
		}
		srv.Handler = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			spy := r.Context().Value(spyKey{}).(*readSpy)
			if !kinds.Within(kinds.Patience, func() bool { return spy.waits.Load() == 1 }) {
				t.Error("net/http does not read while the handler runs: the test shows nothing")
			}
			start := time.Now()
			c, buf, err := http.NewResponseController(rw).Hijack()
			if took := time.Since(start); err != nil || took > time.Second {
				t.Errorf("Hijack took %v, %v; want less than a second", took, err)
				return
			}
			hijacked.Go(func() {
				_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\n\r\n")
				_, _ = io.Copy(c, buf)
				_ = c.Close()
			})
		})
		served := make(chan struct{})
		go func() { _ = srv.Serve(spyListener{w.host}); close(served) }()
		defer func() { _ = srv.Close(); <-served; hijacked.Wait() }()
		for range 5 {
			hijackOnce(t, w)
		}
	})
}

func hijackOnce(t *testing.T, w *way) {
	c := w.device(t)
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(kinds.Patience))
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(c)
	res, err := http.ReadResponse(r, nil)
	if err != nil || res.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("no answer to the hijack: %v", err)
	}
	if _, err := io.WriteString(c, "echo"); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 4)
	if _, err := io.ReadFull(r, got); err != nil || string(got) != "echo" {
		t.Errorf("after the hijack: %q, %v", got, err)
	}
}
