package link

import (
	"sync"
	"time"
)

// deadline is a deadline that a select can wait for, as net.Pipe has.
type deadline struct {
	mu    sync.Mutex
	timer *time.Timer
	ch    chan struct{} // closed when the deadline passes
}

func (d *deadline) init() { d.ch = make(chan struct{}) }

// set moves the deadline; the zero time lifts it.
func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil && !d.timer.Stop() {
		<-d.ch // the timer's function runs or ran: let it close the channel
	}
	d.timer = nil
	over := isClosedChan(d.ch)
	switch wait := time.Until(t); {
	case t.IsZero():
		if over {
			d.ch = make(chan struct{})
		}
	case wait > 0:
		if over {
			d.ch = make(chan struct{})
		}
		ch := d.ch
		d.timer = time.AfterFunc(wait, func() { close(ch) })
	default:
		if !over {
			close(d.ch)
		}
	}
}

// wait gives a channel that is closed when the deadline of now passes. A
// later set may leave it open for ever or make a new one: ask again.
func (d *deadline) wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.ch
}

func (d *deadline) passed() bool { return isClosedChan(d.wait()) }

func isClosedChan(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}
