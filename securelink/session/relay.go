package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"github.com/hermes-reach/hermes-reach/securelink/session/guard"
)

// channels are those of the relay socket. Only system lives here; the grant
// beside each is what a message on it needs besides the relay namespace.
var channels = map[string]string{
	"chat": "chat", "terminal": "terminal", "bridge": "bridge", "tui": "tui",
	"notifications": "", "proactive": "", "desktop": "",
}

const notHere = "not available on this host"

// ServeRelay answers one upgrade to the relay socket: the device proves itself
// in the first frame, then the built-in Relay serves it until it leaves or its
// session ends. It returns when the socket is over. The socket is bound to the
// device that opened it for all its life.
func (s *Store) ServeRelay(w http.ResponseWriter, r *http.Request, p Peer) {
	if wait := s.Blocked(p.Source); wait > 0 {
		w.Header().Set("Retry-After", strconv.FormatInt(int64((wait+time.Second-1)/time.Second), 10))
		refuse(w, http.StatusTooManyRequests, "rate_limited", "too many wrong tokens or codes from this address: wait and try again")
		return
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		refuse(w, http.StatusBadRequest, "upgrade_required", "this path is a WebSocket")
		return
	}
	src := p.Source.peer()
	if err := s.enter(src); err != nil {
		w.Header().Set("Retry-After", "1")
		refuse(w, http.StatusServiceUnavailable, "busy", "too many devices are waiting to authenticate")
		return
	}
	defer s.wg.Done()
	leave := sync.OnceFunc(func() { s.leave(src) })
	defer leave()
	if p.OriginChecked {
		r = r.Clone(r.Context())
		r.Header.Del("Origin")
	}
	c, err := websocket.Accept(w, r, &websocket.AcceptOptions{CompressionMode: websocket.CompressionDisabled})
	if err != nil {
		s.log.Debug("relay upgrade refused", "path", p.Path, "err", err)
		return
	}
	newSocket(s, c, p).serve(leave)
}

func refuse(w http.ResponseWriter, status int, code, text string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]string{"code": code, "message": text}})
}

// enter admits a socket that has proved nothing yet. One peer cannot take all
// the places.
func (s *Store) enter(p guard.Peer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	total := 0
	for _, n := range s.waiting {
		total += n
	}
	switch {
	case s.closed:
		return ErrClosed
	case total >= s.lim.Waiting, !p.Shared && s.waiting[p.Key] >= s.lim.WaitingPeer:
		return ErrFull
	}
	s.waiting[p.Key]++
	s.wg.Add(1)
	return nil
}

func (s *Store) leave(p guard.Peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.waiting[p.Key]--; s.waiting[p.Key] == 0 {
		delete(s.waiting, p.Key)
	}
}

// closure is why a socket ends and what its peer is told. A refusal is sent as
// auth.fail, to the message with that id, before the close.
type closure struct {
	code    websocket.StatusCode
	reason  string
	refusal *AuthError
	id      string
}

func (c *closure) Error() string { return "socket closed: " + c.reason }

var (
	closeDone     = &closure{code: websocket.StatusNormalClosure}
	closeInternal = &closure{code: websocket.StatusInternalError, reason: "internal error"}
	closeSilent   = &closure{code: websocket.StatusPolicyViolation, reason: "no answer to pings"}
)

// A socket is one relay connection. The goroutine of the request reads and
// answers; a second one minds the clock and closes.
type socket struct {
	s    *Store
	c    *websocket.Conn
	peer Peer

	ctx    context.Context // ends with the connection: reads and writes stop
	cancel context.CancelFunc
	ending context.Context // done when the socket is to be closed; its cause says how
	end    context.CancelCauseFunc

	others sync.WaitGroup // the goroutines beside the reading one

	decided atomic.Bool // the first frame is judged once: by its content or by the clock
	proved  chan struct{}

	sess    Session
	untrack func()
}

func newSocket(s *Store, c *websocket.Conn, p Peer) *socket {
	k := &socket{s: s, c: c, peer: p, proved: make(chan struct{}), untrack: func() {}}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	k.ending, k.end = context.WithCancelCause(s.ctx)
	return k
}

// serve runs the socket to its end and leaves no goroutine. waited is called
// when the device has proved itself.
func (k *socket) serve(waited func()) {
	k.others.Go(k.mind)
	defer k.others.Wait() // it ends with mind, which ends with the next
	defer k.end(closeDone)
	if !k.authenticate(waited) {
		return
	}
	defer func() { k.untrack() }()
	k.s.log.Info("device connected", "device", k.sess.Device.ID, "path", k.peer.Path)
	err := k.relay()
	k.s.log.Info("device disconnected", "device", k.sess.Device.ID, "path", k.peer.Path, "err", err, "cause", context.Cause(k.ending))
}

