// Package stalltest holds the row mux-stall of the failure kinds, in virtual
// time. yamux keeps timers in a package variable, so one synctest bubble is all
// that a process may have: the test runs itself in one of its own.
package stalltest

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// inBubble marks the process that is for the bubble.
const inBubble = "STALLTEST_IN_BUBBLE"

const (
	echoes   = 20
	bulk     = 30 << 20 // each way: more than twelve minutes of this link
	maxStall = 2 * time.Second
)

// TestMuxStall: on a link of 300 ms and 40 KB/s stands a stream that nobody
// reads, 30 MB go each way, the link freezes for 15 s, and 20 echo streams go
// on all the while, p99 under 2 s outside the freeze.
func TestMuxStall(t *testing.T) {
	if os.Getenv(inBubble) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestMuxStall$", "-test.v",
			fmt.Sprintf("-test.cpu=%d", runtime.GOMAXPROCS(0)))
		cmd.Env = append(os.Environ(), inBubble+"=1", "GORACE=atexit_sleep_ms=0")
		out, err := cmd.CombinedOutput()
		if t.Logf("%s", out); err != nil {
			t.Fatal(err)
		}
		return
	}
	synctest.Test(t, func(t *testing.T) {
		s := start(t)
		dead, deadPeer := s.open(t)
		var flood atomic.Int64
		flooded := make(chan struct{})
		go func() { fill(deadPeer, &flood); close(flooded) }()

		var work sync.WaitGroup
		stop := make(chan struct{})
		var mu sync.Mutex
		var took []time.Duration
		for range echoes {
			c, h := s.open(t)
			work.Go(func() { _, _ = io.Copy(h, h); _ = h.Close() })
			work.Go(func() {
				for d := range pings(t, c, stop) {
					mu.Lock()
					took = append(took, d)
					mu.Unlock()
				}
			})
		}
		down, up := make(chan struct{}), make(chan struct{})
		// A stream for each direction: yamux holds a lock while it sends an end,
		// and a goroutine that waits for a lock stops a bubble's time.
		dc, dh := s.open(t)
		uc, uh := s.open(t)
		go func() { transfer(t, dh, dc); close(down) }()
		go func() { transfer(t, uc, uh); close(up) }()

		time.Sleep(3 * time.Minute)
		mu.Lock()
		before := len(took)
		mu.Unlock()
		s.near.Freeze()
		time.Sleep(15 * time.Second)
		s.near.Thaw()
		time.Sleep(5 * time.Second) // what was queued in the freeze arrives
		mu.Lock()
		took = took[:before]
		mu.Unlock()

		<-down
		<-up
		close(stop)
		work.Wait()
		report(t, took)
		// Asked before the abort: what is discarded then opens the window again.
		if n := flood.Load(); n > link.Window+(128<<10) {
			t.Errorf("the stream that nobody reads took %d bytes, want its window and a send buffer", n)
		}
		dead.Abort(wire.CodeClosed)
		<-flooded
		s.close()
	})
}

func report(t *testing.T, took []time.Duration) {
	t.Helper()
	slices.Sort(took)
	p50, p99, worst := took[len(took)/2], took[len(took)*99/100], took[len(took)-1]
	t.Logf("%d echoes: p50 %v, p99 %v, worst %v", len(took), p50, p99, worst)
	if len(took) < 1000 {
		t.Errorf("only %d echoes came back in twelve minutes", len(took))
	}
	if p99 > maxStall {
		t.Errorf("echo p99 = %v, want at most %v", p99, maxStall)
	}
}

type session struct {
	near, far      *lab.SlowConn
	client, server *link.Session
}

func start(t *testing.T) *session {
	t.Helper()
	a, b := lab.SlowLink{Delay: 150 * time.Millisecond, Rate: 40_000, Buffer: 16 << 10}.Connect()
	client, err := link.Client(carrier.NewCarrier(a, carrier.TLS), link.Config{})
	if err != nil {
		t.Fatal(err)
	}
	server, err := link.Server(carrier.NewCarrier(b, carrier.TLS), link.Config{})
	if err != nil {
		t.Fatal(err)
	}
	s := &session{near: a, far: b, client: client, server: server}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cs, err := client.OpenStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	hs, err := server.AcceptStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, ctl := range []*link.Control{client.StartControl(cs), server.StartControl(hs)} {
		go resets(ctl)
	}
	return s
}

// resets applies what the other end aborts, as every end of a session does.
func resets(ctl *link.Control) {
	for {
		if _, err := ctl.Receive(); err != nil {
			return
		}
	}
}

func (s *session) close() {
	_ = s.client.Close()
	_ = s.server.Close()
}

func (s *session) open(t *testing.T) (c, h *link.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cs, err := s.client.OpenStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	hs, err := s.server.AcceptStream(ctx)
	if err != nil {
		t.Fatal(err)
	}
	id := wire.NewID()
	cs.Bind(id)
	hs.Bind(id)
	return link.NewConn(cs, s.near.LocalAddr(), s.far.LocalAddr()), link.NewConn(hs, s.far.LocalAddr(), s.near.LocalAddr())
}

// fill writes until the stream ends and counts what was taken.
func fill(c *link.Conn, taken *atomic.Int64) {
	for {
		n, err := c.Write(make([]byte, 16<<10))
		taken.Add(int64(n))
		if err != nil {
			return
		}
	}
}

// pings sends 64 bytes a second and yields how long each took to come back.
func pings(t *testing.T, c *link.Conn, stop <-chan struct{}) func(func(time.Duration) bool) {
	return func(yield func(time.Duration) bool) {
		defer c.Close()
		buf := make([]byte, 64)
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Second + rand.N(100*time.Millisecond)):
			}
			start := time.Now()
			if _, err := c.Write(buf); err != nil {
				t.Errorf("echo: %v", err)
				return
			}
			if _, err := io.ReadFull(c, buf); err != nil {
				t.Errorf("echo: %v", err)
				return
			}
			if !yield(time.Since(start)) {
				return
			}
		}
	}
}

// transfer moves bulk bytes one way and compares sums.
func transfer(t *testing.T, from, to *link.Conn) {
	sent := sha256.New()
	go func() {
		src := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // any bytes will do
		buf := make([]byte, 32<<10)
		for left := bulk; left > 0; left -= len(buf) {
			for i := range buf {
				buf[i] = byte(src.Uint32())
			}
			sent.Write(buf)
			if _, err := from.Write(buf); err != nil {
				t.Errorf("bulk: %v", err)
				return
			}
		}
		_ = from.CloseWrite()
	}()
	got := sha256.New()
	n, err := io.Copy(got, to)
	if err != nil || n != bulk {
		t.Errorf("bulk: %d bytes arrived, %v; want %d", n, err, bulk)
		return
	}
	if string(got.Sum(nil)) != string(sent.Sum(nil)) {
		t.Error("bulk: the bytes that arrived are not those that were sent")
	}
}
