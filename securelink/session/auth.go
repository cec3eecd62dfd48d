package session

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/hermes-reach/hermes-reach/securelink/session/guard"
)

// Peer is who opened a socket, as the caller knows it.
type Peer struct {
	Source Source
	Path   string // the role of the path, such as plugin_proxy or outbound_broker; shown to people
	// OriginChecked says that the caller has judged the Origin header. Without
	// it, a request whose Origin is not its own host is refused.
	OriginChecked bool
}

// errWrong is a credential that proves nothing; the next one is tried.
var errWrong = errors.New("session: wrong credential")

// granted is a proof that held. after tells the world, once the device has its
// answer.
type granted struct {
	sess  Session
	ok    AuthOK
	after func()
}

// Authenticate proves a device by the first of its credentials that holds:
// session token, refresh token, pairing code. The error is an [AuthError] when
// none does; any other error means that it could not be decided or not be
// saved, and that the device should try again with the same credentials. No
// broker routes are made here: see [Store.ServeRelay].
func (s *Store) Authenticate(req AuthRequest, p Peer) (Session, AuthOK, error) {
	g, err := s.authenticate(req, p)
	if err != nil {
		return Session{}, AuthOK{}, err
	}
	g.after()
	return g.sess, g.ok, nil
}

func (s *Store) authenticate(req AuthRequest, p Peer) (granted, error) {
	hasToken := req.SessionToken != "" || req.RefreshToken != ""
	heard := s.fails.Allowed(p.Source.peer(), guard.Token, s.now())
	if hasToken && heard {
		for _, try := range []func(AuthRequest, Peer) (granted, error){s.bySession, s.byRefresh} {
			g, err := try(req, p)
			if err == nil {
				s.fails.Succeeded(p.Source.peer(), guard.Token)
			}
			if !errors.Is(err, errWrong) {
				return g, err
			}
		}
	}
	if req.PairingCode != "" {
		g, err := s.byCode(req, p)
		if !errors.Is(err, errWrong) {
			return g, err
		}
	}
	if heard && (hasToken || req.PairingCode == "") { // an attempt counts once, however many tokens it shows
		s.fails.Failed(p.Source.peer(), guard.Token, deviceOf(req.DeviceID), s.now())
	}
	s.log.Info("device refused", "path", p.Path, "tried_token", hasToken, "tried_code", req.PairingCode != "")
	return granted{}, &AuthError{ReasonInvalid}
}

func (s *Store) bySession(req AuthRequest, p Peer) (granted, error) {
	token, now := digestOf(req.SessionToken), s.now()
	s.mu.Lock()
	d := s.tokens[token]
	_, err := s.check(token, now)
	s.mu.Unlock()
	if err != nil || req.SessionToken == "" {
		return granted{}, errWrong
	}
	var fresh string
	if req.RefreshToken == "" && d.DeviceID != "" && (d.Refresh == nil || !now.Before(d.Refresh.Expires)) {
		fresh = newRefreshToken()
	}
	if fresh != "" || d.describe(req) != *d.described() {
		err = s.grow(func(st *state) error {
			cur := st.devices[d.ID]
			if cur == nil {
				return errWrong
			}
			c := st.edit(cur)
			c.setDescribed(cur.describe(req))
			if cur.Refresh != nil && now.Before(cur.Refresh.Expires) {
				fresh = "" // a second socket of the same device was faster
			}
			if fresh != "" {
				c.Refresh = &refreshRec{Token: digestOf(fresh), Created: stamp(now),
					Expires: earlier(stamp(now.Add(s.lim.RefreshTTL)), c.Policy.Until)}
			}
			return nil
		})
		if errors.Is(err, errWrong) {
			return granted{}, errWrong
		}
		if err != nil { // what was proved stays proved: only the extras are lost
			s.log.Warn("device details could not be saved", "device", d.ID, "err", err)
			fresh = ""
		}
	}
	return s.grant(token, req.SessionToken, fresh, p, nil)
}

