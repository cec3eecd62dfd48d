package session

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// EndReason is why something live was ended.
type EndReason string

const (
	EndRevoked  EndReason = "revoked"
	EndExpired  EndReason = "expired"
	EndReplaced EndReason = "replaced" // the device paired again, or opened too many
	EndShutdown EndReason = "shutdown"
)

// A liveEntry is something open that rests on a session: a socket, a stream.
type liveEntry struct {
	token  digest
	device string
	name   string // the grant it rests on as well; "" for the session alone
	socket bool
	since  time.Time
	end    func(EndReason)
}

// Track ties something live to a session, and to one of its grants unless name
// is empty: end is called when either is revoked, replaced or runs out, and
// when the store closes. It is called once at most, from another goroutine,
// without locks held, and must not block. Untrack when it is over by itself.
// The error is [ErrUnauthorized] or [ErrGrant] when it is over already.
func (s *Store) Track(sess Session, name string, end func(EndReason)) (untrack func(), err error) {
	return s.track(&liveEntry{token: sess.token, device: sess.Device.ID, name: name, end: end})
}

func (s *Store) track(l *liveEntry) (untrack func(), err error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, ErrClosed
	}
	now := s.now()
	end, err := s.deadline(l)
	if err == nil && !now.Before(end) {
		err = ErrGrant
	}
	if err != nil {
		s.mu.Unlock()
		return nil, err
	}
	l.since = now
	crowded := s.makeRoom(l)
	s.live[l] = struct{}{}
	s.arm()
	s.mu.Unlock()
	crowded()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.live, l)
	}, nil
}

// makeRoom ends the oldest socket of a device that has too many: a phone that
// lost its network comes back before we notice that the old socket is dead.
func (s *Store) makeRoom(l *liveEntry) func() {
	var oldest *liveEntry
	n := 0
	for o := range s.live {
		if !l.socket || !o.socket || o.device != l.device {
			continue
		}
		if n++; oldest == nil || o.since.Before(oldest.since) {
			oldest = o
		}
	}
	if n < s.lim.Sockets {
		return func() {}
	}
	return s.endAll(EndReplaced, func(o *liveEntry) bool { return o == oldest })
}

// deadline is the end of what an entry rests on, or why it has none.
func (s *Store) deadline(l *liveEntry) (time.Time, error) {
	d := s.tokens[l.token]
	if d == nil {
		return time.Time{}, ErrUnauthorized
	}
	i := slices.IndexFunc(d.Sessions, func(r sessionRec) bool { return r.Token == l.token })
	end := d.Sessions[i].Expires
	if l.name == "" {
		return end, nil
	}
	g, ok := d.Sessions[i].Grants[l.name]
	if !ok {
		return time.Time{}, ErrGrant
	}
	return earlier(end, g), nil
}

// endStale ends what rests on nothing any more. Like endAll it returns the
// calls, to be made without mu.
func (s *Store) endStale(gone EndReason, now time.Time) func() {
	over := make(map[*liveEntry]bool)
	for l := range s.live {
		if end, err := s.deadline(l); err == nil && !now.Before(end) {
			over[l] = true
		}
	}
	expired := s.endAll(EndExpired, func(l *liveEntry) bool { return over[l] })
	rest := s.endAll(gone, func(l *liveEntry) bool { _, err := s.deadline(l); return err != nil })
	return func() { expired(); rest() }
}

func (s *Store) endAll(why EndReason, which func(*liveEntry) bool) func() {
	var ended []*liveEntry
	for l := range s.live {
		if which(l) {
			ended = append(ended, l)
			delete(s.live, l)
		}
	}
	return func() {
		for _, l := range ended {
			l.end(why)
		}
	}
}

// arm sets the one timer to the next thing that ends. The caller holds mu.
func (s *Store) arm() {
	if s.closed {
		return
	}
	now := s.now()
	next, any := s.codes.next()
	for _, d := range s.st.devices {
		any = true
		for _, r := range d.Sessions {
			next = earlier(next, r.Expires)
		}
		if d.Refresh != nil {
			next = earlier(next, d.Refresh.Expires)
		}
	}
	for l := range s.live {
		if end, err := s.deadline(l); err == nil {
			next = earlier(next, end)
		}
	}
	if len(s.st.pending) > 0 && s.opts.Routes != nil && !s.retrying {
		any, next = true, earlier(next, s.retryAt)
	}
	if s.unsaved { // try again, every maxWait
		any = true
	}
	if !any {
		return
	}
	wait := min(max(next.Sub(now), time.Millisecond), maxWait)
	if s.timer == nil {
		s.timer = time.AfterFunc(wait, s.tick)
		return
	}
	s.timer.Reset(wait)
}

