package lab

import (
	"io"
	"net"
	"sync"
	"time"
)

// SlowLink is a link between two ends in memory, with a delay, a rate and
// small buffers, as a phone on a bad network has. It keeps time by package
// time only, so a synctest bubble runs it in virtual time.
type SlowLink struct {
	Delay  time.Duration // one way
	Rate   int           // bytes a second, each way
	Buffer int           // bytes that a sender's socket takes before it waits
}

const segment = 1400

// Connect makes the two ends. Deadlines are not supported: carriers need none.
func (l SlowLink) Connect() (*SlowConn, *SlowConn) {
	ab, ba := l.direction(), l.direction()
	return &SlowConn{in: ba, out: ab}, &SlowConn{in: ab, out: ba}
}

// slowDir is one direction.
type slowDir struct {
	queue  chan []byte // segments that wait for the link
	flight chan arrival
	stop   chan struct{}
	once   sync.Once
	done   sync.WaitGroup

	mu     sync.Mutex
	frozen chan struct{} // nil, or closed at the thaw
}

type arrival struct {
	at   time.Time
	data []byte
}

func (l SlowLink) direction() *slowDir {
	d := &slowDir{
		queue:  make(chan []byte, max(1, l.Buffer/segment)),
		flight: make(chan arrival, 4+int(l.Delay.Seconds()*float64(l.Rate))/segment),
		stop:   make(chan struct{}),
	}
	d.done.Go(func() { d.transmit(l) })
	return d
}

// transmit takes segments off the queue at the link's rate.
func (d *slowDir) transmit(l SlowLink) {
	for {
		select {
		case seg := <-d.queue:
			d.wait()
			if !d.pause(time.Duration(len(seg)) * time.Second / time.Duration(l.Rate)) {
				return
			}
			select {
			case d.flight <- arrival{time.Now().Add(l.Delay), seg}:
			case <-d.stop:
				return
			}
		case <-d.stop:
			return
		}
	}
}

func (d *slowDir) pause(t time.Duration) bool {
	timer := time.NewTimer(t)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-d.stop:
		return false
	}
}

// wait blocks while the direction is frozen.
func (d *slowDir) wait() {
	d.mu.Lock()
	frozen := d.frozen
	d.mu.Unlock()
	if frozen == nil {
		return
	}
	select {
	case <-frozen:
	case <-d.stop:
	}
}

func (d *slowDir) close() { d.once.Do(func() { close(d.stop) }) }

// SlowConn is one end of a SlowLink.
type SlowConn struct {
	in, out *slowDir
	rest    []byte
}

// Read implements net.Conn, for one reader.
func (c *SlowConn) Read(p []byte) (int, error) {
	if len(c.rest) == 0 {
		select {
		case a := <-c.in.flight:
			if !c.in.pause(time.Until(a.at)) {
				return 0, io.EOF
			}
			c.rest = a.data
		case <-c.in.stop:
			return 0, io.EOF
		}
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// Write implements net.Conn.
func (c *SlowConn) Write(p []byte) (int, error) {
	for sent := 0; sent < len(p); {
		n := min(segment, len(p)-sent)
		select {
		case c.out.queue <- append([]byte(nil), p[sent:sent+n]...):
			sent += n
		case <-c.out.stop:
			return sent, net.ErrClosed
		}
	}
	return len(p), nil
}

// Close ends both directions.
func (c *SlowConn) Close() error {
	c.in.close()
	c.out.close()
	c.in.done.Wait()
	c.out.done.Wait()
	return nil
}

// Freeze stops what this end sends until Thaw.
func (c *SlowConn) Freeze() {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	c.out.frozen = make(chan struct{})
}

// Thaw ends Freeze.
func (c *SlowConn) Thaw() {
	c.out.mu.Lock()
	defer c.out.mu.Unlock()
	close(c.out.frozen)
	c.out.frozen = nil
}

type slowAddr struct{}

func (slowAddr) Network() string { return "slow" }
func (slowAddr) String() string  { return "slow" }

// LocalAddr implements net.Conn.
func (*SlowConn) LocalAddr() net.Addr { return slowAddr{} }

// RemoteAddr implements net.Conn.
func (*SlowConn) RemoteAddr() net.Addr { return slowAddr{} }

// SetDeadline does nothing.
func (*SlowConn) SetDeadline(time.Time) error { return nil }

// SetReadDeadline does nothing.
func (*SlowConn) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline does nothing.
func (*SlowConn) SetWriteDeadline(time.Time) error { return nil }
