package muxstall

import (
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/internal/lab/kinds"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// maxEcho bounds the p99 of echoes, as the row has it.
const maxEcho = 2 * time.Second

// An echoer asks again and again on streams that answer, and keeps the times.
type echoer struct {
	t     testing.TB
	stop  chan struct{}
	tasks sync.WaitGroup
	mu    sync.Mutex
	took  []time.Duration
}

func newEchoer(t testing.TB) *echoer { return &echoer{t: t, stop: make(chan struct{})} }

// add asks on c until the end, and closes it.
func (e *echoer) add(c net.Conn) {
	e.tasks.Go(func() {
		defer c.Close()
		buf := make([]byte, 64)
		for {
			select {
			case <-e.stop:
				return
			case <-time.After(5 * time.Millisecond):
			}
			start := time.Now()
			_ = c.SetDeadline(start.Add(kinds.Patience))
			if _, err := c.Write(buf); err != nil {
				e.t.Errorf("echo: %v", err)
				return
			}
			if _, err := io.ReadFull(c, buf); err != nil {
				e.t.Errorf("echo: %v", err)
				return
			}
			e.mu.Lock()
			e.took = append(e.took, time.Since(start))
			e.mu.Unlock()
		}
	})
}

// count is how many echoes came back so far.
func (e *echoer) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.took)
}

// end stops and judges.
func (e *echoer) end() {
	kinds.Within(kinds.Patience, func() bool { return e.count() >= 100 })
	e.t.Helper()
	close(e.stop)
	e.tasks.Wait()
	slices.Sort(e.took)
	if len(e.took) < 100 {
		e.t.Errorf("only %d echoes came back", len(e.took))
		return
	}
	p99 := e.took[len(e.took)*99/100]
	e.t.Logf("%d echoes: p50 %v, p99 %v, worst %v", len(e.took), e.took[len(e.took)/2], p99, e.took[len(e.took)-1])
	if p99 > maxEcho {
		e.t.Errorf("echo p99 = %v, want at most %v", p99, maxEcho)
	}
}

// settle waits until no more goroutines run than before.
func settle(t testing.TB, before int) {
	t.Helper()
	if !kinds.Within(kinds.Patience, func() bool { return runtime.NumGoroutine() <= before }) {
		buf := make([]byte, 64<<10)
		t.Errorf("%d goroutines are left, there were %d:\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
	}
}
