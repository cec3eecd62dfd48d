package broker

import (
	"cmp"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// registry knows which sessions are up and which streams run. All its state is
// under one lock, which is never held while anything waits: control messages
// are queued, streams are aborted without waiting.
type registry struct {
	limits Limits

	mu       sync.Mutex
	hosts    map[wire.ID]*host
	clients  map[*client]struct{}
	streams  int
	draining bool
	empty    chan struct{} // closed when draining and no stream is left
	timers   map[*time.Timer]struct{}
}

// host is one host id. Its slots are the sessions of its current process; all
// are these and those that were replaced and still have streams.
type host struct {
	epoch    int64
	instance wire.ID
	slots    map[int]*hostSession
	all      map[*hostSession]struct{}
	streams  int
	perCred  map[credential]int
	recheck  time.Time // when its tokens are looked at again
}

// credential names what a client registered with.
type credential struct {
	host wire.ID
	kind wire.Kind
	id   string
}

// hostSession is one registered session of a host.
type hostSession struct {
	id         wire.ID // host_id
	connection wire.ID // connection_id of its registration
	slot       int
	epoch      int64
	instance   wire.ID
	token      wire.Digest
	sess       *link.Session
	ctl        *link.Control

	// Guarded by registry.mu.
	live     map[*match]struct{}
	replaced bool // takes no new streams
	silent   bool // did not answer its last stream: others are asked first
}

// client is one registered session of a device.
type client struct {
	cred     credential
	token    wire.Digest
	instance wire.ID
	source   string
	addr     string
	sess     *link.Session
	ctl      *link.Control

	// Guarded by registry.mu.
	live map[*match]struct{}
	gone wire.Code // why it may not dial any more
}

func newRegistry(l Limits) *registry {
	return &registry{
		limits: l, hosts: make(map[wire.ID]*host), clients: make(map[*client]struct{}), empty: make(chan struct{}),
		timers: make(map[*time.Timer]struct{}),
	}
}

// featureClone in an answer to a host says that its registration took the place
// of another process that runs with the same identity and epoch.
const featureClone = "clone"

// addHost registers hs and decides between it and what is there: protocol 2,
// section Host sessions. The answer is sent before anything else the registry
// may send. A refusal has a code and perhaps a wait; then nothing was sent.
func (r *registry) addHost(hs *hostSession, answer *wire.Registered) *wire.RefusedError {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.draining {
		return &wire.RefusedError{Code: wire.CodeDraining}
	}
	h := r.hosts[hs.id]
	switch {
	case h == nil && len(r.hosts) >= r.limits.Hosts:
		return &wire.RefusedError{Code: wire.CodeQuotaExceeded, RetryAfter: time.Minute}
	case h == nil:
		h = &host{slots: make(map[int]*hostSession), all: make(map[*hostSession]struct{}), perCred: make(map[credential]int)}
		r.hosts[hs.id] = h
	case hs.epoch < h.epoch:
		return &wire.RefusedError{Code: wire.CodeReplaced, RetryAfter: time.Minute}
	case hs.instance != h.instance: // a newer process, or a clone: the newer wins
		if hs.epoch == h.epoch && len(h.slots) > 0 {
			answer.Features = append(answer.Features, featureClone)
		}
		for _, old := range h.slots {
			r.replace(old)
		}
		clear(h.slots)
	}
	hs.ctl.Send(answer)
	h.epoch, h.instance = hs.epoch, hs.instance
	if old := h.slots[hs.slot]; old != nil {
		r.replace(old)
	}
	h.slots[hs.slot], h.all[hs] = hs, struct{}{}
	return nil
}

// replace tells a session that it is no longer the host's. Its streams may go
// on for a while, new ones go elsewhere. The lock is held.
func (r *registry) replace(old *hostSession) {
	old.replaced = true
	old.ctl.Send(&wire.Error{Code: wire.CodeReplaced, RetryAfter: time.Minute})
	r.after(r.limits.Takeover, func() {
		r.abortAll(old, wire.CodeReplaced)
		old.sess.CloseSoon()
	})
}

// after runs f in d, with the lock free, unless close comes first. The lock is
// held.
func (r *registry) after(d time.Duration, f func()) {
	var t *time.Timer
	t = time.AfterFunc(d, func() {
		r.mu.Lock()
		_, due := r.timers[t]
		delete(r.timers, t)
		r.mu.Unlock()
		if due {
			f()
		}
	})
	r.timers[t] = struct{}{}
}

// close stops what after has planned.
func (r *registry) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for t := range r.timers {
		t.Stop()
	}
	clear(r.timers)
}

