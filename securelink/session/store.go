package session

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/securelink/session/guard"
)

const (
	deviceIDLen = 16
	maxDeviceID = 128
	minPrefix   = 4

	// maxWait bounds how late an end can be noticed when the wall clock jumps
	// (a laptop that slept, a first NTP answer): timers count monotonic time.
	maxWait = 30 * time.Second

	// seenEvery is how often "last seen" alone is worth a write.
	seenEvery = 10 * time.Minute

	// routeTTL is the life of the route of a session without end; each login
	// renews it.
	routeTTL = 30 * day

	retryFirst = 5 * time.Second
	retryMost  = 5 * time.Minute
)

// A Store keeps the paired devices of one host, in one folder, for one
// process. All methods may be called concurrently.
type Store struct {
	now   func() time.Time
	log   *slog.Logger
	opts  Options
	lim   Limits
	codes *codes
	fails *guard.Table

	ctx  context.Context // ends with Close
	stop context.CancelFunc
	wg   sync.WaitGroup // every goroutine of the store, and every socket

	guess sync.Mutex // one attempt at a code at a time: see byCode
	write sync.Mutex // one change at a time, held while it is saved

	mu       sync.Mutex
	disk     *disk
	st       state
	tokens   map[digest]*deviceRec // of sessions
	refresh  map[digest]*deviceRec
	uses     map[string]use // by device, newer than what is saved
	live     map[*liveEntry]struct{}
	waiting  map[string]int // sockets that have not authenticated, by peer
	timer    *time.Timer
	saved    time.Time // when last seen was last saved
	unsaved  bool      // the file holds more than is true: something ended since
	retrying bool
	retry    time.Duration
	retryAt  time.Time
	closed   bool
}

type use struct {
	at   time.Time
	path string
}

// Open reads the paired devices from dir, which is made when it is not there.
// A file that cannot be read is [ErrCorrupt], with what to do about it. Close
// the store to end its timers.
func Open(dir string, o Options) (*Store, error) {
	s := &Store{now: o.Now, log: o.Log, opts: o, lim: o.Limits.withDefaults(), codes: newCodes(),
		waiting: make(map[string]int), uses: make(map[string]use), live: make(map[*liveEntry]struct{})}
	if s.now == nil {
		s.now = time.Now
	}
	if s.log == nil {
		s.log = discard
	}
	s.fails = guard.New(s.lim.guard())
	var err error
	if s.disk, err = openDisk(dir, s.lim.FileBytes); err != nil {
		return nil, err
	}
	st, err := s.disk.load(s.lim)
	if err != nil {
		return nil, errors.Join(err, s.disk.root.Close())
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	s.saved = s.now()
	s.mu.Lock()
	s.install(st)
	s.arm()
	s.mu.Unlock()
	return s, nil
}

// Close ends every live socket, waits for them and saves when devices were
// last seen. Sessions stay.
func (s *Store) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	if s.timer != nil {
		s.timer.Stop()
	}
	ended := s.endAll(EndShutdown, func(*liveEntry) bool { return true })
	s.mu.Unlock()
	s.stop()
	ended()
	s.wg.Wait()
	s.write.Lock()
	defer s.write.Unlock()
	s.mu.Lock()
	changed := len(s.uses) > 0 || s.unsaved
	s.mu.Unlock()
	var err error
	if changed {
		err = s.disk.save(s.snapshot())
	}
	return errors.Join(err, s.disk.root.Close())
}

// MintCode makes a pairing code for one device: six characters, one use, good
// until expires. The code is returned once and kept nowhere.
func (s *Store) MintCode(m Mint) (code string, expires time.Time, err error) {
	if m.TTL == 0 {
		m.TTL = s.lim.SessionTTL
	}
	p, err := newPolicy(m.TTL, m.Grants)
	if err != nil {
		return "", time.Time{}, fmt.Errorf("mint a pairing code: %w", err)
	}
	now := s.now()
	e := newCode(m, p, stamp(now.Add(s.lim.CodeTTL)))
	code, ended, err := s.codes.mint(e, now, s.lim.Codes)
	s.tellCodes(ended)
	if err != nil {
		return "", time.Time{}, err
	}
	if id := cleanDeviceID(m.DeviceID); id != "" {
		s.fails.Forgive(deviceOf(id))
	}
	s.mu.Lock()
	s.arm()
	s.mu.Unlock()
	s.log.Info("pairing code minted", "pairing_id", m.PairingID, "expires", e.expires, "session", FormatTTL(m.TTL))
	return code, e.expires, nil
}

func newCode(m Mint, p policy, expires time.Time) *code {
	return &code{pairingID: m.PairingID, hint: cmp.Or(m.TransportHint, "wss"), policy: p, expires: expires}
}

// CancelCode makes a code useless, and says whether it still was of use.
func (s *Store) CancelCode(code string) bool {
	e, ok := s.codes.cancel(code)
	if ok {
		s.tellCodes([]CodeEnd{{e.pairingID, CodeCancelled}})
	}
	return ok
}

