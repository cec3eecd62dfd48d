package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// closeGrace is how long Close lets what was already written leave.
const closeGrace = time.Second

// Session is yamux over one carrier. Its methods may be called by any number
// of goroutines. Whoever made it must Close it; Close waits for every goroutine
// of the session, those of its streams included.
type Session struct {
	carrier *carrier.Carrier
	y       *yamux.Session
	out     *joiner
	watch   *watchdog

	deadAfter time.Duration

	mu      sync.Mutex
	bound   map[wire.ID]*Stream
	early   map[wire.ID]wire.Code // resets of streams that are not bound yet
	control *Control
	ending  bool  // CloseSoon was called
	closing bool  // Close was called: nothing is started any more
	cause   error // why the session ended, first reason wins
	tasks   sync.WaitGroup

	liveMu sync.Mutex
	live   map[*Stream]struct{} // streams that yamux may still hold
	dead   atomic.Bool          // yamux closes: nobody may wait in it any more
}

// Client runs a session on the end that dialled the broker. It owns c.
func Client(c *carrier.Carrier, cfg Config) (*Session, error) {
	return newSession(c, cfg, yamux.Client)
}

// Server runs a session on the broker's end. It owns c.
func Server(c *carrier.Carrier, cfg Config) (*Session, error) {
	return newSession(c, cfg, yamux.Server)
}

func newSession(c *carrier.Carrier, cfg Config, side func(io.ReadWriteCloser, *yamux.Config) (*yamux.Session, error)) (*Session, error) {
	cfg = cfg.withDefaults()
	s := &Session{carrier: c, out: newJoiner(c), bound: make(map[wire.ID]*Stream), early: make(map[wire.ID]wire.Code), deadAfter: cfg.DeadAfter, live: make(map[*Stream]struct{})}
	s.watch = watch(cfg.DeadAfter, s.shrink, func() { s.fail(ErrDead) })
	y, err := side(&muxConn{s: s, in: newFramer(&aliveReader{c, s.watch}, cfg.Window)}, cfg.yamux())
	if err != nil {
		s.watch.stop()
		return nil, errors.Join(fmt.Errorf("start a session: %w", err), c.Close())
	}
	s.y = y
	s.tasks.Go(s.out.run)
	return s, nil
}

// muxConn is the carrier as yamux sees it: reads come through the framer,
// writes go through the joiner.
type muxConn struct {
	s  *Session
	in *framer
}

// aliveReader tells the watchdog of every byte that arrives.
type aliveReader struct {
	r io.Reader
	w *watchdog
}

func (a *aliveReader) Read(p []byte) (int, error) {
	n, err := a.r.Read(p)
	if n > 0 {
		a.w.alive()
	}
	return n, err
}

func (m *muxConn) Read(p []byte) (int, error) {
	n, err := m.in.Read(p)
	if err != nil {
		m.s.wakeAll() // yamux closes next
	}
	return n, err
}

func (m *muxConn) Write(p []byte) (int, error) { return m.s.out.Write(p) }

// Close is called by yamux as the first thing when it closes.
func (m *muxConn) Close() error {
	m.s.wakeAll()
	m.s.out.close(ErrSessionClosed)
	return m.s.carrier.Close()
}

// Carrier tells what the session runs on.
func (s *Session) Carrier() *carrier.Carrier { return s.carrier }

// Done is closed when the session has ended, from whichever side.
func (s *Session) Done() <-chan struct{} { return s.y.CloseChan() }

// Err says why the session ended, always an ErrSessionClosed; nil while it lives.
func (s *Session) Err() error {
	if !s.y.IsClosed() {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cause == nil || errors.Is(s.cause, ErrSessionClosed) {
		return ErrSessionClosed
	}
	return fmt.Errorf("%w: %w", ErrSessionClosed, s.cause)
}

// NumStreams counts streams that hold resources, the control stream included.
func (s *Session) NumStreams() int { return s.y.NumStreams() }

// OpenStream opens a stream. It fails when ctx or the session ends first.
func (s *Session) OpenStream(ctx context.Context) (*Stream, error) {
	type result struct {
		y   *yamux.Stream
		err error
	}
	ch := make(chan result)
	ok := s.spawn(func() { // yamux's open knows no context and may wait for the carrier
		y, err := s.y.OpenStream()
		select {
		case ch <- result{y, err}:
		case <-ctx.Done():
			if err == nil {
				_ = y.Close()
			}
		}
	})
	if !ok {
		return nil, s.over(nil)
	}
	select {
	case r := <-ch:
		if r.err != nil {
			return nil, s.over(r.err)
		}
		return s.newStream(r.y), nil
	case <-ctx.Done():
		return nil, fmt.Errorf("open a stream: %w", context.Cause(ctx))
	}
}

// AcceptStream waits for the other end to open a stream.
func (s *Session) AcceptStream(ctx context.Context) (*Stream, error) {
	y, err := s.y.AcceptStreamWithContext(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("accept a stream: %w", context.Cause(ctx))
		}
		return nil, s.over(err)
	}
	return s.newStream(y), nil
}