// mind times the first frame, pings the peer after it, and closes the socket
// when that is asked for.
func (k *socket) mind() {
	first := time.NewTimer(k.s.lim.FirstFrameWait)
	defer first.Stop()
	beat := time.NewTicker(k.s.lim.Heartbeat)
	defer beat.Stop()
	var beats <-chan time.Time
	proved := k.proved
	for {
		select {
		case <-k.ending.Done():
			k.close()
			return
		case <-proved:
			proved, beats = nil, beat.C
		case <-first.C:
			if k.decided.CompareAndSwap(false, true) {
				k.fail("", &AuthError{ReasonTimeout})
			}
		case <-beats:
			k.others.Go(k.ping)
		}
	}
}

// ping waits for its pong beside mind, which must stay free to close. It does
// not end with ending: a ping that is cut short takes the connection with it,
// and the goodbye would be lost.
func (k *socket) ping() {
	ctx, cancel := context.WithTimeout(k.ctx, k.s.lim.Heartbeat)
	defer cancel()
	if err := k.c.Ping(ctx); err != nil {
		k.end(closeSilent)
	}
}

// close says goodbye and gives the peer a moment to answer; then the
// connection goes, whatever the peer does.
func (k *socket) close() {
	defer k.cancel()
	how, ok := errors.AsType[*closure](context.Cause(k.ending))
	if !ok {
		how = &closure{code: websocket.StatusGoingAway, reason: string(EndShutdown)}
	}
	grace := time.AfterFunc(k.s.lim.CloseGrace, k.cancel)
	defer grace.Stop()
	if how.refusal != nil {
		if err := k.send("auth.fail", how.id, map[string]string{"reason": how.refusal.Reason}); err != nil {
			k.s.log.Debug("refusal not sent", "path", k.peer.Path, "err", err)
		}
	}
	// Close needs the reader's turn to wait for the answer, and the reader has
	// it until cancel: so both end here.
	if err := k.c.Close(how.code, how.reason); err != nil {
		k.s.log.Debug("relay socket closed without goodbye", "path", k.peer.Path, "err", err)
	}
}

// authenticate reads and answers the first frame.
func (k *socket) authenticate(waited func()) bool {
	k.c.SetReadLimit(k.s.lim.FirstFrame)
	b, err := k.read()
	if err != nil {
		k.s.log.Debug("socket ended before its first frame", "path", k.peer.Path, "err", err)
		return false
	}
	if !k.decided.CompareAndSwap(false, true) || !k.answer(b) {
		return false
	}
	close(k.proved)
	waited()
	k.c.SetReadLimit(k.s.lim.Message)
	return true
}

func (k *socket) answer(b []byte) bool {
	req, id, err := parseFirst(b)
	var g granted
	if err == nil {
		g, err = k.s.authenticate(req, k.peer)
	} else if e, ok := errors.AsType[*AuthError](err); ok && e.Reason == ReasonInvalid {
		k.s.fails.Failed(k.peer.Source.peer(), guard.Token, guard.Device{}, k.s.now())
	}
	if err != nil {
		k.fail(id, err)
		return false
	}
	defer g.after()
	k.sess = g.sess
	untrack, err := k.s.track(&liveEntry{token: g.sess.token, device: g.sess.Device.ID, socket: true, end: k.ended})
	if err != nil {
		k.fail(id, &AuthError{ReasonInvalid}) // revoked in this moment
		return false
	}
	k.untrack = untrack
	g.ok.Routes = k.s.issueRoutes(k.ending, g.sess, k.peer.Source.Broker)
	if err := k.send("auth.ok", id, g.ok); err != nil {
		k.untrack()
		k.s.log.Info("device left before its answer", "device", g.sess.Device.ID, "err", err)
		return false
	}
	return true
}

// ended is called by the store when what the socket rests on is over.
func (k *socket) ended(why EndReason) {
	k.end(&closure{code: websocket.StatusPolicyViolation, reason: string(why)})
}

// fail answers a first frame that proved nothing and ends the socket. An error
// that is no refusal is not called one: the device keeps its credentials and
// comes again.
func (k *socket) fail(id string, err error) {
	e, ok := errors.AsType[*AuthError](err)
	if !ok {
		k.s.log.Error("authentication could not be decided", "path", k.peer.Path, "err", err)
		k.end(closeInternal)
		return
	}
	k.end(&closure{code: websocket.StatusNormalClosure, refusal: e, id: id})
}

// read gives the next text message; binary ones are not for us.
func (k *socket) read() ([]byte, error) {
	for {
		typ, b, err := k.c.Read(k.ctx)
		if err != nil {
			return nil, err
		}
		if k.ending.Err() != nil { // it may still talk while it is shown out
			return nil, context.Cause(k.ending)
		}
		if typ == websocket.MessageText {
			return b, nil
		}
	}
}

func (k *socket) send(typ, id string, payload any) error {
	b, err := encode("system", typ, id, payload)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(k.ctx, k.s.lim.WriteTimeout)
	defer cancel()
	return k.c.Write(ctx, websocket.MessageText, b)
}

func (k *socket) sayError(id, text string) error {
	return k.send("error", id, map[string]string{"message": text})
}

