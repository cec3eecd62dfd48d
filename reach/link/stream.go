package link

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// aLongTimeAgo is a deadline that has passed: it wakes what waits in yamux.
var aLongTimeAgo = time.Unix(1, 0)

// ResetError says that a stream was aborted, and why.
type ResetError struct{ Code wire.Code }

func (e *ResetError) Error() string { return fmt.Sprintf("the stream was aborted: %s", e.Code) }

// Stream is one stream of a session: ordered bytes each way with half-close.
// Read and Write block as long as it takes; Abort ends them. It is what a
// splice needs and no more: see Conn for a net.Conn.
type Stream struct {
	y *yamux.Stream
	s *Session

	reading sync.Mutex // held while a call is inside yamux's Read

	mu       sync.Mutex
	id       wire.ID // zero until Bind
	readEnd  bool    // the other end's bytes are over: nothing left to drain
	writeEnd bool    // our end was sent, or is about to be
	draining bool    // somebody discards what still comes
	drained  bool    // and has come to its end
	readErr  error   // why Read may no longer be used
	writeErr error   // why Write may no longer be used
}

// Bind names the stream as the broker did, so that a `reset` finds it.
func (st *Stream) Bind(id wire.ID) {
	st.mu.Lock()
	st.id = id
	st.mu.Unlock()
	st.s.bind(id, st)
}

// ID is the stream's name, the zero ID before Bind.
func (st *Stream) ID() wire.ID {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.id
}

// SetReadDeadline bounds the wait of Read. The zero time lifts it.
func (st *Stream) SetReadDeadline(t time.Time) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.readErr != nil {
		return st.readErr
	}
	st.setReadDeadline(t)
	return nil
}

func (st *Stream) setReadDeadline(t time.Time) {
	_ = st.y.SetReadDeadline(t) // cannot fail
	if st.s.dead.Load() {
		st.wake()
	}
}

// wake makes calls that wait in yamux return, now and later.
func (st *Stream) wake() {
	_ = st.y.SetReadDeadline(aLongTimeAgo)
	_ = st.y.SetWriteDeadline(aLongTimeAgo)
}

func (st *Stream) check(err *error) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	return *err
}

// Read gives the other end's bytes. io.EOF is its orderly end; a session that
// died or a stream that was aborted is another error, never io.EOF. With an
// empty p it waits until there is something to read, as yamux does.
func (st *Stream) Read(p []byte) (int, error) {
	st.reading.Lock()
	defer st.reading.Unlock()
	if err := st.check(&st.readErr); err != nil {
		return 0, err
	}
	n, err := st.y.Read(p)
	if err == nil || n > 0 {
		return n, nil
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	switch {
	case st.readErr != nil:
		return 0, st.readErr
	case errors.Is(err, io.EOF) && !st.s.y.IsClosed():
		st.readEnd = true
		return 0, io.EOF
	case errors.Is(err, io.EOF):
		return 0, st.s.over(nil) // yamux ends streams of a dead session with EOF
	}
	return 0, st.translate(err)
}

// Write sends p, waiting for the other end's window. Other streams take turns
// with it, a frame each.
func (st *Stream) Write(p []byte) (int, error) {
	sent := 0
	for {
		n, err := st.write(p[sent:min(len(p), sent+st.s.out.frame())])
		if sent += n; err != nil || sent == len(p) {
			return sent, err
		}
	}
}

func (st *Stream) write(p []byte) (int, error) {
	if err := st.check(&st.writeErr); err != nil {
		return 0, err
	}
	n, err := st.y.Write(p)
	if err == nil {
		return n, nil
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.writeErr != nil {
		return n, st.writeErr
	}
	return n, st.translate(err)
}

// translate turns yamux's errors into ours.
func (st *Stream) translate(err error) error {
	switch {
	case errors.Is(err, yamux.ErrTimeout) && !st.s.dead.Load():
		return os.ErrDeadlineExceeded
	case errors.Is(err, yamux.ErrConnectionReset):
		return &ResetError{Code: wire.CodeClosed}
	case errors.Is(err, yamux.ErrStreamClosed) && !st.s.y.IsClosed():
		return io.ErrClosedPipe
	}
	return st.s.over(err)
}

// CloseWrite sends our end; the other direction goes on.
func (st *Stream) CloseWrite() error {
	st.mu.Lock()
	if st.writeEnd || st.writeErr != nil {
		st.mu.Unlock()
		return nil
	}
	st.writeEnd = true
	st.mu.Unlock()
	return st.y.Close()
}

// CloseRead tells the other end that we read no more; our direction goes on.
// What still comes is discarded. It does not wait.
func (st *Stream) CloseRead() { st.close(wire.CodeClosed, false) }

// Close ends the stream: our direction in order, so that what was written
// still arrives, and the other by CloseRead unless it had ended. It does not
// wait for the link; the session owns what is left to do.
func (st *Stream) Close() error {
	st.close(wire.CodeClosed, true)
	return nil
}

// Abort ends both directions now: waiting calls return, and the other end
// learns the code. Like Close it does not wait.
func (st *Stream) Abort(code wire.Code) { st.close(code, true) }

func (st *Stream) close(code wire.Code, write bool) {
	st.mu.Lock()
	id, tell := st.id, code != wire.CodeClosed || !st.readEnd && st.readErr == nil
	drain := st.end(&ResetError{Code: code}, write)
	st.mu.Unlock()
	st.s.spawn(func() {
		if tell && id != (wire.ID{}) {
			st.s.sendReset(id, code)
		}
		st.finish(write, drain)
	})
}

// end makes calls return err and says whether the caller has to drain. The lock
// is held.
func (st *Stream) end(err error, write bool) (drain bool) {
	if st.readErr == nil {
		st.readErr = err
	}
	_ = st.y.SetReadDeadline(aLongTimeAgo)
	if write {
		st.writeEnd = true
		if st.writeErr == nil {
			st.writeErr = err
		}
		_ = st.y.SetWriteDeadline(aLongTimeAgo)
	}
	drain = !st.readEnd && !st.draining
	st.draining = st.draining || drain
	return drain
}

// finish sends our end if the stream is over whole, and discards what the
// other end still sends, so that yamux forgets the stream and no window of
// dead bytes is held.
func (st *Stream) finish(write, drain bool) {
	defer st.settle()
	if write {
		defer st.s.unbind(st.ID(), st)
		_ = st.y.Close()
	}
	if !drain {
		return
	}
	st.reading.Lock() // the call that was woken is out, no other comes in
	defer st.reading.Unlock()
	st.setReadDeadline(time.Time{})
	buf := make([]byte, 4<<10)
	for {
		if _, err := st.y.Read(buf); err != nil {
			break
		}
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.drained = true
}

// settle makes the session forget the stream once both directions are over.
func (st *Stream) settle() {
	st.mu.Lock()
	over := st.writeEnd && (st.readEnd || st.drained)
	st.mu.Unlock()
	if over {
		st.s.forget(st)
	}
}

// peerReset is the other end's `reset`: with wire.CodeClosed it reads no more,
// any other code aborts both directions.
func (st *Stream) peerReset(code wire.Code) {
	st.mu.Lock()
	defer st.mu.Unlock()
	err := &ResetError{Code: code}
	if code != wire.CodeClosed {
		drain := st.end(err, true)
		st.s.spawn(func() { st.finish(true, drain) })
		return
	}
	if st.writeErr == nil {
		st.writeErr = err
	}
	_ = st.y.SetWriteDeadline(aLongTimeAgo)
}