// over is the error for a use of a session that has ended.
func (s *Session) over(err error) error {
	if cause := s.Err(); cause != nil {
		return cause
	}
	if err == nil || errors.Is(err, yamux.ErrSessionShutdown) {
		return ErrSessionClosed
	}
	return fmt.Errorf("%w: %w", ErrSessionClosed, err)
}

// fail ends the session at once for a reason. It does not wait: it is called
// from goroutines that Close waits for.
func (s *Session) fail(cause error) {
	s.mu.Lock()
	if s.cause == nil {
		s.cause = cause
	}
	s.mu.Unlock()
	s.out.close(cause)
	s.spawn(func() { _ = s.carrier.Close() }) // yamux's reader fails and closes the session
}

// CloseSoon ends the session after the control messages that wait, or when the
// other end does not take them for a while. It does not wait itself; whoever
// made the session must still Close it.
func (s *Session) CloseSoon() {
	s.mu.Lock()
	c, first := s.control, !s.ending
	s.ending = true
	s.mu.Unlock()
	switch {
	case c == nil:
		s.fail(ErrSessionClosed)
	case first:
		time.AfterFunc(2*closeGrace, func() { s.fail(ErrSessionClosed) })
		c.Send(nil)
	}
}

// flush waits until what was written has left, for at most closeGrace.
func (s *Session) flush() {
	hurry := time.AfterFunc(closeGrace, func() { s.out.close(ErrSessionClosed) })
	defer hurry.Stop()
	s.out.flush()
}

// Close lets what was written leave, for a second or two at most, ends the
// session with its streams, and waits for everything the session started.
func (s *Session) Close() error {
	s.mu.Lock()
	s.closing = true
	c := s.control
	s.mu.Unlock()
	s.watch.stop()
	if c != nil {
		c.Send(nil)
		hurry := time.AfterFunc(closeGrace, func() {
			s.out.close(ErrSessionClosed)
			_ = s.carrier.Close()
		})
		<-c.done
		hurry.Stop()
	}
	s.flush()
	s.wakeAll()
	err := s.y.Close()
	s.out.close(ErrSessionClosed)
	s.tasks.Wait()
	return err
}

// spawn runs f as a goroutine of the session; false when the session is closing.
func (s *Session) spawn(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return false
	}
	s.tasks.Go(f)
	return true
}

// earlyResets bounds the resets that are kept for streams not yet bound.
const earlyResets = 256

// Reset applies a `reset` message that came on the control stream. One for a
// stream that is not bound yet is kept for a while: it crosses the message that
// names the stream, and lost it would leave an orderly end in its place.
func (s *Session) Reset(id wire.ID, code wire.Code) {
	s.mu.Lock()
	st := s.bound[id]
	if st == nil {
		if len(s.early) >= earlyResets {
			clear(s.early)
		}
		s.early[id] = code
	}
	s.mu.Unlock()
	if st != nil {
		st.peerReset(code)
	}
}

func (s *Session) bind(id wire.ID, st *Stream) {
	s.mu.Lock()
	s.bound[id] = st
	code, early := s.early[id]
	delete(s.early, id)
	s.mu.Unlock()
	if early {
		st.peerReset(code)
	}
}

func (s *Session) unbind(id wire.ID, st *Stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bound[id] == st {
		delete(s.bound, id)
	}
}

func (s *Session) newStream(y *yamux.Stream) *Stream {
	st := &Stream{y: y, s: s}
	s.liveMu.Lock()
	s.live[st] = struct{}{}
	s.liveMu.Unlock()
	if s.dead.Load() {
		st.wake()
	}
	return st
}

func (s *Session) forget(st *Stream) {
	s.liveMu.Lock()
	defer s.liveMu.Unlock()
	delete(s.live, st)
}

// wakeAll gets every waiter out of yamux. From the moment that yamux closes until
// it has told its streams, who waits in one of them spins; with some hundred
// streams that takes every processor for seconds.
func (s *Session) wakeAll() {
	s.dead.Store(true)
	s.liveMu.Lock()
	defer s.liveMu.Unlock()
	for st := range s.live {
		st.wake()
	}
}

// shrink gives back the buffers of streams that hold nothing now. yamux keeps a
// stream's buffer as large as it ever was, up to twice its window.
func (s *Session) shrink() {
	s.liveMu.Lock()
	defer s.liveMu.Unlock()
	for st := range s.live {
		st.y.Shrink()
	}
}

// watchdog calls dead when alive was not called for a whole period. It counts
// ticks of a timer instead of asking the clock at each read.
type watchdog struct {
	beats atomic.Uint64
	timer *time.Timer
	mu    sync.Mutex
	ended bool
}

const watchTicks = 7 // a period is noticed at most a seventh late

// watch starts a watchdog that also calls each at every tick.
func watch(period time.Duration, each, dead func()) *watchdog {
	w := &watchdog{}
	tick := period / watchTicks
	var last uint64
	silent := 0
	w.mu.Lock()
	defer w.mu.Unlock()
	w.timer = time.AfterFunc(tick, func() {
		each()
		if now := w.beats.Load(); now != last {
			last, silent = now, 0
		} else if silent++; silent >= watchTicks {
			dead()
			return
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if !w.ended {
			w.timer.Reset(tick)
		}
	})
	return w
}

func (w *watchdog) alive() { w.beats.Add(1) }

func (w *watchdog) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
	w.timer.Stop()
}
