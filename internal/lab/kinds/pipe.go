package kinds

import (
	"errors"
	"io"
	"net"
	"sync"
	"testing"
)

// A Pipe is a TCP relay on loopback that can stop without closing anything, as
// networks do.
type Pipe struct {
	ln     net.Listener
	dial   func() (net.Conn, error)
	tasks  sync.WaitGroup
	mu     sync.Mutex
	closed bool
	pairs  map[*pair]struct{}
	sink   bool
}

// A pair is one relayed connection.
type pair struct {
	near, far net.Conn
	mu        sync.Mutex
	frozen    chan struct{} // not nil: nothing is read until it is closed
	sink      bool          // everything is read, nothing is passed on
}

// NewPipe relays to what dial reaches, until the test ends.
func NewPipe(t testing.TB, dial func() (net.Conn, error)) *Pipe {
	t.Helper()
	p := &Pipe{ln: Listen(t), dial: dial, pairs: make(map[*pair]struct{})}
	p.tasks.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// To dials addr for NewPipe.
func To(addr string) func() (net.Conn, error) {
	return func() (net.Conn, error) { return net.Dial("tcp", addr) } //nolint:noctx // loopback
}

// Addr is where the pipe listens.
func (p *Pipe) Addr() string { return p.ln.Addr().String() }

func (p *Pipe) accept() {
	for {
		near, err := p.ln.Accept()
		if err != nil {
			return
		}
		p.tasks.Go(func() {
			if err := p.relay(near); err != nil {
				_ = near.Close()
			}
		})
	}
}

func (p *Pipe) relay(near net.Conn) error {
	far, err := p.dial()
	if err != nil {
		return err
	}
	r := &pair{near: near, far: far}
	p.mu.Lock()
	r.sink = p.sink
	p.pairs[r] = struct{}{}
	closed := p.closed
	p.mu.Unlock()
	if closed {
		r.cut()
	}
	var both sync.WaitGroup
	both.Go(func() { r.copy(far, near) })
	both.Go(func() { r.copy(near, far) })
	both.Wait()
	p.mu.Lock()
	delete(p.pairs, r)
	p.mu.Unlock()
	return errors.Join(near.Close(), far.Close())
}

func (r *pair) copy(dst, src net.Conn) {
	buf := make([]byte, 16<<10)
	for {
		r.wait()
		n, err := src.Read(buf)
		if n > 0 && r.wait() {
			if _, err := dst.Write(buf[:n]); err != nil {
				r.cut()
				return
			}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				r.cut()
				return
			}
			if half, ok := dst.(*net.TCPConn); ok && !r.sunk() {
				_ = half.CloseWrite()
			}
			return
		}
	}
}

// wait blocks while the pair is frozen, and says whether bytes are passed on.
func (r *pair) wait() bool {
	for {
		r.mu.Lock()
		frozen, sink := r.frozen, r.sink
		r.mu.Unlock()
		if frozen == nil {
			return !sink
		}
		<-frozen
	}
}

func (r *pair) sunk() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.sink
}

// cut closes both ends, which also ends a copy that is inside one of them.
func (r *pair) cut() {
	_ = r.near.Close()
	_ = r.far.Close()
}

func (p *Pipe) each(f func(*pair)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for r := range p.pairs {
		r.mu.Lock()
		f(r)
		r.mu.Unlock()
	}
}

// Freeze stops reading what runs now, in both directions, until Thaw.
func (p *Pipe) Freeze() {
	frozen := make(chan struct{})
	p.each(func(r *pair) {
		if r.frozen == nil {
			r.frozen = frozen
		}
	})
}

// Thaw ends Freeze.
func (p *Pipe) Thaw() {
	open := make(map[chan struct{}]bool)
	p.each(func(r *pair) {
		if r.frozen != nil {
			open[r.frozen] = true
			r.frozen = nil
		}
	})
	for ch := range open {
		close(ch)
	}
}

// Sink takes everything from both ends and passes nothing on, from what runs
// now and from what connects until Heal.
func (p *Pipe) Sink() {
	p.mu.Lock()
	p.sink = true
	p.mu.Unlock()
	p.each(func(r *pair) { r.sink = true })
}

// Heal lets new connections through again. What was sunk stays so.
func (p *Pipe) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.sink = false
}

func (p *Pipe) close() {
	_ = p.ln.Close()
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.Thaw()
	p.each((*pair).cut)
	p.tasks.Wait()
}
