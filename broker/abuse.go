package broker

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"hash/maphash"
	"net/netip"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

const (
	failureWindow  = time.Minute
	maxSources     = 4096
	sharedSources  = 4096
	replayWindow   = 24 * time.Hour
	replayPerToken = 4096
	tagLife        = 24 * time.Hour
)

// sources counts failed registrations by address. When more addresses fail
// than it remembers, the rest are counted by their /16 (IPv4) or /32 (IPv6),
// folded into a table of fixed size: memory stays bounded, and who fills the
// table locks out himself and few others.
//
// It also counts the sessions of each address that are not registered yet.
type sources struct {
	limit      int
	maxPending int
	now        func() time.Time
	seed       maphash.Seed

	mu      sync.Mutex
	counts  map[netip.Prefix]*failures
	swept   time.Time // when the counts were cleaned up
	shared  [sharedSources]failures
	pending map[netip.Prefix]int
}

type failures struct {
	start time.Time
	n     int
}

func newSources(l Limits, now func() time.Time) *sources {
	return &sources{
		limit: l.Failures, maxPending: l.Pending, now: now, seed: maphash.MakeSeed(),
		counts: make(map[netip.Prefix]*failures), pending: make(map[netip.Prefix]int),
	}
}

// enter counts a session that has yet to register, unless its source has too
// many. Each that was counted must leave once.
func (s *sources) enter(src netip.Prefix) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending[src] >= s.maxPending {
		return false
	}
	s.pending[src]++
	return true
}

func (s *sources) leave(src netip.Prefix) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending[src]--; s.pending[src] == 0 {
		delete(s.pending, src)
	}
}

// wait says how long the source is turned away; 0 lets it in.
func (s *sources) wait(src netip.Prefix) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.counts[src]
	if f == nil {
		if len(s.counts) < maxSources {
			return 0
		}
		f = s.share(src)
	}
	left := failureWindow - s.now().Sub(f.start)
	if f.n < s.limit || left <= 0 {
		return 0
	}
	return left
}

// share is the count of all the addresses around src. The lock is held.
func (s *sources) share(src netip.Prefix) *failures {
	around := masked(src.Addr(), 16, 32)
	return &s.shared[maphash.Comparable(s.seed, around)%sharedSources]
}

// failed counts one failure.
func (s *sources) failed(src netip.Prefix) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	f := s.counts[src]
	if f == nil && len(s.counts) >= maxSources && now.Sub(s.swept) >= time.Second {
		s.swept = now
		for k, old := range s.counts {
			if now.Sub(old.start) >= failureWindow {
				delete(s.counts, k)
			}
		}
	}
	switch {
	case f != nil:
	case len(s.counts) < maxSources:
		f = &failures{}
		s.counts[src] = f
	default:
		f = s.share(src)
	}
	if now.Sub(f.start) >= failureWindow {
		f.start, f.n = now, 0
	}
	f.n++
}

// replays remembers the connection ids of successful registrations for a day,
// at most replayPerToken for each token. A registration that does not succeed
// costs nothing.
type replays struct {
	now  func() time.Time
	mu   sync.Mutex
	seen map[wire.Digest]*tokenReplays
}

type tokenReplays struct {
	ids   map[wire.ID]time.Time
	order []wire.ID
	last  time.Time
}

func newReplays(now func() time.Time) *replays {
	return &replays{now: now, seen: make(map[wire.Digest]*tokenReplays)}
}

// fresh notes id and says whether it is new for the token.
func (r *replays) fresh(token wire.Digest, id wire.ID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.now()
	t := r.seen[token]
	if t == nil {
		r.sweep(now)
		t = &tokenReplays{ids: make(map[wire.ID]time.Time)}
		r.seen[token] = t
	}
	t.last = now
	if at, ok := t.ids[id]; ok && now.Sub(at) < replayWindow {
		return false
	}
	t.ids[id] = now
	t.order = append(t.order, id)
	if len(t.order) > replayPerToken {
		delete(t.ids, t.order[0])
		t.order = t.order[1:]
	}
	return true
}

func (r *replays) sweep(now time.Time) {
	for k, t := range r.seen {
		if now.Sub(t.last) >= replayWindow {
			delete(r.seen, k)
		}
	}
}

// tagger names clients to hosts without showing addresses: a keyed hash that
// is stable for a day. The key lives in memory only.
type tagger struct {
	now func() time.Time
	mu  sync.Mutex
	key [32]byte
	end time.Time
}

func newTagger(now func() time.Time) *tagger { return &tagger{now: now} }

func (t *tagger) tag(src netip.Prefix) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now := t.now(); !now.Before(t.end) {
		_, _ = rand.Read(t.key[:]) // never fails
		t.end = now.Add(tagLife)
	}
	mac := hmac.New(sha256.New, t.key[:])
	mac.Write([]byte(src.String()))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil)[:12])
}
