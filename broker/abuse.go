package broker

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

const (
	failureWindow  = time.Minute
	maxSources     = 4096
	replayWindow   = 24 * time.Hour
	replayPerToken = 4096
	tagLife        = 24 * time.Hour
)

// sources counts failed registrations by address. When more addresses fail
// than it remembers, the rest share one count: memory stays bounded and nobody
// who was counted on his own is affected.
type sources struct {
	limit int
	now   func() time.Time

	mu     sync.Mutex
	counts map[string]*failures
	shared failures
}

type failures struct {
	start time.Time
	n     int
}

func newSources(limit int, now func() time.Time) *sources {
	return &sources{limit: limit, now: now, counts: make(map[string]*failures)}
}

// wait says how long the source is turned away; 0 lets it in.
func (s *sources) wait(src string) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.counts[src]
	if f == nil {
		if len(s.counts) < maxSources {
			return 0
		}
		f = &s.shared
	}
	left := failureWindow - s.now().Sub(f.start)
	if f.n < s.limit || left <= 0 {
		return 0
	}
	return left
}

// failed counts one failure.
func (s *sources) failed(src string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	f := s.counts[src]
	if f == nil && len(s.counts) >= maxSources {
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
		f = &s.shared
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

func (t *tagger) tag(src string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now := t.now(); !now.Before(t.end) {
		_, _ = rand.Read(t.key[:]) // never fails
		t.end = now.Add(tagLife)
	}
	mac := hmac.New(sha256.New, t.key[:])
	mac.Write([]byte(src))
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil)[:12])
}