// abortAll ends the streams of a host session.
func (r *registry) abortAll(hs *hostSession, code wire.Code) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for m := range hs.live {
		m.abort(code)
	}
}

func (r *registry) removeHost(hs *hostSession) {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := r.hosts[hs.id]
	if h == nil {
		return
	}
	delete(h.all, hs)
	if h.slots[hs.slot] == hs {
		delete(h.slots, hs.slot)
	}
	r.forget(hs.id, h)
}

// forget drops a host that nothing is left of. The lock is held.
func (r *registry) forget(id wire.ID, h *host) {
	if len(h.all) == 0 && h.streams == 0 {
		delete(r.hosts, id)
	}
}

// online says whether a host has a session that takes streams.
func (r *registry) online(id wire.ID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.pick(id) != nil
}

// pick chooses the host's session with the fewest streams. The lock is held.
func (r *registry) pick(id wire.ID) *hostSession {
	h := r.hosts[id]
	if h == nil {
		return nil
	}
	var best *hostSession
	for _, hs := range h.slots {
		if !hs.replaced && (best == nil || hs.before(best)) {
			best = hs
		}
	}
	return best
}

// before orders sessions for a new stream: those that answer first, then those
// with fewer streams. The lock is held.
func (hs *hostSession) before(other *hostSession) bool {
	if hs.silent != other.silent {
		return other.silent
	}
	return cmp.Or(cmp.Compare(len(hs.live), len(other.live)), cmp.Compare(hs.slot, other.slot)) < 0
}

// addClient registers c and sends the answer, or refuses and sends nothing.
func (r *registry) addClient(c *client, answer *wire.Registered) *wire.RefusedError {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.draining {
		return &wire.RefusedError{Code: wire.CodeDraining}
	}
	c.ctl.Send(answer)
	r.clients[c] = struct{}{}
	return nil
}

func (r *registry) removeClient(c *client) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.clients, c)
}

// reserve counts a new stream against every limit and chooses its host session.
func (r *registry) reserve(m *match) wire.Code {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.client.gone != "" {
		return m.client.gone
	}
	if r.draining {
		return wire.CodeDraining
	}
	hs := r.pick(m.cred.host)
	if hs == nil {
		return wire.CodeHostOffline
	}
	h := r.hosts[m.cred.host]
	perCred := r.limits.CredentialStreams
	if m.cred.kind == wire.KindBootstrap {
		perCred = r.limits.BootstrapStreams
	}
	if h.streams >= r.limits.HostStreams || h.perCred[m.cred] >= perCred {
		return wire.CodeHostBusy
	}
	m.host = hs
	h.streams++
	h.perCred[m.cred]++
	hs.live[m], m.client.live[m] = struct{}{}, struct{}{}
	r.streams++
	return ""
}

// elsewhere moves a match, whose host session did not answer, to another one.
// It says false when there is none.
func (r *registry) elsewhere(m *match) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	m.host.silent = true
	hs := r.pick(m.cred.host)
	if hs == nil || hs == m.host {
		return false
	}
	delete(m.host.live, m)
	m.host = hs
	hs.live[m] = struct{}{}
	return true
}

// answered notes that a host session is alive.
func (r *registry) answered(hs *hostSession) {
	r.mu.Lock()
	defer r.mu.Unlock()
	hs.silent = false
}

func (r *registry) release(m *match) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(m.host.live, m)
	delete(m.client.live, m)
	r.streams--
	if r.draining && r.streams == 0 {
		close(r.empty)
	}
	h := r.hosts[m.cred.host]
	if h == nil {
		return
	}
	h.streams--
	if h.perCred[m.cred]--; h.perCred[m.cred] <= 0 {
		delete(h.perCred, m.cred)
	}
	r.forget(m.cred.host, h)
}

