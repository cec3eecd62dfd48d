package link

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

const (
	// sendBuffer is how much a Conn takes before Write waits, as a kernel's
	// socket buffer does.
	sendBuffer = 64 << 10

	// linger bounds how long Close keeps trying to deliver what was written.
	linger = 10 * time.Second
)

// sendBuffers are shared, so that a Conn holds none while it has nothing to send.
var sendBuffers = sync.Pool{New: func() any { return new([sendBuffer]byte) }}

// Conn is a stream as a net.Conn that keeps the whole contract of net.Conn:
// deadlines and Close take effect at once even while the link below hangs,
// because Write only copies into a buffer that a goroutine of the session
// empties. CloseWrite half-closes.
type Conn struct {
	st            *Stream
	local, remote net.Addr

	rd, wd deadline

	mu       sync.Mutex
	room     chan struct{} // closed and replaced when the buffer got room or failed
	pending  []byte        // not yet sent, in a buffer of sendBuffers; nil when idle
	running  bool          // the sender runs; it ends when there is nothing to send
	finished bool          // CloseWrite or Close was called
	ended    bool          // our end was sent, or sending failed with err
	err      error         // of the sender
	hurry    *time.Timer   // bounds the delivery of what is left after Close

	once   sync.Once
	closed chan struct{}
	linger time.Duration
}

// NewConn wraps st, which the Conn then owns.
func NewConn(st *Stream, local, remote net.Addr) *Conn {
	c := &Conn{st: st, local: local, remote: remote, room: make(chan struct{}), closed: make(chan struct{}), linger: linger}
	c.rd.init()
	c.wd.init()
	return c
}

// LocalAddr is this end's name as the maker of the Conn gave it.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr is the other end's name as the maker of the Conn gave it.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	if c.isClosed() {
		return 0, c.opError("read", net.ErrClosed)
	}
	if c.rd.passed() {
		return 0, c.opError("read", os.ErrDeadlineExceeded)
	}
	n, err := c.st.Read(p)
	if err == nil || errors.Is(err, io.EOF) {
		return n, err
	}
	if c.isClosed() {
		err = net.ErrClosed
	}
	return n, c.opError("read", err)
}

// Write implements net.Conn. It returns when p is buffered; what goes wrong
// later is returned by the next call.
func (c *Conn) Write(p []byte) (int, error) {
	sent := 0
	for first := true; first || sent < len(p); first = false {
		if c.wd.passed() {
			return sent, c.opError("write", os.ErrDeadlineExceeded)
		}
		n, room, err := c.buffer(p[sent:])
		sent += n
		if err != nil {
			return sent, c.opError("write", err)
		}
		if n > 0 || sent == len(p) {
			continue
		}
		select {
		case <-room:
		case <-c.wd.wait():
		case <-c.closed:
		}
	}
	return sent, nil
}

// buffer takes as much of p as there is room for. With none it returns the
// channel that is closed when there is.
func (c *Conn) buffer(p []byte) (int, <-chan struct{}, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.isClosed():
		return 0, nil, net.ErrClosed
	case c.err != nil:
		return 0, nil, c.err
	case c.finished:
		return 0, nil, io.ErrClosedPipe
	}
	if err := c.st.check(&c.st.writeErr); err != nil {
		return 0, nil, err
	}
	n := min(len(p), sendBuffer-len(c.pending))
	if n == 0 {
		return 0, c.room, nil
	}
	if c.pending == nil && n > 0 {
		c.pending = sendBuffers.Get().(*[sendBuffer]byte)[:0]
	}
	c.pending = append(c.pending, p[:n]...)
	return n, nil, c.startSender()
}

// startSender sees to it that the sender runs. The lock is held.
func (c *Conn) startSender() error {
	if !c.running {
		if !c.st.s.spawn(c.send) {
			return c.st.s.over(nil)
		}
		c.running = true
	}
	return nil
}

// send moves the buffer into the stream until it is empty, then our end if the
// Conn is finished.
func (c *Conn) send() {
	for {
		c.mu.Lock()
		out := c.pending
		if len(out) == 0 {
			c.running = false
			last := c.finished && !c.ended
			c.mu.Unlock()
			if last {
				c.end(c.st.CloseWrite())
			}
			return
		}
		c.pending = nil
		c.signalRoom()
		c.mu.Unlock()
		if _, err := c.st.Write(out); err != nil {
			c.end(err)
			return
		}
		sendBuffers.Put((*[sendBuffer]byte)(out[:sendBuffer]))
	}
}

// end notes that nothing more will be sent; after Close it ends the stream whole.
func (c *Conn) end(err error) {
	c.mu.Lock()
	c.ended, c.err, c.running = true, err, false
	c.pending = nil
	c.signalRoom()
	if c.hurry != nil {
		c.hurry.Stop()
	}
	c.mu.Unlock()
	if c.isClosed() {
		c.st.Abort(lastWord(err))
	}
}

// lastWord is the code that ends a stream whose sending ended with err: bytes
// that could not be delivered must not look like an orderly end.
func lastWord(err error) wire.Code {
	if reset, ok := errors.AsType[*ResetError](err); err == nil || ok && reset.Code == wire.CodeClosed {
		return wire.CodeClosed
	}
	return wire.CodeIdleTimeout
}

func (c *Conn) signalRoom() {
	close(c.room)
	c.room = make(chan struct{})
}

// CloseWrite sends the end of our bytes after what is buffered; reading goes on.
func (c *Conn) CloseWrite() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.finished {
		return nil
	}
	c.finished = true
	if err := c.startSender(); err != nil {
		return c.opError("close write", err)
	}
	return nil
}

// Close ends both directions and returns at once. What was written is still
// delivered if the other end takes it within 10 s.
func (c *Conn) Close() error {
	c.once.Do(func() {
		close(c.closed)
		_ = c.st.SetReadDeadline(aLongTimeAgo)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.finished = true
		if c.ended || c.startSender() != nil {
			c.st.Abort(lastWord(c.err))
			return
		}
		c.hurry = time.AfterFunc(c.linger, func() { c.st.Abort(wire.CodeIdleTimeout) })
	})
	return nil
}

// Abort ends the Conn now with a code that the other end is told.
func (c *Conn) Abort(code wire.Code) {
	c.once.Do(func() { close(c.closed) })
	c.st.Abort(code)
}

func (c *Conn) isClosed() bool {
	select {
	case <-c.closed:
		return true
	default:
		return false
	}
}

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error {
	if c.isClosed() {
		return c.opError("set", net.ErrClosed)
	}
	c.rd.set(t)
	_ = c.st.SetReadDeadline(t) // an aborted stream needs none
	if c.isClosed() {           // meanwhile: a Read must not wait for t
		_ = c.st.SetReadDeadline(aLongTimeAgo)
	}
	return nil
}

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	if c.isClosed() {
		return c.opError("set", net.ErrClosed)
	}
	c.wd.set(t)
	return nil
}

func (c *Conn) opError(op string, err error) error {
	if e, ok := err.(*net.OpError); ok { //nolint:errorlint // our own, never wrapped
		return e
	}
	return &net.OpError{Op: op, Net: "reach", Source: c.local, Addr: c.remote, Err: err}
}

// StreamID is the broker's name for the stream.
func (c *Conn) StreamID() wire.ID { return c.st.ID() }

// String tells the ends, for logs.
func (c *Conn) String() string { return fmt.Sprintf("%v > %v", c.local, c.remote) }
