package broker

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// bufferSize is what a direction borrows while it has something to copy: four
// TLS records less the frame header that goes with them.
const bufferSize = 4*(16<<10) - 12

var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// half is one end of a splice. What carries it is none of the splice's business.
// A Read of no bytes should wait until there are some: until then the splice
// holds no buffer.
type half interface {
	io.ReadWriter
	CloseWrite() error
	CloseRead()
	Abort(wire.Code)
	Close() error
}

// splice joins two streams until both directions ended, one was aborted, or
// nothing passed for idle. A slow reader slows its own direction only; an end
// in order is passed on as such, an abort as an abort with its code. It owns
// both halves and returns the payload bytes of each direction and, for an
// abort, its code.
func splice(a, b half, idle time.Duration) (ab, ba int64, code wire.Code) {
	s := &spliceState{a: a, b: b}
	watch := watchIdle(s, idle)
	var done sync.WaitGroup
	done.Go(func() { s.copy(b, a, &s.ab) })
	done.Go(func() { s.copy(a, b, &s.ba) })
	done.Wait()
	watch.stop()
	if s.code == "" { // the end that Close sends could overtake an abort's code
		_ = a.Close()
		_ = b.Close()
	}
	return s.ab.Load(), s.ba.Load(), s.code
}

type spliceState struct {
	a, b   half
	ab, ba atomic.Int64
	once   sync.Once
	code   wire.Code
}

func (s *spliceState) abort(code wire.Code) {
	s.once.Do(func() {
		s.code = code
		s.a.Abort(code)
		s.b.Abort(code)
	})
}

// copy moves one direction. The count is of bytes that dst has taken.
func (s *spliceState) copy(dst, src half, count *atomic.Int64) {
	rerr, werr := pump(dst, src, count)
	var reset *link.ResetError
	switch {
	case rerr == nil && werr == nil:
		if dst.CloseWrite() != nil {
			s.abort(wire.CodeClosed)
		}
	case errors.As(werr, &reset) && reset.Code == wire.CodeClosed:
		src.CloseRead() // dst reads no more; the other direction ends by itself
	case errors.As(errors.Join(rerr, werr), &reset):
		s.abort(reset.Code)
	default:
		s.abort(wire.CodeHostOffline)
	}
}

// pump copies until src ends or either side fails, and says which. It borrows a
// buffer only while there is something to copy, so that idle streams hold none.
func pump(dst io.Writer, src io.Reader, count *atomic.Int64) (rerr, werr error) {
	for {
		_, rerr = src.Read(nil)
		if rerr == nil {
			rerr, werr = copyOnce(dst, src, count)
		}
		switch {
		case errors.Is(rerr, io.EOF):
			return nil, nil
		case rerr != nil || werr != nil:
			return rerr, werr
		}
	}
}

func copyOnce(dst io.Writer, src io.Reader, count *atomic.Int64) (rerr, werr error) {
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	n, rerr := src.Read(buf[:])
	if n == 0 {
		return rerr, nil
	}
	if _, err := dst.Write(buf[:n]); err != nil {
		return nil, err
	}
	count.Add(int64(n))
	return rerr, nil
}

// idleWatch ends a splice on which nothing passed either way.
type idleWatch struct {
	mu    sync.Mutex
	timer *time.Timer
	over  bool
}

const idleTicks = 4 // idleness is noticed at most a quarter late

func watchIdle(s *spliceState, idle time.Duration) *idleWatch {
	w := &idleWatch{}
	var last int64
	quiet := 0
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer = time.AfterFunc(idle/idleTicks, func() {
		if now := s.ab.Load() + s.ba.Load(); now != last {
			last, quiet = now, 0
		} else if quiet++; quiet >= idleTicks {
			s.abort(wire.CodeIdleTimeout)
			return
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.over {
			w.timer.Reset(idle / idleTicks)
		}
	})
	return w
}

func (w *idleWatch) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	w.timer.Stop()
}