func (s *Store) tellCodes(ended []CodeEnd) {
	for _, e := range ended {
		s.log.Info("pairing code ended", "pairing_id", e.PairingID, "why", e.Why)
		if s.opts.OnCode != nil {
			s.opts.OnCode(e)
		}
	}
}

// Devices lists the paired devices, the one seen last first.
func (s *Store) Devices() []Device {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	var out []Device
	for _, d := range s.st.devices {
		if v := s.view(d, now); v.Sessions > 0 || v.Renewable {
			out = append(out, v)
		}
	}
	slices.SortFunc(out, func(a, b Device) int {
		return cmp.Or(b.LastSeen.Compare(a.LastSeen), strings.Compare(a.ID, b.ID))
	})
	return out
}

// Device finds one device by its id, or by the first characters of it.
func (s *Store) Device(id string) (Device, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	d, err := s.find(s.st, id)
	if err != nil {
		return Device{}, err
	}
	return s.view(d, s.now()), nil
}

// view is what people see of a device. The caller holds mu.
func (s *Store) view(d *deviceRec, now time.Time) Device {
	v := Device{ID: d.ID, DeviceID: d.DeviceID, Name: d.Name, Model: d.Model, Platform: d.Platform,
		Surface: d.Surface, FormFactor: d.FormFactor, Created: d.Created, LastSeen: d.LastSeen, Path: d.Path}
	if u, ok := s.uses[d.ID]; ok {
		v.LastSeen, v.Path = u.at, u.path
	}
	for _, r := range d.Sessions {
		if !now.Before(r.Expires) {
			continue
		}
		v.Sessions++
		if !r.Expires.Before(v.Expires) {
			v.Expires, v.Grants = r.Expires, maps.Clone(r.Grants)
		}
	}
	for l := range s.live {
		if l.device == d.ID {
			v.Live++
		}
	}
	v.Renewable = d.Refresh != nil && now.Before(d.Refresh.Expires)
	return v
}

// find resolves an id or a prefix of one. A device's own id is taken too, but
// only whole.
func (s *Store) find(st state, id string) (*deviceRec, error) {
	id = strings.TrimSpace(id)
	if d := st.devices[strings.ToLower(id)]; d != nil {
		return d, nil
	}
	var found []*deviceRec
	for _, d := range st.devices {
		if d.DeviceID != "" && d.DeviceID == id {
			return d, nil
		}
		if strings.HasPrefix(d.ID, strings.ToLower(id)) {
			found = append(found, d)
		}
	}
	switch {
	case len(id) < minPrefix:
		return nil, ErrShortID
	case len(found) == 0:
		return nil, fmt.Errorf("%w: %q", ErrNoDevice, clip(id, 32))
	case len(found) > 1:
		return nil, fmt.Errorf("%w: %q", ErrAmbiguous, clip(id, 32))
	}
	return found[0], nil
}

// Check proves a session token.
func (s *Store) Check(token string) (Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.check(digestOf(token), s.now())
}

func (s *Store) check(token digest, now time.Time) (Session, error) {
	d := s.tokens[token]
	if d == nil {
		return Session{}, ErrUnauthorized
	}
	for _, r := range d.Sessions {
		if r.Token == token && now.Before(r.Expires) {
			return Session{ID: r.credentialID(), Device: s.view(d, now), Created: r.Created,
				Expires: r.Expires, Grants: maps.Clone(r.Grants), token: token}, nil
		}
	}
	return Session{}, ErrUnauthorized
}

// Authorize proves a session token and that its grants name a namespace (or a
// channel) at that moment: [ErrUnauthorized] or [ErrGrant] otherwise.
func (s *Store) Authorize(token, name string, now time.Time) (Session, error) {
	s.mu.Lock()
	sess, err := s.check(digestOf(token), now)
	s.mu.Unlock()
	if err != nil {
		return Session{}, err
	}
	return sess, sess.Allows(name, now)
}

// Touch notes that a device was seen, and by which path. It is written with
// the next change, and every ten minutes at most, never for itself.
func (s *Store) Touch(sess Session, path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if d := s.tokens[sess.token]; d != nil {
		s.uses[d.ID] = use{at: stamp(s.now()), path: path}
	}
}

// Blocked says how long a source must wait before anything it sends is looked
// at; 0 when it need not.
func (s *Store) Blocked(src Source) time.Duration { return s.fails.Blocked(src.peer(), s.now()) }

// CountFailure notes a wrong session token that was shown elsewhere than on
// the socket, such as in a header.
func (s *Store) CountFailure(src Source) {
	s.fails.Failed(src.peer(), guard.Token, guard.Device{}, s.now())
}

