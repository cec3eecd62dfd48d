package guard

import (
	"strconv"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var limits = Limits{Codes: 10, CodeWindow: time.Minute, CodeBlock: 2 * time.Minute,
	Tokens: 5, TokenWindow: time.Minute, TokenBlock: 5 * time.Minute, BrokerCodes: 60, Sources: 8}

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func TestBlock(t *testing.T) {
	for name, tt := range map[string]struct {
		class Class
		n     int
		block time.Duration
	}{"tokens": {Token, 5, 5 * time.Minute}, "codes": {Code, 10, 2 * time.Minute}} {
		t.Run(name, func(t *testing.T) {
			g, p, now := New(limits), Peer{Key: "a"}, start
			for i := range tt.n {
				if g.Blocked(p, now) != 0 || !g.Allowed(p, tt.class, now) {
					t.Fatalf("blocked after %d", i)
				}
				g.Failed(p, tt.class, Device{}, now)
				now = now.Add(time.Second)
			}
			last := now.Add(-time.Second)
			if got := g.Blocked(p, now); got != last.Add(tt.block).Sub(now) {
				t.Errorf("blocked for %v, want %v from the last failure", got, tt.block)
			}
			if g.Allowed(p, Token, now) || g.Allowed(p, Code, now) {
				t.Error("a blocked peer was listened to")
			}
			if g.Blocked(Peer{Key: "b"}, now) != 0 {
				t.Error("another peer pays for it")
			}
			if end := last.Add(tt.block); g.Blocked(p, end) != 0 || !g.Allowed(p, tt.class, end) {
				t.Error("the block does not end")
			}
		})
	}
}

// Failures older than the window do not count.
func TestWindow(t *testing.T) {
	g, p, now := New(limits), Peer{Key: "a"}, start
	for range 50 {
		g.Failed(p, Token, Device{}, now)
		now = now.Add(15 * time.Second) // four a minute
	}
	if g.Blocked(p, now) != 0 {
		t.Error("slow failures blocked")
	}
}

func TestSuccessClears(t *testing.T) {
	g, p := New(limits), Peer{Key: "a"}
	for range 9 {
		g.Failed(p, Code, Device{}, start)
	}
	for range 4 {
		g.Failed(p, Token, Device{}, start)
	}
	g.Succeeded(p, Token)
	g.Failed(p, Token, Device{}, start)
	if g.Blocked(p, start) != 0 {
		t.Error("a good token did not clear wrong ones")
	}
	g.Failed(p, Code, Device{}, start)
	if g.Blocked(p, start) == 0 {
		t.Error("a good token cleared wrong codes: a paired device could guess on")
	}
}

// A key that stands for a whole broker bounds codes and never refuses a peer.
func TestSharedKey(t *testing.T) {
	g, p := New(limits), Peer{Key: "broker b", Broker: "b", Shared: true}
	for range 20 {
		g.Failed(p, Token, Device{}, start)
		g.Failed(p, Code, Device{}, start)
	}
	if g.Blocked(p, start) != 0 || !g.Allowed(p, Token, start) {
		t.Error("every phone behind the broker is locked out")
	}
	if g.Allowed(p, Code, start) {
		t.Error("codes are not bounded")
	}
}

func TestBrokerBound(t *testing.T) {
	g := New(limits)
	for i := range 60 {
		p := Peer{Key: "tag " + strconv.Itoa(i), Broker: "b"}
		if !g.Allowed(p, Code, start) {
			t.Fatalf("refused after %d", i)
		}
		g.Failed(p, Code, Device{}, start)
	}
	p := Peer{Key: "tag new", Broker: "b"}
	if g.Allowed(p, Code, start) || !g.Allowed(p, Token, start) {
		t.Error("want codes of this broker refused, and tokens not")
	}
	if !g.Allowed(Peer{Key: "tag new", Broker: "c"}, Code, start) {
		t.Error("another broker pays for it")
	}
	if !g.Allowed(p, Code, start.Add(time.Minute)) {
		t.Error("the bound does not slide")
	}
}

// A flood of invented peers costs bounded memory and unblocks nobody.
func TestMemoryBounded(t *testing.T) {
	g, bad := New(limits), Peer{Key: "bad"}
	for range 5 {
		g.Failed(bad, Token, Device{}, start)
	}
	for i := range 10000 {
		g.Failed(Peer{Key: "flood " + strconv.Itoa(i), Broker: "b" + strconv.Itoa(i)}, Code, Device{byte(i)}, start.Add(time.Duration(i)*time.Millisecond))
	}
	if len(g.sources) > limits.Sources || len(g.overflow) > overflowBuckets || len(g.brokers) > overflowBuckets+1 {
		t.Errorf("%d peers, %d shared, %d brokers remembered", len(g.sources), len(g.overflow), len(g.brokers))
	}
	if g.Blocked(bad, start.Add(10*time.Second)) == 0 {
		t.Error("the flood washed a block away")
	}
	for _, b := range g.overflow {
		if len(b.wrong[Code]) > limits.Codes || len(b.devices) > bucketDevices {
			t.Fatal("a bucket has no bound")
		}
	}
	// Once all is over, new peers get buckets of their own again.
	now := start.Add(time.Hour)
	g.Failed(Peer{Key: "later"}, Token, Device{}, now)
	if g.sources["later"] == nil {
		t.Error("the table never empties")
	}
}

func TestForgive(t *testing.T) {
	g, dev := New(limits), Device{7}
	for range 5 {
		g.Failed(Peer{Key: "a"}, Token, dev, start)
		g.Failed(Peer{Key: "b"}, Token, Device{8}, start)
	}
	g.Forgive(dev)
	if g.Blocked(Peer{Key: "a"}, start) != 0 || g.Blocked(Peer{Key: "b"}, start) == 0 {
		t.Error("want the block lifted where this device failed, and only there")
	}
}
