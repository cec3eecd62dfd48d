package host

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/reach/wire"
	"github.com/hermes-reach/hermes-reach/securelink/session"
)

const (
	// publishTimeout bounds how long an invite waits for a broker to know its
	// bootstrap.
	publishTimeout = 10 * time.Second

	// firstMoment is how long a start waits for its brokers before it announces
	// what there is.
	firstMoment = 2 * time.Second

	// maxScanned is the largest QR code that phones scan well.
	maxScanned = 30
)

// PairRequest says what an invite shall give.
type PairRequest struct {
	TTL    string `json:"ttl,omitempty"`    // as session.ParseTTL reads; "" is 30 days
	Grants string `json:"grants,omitempty"` // as session.ParseGrants reads; "" is the defaults
}

// Invite is what a device pairs with. Text and QR are secrets until used.
type Invite struct {
	ID         string    `json:"id"`     // names the pairing to `pair`
	Text       string    `json:"invite"` // hermes-relay://pair?…
	QR         string    `json:"qr"`     // the field form, for a picture
	Expires    time.Time `json:"expires_at"`
	Candidates []string  `json:"candidates"` // for people: role and address, the best first
	Notes      []string  `json:"notes"`      // for people: what is missing, and why
}

// PairEnd is how a pairing ended.
type PairEnd struct {
	// State is "joined", "expired", "cancelled" or "voided" (too many wrong codes).
	State  string          `json:"state"`
	Device *session.Device `json:"device,omitempty"`
	Path   string          `json:"path,omitempty"`
}

// pairings are the invites that are open, and those that `pair` still waits for.
type pairings struct {
	mu   sync.Mutex
	open map[string]*pairing
}

type pairing struct {
	code  string
	ended chan struct{} // closed with end set
	end   PairEnd
	at    time.Time // of the end
}

// endKept is how long the end of a pairing can be asked for.
const endKept = time.Hour

func newPairings() *pairings { return &pairings{open: make(map[string]*pairing)} }

// add notes a new invite, and forgets those whose end is long told.
func (p *pairings) add(id, code string, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.open, func(_ string, e *pairing) bool { return e.end.State != "" && now.Sub(e.at) > endKept })
	p.open[id] = &pairing{code: code, ended: make(chan struct{})}
}

// live says whether the code of a pairing can still be used.
func (p *pairings) live(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.open[id]
	return e != nil && e.end.State == ""
}

func (p *pairings) get(id string) *pairing {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.open[id]
}

// joined notes the device that used a code.
func (p *pairings) joined(j session.Joined) {
	p.finish(j.PairingID, PairEnd{State: "joined", Device: &j.Device, Path: j.Path})
}

// finish ends a pairing; the first reason counts.
func (p *pairings) finish(id string, end PairEnd) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.open[id]
	if e == nil || e.end.State != "" {
		return
	}
	e.end, e.at = end, time.Now()
	close(e.ended)
}

// codeEnded takes a bootstrap back when its code is no longer of use. The
// device that used it does not wait for that.
func (h *Host) codeEnded(end session.CodeEnd) {
	if end.Why != session.CodeUsed { // a used one ends by `joined`, which names the device
		h.pairings.finish(end.PairingID, PairEnd{State: string(end.Why)})
	}
	h.spawn(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, publishTimeout)
		defer cancel()
		var all sync.WaitGroup
		for _, b := range h.brokers() {
			all.Go(func() {
				err := b.conn.Revoke(ctx, wire.KindBootstrap, end.PairingID)
				if err != nil && !errors.Is(err, connector.ErrOffline) && !errors.Is(err, context.Canceled) {
					h.log.Warn("bootstrap not taken back", "broker", b.broker.URL.HostPort(), "err", err)
				}
			})
		}
		all.Wait()
	})
}

