package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

const (
	// controlQueue is how many messages may wait for the control stream: more
	// than a reset for every stream that a host may have.
	controlQueue = 1024

	// patience bounds the wait for the other end to deal with a message, in units
	// of Config.DeadAfter. A slow link is no fault, so it is long; a peer that
	// never answers would have us keep what waits for it.
	patience = 2
)

// ErrControlStuck says that the other end no longer takes or answers control
// messages.
var ErrControlStuck = errors.New("the control stream is stuck: the other end takes or answers nothing")

// Control is the first stream of a session: framed messages both ways.
// Send never waits for the link, so it may be called under any lock.
type Control struct {
	st   *Stream
	done chan struct{} // closed when run has ended
	wake chan struct{} // something was queued

	mu    sync.Mutex
	queue []queued
	next  *barrier // not yet on its way: more may join
	lastT int64
	pings map[int64]*barrier // on their way
}

// queued is a message that waits, or what to do after those before it: write a
// barrier's ping, or, with neither, end the session.
type queued struct {
	m wire.Message
	b *barrier
}

// barrier is a ping that many wait for.
type barrier struct {
	closed   bool // nobody joins any more
	answered chan struct{}
}

// StartControl makes st the session's control stream. It may be called once.
func (s *Session) StartControl(st *Stream) *Control {
	c := &Control{st: st, wake: make(chan struct{}, 1), done: make(chan struct{}), pings: make(map[int64]*barrier)}
	s.mu.Lock()
	s.control = c
	s.mu.Unlock()
	if !s.spawn(c.run) {
		close(c.done)
	}
	return c
}

// Session is the session that the stream controls.
func (c *Control) Session() *Session { return c.st.s }

func (c *Control) run() {
	defer close(c.done)
	for {
		q, ok := c.take()
		switch {
		case !ok:
			select {
			case <-c.wake:
				continue
			case <-c.st.s.Done():
				return
			}
		case q.m == nil && q.b == nil:
			c.st.s.flush()
			c.st.s.fail(ErrSessionClosed)
			return
		case q.m == nil:
			q.m = c.launch(q.b)
		}
		if q.m == nil {
			continue
		}
		if err := wire.WriteMessage(c.st, q.m); err != nil {
			c.st.s.fail(fmt.Errorf("write to the control stream: %w", err))
			return
		}
	}
}

func (c *Control) take() (queued, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) == 0 {
		c.queue = nil
		return queued{}, false
	}
	q := c.queue[0]
	c.queue = c.queue[1:]
	return q, true
}

// Send queues m. A queue that is full ends the session: the other end has not
// read for hundreds of messages.
func (c *Control) Send(m wire.Message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.push(queued{m: m})
}

// push queues q. The lock is held.
func (c *Control) push(q queued) {
	if len(c.queue) >= controlQueue {
		c.st.s.fail(ErrControlStuck)
		return
	}
	c.queue = append(c.queue, q)
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Receive waits for the next message that is the caller's affair. Pings and
// their answers, resets, and messages of unknown type (answered with malformed)
// are dealt with on the way: whoever has a session must keep receiving.
func (c *Control) Receive() (wire.Message, error) {
	for {
		m, err := wire.ReadMessage(c.st)
		if _, ok := errors.AsType[*wire.UnknownTypeError](err); ok {
			c.Send(&wire.Error{Code: wire.CodeMalformed})
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("control stream: %w", noEOF(err))
		}
		switch m := m.(type) {
		case *wire.Ping:
			c.Send(&wire.Pong{T: m.T})
		case *wire.Pong:
			c.pong(m.T)
		case *wire.Reset:
			c.st.s.Reset(m.StreamID, m.Code)
		default:
			return m, nil
		}
	}
}

// await waits until the other end has dealt with every message sent before: it
// answers them in order. All who wait at a time share one ping. It fails when
// the session ends first; an answer that does not come ends it.
func (c *Control) await() error {
	c.mu.Lock()
	if c.next == nil {
		c.next = &barrier{answered: make(chan struct{})}
		c.push(queued{b: c.next})
	}
	b := c.next
	c.mu.Unlock()
	late := time.NewTimer(patience * c.st.s.deadAfter)
	defer late.Stop()
	select {
	case <-b.answered:
		return nil
	case <-late.C:
		c.st.s.fail(ErrControlStuck)
	case <-c.st.s.Done():
	}
	return c.st.s.over(nil)
}

// launch gives the ping of a barrier. Who joined may have queued his message
// behind it, so at the first time it is closed and goes to the end of the queue.
func (c *Control) launch(b *barrier) wire.Message {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !b.closed {
		b.closed, c.next = true, nil
		if len(c.queue) > 0 {
			c.push(queued{b: b})
			return nil
		}
	}
	c.lastT++
	c.pings[c.lastT] = b
	return &wire.Ping{T: c.lastT}
}

func (c *Control) pong(t int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if b := c.pings[t]; b != nil {
		close(b.answered)
		delete(c.pings, t)
	}
}

// sendReset tells the other end that a stream is over, and waits until it
// knows unless the code is wire.CodeClosed: the end of our bytes, sent next, must
// not pass for an orderly one. Without a control stream (a session that has not
// registered) there is nobody to tell.
func (s *Session) sendReset(id wire.ID, code wire.Code) {
	s.mu.Lock()
	c := s.control
	s.mu.Unlock()
	if c == nil {
		return
	}
	c.Send(&wire.Reset{StreamID: id, Code: code})
	if code != wire.CodeClosed {
		_ = c.await() // without an answer the session has ended, which is no orderly end either
	}
}

// registerTimeout bounds the wait for the answer to a registration.
const registerTimeout = 10 * time.Second

// Register opens the session's first stream, registers on it and makes it the
// control stream. A broker's no is a *wire.RefusedError.
func (s *Session) Register(ctx context.Context, reg *wire.Register) (*Control, *wire.Registered, error) {
	st, err := s.OpenStream(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("register: %w", err)
	}
	defer context.AfterFunc(ctx, func() { st.Abort(wire.CodeClosed) })()
	if err := wire.WriteMessage(st, reg); err != nil {
		return nil, nil, fmt.Errorf("register: %w", err)
	}
	m, err := ReadHeader(st, registerTimeout)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, nil, fmt.Errorf("register: %w", noEOF(err))
	}
	switch m := m.(type) {
	case *wire.Registered:
		return s.StartControl(st), m, nil
	case *wire.Error:
		return nil, nil, fmt.Errorf("register: %w", m.Refused())
	}
	return nil, nil, errors.New("register: the broker answered with something else")
}

// noEOF keeps an end that came too early from passing for a proper one.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// ReadHeader reads the header message of a stream, for at most d.
func ReadHeader(st *Stream, d time.Duration) (wire.Message, error) {
	if err := st.SetReadDeadline(time.Now().Add(d)); err != nil {
		return nil, err
	}
	m, err := wire.ReadMessage(st)
	if err != nil {
		return nil, noEOF(err)
	}
	return m, st.SetReadDeadline(time.Time{})
}
