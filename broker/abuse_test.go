package broker

import (
	"fmt"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

type testClock struct{ t time.Time }

func (c *testClock) now() time.Time { return c.t }

func newTestClock() *testClock { return &testClock{time.Unix(2_000_000_000, 0)} }

func TestSourceIsANetwork(t *testing.T) {
	for in, want := range map[string]string{
		"192.0.2.7:1234":            "192.0.2.7/32",
		"[::ffff:192.0.2.7]:1":      "192.0.2.7/32",
		"[2001:db8:1:2:3:4:5:6]:80": "2001:db8:1:2::/64",
		"[fe80::1%eth0]:1":          "fe80::/64",
		"@":                         "invalid Prefix",
	} {
		if got := source(in).String(); got != want {
			t.Errorf("source(%s) = %s, want %s", in, got, want)
		}
	}
}

func TestRetryAfterIsWholeSeconds(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "1", time.Millisecond: "1", time.Second: "1", 1001 * time.Millisecond: "2", time.Minute: "60", 90 * time.Second: "90",
	} {
		if got := seconds(d); got != want {
			t.Errorf("seconds(%v) = %q, want %q", d, got, want)
		}
	}
}

func TestFailuresAreForgottenAfterAMinute(t *testing.T) {
	c, a, b := newTestClock(), source("192.0.2.1:1"), source("192.0.2.2:1")
	s := newSources(Limits{Failures: 2}, c.now)
	s.failed(a)
	if s.wait(a) != 0 {
		t.Error("one failure shuts out")
	}
	c.t = c.t.Add(20 * time.Second)
	s.failed(a)
	if got := s.wait(a); got != 40*time.Second {
		t.Errorf("wait = %v, want what is left of the minute", got)
	}
	if s.wait(b) != 0 {
		t.Error("a neighbour is shut out")
	}
	c.t = c.t.Add(40 * time.Second)
	if s.wait(a) != 0 {
		t.Error("after a minute it is still shut out")
	}
	s.failed(a)
	if s.wait(a) != 0 {
		t.Error("the minute does not begin again")
	}
}

// TestManySourcesLockNobodyElseOut: who fills the table is counted by his
// surroundings; others, and those in the table, are not.
func TestManySourcesLockNobodyElseOut(t *testing.T) {
	c := newTestClock()
	s := newSources(Limits{Failures: 2}, c.now)
	known := source("198.51.100.7:1")
	s.failed(known)
	attacker := func(i int) netip.Prefix { return source(fmt.Sprintf("[2001:db8:%x:%x::1]:1", i>>16, i&0xffff)) }
	for i := range 3 * maxSources {
		s.failed(attacker(i))
	}
	if n := len(s.counts); n > maxSources {
		t.Errorf("%d sources are remembered, at most %d may be", n, maxSources)
	}
	if s.wait(attacker(1<<20)) == 0 {
		t.Error("the attacker's next address is let in")
	}
	if s.wait(known) != 0 {
		t.Error("a source in the table is shut out by others")
	}
	locked := 0
	for i := range 1000 {
		if s.wait(source(fmt.Sprintf("%d.%d.1.1:1", 1+i/250, i%250))) != 0 {
			locked++
		}
	}
	if locked > 5 {
		t.Errorf("%d of 1000 other networks are shut out", locked)
	}
	c.t = c.t.Add(time.Minute)
	s.failed(attacker(1 << 21))
	s.failed(attacker(1<<21 + 1))
	if n := len(s.counts); n > 2 {
		t.Errorf("%d sources are remembered after a minute", n)
	}
}

func TestReplaysAreBounded(t *testing.T) {
	c := newTestClock()
	r := newReplays(c.now)
	token, first := wire.DigestOf("t"), wire.NewID()
	if !r.fresh(token, first) || r.fresh(token, first) {
		t.Error("an id is not fresh exactly once")
	}
	if !r.fresh(wire.DigestOf("other"), first) {
		t.Error("one token's id is taken for another's")
	}
	for range replayPerToken {
		r.fresh(token, wire.NewID())
	}
	if n := len(r.seen[token].ids); n > replayPerToken {
		t.Errorf("%d ids are remembered, at most %d may be", n, replayPerToken)
	}
	c.t = c.t.Add(replayWindow)
	r.fresh(wire.DigestOf("third"), wire.NewID())
	if len(r.seen) != 1 {
		t.Errorf("%d tokens are remembered after a day without them", len(r.seen)-1)
	}
}

func TestTagsHideAddressesForADay(t *testing.T) {
	c := newTestClock()
	g, a, b := newTagger(c.now), source("192.0.2.1:1"), source("192.0.2.2:1")
	tag := g.tag(a)
	if tag != g.tag(a) || tag == g.tag(b) || tag == newTagger(c.now).tag(a) {
		t.Error("a tag is not one address at one broker")
	}
	c.t = c.t.Add(tagLife - time.Second)
	if g.tag(a) != tag {
		t.Error("a tag changes within a day")
	}
	c.t = c.t.Add(time.Second)
	if g.tag(a) == tag {
		t.Error("a tag is the same after a day")
	}
}

// TestEveryLimitIsChecked: a limit that is added has a default and is refused
// when negative.
func TestEveryLimitIsChecked(t *testing.T) {
	defaults, filled := reflect.ValueOf(DefaultLimits()), reflect.ValueOf(Limits{}.withDefaults())
	for i := range defaults.NumField() {
		name := defaults.Type().Field(i).Name
		if defaults.Field(i).IsZero() || !filled.Field(i).Equal(defaults.Field(i)) {
			t.Errorf("%s has no default", name)
		}
		var l Limits
		reflect.ValueOf(&l).Elem().Field(i).SetInt(-1)
		if l.Validate() == nil {
			t.Errorf("a negative %s is taken", name)
		}
	}
}