// revoke ends the sessions and streams of a credential.
func (r *registry) revoke(cred credential) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.clients {
		if c.cred == cred {
			r.dropClient(c, wire.CodeRevoked)
		}
	}
}

// revokeBootstrap ends what still uses a bootstrap once its pairing had time to
// register with its own credential.
func (r *registry) revokeBootstrap(cred credential, grace time.Duration) {
	r.later(grace, func() { r.revoke(cred) })
}

// retire takes a host session out of the choice for new streams, at the host's
// own wish.
func (r *registry) retire(hs *hostSession) {
	r.mu.Lock()
	defer r.mu.Unlock()
	hs.replaced = true
}

// dropClient ends the streams of a client and tells it why. The lock is held.
func (r *registry) dropClient(c *client, code wire.Code) {
	c.gone = code
	for m := range c.live {
		m.abort(code)
	}
	c.ctl.Send(&wire.Error{Code: code})
	delete(r.clients, c)
	c.sess.CloseSoon()
}

// dropHost ends a session of a host and its streams. The lock is held.
func (r *registry) dropHost(hs *hostSession) {
	hs.replaced = true
	for m := range hs.live {
		m.abort(wire.CodeRevoked)
	}
	hs.ctl.Send(&wire.Error{Code: wire.CodeUnauthorized})
	hs.sess.CloseSoon()
}

// removeHostID ends everything of a host that may no longer register.
func (r *registry) removeHostID(id wire.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.clients {
		if c.cred.host == id {
			r.dropClient(c, wire.CodeRevoked)
		}
	}
	if h := r.hosts[id]; h != nil {
		for hs := range h.all {
			r.dropHost(hs)
		}
	}
}

// recheckHost ends those sessions of a host whose token no longer holds, and
// says in what time to come back for the next one, or 0. holds must not wait.
func (r *registry) recheckHost(id wire.ID, holds func(wire.Digest) (bool, time.Duration)) (next time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := r.hosts[id]
	if h == nil {
		return 0
	}
	for hs := range h.all {
		switch ok, left := holds(hs.token); {
		case !ok:
			r.dropHost(hs)
		case left > 0 && (next == 0 || left < next):
			next = left
		}
	}
	now := time.Now()
	due := now.Add(next)
	if next == 0 || h.recheck.After(now) && !due.Before(h.recheck) {
		return 0 // nothing to come, or planned already
	}
	h.recheck = due
	return next
}

// later is after for those who do not hold the lock.
func (r *registry) later(d time.Duration, f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.after(d, f)
}

// hostStatus counts what a host has here.
func (r *registry) hostStatus(id wire.ID) HostStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	h := r.hosts[id]
	if h == nil {
		return HostStatus{}
	}
	return HostStatus{Sessions: len(h.slots), Streams: h.streams}
}

// reused tells the host that somebody tried a used bootstrap.
func (r *registry) reused(id wire.ID, pairing, via string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if hs := r.pick(id); hs != nil {
		hs.ctl.Send(&wire.BootstrapReused{PairingID: pairing, Via: via})
	}
}

// drain tells every peer that the broker goes away, and returns a channel that
// is closed when no stream is left.
func (r *registry) drain(deadline time.Duration) <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.draining {
		return r.empty
	}
	r.draining = true
	m := &wire.Drain{DeadlineSeconds: int(deadline / time.Second)}
	for c := range r.clients {
		c.ctl.Send(m)
	}
	for _, h := range r.hosts {
		for _, hs := range h.slots {
			hs.ctl.Send(m)
		}
	}
	if r.streams == 0 {
		close(r.empty)
	}
	return r.empty
}

func (r *registry) status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	st := Status{Sessions: len(r.clients), Streams: r.streams}
	for _, h := range r.hosts {
		st.Sessions += len(h.slots)
		if len(h.slots) > 0 {
			st.Hosts++
		}
	}
	return st
}
