package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"golang.org/x/time/rate"
)

// Errors of a peer that does not keep to yamux; they end the session.
var (
	errFrameTooLong = errors.New("a frame is longer than a stream's window")
	errPingFlood    = errors.New("too many pings")
)

// Pings cost yamux a goroutine each, so a peer gets a few a second at most.
const (
	pingsPerSecond = 10
	pingBurst      = 100
)

const (
	typeData = 0
	typePing = 2
	flagSYN  = 1
)

// framer is the reader below yamux. yamux holds a stream's lock while it reads
// a frame's body from the network, so a reader of that stream would wait with
// it, beyond any deadline; the framer lets yamux see a frame only when it has
// arrived whole. It also refuses lengths and pings that only a hostile peer
// sends, before anything is allocated for them.
type framer struct {
	r      io.Reader
	window int
	pings  *rate.Limiter
	head   [yamuxHeader]byte
	ready  []byte // of the current frame, not yet given to yamux
	body   *[]byte
}

var bodies = sync.Pool{New: func() any { b := make([]byte, 0, maxFrame+yamuxHeader); return &b }}

func newFramer(r io.Reader, window int) *framer {
	return &framer{r: r, window: window, pings: rate.NewLimiter(pingsPerSecond, pingBurst)}
}

// Read gives bytes of frames that are there whole.
func (f *framer) Read(p []byte) (int, error) {
	if len(f.ready) == 0 {
		if err := f.next(); err != nil {
			return 0, err
		}
	}
	n := copy(p, f.ready)
	if f.ready = f.ready[n:]; len(f.ready) == 0 {
		f.giveBack()
	}
	return n, nil
}

// next reads one frame.
func (f *framer) next() error {
	if _, err := io.ReadFull(f.r, f.head[:]); err != nil {
		return err
	}
	f.ready = f.head[:]
	n := binary.BigEndian.Uint32(f.head[8:])
	switch {
	case f.head[0] != 0: // another version: yamux's to refuse
	case f.head[1] == typePing && f.head[3]&flagSYN != 0 && !f.pings.Allow():
		return errPingFlood
	case f.head[1] == typeData && uint64(n) > uint64(f.window):
		return fmt.Errorf("%w: %d bytes", errFrameTooLong, n)
	case f.head[1] == typeData && n > 0:
		return f.readBody(int(n))
	}
	return nil
}

func (f *framer) readBody(n int) error {
	f.body = bodies.Get().(*[]byte)
	buf := append((*f.body)[:0], f.head[:]...)
	if cap(buf) < n+yamuxHeader {
		grown := make([]byte, yamuxHeader, n+yamuxHeader)
		copy(grown, buf)
		buf = grown
	}
	buf = buf[:yamuxHeader+n]
	f.ready = buf
	if _, err := io.ReadFull(f.r, buf[yamuxHeader:]); err != nil {
		f.ready = nil
		f.giveBack()
		return noEOF(err)
	}
	return nil
}

// giveBack returns the pooled buffer; a larger one that a long frame needed is
// left to the garbage collector.
func (f *framer) giveBack() {
	if f.body != nil {
		bodies.Put(f.body)
		f.body = nil
	}
}
