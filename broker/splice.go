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

const (
	// smallRead is what an idle direction holds: enough for a message.
	smallRead = 2 << 10

	// bigRead is what a direction borrows while bytes flow: four TLS records
	// less the frame header that goes with them.
	bigRead = 4*(16<<10) - 12
)

var bigBuffers = sync.Pool{New: func() any { return new([bigRead]byte) }}

// half is one end of a splice. What carries it is none of the splice's business.
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
	_ = a.Close()
	_ = b.Close()
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

// pump copies until src ends or either side fails, and says which. It holds a
// small buffer while nothing comes and borrows a big one while bytes flow.
func pump(dst io.Writer, src io.Reader, count *atomic.Int64) (rerr, werr error) {
	small := make([]byte, smallRead)
	buf := small
	var big *[bigRead]byte
	defer func() {
		if big != nil {
			bigBuffers.Put(big)
		}
	}()
	for {
		n, err := src.Read(buf)
		if n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				return nil, err
			}
			count.Add(int64(n))
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil, nil
		case err != nil:
			return err, nil
		case big == nil && n == len(small):
			big = bigBuffers.Get().(*[bigRead]byte)
			buf = big[:]
		case big != nil && n < len(small):
			bigBuffers.Put(big)
			big, buf = nil, small
		}
	}
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