// byRefresh makes a new session of what is left of the device's policy. The
// old refresh token is dead as soon as the new one exists.
func (s *Store) byRefresh(req AuthRequest, p Peer) (granted, error) {
	if req.RefreshToken == "" {
		return granted{}, errWrong
	}
	old, id := digestOf(req.RefreshToken), cleanDeviceID(req.DeviceID)
	token, fresh := newSessionToken(), newRefreshToken()
	err := s.grow(func(st *state) error {
		now := s.now()
		s.mu.Lock()
		d := s.refresh[old]
		s.mu.Unlock()
		if d == nil || !now.Before(d.Refresh.Expires) || d.DeviceID != "" && d.DeviceID != id {
			return errWrong
		}
		c := st.edit(st.devices[d.ID])
		if c.DeviceID == "" && !st.hasDevice(id) {
			c.DeviceID = id // a record from before the device had a name for itself
		}
		c.setDescribed(c.describe(req))
		c.Refresh = &refreshRec{Token: digestOf(fresh), Created: stamp(now), Expires: d.Refresh.Expires}
		return c.addSession(digestOf(token), now, s.lim.Sessions)
	})
	if err != nil {
		return granted{}, err
	}
	return s.grant(digestOf(token), token, fresh, p, nil)
}

// byCode pairs a device. One attempt is decided before the next begins, so
// that many sockets at once buy no more guesses than one.
func (s *Store) byCode(req AuthRequest, p Peer) (granted, error) {
	e, ended := s.takeCode(req, p)
	s.tellCodes(ended)
	if e == nil {
		return granted{}, errWrong
	}
	token, fresh := newSessionToken(), newRefreshToken()
	err := s.grow(func(st *state) error { return s.pair(st, req, e, digestOf(token), digestOf(fresh)) })
	if err != nil {
		s.codes.restore(e)
		return granted{}, err
	}
	s.fails.Succeeded(p.Source.peer(), guard.Code)
	return s.grant(digestOf(token), token, fresh, p, e)
}

func (s *Store) takeCode(req AuthRequest, p Peer) (*code, []CodeEnd) {
	s.guess.Lock()
	defer s.guess.Unlock()
	now := s.now()
	if !s.fails.Allowed(p.Source.peer(), guard.Code, now) {
		return nil, nil
	}
	e, ended := s.codes.take(req.PairingCode, now, s.lim.CodeGuesses)
	if e == nil {
		s.fails.Failed(p.Source.peer(), guard.Code, deviceOf(req.DeviceID), now)
	}
	return e, ended
}

// pair adds a device in place of whatever bore its id before.
func (s *Store) pair(st *state, req AuthRequest, e *code, token, fresh digest) error {
	now := s.now()
	st.prune(now)
	d := &deviceRec{DeviceID: cleanDeviceID(req.DeviceID), Hint: e.hint, Created: stamp(now),
		LastSeen: stamp(now), Policy: e.policy.clone()}
	d.ID = publicID(d.deviceHash(token))
	maps.DeleteFunc(st.devices, func(_ string, o *deviceRec) bool {
		return d.DeviceID != "" && o.DeviceID == d.DeviceID
	})
	if st.devices[d.ID] != nil {
		return fmt.Errorf("session: two devices would have the id %s", d.ID)
	}
	if len(st.devices) >= s.lim.Devices {
		return fmt.Errorf("%w: %d devices are paired: revoke one first", ErrFull, s.lim.Devices)
	}
	d.setDescribed(d.describe(req))
	d.Refresh = &refreshRec{Token: fresh, Created: stamp(now), Expires: stamp(now.Add(s.lim.RefreshTTL))}
	st.devices[d.ID] = d
	return d.addSession(token, now, s.lim.Sessions)
}

// addSession makes a session of the policy as it is now.
func (d *deviceRec) addSession(token digest, now time.Time, limit int) error {
	end, grants := d.Policy.session(now)
	if !now.Before(end) {
		return errWrong
	}
	d.Sessions = append(d.Sessions, sessionRec{Token: token, Created: stamp(now), Expires: end, Grants: grants})
	d.Sessions = slices.Clone(d.Sessions[max(0, len(d.Sessions)-limit):]) // oldest first
	return nil
}

// grant builds the answer for a session that now exists.
func (s *Store) grant(token digest, raw, refresh string, p Peer, e *code) (granted, error) {
	s.mu.Lock()
	sess, err := s.check(token, s.now())
	hint := ""
	if d := s.tokens[token]; d != nil {
		hint = d.Hint
		s.uses[d.ID] = use{at: stamp(s.now()), path: clip(p.Path, 64)}
		sess.Device.Path, sess.Device.LastSeen = s.uses[d.ID].path, s.uses[d.ID].at
	}
	s.mu.Unlock()
	if err != nil {
		return granted{}, errWrong // revoked in this very moment
	}
	g := granted{sess: sess, after: func() {}, ok: AuthOK{
		SessionToken: raw, ServerVersion: s.opts.Version, ExpiresAt: sess.Expires, Grants: sess.Grants,
		TransportHint: cmp.Or(hint, "wss"), RefreshToken: refresh,
		ClientSurface: cmp.Or(sess.Device.Surface, unknown), DeviceFormFactor: cmp.Or(sess.Device.FormFactor, unknown),
	}}
	if e != nil {
		g.after = func() { s.joined(sess.Device, p.Path, e) }
	}
	return g, nil
}