// Knows says whether a credential id is that of a session that has not ended:
// what a broker route must belong to.
func (s *Store) Knows(credential string) bool {
	now := s.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for token, d := range s.tokens {
		if credentialID(token) != credential {
			continue
		}
		for _, r := range d.Sessions {
			if r.Token == token {
				return r.Expires.After(now)
			}
		}
	}
	return false
}

// LiveRoutes lists the routes that brokers should know: one for each session
// that has not ended, as it would be asked for at the device's next login. It
// is for brokers that may never have heard of them, or have lost their disk.
func (s *Store) LiveRoutes() []RouteRequest {
	now := s.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []RouteRequest
	for _, d := range s.st.devices {
		for _, r := range d.Sessions {
			if now.Before(r.Expires) {
				out = append(out, d.route(r, now))
			}
		}
	}
	return out
}

// route asks for the route of one session of the device.
func (d *deviceRec) route(r sessionRec, now time.Time) RouteRequest {
	hash := d.deviceHash(r.Token)
	return RouteRequest{CredentialID: r.credentialID(), Expires: routeEnd(r.Expires, now),
		DeviceIDHash: base64.RawURLEncoding.EncodeToString(hash[:])}
}

func (r sessionRec) credentialID() string { return credentialID(r.Token) }

// credentialID names the broker route of a session, as protocol 1 has it.
func credentialID(token digest) string { return base64.RawURLEncoding.EncodeToString(token[:16]) }

// deviceHash is the device_id_hash of a route.
func (d *deviceRec) deviceHash(token digest) digest {
	if d.DeviceID == "" {
		return token
	}
	return digestOf(d.DeviceID)
}

// publicID is our name for a device, made of what names it: see deviceHash.
func publicID(h digest) string { return hex.EncodeToString(h[:deviceIDLen/2]) }

// snapshot is the state as it should be saved now. The caller holds write.
func (s *Store) snapshot() state {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := s.st.clone()
	for id, u := range s.uses {
		if d := next.devices[id]; d != nil {
			c := next.edit(d)
			c.LastSeen, c.Path = u.at, u.path
		}
	}
	return next
}

// grow makes a change that adds authority: it holds once it is durable, and
// not at all when it cannot be saved.
func (s *Store) grow(f func(*state) error) error { return s.change(f, EndReplaced, false) }

// shrink makes a change that takes authority away: it holds at once, whatever
// the disk says about it.
func (s *Store) shrink(why EndReason, f func(*state) error) error { return s.change(f, why, true) }

func (s *Store) change(f func(*state) error, why EndReason, atOnce bool) error {
	s.write.Lock()
	defer s.write.Unlock()
	if s.ctx.Err() != nil {
		return ErrClosed
	}
	next := s.snapshot()
	if err := f(&next); err != nil {
		return err
	}
	if s.opts.Routes != nil {
		s.mu.Lock()
		if lost := lostRoutes(s.st, next); len(lost) > 0 {
			next.pending = append(next.pending, lost...)
			next.pending = next.pending[max(0, len(next.pending)-maxPending):]
			s.retryAt = time.Time{} // what is new does not wait for what failed before
		}
		s.mu.Unlock()
	}
	if atOnce {
		s.replace(next, why)
	}
	err := s.disk.save(next)
	if err == nil || atOnce {
		s.mu.Lock()
		s.unsaved = err != nil
		s.arm()
		s.mu.Unlock()
	}
	if err == nil && !atOnce {
		s.replace(next, why)
	}
	return err
}

// replace makes next the state and ends what no longer rests on a session.
func (s *Store) replace(next state, why EndReason) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	s.install(next)
	s.saved = s.now()
	ended := s.endStale(why, s.now())
	s.arm()
	s.mu.Unlock()
	ended()
	s.withdraw()
}

// install takes over a state and its indexes. The caller holds mu.
func (s *Store) install(st state) {
	s.st = st
	s.tokens, s.refresh = make(map[digest]*deviceRec), make(map[digest]*deviceRec)
	for _, d := range st.devices {
		for _, r := range d.Sessions {
			s.tokens[r.Token] = d
		}
		if d.Refresh != nil {
			s.refresh[d.Refresh.Token] = d
		}
	}
	for id, u := range s.uses { // what is saved need not be kept beside it
		if d := st.devices[id]; d == nil || !d.LastSeen.Before(u.at) {
			delete(s.uses, id)
		}
	}
}

// lostRoutes names the routes of sessions that are in old and not in next.
func lostRoutes(old, next state) (lost []string) {
	kept := make(map[digest]bool)
	for _, d := range next.devices {
		for _, r := range d.Sessions {
			kept[r.Token] = true
		}
	}
	for _, d := range old.devices {
		for _, r := range d.Sessions {
			if !kept[r.Token] {
				lost = append(lost, r.credentialID())
			}
		}
	}
	return lost
}

// recheck looks a session up again: what it is now, or that it is over.
func (s *Store) recheck(sess Session) (Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.check(sess.token, s.now())
}
