package deadlink

import (
	"flag"
	"fmt"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/internal/lab/kinds"
	"github.com/hermes-reach/hermes-reach/reach/link"
)

// The bounds of the row. A session notices a dead link after link.DeadAfter;
// where a test shortens that, the bound of 45 s shrinks with it. The 15 s do not
// shrink: TCP tries again in its own time.
const (
	noticed   = 45 * time.Second
	reachable = 15 * time.Second
)

// scaled shortens a time of the field as much as deadAfter is shortened.
func scaled(d, deadAfter time.Duration) time.Duration {
	return time.Duration(d.Seconds() / link.DeadAfter.Seconds() * float64(deadAfter))
}

var long = flag.Bool("long", false, "take the outages and timeouts as they are in the field: 7 minutes")

// A fault is what happens to a path, and what makes it good again.
type fault struct {
	pipe   bool // the host's connections go through one
	begin  func(*place)
	repair func(*place)
	// shown says that TCP itself tells the ends at once. (After a change of the
	// address it tells the host when the host sends something, if that is before
	// the silence is long enough.)
	shown bool
	// device says that the device's path is hit and the host's is not.
	device bool
}

func at(ns func(*place) *netns, changes ...func(*port)) func(*place) {
	return func(p *place) {
		p.router.set(ns(p), func(port *port) {
			for _, c := range changes {
				c(port)
			}
		})
	}
}

func theHost(p *place) *netns   { return p.host }
func theDevice(p *place) *netns { return p.device }
func nothing(*place)            {}

var faults = map[string]fault{
	"all packets lost":             {begin: at(theHost, cut), repair: at(theHost, repair)},
	"the host's packets lost":      {begin: at(theHost, cutFrom), repair: at(theHost, repair)},
	"the broker's packets lost":    {begin: at(theHost, cutTo), repair: at(theHost, repair)},
	"the device's packets lost":    {begin: at(theDevice, cut), repair: at(theDevice, repair), device: true},
	"taken and not passed on":      {begin: func(p *place) { p.pipe.Sink() }, repair: func(p *place) { p.pipe.Heal() }, pipe: true},
	"the broker is killed":         {begin: (*place).killBroker, repair: (*place).startBroker, shown: true},
	"another address, RST shown":   {begin: at(theHost, readdress), repair: nothing},
	"another address, RST dropped": {begin: at(theHost, readdress, hideRST), repair: nothing},
}

// TestDeadLink: whatever happens to a path, both ends notice in time, and the
// same process is reachable again soon after the path is. Everything happens at
// once, each in a place of its own.
func TestDeadLink(t *testing.T) {
	deadAfter, outages := 3*time.Second, []time.Duration{10 * time.Second, 90 * time.Second}
	if *long {
		deadAfter, outages = link.DeadAfter, append(outages, 6*time.Minute)
	}
	var all, built sync.WaitGroup
	defer all.Wait()
	built.Add(len(faults) + len(outages))
	in := func(name string, pipe bool, happen func(*testing.T, *place)) {
		all.Go(func() {
			t.Run(name, func(t *testing.T) { // at once: not by Parallel, which runs as many as there are processors
				ready := sync.OnceFunc(built.Done)
				defer ready()
				p := newPlace(t, deadAfter, pipe)
				ready()
				built.Wait()
				happen(t, p)
			})
		})
	}
	for name, f := range faults {
		in(name, f.pipe, func(t *testing.T, p *place) { f.run(t, p, deadAfter) })
	}
	for _, outage := range outages {
		in(fmt.Sprintf("an outage of %v", outage), false, func(t *testing.T, p *place) {
			p.outage(t, scaled(outage, deadAfter), deadAfter)
		})
	}
}

// run makes the fault, and judges.
func (f fault) run(t *testing.T, p *place, deadAfter time.Duration) {
	bound := scaled(noticed, deadAfter)
	if f.shown {
		bound = deadAfter / 2 // nobody has to wait for silence
	}
	gone := func() bool { return !p.conn.Connected() }
	if f.device { // which shows its state by its streams
		c := kinds.Dial(t, p.dialer)
		ended := make(chan struct{})
		go func() { defer close(ended); _, _ = c.Read(make([]byte, 1)) }()
		defer func() { _ = c.Close(); <-ended }()
		gone = func() bool { return isClosed(ended) }
	}
	start := time.Now()
	f.begin(p)
	if !kinds.Within(bound, gone) {
		t.Errorf("after %v the state is still connected", bound)
	}
	took := time.Since(start)
	if !f.shown && !f.device {
		brokerNotices(t, p, bound-time.Since(start)+deadAfter/4)
	}
	repaired := time.Now()
	f.repair(p)
	if !kinds.Within(reachable, func() bool { return p.seen.Load() > repaired.UnixNano() }) {
		t.Errorf("%v after the repair the host does not answer: %+v", reachable, p.conn.Status())
	}
	t.Logf("noticed after %v, reachable %v after the repair", took, time.Since(repaired))
}