// tick ends what has run out.
func (s *Store) tick() {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	s.wg.Add(1)
	defer s.wg.Done()
	now := s.now()
	ended := s.endStale(EndExpired, now)
	stale := s.unsaved || len(s.uses) > 0 && now.Sub(s.saved) >= seenEvery
	for _, d := range s.st.devices {
		stale = stale || d.stale(now)
	}
	s.mu.Unlock()
	ended()
	codes := s.codes.sweep(now)
	s.tellCodes(codes)
	if stale {
		if err := s.shrink(EndExpired, func(st *state) error { st.prune(now); return nil }); err != nil {
			s.log.Warn("expired sessions ended but could not be removed from disk", "err", err)
		}
	}
	s.withdraw()
	s.mu.Lock()
	s.arm()
	s.mu.Unlock()
}

func (d *deviceRec) stale(now time.Time) bool {
	over := func(r sessionRec) bool { return !now.Before(r.Expires) }
	return slices.ContainsFunc(d.Sessions, over) || d.Refresh != nil && !now.Before(d.Refresh.Expires)
}

// prune removes what has run out, and devices that have nothing left.
func (s *state) prune(now time.Time) {
	for _, d := range s.devices {
		if !d.stale(now) {
			continue
		}
		c := s.edit(d)
		c.Sessions = slices.DeleteFunc(c.Sessions, func(r sessionRec) bool { return !now.Before(r.Expires) })
		if c.Refresh != nil && !now.Before(c.Refresh.Expires) {
			c.Refresh = nil
		}
		if len(c.Sessions) == 0 && c.Refresh == nil {
			delete(s.devices, c.ID)
		}
	}
}

// Revoke ends a device: its sessions, its refresh token, its routes, and all
// that is live, before it returns or at once after. The id may be cut to four
// characters if that is clear. An error of the disk is returned beside the
// device: it is out all the same, and saving that is tried again until it is
// done; only a restart before that would bring the device back.
func (s *Store) Revoke(id string) (Device, error) {
	return s.revoke(func(st state) (*deviceRec, error) { return s.find(st, id) })
}

func (s *Store) revoke(which func(state) (*deviceRec, error)) (Device, error) {
	var gone Device
	err := s.shrink(EndRevoked, func(st *state) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		d, err := which(*st)
		if err != nil {
			return err
		}
		gone = s.view(d, s.now())
		delete(st.devices, d.ID)
		return nil
	})
	if gone.ID != "" {
		s.log.Info("device revoked", "device", gone.ID, "err", err)
	}
	return gone, err
}

// A Reduction says how much time a device keeps, counted from now.
type Reduction struct {
	TTL    time.Duration            // for its sessions; 0: as it is
	Grants map[string]time.Duration // by grant, others as they are; 0: over at once
}

// Shorten takes time away from a device: from its sessions, their grants, and
// all that a refresh will ever make of them. It never adds: [ErrIncrease].
func (s *Store) Shorten(id string, r Reduction) (Device, error) {
	return s.shorten(func(st state) (*deviceRec, error) { return s.find(st, id) }, r)
}

func (s *Store) shorten(which func(state) (*deviceRec, error), r Reduction) (Device, error) {
	var out Device
	err := s.shrink(EndExpired, func(st *state) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		d, err := which(*st)
		if err != nil {
			return err
		}
		now := s.now()
		if err := d.mayReduce(r, now); err != nil {
			return err
		}
		d = st.edit(d)
		d.reduce(r, now)
		out = s.view(d, now)
		return nil
	})
	if out.ID != "" {
		s.log.Info("device shortened", "device", out.ID, "expires", out.Expires, "err", err)
	}
	return out, err
}

// mayReduce checks that r takes away and names what is there.
func (d *deviceRec) mayReduce(r Reduction, now time.Time) error {
	if r.TTL == 0 && len(r.Grants) == 0 {
		return errors.New("session: nothing to shorten: give a lifetime or grants")
	}
	var end time.Time
	grants := make(map[string]time.Time)
	for _, rec := range d.Sessions {
		end = later(end, rec.Expires)
		for n, g := range rec.Grants {
			grants[n] = later(grants[n], g)
		}
	}
	if len(d.Sessions) == 0 { // between two sessions: what a refresh would give
		end, grants = d.Policy.session(now)
	}
	if r.TTL != 0 {
		if r.TTL < 0 {
			return errors.New("session: a lifetime is not below zero")
		}
		if span(r.TTL).from(now).After(end) {
			return fmt.Errorf("%w: the session ends %s", ErrIncrease, end.Format(time.RFC3339))
		}
	}
	for n, ttl := range r.Grants {
		g, ok := grants[n]
		switch {
		case !ok:
			return fmt.Errorf("%w: this device has no grant for %s", ErrGrant, clip(n, 32))
		case ttl < 0:
			return errors.New("session: a lifetime is not below zero")
		case span(ttl).from(now).After(g):
			return fmt.Errorf("%w: the grant for %s ends %s", ErrIncrease, n, g.Format(time.RFC3339))
		}
	}
	return nil
}

