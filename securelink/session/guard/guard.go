// Package guard counts wrong credentials, so that guessing is slow for who
// guesses and nobody else pays for it.
//
// It knows peers by a key and no more. Two classes are counted apart: tokens,
// which nobody can guess and which only cost work, and pairing codes, which are
// short and must not be guessed. The key of a peer behind a broker is the
// broker's word, so all codes of one broker are bounded together as well.
package guard

import (
	"hash/maphash"
	"slices"
	"sync"
	"time"
)

// Class is what was wrong in an attempt.
type Class uint8

const (
	Token Class = iota // a session or refresh token, or nothing at all
	Code               // a pairing code
)

// A Peer is a source as it is counted.
type Peer struct {
	Key    string
	Broker string // "" for a direct peer
	// Shared says that the key stands for all peers of a broker that does not
	// tell them apart. Such a key is counted for codes only, and never refused
	// as a whole: one phone's mistakes would lock out all.
	Shared bool
}

// Device is the digest of the id that a device claimed in an attempt.
type Device [32]byte

// Limits are how many failures within which window block for how long. All
// must be above zero.
type Limits struct {
	Codes, Tokens           int
	CodeWindow, TokenWindow time.Duration
	CodeBlock, TokenBlock   time.Duration
	BrokerCodes             int // by one broker within CodeWindow
	Sources                 int // peers remembered one by one
}

// A Table counts wrong credentials by peer. Its memory is bounded: when
// Limits.Sources are remembered, further sources share a few hundred buckets,
// so that a flood of invented sources locks out none that is remembered.
type Table struct {
	mu       sync.Mutex
	lim      Limits
	sources  map[string]*bucket
	overflow map[uint64]*bucket
	brokers  map[string]*bucket
	seed     maphash.Seed
	swept    time.Time
}

type bucket struct {
	wrong   [2][]time.Time // by class, within its window, oldest first, never more than its limit
	blocked time.Time
	devices []Device // device ids that failed here, the last few
}

const (
	overflowBuckets = 256
	bucketDevices   = 4
)

// New makes an empty table.
func New(l Limits) *Table {
	return &Table{lim: l, sources: make(map[string]*bucket), overflow: make(map[uint64]*bucket),
		brokers: make(map[string]*bucket), seed: maphash.MakeSeed()}
}

// limits of a class: how many within which window, and the block that follows.
func (f *Table) limits(c Class) (n int, window, block time.Duration) {
	if c == Code {
		return f.lim.Codes, f.lim.CodeWindow, f.lim.CodeBlock
	}
	return f.lim.Tokens, f.lim.TokenWindow, f.lim.TokenBlock
}

// lookup finds the bucket of a source, or nil when it has failed nothing.
func (f *Table) lookup(key string) *bucket {
	if b := f.sources[key]; b != nil {
		return b
	}
	return f.overflow[f.slot(key)]
}

func (f *Table) slot(key string) uint64 { return maphash.String(f.seed, key) % overflowBuckets }

// bucketFor finds or makes the bucket of a source.
func (f *Table) bucketFor(key string, now time.Time) *bucket {
	if b := f.sources[key]; b != nil {
		return b
	}
	if len(f.sources) >= f.lim.Sources {
		f.sweep(now)
	}
	b := new(bucket)
	if len(f.sources) < f.lim.Sources {
		f.sources[key] = b
		return b
	}
	if old := f.overflow[f.slot(key)]; old != nil {
		return old
	}
	f.overflow[f.slot(key)] = b
	return b
}

// sweep forgets sources that have nothing left to remember, at most once a
// second: the flood that fills the table must not buy work with it.
func (f *Table) sweep(now time.Time) {
	if now.Sub(f.swept) < time.Second && now.After(f.swept) {
		return
	}
	f.swept = now
	for k, b := range f.sources {
		if f.idle(b, now) {
			delete(f.sources, k)
		}
	}
	for k, b := range f.overflow {
		if f.idle(b, now) {
			delete(f.overflow, k)
		}
	}
}

func (f *Table) idle(b *bucket, now time.Time) bool {
	return !now.Before(b.blocked) && f.count(b, Token, now) == 0 && f.count(b, Code, now) == 0
}

// count drops what left the window and says how many are in it.
func (f *Table) count(b *bucket, c Class, now time.Time) int {
	_, window, _ := f.limits(c)
	b.wrong[c] = slices.DeleteFunc(b.wrong[c], func(t time.Time) bool { return now.Sub(t) >= window })
	return len(b.wrong[c])
}

// Blocked says how long a source has to wait before it may open a socket. A
// source that stands for a whole broker is never refused as a whole.
func (f *Table) Blocked(p Peer, now time.Time) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	if b := f.lookup(p.Key); b != nil && !p.Shared {
		return max(b.blocked.Sub(now), 0)
	}
	return 0
}

// Allowed says whether a credential of this class is looked at at all. It is
// asked again for each attempt: sockets opened before the block are no way
// around it.
func (f *Table) Allowed(p Peer, c Class, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p.Shared && c == Token {
		return true
	}
	if b := f.lookup(p.Key); b != nil && now.Before(b.blocked) {
		return false
	}
	if c == Code && p.Broker != "" {
		return f.count(f.broker(p.Broker), Code, now) < f.lim.BrokerCodes
	}
	return true
}

// Failed counts one attempt that proved nothing.
func (f *Table) Failed(p Peer, c Class, device Device, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p.Shared && c == Token {
		return
	}
	n, _, block := f.limits(c)
	b := f.bucketFor(p.Key, now)
	if !slices.Contains(b.devices, device) {
		b.devices = append(b.devices, device)
		b.devices = b.devices[max(0, len(b.devices)-bucketDevices):]
	}
	if f.count(b, c, now) < n {
		b.wrong[c] = append(b.wrong[c], now)
	}
	if len(b.wrong[c]) >= n {
		b.blocked, b.wrong[c] = now.Add(block), nil
	}
	if c == Code && p.Broker != "" {
		if b := f.broker(p.Broker); f.count(b, Code, now) < f.lim.BrokerCodes {
			b.wrong[Code] = append(b.wrong[Code], now)
		}
	}
}

// broker finds or makes the bucket of a broker. Brokers are those the operator
// enrolled, so their number is small; should it not be, the rest share one.
func (f *Table) broker(name string) *bucket {
	b := f.brokers[name]
	if b == nil && len(f.brokers) >= overflowBuckets {
		name = ""
		b = f.brokers[""]
	}
	if b == nil {
		b = new(bucket)
		f.brokers[name] = b
	}
	return b
}

// Succeeded forgets the failures that a proof outweighs: a token clears wrong
// tokens, a pairing clears all of its source.
func (f *Table) Succeeded(p Peer, c Class) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if b := f.sources[p.Key]; b != nil {
		b.wrong[Token] = nil
		if c == Code {
			delete(f.sources, p.Key)
		}
	}
}

// Forgive lifts the blocks of sources where this device failed.
func (f *Table) Forgive(device Device) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for k, b := range f.sources {
		if slices.Contains(b.devices, device) {
			delete(f.sources, k)
		}
	}
}
