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
}

// host is one host id with the sessions of its current process.
type host struct {
	epoch    int64
	instance wire.ID
	slots    map[int]*hostSession
	streams  int
	perCred  map[credential]int
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
	sess       *link.Session
	ctl        *link.Control
	live       map[*match]struct{} // guarded by registry.mu
	replaced   bool                // takes no new streams; guarded by registry.mu
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
}

// match is one stream from a client to a host.
type match struct {
	id     wire.ID
	cred   credential
	client *client
	host   *hostSession // set by registry.reserve

	mu   sync.Mutex
	ends []*link.Stream
	code wire.Code // why it was aborted
}

func newMatch(c *client, st *link.Stream) *match {
	m := &match{id: wire.NewID(), cred: c.cred, client: c}
	m.add(st)
	return m
}

// add names an end of the match. An end of an aborted match is aborted at once.
func (m *match) add(st *link.Stream) {
	st.Bind(m.id)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ends = append(m.ends, st)
	if m.code != "" {
		st.Abort(m.code)
	}
}

// abort ends the match whatever it is doing. It does not wait.
func (m *match) abort(code wire.Code) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.code = code
	for _, st := range m.ends {
		st.Abort(code)
	}
}

func newRegistry(l Limits) *registry {
	return &registry{limits: l, hosts: make(map[wire.ID]*host), clients: make(map[*client]struct{}), empty: make(chan struct{})}
}

// addHost registers hs and decides between it and what is there: protocol 2,
// section Host sessions. A refusal has a code and perhaps a wait.
func (r *registry) addHost(hs *hostSession) *wire.RefusedError {
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
		h = &host{slots: make(map[int]*hostSession), perCred: make(map[credential]int)}
		r.hosts[hs.id] = h
	case hs.epoch < h.epoch:
		return &wire.RefusedError{Code: wire.CodeReplaced, RetryAfter: time.Minute}
	case hs.instance != h.instance: // a newer process, or a clone: the newer wins
		for _, old := range h.slots {
			r.replace(old)
		}
		clear(h.slots)
	}
	h.epoch, h.instance = hs.epoch, hs.instance
	if old := h.slots[hs.slot]; old != nil {
		r.replace(old)
	}
	h.slots[hs.slot] = hs
	return nil
}

// replace tells a session that it is no longer the host's. Its streams may go
// on for a while, new ones go elsewhere. The lock is held.
func (r *registry) replace(old *hostSession) {
	old.replaced = true
	old.ctl.Send(&wire.Error{Code: wire.CodeReplaced, RetryAfter: time.Minute})
	time.AfterFunc(r.limits.Takeover, func() { old.abortAll(r, wire.CodeReplaced) })
}

// abortAll ends the streams of a session that was replaced.
func (hs *hostSession) abortAll(r *registry, code wire.Code) {
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
	if h.slots[hs.slot] == hs {
		delete(h.slots, hs.slot)
	}
	if len(h.slots) == 0 && h.streams == 0 {
		delete(r.hosts, hs.id)
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
		if !hs.replaced && (best == nil || cmp.Or(cmp.Compare(len(hs.live), len(best.live)), cmp.Compare(hs.slot, best.slot)) < 0) {
			best = hs
		}
	}
	return best
}

func (r *registry) addClient(c *client) *wire.RefusedError {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.draining {
		return &wire.RefusedError{Code: wire.CodeDraining}
	}
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
	hs.live[m] = struct{}{}
	r.streams++
	return ""
}

func (r *registry) release(m *match) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(m.host.live, m)
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
	if len(h.slots) == 0 && h.streams == 0 {
		delete(r.hosts, m.cred.host)
	}
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
	time.AfterFunc(grace, func() { r.revoke(cred) })
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
	for _, h := range r.hosts {
		for _, hs := range h.slots {
			for m := range hs.live {
				if m.client == c {
					m.abort(code)
				}
			}
		}
	}
	c.ctl.Send(&wire.Error{Code: code})
	delete(r.clients, c)
	c.sess.CloseSoon()
}

// removeHostID ends everything of a host that was removed or whose token no
// longer holds.
func (r *registry) removeHostID(id wire.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.clients {
		if c.cred.host == id {
			r.dropClient(c, wire.CodeRevoked)
		}
	}
	if h := r.hosts[id]; h != nil {
		for _, hs := range h.slots {
			hs.ctl.Send(&wire.Error{Code: wire.CodeUnauthorized})
			hs.sess.CloseSoon()
		}
	}
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