func isClosed(ch chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

// brokerNotices wants the broker to take the host off its list, too. With a new
// address the host is back before anybody could look.
func brokerNotices(t *testing.T, p *place, within time.Duration) {
	client := p.httpClient()
	defer client.CloseIdleConnections()
	var last error
	if !kinds.Within(within, func() bool {
		n, err := p.hostsOnline(client)
		last = err
		return err == nil && (n == 0 || p.conn.Connected())
	}) {
		t.Errorf("the broker still lists the host (%v)", last)
	}
}

// outage loses all packets for a time. A session's patience outlives a short
// one: it costs nothing but its own time.
func (p *place) outage(t *testing.T, length, deadAfter time.Duration) {
	before := p.conn.Status()[0].Since
	at(theHost, cut)(p)
	<-time.After(length)
	repaired := time.Now()
	at(theHost, repair)(p)
	if !kinds.Within(reachable, func() bool { return p.seen.Load() > repaired.UnixNano() }) {
		t.Errorf("%v after it the host does not answer: %+v", reachable, p.conn.Status())
	}
	t.Logf("it took %v, reachable %v after it", length, time.Since(repaired))
	switch same := p.conn.Status()[0].Since.Equal(before); {
	case length < deadAfter && !same:
		t.Errorf("the session was given up after %v", length)
	case length > scaled(noticed, deadAfter) && same:
		t.Errorf("the session was not replaced after %v", length)
	}
}

// TestRounds: ten losses of every sort, five each in two places, leave neither a
// goroutine nor a file behind, in this process and in the brokers'. More of them
// in one place would only wait longer and longer for the next try.
func TestRounds(t *testing.T) {
	const deadAfter = time.Second
	places := []*place{newPlace(t, deadAfter, false), newPlace(t, deadAfter, false)}
	theirs := func() int {
		return openFiles(places[0].proc.Process.Pid) + openFiles(places[1].proc.Process.Pid)
	}
	ours := func() int { return openFiles(os.Getpid()) }
	kinds.Within(deadAfter, func() bool { return false }) // for what the start left to do
	counts := map[string]func() int{"goroutines": runtime.NumGoroutine, "open files": ours, "the brokers' open files": theirs}
	before := make(map[string]int)
	for what, count := range counts {
		before[what] = least(count)
	}
	var all sync.WaitGroup
	for i, p := range places {
		all.Go(func() {
			for j := range 5 {
				p.round(t, roundFaults[(i+j)%len(roundFaults)])
			}
		})
	}
	all.Wait()
	for what, count := range counts {
		if !kinds.Within(reachable, func() bool { return count() <= before[what] }) {
			t.Errorf("%s: %d after ten rounds, %d before", what, count(), before[what])
		}
	}
}

var roundFaults = []string{"another address, RST shown", "the broker is killed", "all packets lost"}

// round makes a fault, waits until it is noticed and until it is over.
func (p *place) round(t *testing.T, name string) {
	lost := time.Now()
	faults[name].begin(p)
	if !kinds.Within(reachable, func() bool { s := p.conn.Status()[0]; return s.State != "connected" || s.Since.After(lost) }) {
		t.Errorf("%s: the loss was not noticed", name)
	}
	repaired := time.Now()
	faults[name].repair(p)
	if !kinds.Within(reachable, func() bool { return p.seen.Load() > repaired.UnixNano() }) {
		t.Errorf("%s: the host is not back after %v: %+v", name, reachable, p.conn.Status())
	}
}

// least is the smallest of many looks: questions to the host come and go.
func least(look func() int) int {
	n := look()
	kinds.Within(500*time.Millisecond, func() bool { n = min(n, look()); return false })
	return n
}

func openFiles(pid int) int {
	files, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(files)
}