// Pair mints an invite: a pairing code, a bootstrap at each broker that can be
// reached, and the signed payload that carries both.
func (h *Host) Pair(ctx context.Context, req PairRequest) (*Invite, error) {
	mint, err := parseMint(req)
	if err != nil {
		return nil, err
	}
	mint.PairingID = wire.NewID().String()
	code, expires, err := h.sessions.MintCode(mint)
	if err != nil {
		return nil, fmt.Errorf("mint a pairing code: %w", err)
	}
	h.pairings.add(mint.PairingID, code, time.Now())
	inv := &Invite{ID: mint.PairingID, Expires: expires, Notes: []string{}}
	cands := h.direct(inv)
	cands = append(cands, h.throughBrokers(ctx, inv)...)
	for i := range cands {
		cands[i].Priority = i
	}
	err = ctx.Err() // who asked is gone: nobody holds this invite
	if err == nil {
		err = h.encode(inv, cands, code, mint)
	}
	if err != nil {
		h.sessions.CancelCode(code)
		return nil, err
	}
	return inv, nil
}

func parseMint(req PairRequest) (session.Mint, error) {
	var m session.Mint
	var err error
	if req.TTL != "" {
		if m.TTL, err = session.ParseTTL(req.TTL); err != nil {
			return m, err
		}
		if m.TTL == 0 {
			m.TTL = session.Never
		}
	}
	if req.Grants != "" {
		m.Grants, err = session.ParseGrants(req.Grants)
	}
	return m, err
}

// proxy describes this host's Secure Link at an authority.
func (h *Host) proxy(authority string) *endpoints.Proxy {
	return &endpoints.Proxy{
		URL: "https://" + authority, TransportHint: "https", PinSHA256: h.identity.Pin().String(),
		CertDER:  base64.StdEncoding.EncodeToString(h.identity.LeafDER()),
		Surfaces: []endpoints.Surface{endpoints.SurfaceRelay, endpoints.SurfaceAPI, endpoints.SurfaceDashboard},
	}
}

// authorities are the addresses that devices may use, the best first.
func (h *Host) authorities() []string {
	hosts := advertised(h.cfg.Advertise, h.listeners)
	if _, err := h.identity.AddHosts(hostNames(hosts), time.Now()); err != nil {
		h.log.Warn("an address could not be added to the identity", "err", err)
	}
	covered := []string{}
	for _, hp := range hosts {
		if host, _, err := net.SplitHostPort(hp); err == nil && h.identity.Covers(host) {
			covered = append(covered, hp)
		}
	}
	return covered
}

// direct are the candidates that end at our own listeners.
func (h *Host) direct(inv *Invite) []endpoints.Candidate {
	var cands []endpoints.Candidate
	if len(h.listeners) == 0 {
		return nil
	}
	for _, authority := range h.authorities() {
		note := ""
		if thisMachineOnly(authority) {
			note = " (this machine only)"
		}
		inv.Candidates = append(inv.Candidates, fmt.Sprintf("%s %s%s", endpoints.RolePluginProxy, authority, note))
		cands = append(cands, endpoints.Candidate{
			Role: endpoints.RolePluginProxy, Security: endpoints.SecurityPinned, Proxy: h.proxy(authority),
		})
	}
	return cands
}

// throughBrokers publishes a bootstrap at every broker at once, and gives a
// candidate for each that has it.
func (h *Host) throughBrokers(ctx context.Context, inv *Invite) []endpoints.Candidate {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	authorities := h.authorities()
	if len(authorities) == 0 {
		return nil
	}
	brokers := h.brokers()
	tokens := make([]string, len(brokers))
	errs := make([]error, len(brokers))
	var all sync.WaitGroup
	for i, b := range brokers {
		tokens[i] = wire.NewToken()
		all.Go(func() {
			b.awaitFirst(ctx)
			errs[i] = b.conn.Publish(ctx, connector.Publication{
				Kind: wire.KindBootstrap, ID: inv.ID, Digest: wire.DigestOf(tokens[i]), Expires: inv.Expires,
			})
		})
	}
	all.Wait()
	var cands []endpoints.Candidate
	for i, b := range brokers {
		if errs[i] != nil {
			inv.Notes = append(inv.Notes, fmt.Sprintf("not through broker %s: %v", b.broker.URL.HostPort(), errs[i]))
			continue
		}
		inv.Candidates = append(inv.Candidates, fmt.Sprintf("%s %s", endpoints.RoleOutboundBroker, b.broker.URL.HostPort()))
		cands = append(cands, endpoints.Candidate{
			Role: endpoints.RoleOutboundBroker, Experimental: true, Security: endpoints.SecurityE2E,
			Broker: &endpoints.Broker{
				ProtocolVersion: 1, URL: b.broker.URL.String(), HostID: b.broker.HostID.String(),
				CredentialKind: endpoints.KindBootstrap, Token: tokens[i], ExpiresAt: wire.ExpiryAt(inv.Expires),
			},
			Proxy: h.proxy(authorities[0]),
		})
	}
	return cands
}