// relay is the built-in Relay: one answer at most for each message, so that a
// device that does not read slows only itself.
func (k *socket) relay() error {
	for {
		b, err := k.read()
		if err != nil {
			return err
		}
		msg, err := parseMessage(b)
		if err != nil {
			k.s.log.Debug("message dropped", "device", k.sess.Device.ID, "err", err)
			continue
		}
		sess, err := k.s.recheck(k.sess)
		if err != nil {
			return err
		}
		k.s.Touch(sess, k.peer.Path)
		if err := k.dispatch(sess, msg); err != nil {
			return err
		}
	}
}

func (k *socket) dispatch(sess Session, msg message) error {
	if msg.channel == "system" {
		return k.system(sess, msg)
	}
	grant, ok := channels[msg.channel]
	if !ok {
		return k.sayError(msg.id, "Unknown channel: "+clip(cleanText(msg.channel), 64))
	}
	for _, name := range []string{NamespaceRelay, grant} {
		if name != "" && sess.Allows(name, k.s.now()) != nil {
			return k.sayError(msg.id, fmt.Sprintf("%s grant expired for this device", title(name)))
		}
	}
	return k.sayError(msg.id, notHere)
}

func title(name string) string { return strings.ToUpper(name[:1]) + name[1:] }

func (k *socket) system(sess Session, msg message) error {
	switch msg.typ {
	case "ping":
		m, err := members(msg.payload)
		pong := map[string]any{}
		if ts, ok := m["ts"]; ok && err == nil && len(ts) <= maxID {
			pong["ts"] = ts
		}
		return k.send("pong", msg.id, pong)
	case "pong":
		return nil
	case "session":
		return k.session(sess, msg)
	}
	return k.sayError(msg.id, "Unknown system message: "+clip(cleanText(msg.typ), 64))
}

// sessionWire is a device as it may see itself.
type sessionWire struct {
	ID        string            `json:"id"`
	Name      string            `json:"name"`
	Created   *epoch            `json:"created_at"`
	LastSeen  *epoch            `json:"last_seen"`
	ExpiresAt *epoch            `json:"expires_at"`
	Grants    map[string]*epoch `json:"grants"`
	Path      string            `json:"path"`
}

type sessionAnswer struct {
	Action  string      `json:"action"`
	Session sessionWire `json:"session"`
}

func wireOf(d Device) sessionWire {
	ptr := func(t time.Time) *epoch { e := epoch(t); return &e }
	w := sessionWire{ID: d.ID, Name: d.Name, Created: ptr(d.Created), LastSeen: ptr(d.LastSeen),
		ExpiresAt: ptr(d.Expires), Grants: make(map[string]*epoch), Path: d.Path}
	for n, t := range d.Grants {
		w.Grants[n] = ptr(t)
	}
	return w
}

// session lets a device look at, shorten and revoke itself, and nothing else:
// no message names another device.
func (k *socket) session(sess Session, msg message) error {
	m, err := members(msg.payload)
	if err != nil {
		return k.sayError(msg.id, "session: the payload is no object")
	}
	action, _ := text(m, "action", maxText)
	d := sess.Device
	switch action {
	case "list":
	case "shorten":
		var r Reduction
		if r, err = parseReduction(m); err == nil {
			d, err = k.s.shorten(sess.holder, r)
		}
	case "revoke":
		k.untrack() // the answer goes first, then this socket too
		if d, err = k.s.revoke(sess.holder); err == nil {
			defer k.end(&closure{code: websocket.StatusNormalClosure, reason: string(EndRevoked)})
		}
	default:
		err = errors.New("session: action is list, shorten or revoke")
	}
	if err != nil {
		return k.sayError(msg.id, err.Error())
	}
	return k.send("session", msg.id, sessionAnswer{action, wireOf(d)})
}

// parseReduction reads what a device gives up: whole seconds, 0 for no end.
func parseReduction(m map[string]json.RawMessage) (r Reduction, err error) {
	if raw, ok := m["ttl_seconds"]; ok {
		if r.TTL, err = parseSeconds(raw); err != nil {
			return r, fmt.Errorf("session: ttl_seconds: %w", err)
		}
	}
	raw, ok := m["grants"]
	if !ok {
		return r, nil
	}
	grants, err := members(raw)
	if err != nil || len(grants) > 4*maxGrants {
		return r, errors.New("session: grants is no object of seconds")
	}
	r.Grants = make(map[string]time.Duration)
	for n, raw := range grants {
		if r.Grants[n], err = parseSeconds(raw); err != nil {
			return r, fmt.Errorf("session: grant %s: %w", clip(cleanText(n), 32), err)
		}
	}
	return r, nil
}

func parseSeconds(raw json.RawMessage) (time.Duration, error) {
	var f *float64
	if err := json.Unmarshal(raw, &f); err != nil || f == nil || *f < 0 || *f != math.Trunc(*f) || *f > maxTTL.Seconds() {
		return 0, errors.New("a whole number of seconds, 0 for no end, at most 100 years")
	}
	if *f == 0 {
		return Never, nil
	}
	return time.Duration(*f) * time.Second, nil
}
