package link

import (
	"errors"
	"fmt"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// controlQueue is how many messages may wait for the control stream.
const controlQueue = 256

// ErrControlStuck says that the other end no longer takes control messages.
var ErrControlStuck = errors.New("the control stream is stuck: too many messages wait")

// Control is the first stream of a session: framed messages both ways.
// Send never waits for the link, so it may be called under any lock.
type Control struct {
	st    *Stream
	queue chan wire.Message // nil means: end the session after what came before
	done  chan struct{}     // closed when run has ended
}

// StartControl makes st the session's control stream. It may be called once.
func (s *Session) StartControl(st *Stream) *Control {
	c := &Control{st: st, queue: make(chan wire.Message, controlQueue), done: make(chan struct{})}
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
		select {
		case m := <-c.queue:
			if m == nil {
				c.st.s.flush()
				c.st.s.fail(ErrSessionClosed)
				return
			}
			if err := wire.WriteMessage(c.st, m); err != nil {
				c.st.s.fail(fmt.Errorf("write to the control stream: %w", err))
				return
			}
		case <-c.st.s.Done():
			return
		}
	}
}

// Send queues m. A queue that is full ends the session: the other end has not
// read for hundreds of messages.
func (c *Control) Send(m wire.Message) {
	select {
	case c.queue <- m:
	default:
		c.st.s.fail(ErrControlStuck)
	}
}

// Receive waits for the next message. Messages of unknown type come back as
// *wire.UnknownTypeError and leave the stream usable.
func (c *Control) Receive() (wire.Message, error) { return wire.ReadMessage(c.st) }

// sendReset tells the other end that a stream is over. Without a control
// stream (a session that has not registered) there is nobody to tell.
func (s *Session) sendReset(id wire.ID, code wire.Code) {
	s.mu.Lock()
	c := s.control
	s.mu.Unlock()
	if c != nil {
		c.Send(&wire.Reset{StreamID: id, Code: code})
	}
}