// awaitFirst waits while the first session to a broker is under way, so that an
// invite can be made as soon as the host is started.
func (r *running) awaitFirst(ctx context.Context) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for r.beginning() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// awaitBrokers gives the first sessions a moment, so that what is announced is
// not only that they are being tried.
func (h *Host) awaitBrokers(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, firstMoment)
	defer cancel()
	for _, r := range h.brokers() {
		r.awaitFirst(ctx)
	}
}

// beginning says that no session is up and none has failed.
func (r *running) beginning() bool {
	for _, s := range r.conn.Status() {
		if s.State == "connected" || s.State == "waiting" {
			return false
		}
	}
	return true
}

// encode writes the payload in both forms and signs them.
func (h *Host) encode(inv *Invite, cands []endpoints.Candidate, code string, mint session.Mint) error {
	if len(cands) == 0 {
		return errors.New("no way to this host can be put into an invite: " +
			"listen on an address (--listen), name one (--advertise), or enrol with a broker that is up")
	}
	authority, err := cands[0].Proxy.Authority()
	if err != nil {
		return err
	}
	host, _, err := net.SplitHostPort(authority)
	if err != nil {
		return err
	}
	ttl := mint.TTL
	if ttl == 0 {
		ttl = 30 * 24 * time.Hour
	}
	seconds := session.TTLSeconds(ttl)
	p := &endpoints.Payload{
		Host: host, Port: endpoints.DefaultAPIPort,
		Relay: &endpoints.PayloadRelay{
			URL: "wss://" + authority + "/relay", Code: code, TTLSeconds: &seconds, Grants: grantSeconds(mint.Grants), TransportHint: "wss",
		},
		Endpoints: cands,
	}
	text, err := endpoints.EncodeSigned(p, endpoints.FormInvite, h.secret)
	if err != nil {
		return fmt.Errorf("write the invite: %w", err)
	}
	inv.Text = endpoints.InviteURL(text)
	return h.encodeQR(inv, p)
}

// encodeQR writes the form for a picture. A code that phones cannot scan helps
// nobody, so the last direct addresses are left out of it until it is small
// enough; the best one and the brokers stay.
func (h *Host) encodeQR(inv *Invite, p *endpoints.Payload) error {
	left := 0
	for {
		for i := range p.Endpoints {
			p.Endpoints[i].Priority = i
		}
		qr, err := endpoints.EncodeSigned(p, endpoints.FormField, h.secret)
		if err != nil {
			return fmt.Errorf("write the invite: %w", err)
		}
		inv.QR = string(qr)
		v, err := endpoints.QRVersion(inv.QR)
		last := lastDirect(p.Endpoints)
		if err == nil && v <= maxScanned || last < 1 {
			break
		}
		left++
		p.Endpoints = slices.Delete(p.Endpoints, last, last+1)
	}
	if left > 0 {
		inv.Notes = append(inv.Notes, fmt.Sprintf("%d of the addresses are not in the QR code, which would be too large to scan; "+
			"--advertise names the ones that count", left))
	}
	return nil
}

func lastDirect(cands []endpoints.Candidate) int {
	for i, c := range slices.Backward(cands) {
		if c.Broker == nil {
			return i
		}
	}
	return -1
}

func grantSeconds(grants map[string]time.Duration) map[string]int64 {
	if grants == nil {
		return nil
	}
	out := make(map[string]int64, len(grants))
	for name, d := range grants {
		out[name] = session.TTLSeconds(d)
	}
	return out
}

// CancelPair makes an invite useless.
func (h *Host) CancelPair(id string) bool {
	e := h.pairings.get(id)
	return e != nil && h.sessions.CancelCode(e.code)
}