func (s *Store) joined(d Device, path string, e *code) {
	s.log.Info("device paired", "device", d.ID, "name", d.Name, "path", path, "pairing_id", e.pairingID)
	s.tellCodes([]CodeEnd{{e.pairingID, CodeUsed}})
	if s.opts.OnJoin != nil {
		s.opts.OnJoin(Joined{Device: d, Path: path, PairingID: e.pairingID})
	}
}

// issueRoutes asks for the broker routes of a session. It fails quietly: a
// device without a route is still paired, and asks again at its next login.
func (s *Store) issueRoutes(ctx context.Context, sess Session, broker string) []RouteCredential {
	if s.opts.Routes == nil {
		return nil
	}
	s.mu.Lock()
	d := s.tokens[sess.token]
	s.mu.Unlock()
	if d == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.lim.RouteTimeout)
	defer cancel()
	req := d.route(sessionRec{Token: sess.token, Expires: sess.Expires}, s.now())
	req.Broker = broker
	routes, err := s.opts.Routes.Issue(ctx, req)
	if err != nil {
		s.log.Warn("no broker route for this device: it can pair and work on other paths", "device", sess.Device.ID, "err", err)
	}
	// Revoked while we asked: the withdrawal may have come before the issue.
	if _, gone := s.recheck(sess); gone != nil {
		err := s.shrink(EndRevoked, func(st *state) error {
			st.pending = append(st.pending, sess.ID)
			return nil
		})
		s.log.Debug("route of an ended session is taken back", "device", sess.Device.ID, "err", err)
		return nil
	}
	return routes
}

func routeEnd(session, now time.Time) time.Time {
	if session.Equal(Forever) {
		return stamp(now.Add(routeTTL))
	}
	return session
}

func (s *state) hasDevice(id string) bool {
	for _, d := range s.devices {
		if d.DeviceID == id {
			return true
		}
	}
	return false
}

const unknown = "unknown"

// cleanDeviceID is a device's word for itself, or "" for one that says nothing.
func cleanDeviceID(id string) string {
	switch strings.ToLower(strings.TrimSpace(id)) {
	case "", unknown, "none", "null":
		return ""
	}
	return id
}

// deviceOf is how failures remember which device they were about.
func deviceOf(id string) guard.Device { return guard.Device(digestOf(cleanDeviceID(id))) }

// described is what a device says about itself: shown to people, never trusted.
type described struct{ name, model, platform, surface, formFactor string }

func (d *deviceRec) described() *described {
	return &described{d.Name, d.Model, d.Platform, d.Surface, d.FormFactor}
}

func (d *deviceRec) setDescribed(v described) {
	d.Name, d.Model, d.Platform, d.Surface, d.FormFactor = v.name, v.model, v.platform, v.surface, v.formFactor
}

// describe is what the device is known as after this request: what it leaves
// out or calls unknown stays as it was.
func (d *deviceRec) describe(r AuthRequest) described {
	pick := func(old string, said ...string) string {
		for _, s := range said {
			if s = cleanText(s); s != "" && !strings.EqualFold(s, unknown) {
				return s
			}
		}
		return old
	}
	return described{name: pick(d.Name, r.DeviceName, r.DeviceHostname), model: pick(d.Model, r.DeviceModel),
		platform: pick(d.Platform, r.DevicePlatform), surface: pick(d.Surface, r.ClientSurface),
		formFactor: pick(d.FormFactor, r.DeviceFormFactor)}
}

// cleanText makes text from a device fit for a terminal and bounds it.
func cleanText(s string) string {
	s = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) || r == unicode.ReplacementChar {
			return -1
		}
		return r
	}, s)
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "")
	}
	return strings.TrimSpace(s)
}

// newSessionToken draws a UUID, version 4: the form devices in the field know.
func newSessionToken() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// newRefreshToken draws 32 bytes: 43 characters.
func newRefreshToken() string {
	var b [32]byte
	_, _ = rand.Read(b[:])
	return base64.RawURLEncoding.EncodeToString(b[:])
}