// reduce applies r to a device that may be changed. The policy keeps both the
// shorter lifetime and the day it ends: neither can be won back by a refresh.
func (d *deviceRec) reduce(r Reduction, now time.Time) {
	if r.TTL != 0 {
		d.Policy.TTL = min(d.Policy.TTL, span(r.TTL))
		d.Policy.Until = earlier(d.Policy.Until, span(r.TTL).from(now))
	}
	for n, ttl := range r.Grants {
		until := span(ttl).from(now)
		if d.Policy.GrantUntil == nil {
			d.Policy.GrantUntil = make(map[string]time.Time)
		}
		if old, ok := d.Policy.GrantUntil[n]; ok {
			until = earlier(until, old)
		}
		d.Policy.GrantUntil[n] = until
	}
	for i := range d.Sessions {
		rec := &d.Sessions[i]
		rec.Expires = earlier(rec.Expires, d.Policy.Until)
		rec.Grants = maps.Clone(rec.Grants)
		for n, g := range rec.Grants {
			g = earlier(g, rec.Expires)
			if until, ok := d.Policy.GrantUntil[n]; ok {
				g = earlier(g, until)
			}
			rec.Grants[n] = g
		}
	}
	if d.Refresh != nil {
		c := *d.Refresh
		c.Expires = earlier(c.Expires, d.Policy.Until)
		d.Refresh = &c
	}
}

// holder finds the device that holds this very session: not one that was
// paired again under the same name meanwhile.
func (s Session) holder(st state) (*deviceRec, error) {
	d := st.devices[s.Device.ID]
	if d == nil || !slices.ContainsFunc(d.Sessions, func(r sessionRec) bool { return r.Token == s.token }) {
		return nil, ErrUnauthorized
	}
	return d, nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// RetryWithdrawals tries now to take back routes that could not be taken back
// yet; otherwise it is tried again every few minutes, across restarts. Call it
// when a broker can be reached again.
func (s *Store) RetryWithdrawals() {
	s.mu.Lock()
	s.retryAt, s.retry = time.Time{}, 0
	s.mu.Unlock()
	s.withdraw()
}

// withdraw starts taking back routes, unless that is under way or resting.
func (s *Store) withdraw() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.retrying || s.opts.Routes == nil || len(s.st.pending) == 0 || s.now().Before(s.retryAt) {
		return
	}
	s.retrying = true
	s.wg.Go(s.withdrawAll)
}

func (s *Store) withdrawAll() {
	for {
		s.mu.Lock()
		ids := slices.Clone(s.st.pending)
		if len(ids) == 0 || s.closed {
			s.retrying = false
			s.arm()
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		done, failed := s.withdrawEach(ids)
		err := s.shrink(EndReplaced, func(st *state) error {
			st.pending = slices.DeleteFunc(st.pending, func(id string) bool { return done[id] })
			return nil
		})
		s.mu.Lock()
		untried := slices.ContainsFunc(s.st.pending, func(id string) bool { return !slices.Contains(ids, id) })
		if err == nil && (failed == nil || untried) {
			s.mu.Unlock()
			continue
		}
		s.retry = min(max(2*s.retry, retryFirst), retryMost)
		s.retryAt = s.now().Add(s.retry)
		s.retrying = false
		again := s.retry
		s.arm()
		s.mu.Unlock()
		s.log.Warn("broker routes of ended sessions are still to be taken back", "left", len(ids)-len(done),
			"err", failed, "save", err, "again_in", again)
		return
	}
}

// withdrawEach tries each route once. One that fails does not keep back the
// others: of two brokers, the one that is up shall hear of them all. A deadline
// ends the round, because the next ones would each wait for it too.
func (s *Store) withdrawEach(ids []string) (done map[string]bool, failed error) {
	done = make(map[string]bool)
	for _, id := range ids {
		ctx, cancel := context.WithTimeout(s.ctx, s.lim.RouteTimeout)
		err := s.opts.Routes.Withdraw(ctx, id)
		late := ctx.Err() != nil
		cancel()
		if err == nil {
			done[id] = true
			continue
		}
		failed = err
		if late {
			break
		}
	}
	return done, failed
}
