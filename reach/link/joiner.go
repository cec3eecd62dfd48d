package link

import (
	"encoding/binary"
	"io"
	"sync"
	"time"
)

const (
	// The bytes that wait for the carrier are bounded by a limit between these,
	// so that small messages do not queue behind bulk: a write that took longer
	// than slowWrite halves it, one faster than fastWrite doubles it.
	minJoin   = 2 << 10
	maxJoin   = 128 << 10
	slowWrite = 50 * time.Millisecond
	fastWrite = 10 * time.Millisecond

	// maxFrame is the most that one stream puts into one frame: four TLS
	// records with the frame's header.
	maxFrame = 4*(16<<10) - yamuxHeader

	yamuxHeader = 12
)

// joiner is the writer below yamux. yamux writes a frame's header and its body
// apart, which would cost a TLS record and a system call each; the joiner keeps
// a header back until its body is there, and while one write is under way it
// gathers what comes next into one more.
type joiner struct {
	w io.Writer

	mu     sync.Mutex
	room   sync.Cond // signalled when buf shrank, all is written, or err was set
	work   sync.Cond // signalled when there is something to write or err was set
	buf    []byte
	limit  int
	held   bool // buf ends with a header whose body has not come yet
	flying int  // bytes that run is writing
	err    error
}

func newJoiner(w io.Writer) *joiner {
	j := &joiner{w: w, limit: maxFrame + yamuxHeader}
	j.room.L, j.work.L = &j.mu, &j.mu
	return j
}

// Write queues p and returns; it waits only while the limit is under way.
// An error of the carrier is returned by the next call.
func (j *joiner) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for len(j.buf)+j.flying >= j.limit && !j.held && j.err == nil {
		j.room.Wait()
	}
	if j.err != nil {
		return 0, j.err
	}
	j.buf = append(j.buf, p...)
	j.held = !j.held && announcesBody(p)
	if !j.held {
		j.work.Signal()
	}
	return len(p), nil
}

// announcesBody tells a yamux header that a body follows: version 0, type data,
// length above zero. Bodies are never asked, because a held header precedes them.
func announcesBody(p []byte) bool {
	return len(p) == yamuxHeader && p[0] == 0 && p[1] == 0 && binary.BigEndian.Uint32(p[8:12]) > 0
}

// run writes what is queued until the carrier fails or close is called.
func (j *joiner) run() {
	var spare []byte
	j.mu.Lock()
	defer j.mu.Unlock()
	for {
		for (len(j.buf) == 0 || j.held) && j.err == nil {
			j.work.Wait()
		}
		if j.err != nil {
			return
		}
		out := j.buf
		j.buf = spare[:0]
		j.flying = len(out)
		j.mu.Unlock()
		start := time.Now()
		_, err := j.w.Write(out)
		took := time.Since(start)
		j.mu.Lock()
		j.flying = 0
		j.room.Broadcast()
		if spare = out; cap(spare) > 2*maxJoin {
			spare = nil // one frame may be as large as the window: do not keep that
		}
		if err != nil {
			j.fail(err)
		}
		switch {
		case took > slowWrite:
			j.limit = max(minJoin, j.limit/2)
		case took < fastWrite:
			j.limit = min(maxJoin, j.limit*2)
		}
	}
}

// frame is how much one stream should put into one frame now.
func (j *joiner) frame() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return min(maxFrame, j.limit)
}

// flush waits until all that was queued is written, or the joiner failed.
func (j *joiner) flush() {
	j.mu.Lock()
	defer j.mu.Unlock()
	for len(j.buf)+j.flying > 0 && j.err == nil {
		j.room.Wait()
	}
}

// close makes run and every Write return err.
func (j *joiner) close(err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.fail(err)
}

func (j *joiner) fail(err error) {
	if j.err == nil {
		j.err = err
	}
	j.room.Broadcast()
	j.work.Broadcast()
}
