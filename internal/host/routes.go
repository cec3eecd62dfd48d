package host

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/reach/wire"
	"github.com/hermes-reach/hermes-reach/securelink/session"
)

// generation rises on an ordered rotation of all route tokens.
const generation = "1"

// routes makes the credentials with which devices come back through brokers.
// It keeps no token: each is derived from the host's secret, so that a device
// asks again after any restart and gets the one it has.
type routes struct {
	host   *Host
	secret []byte
}

// token is base64url(HMAC-SHA256(secret, broker ‖ 0 ‖ credential ‖ 0 ‖ generation)).
func (r *routes) token(broker wire.BrokerURL, credential string) string {
	mac := hmac.New(sha256.New, r.secret)
	fmt.Fprintf(mac, "%s\x00%s\x00%s", broker.HostPort(), credential, generation)
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// publication is the route of one session at one broker, and its token.
func (r *routes) publication(broker wire.BrokerURL, req session.RouteRequest) (connector.Publication, string, error) {
	device, err := wire.ParseDigest(req.DeviceIDHash)
	if err != nil {
		return connector.Publication{}, "", fmt.Errorf("route of a session: %w", err)
	}
	token := r.token(broker, req.CredentialID)
	return connector.Publication{
		Kind: wire.KindRoute, ID: req.CredentialID, Digest: wire.DigestOf(token), Expires: req.Expires, Device: device,
	}, token, nil
}

// tell gives a connector that does not run yet the routes of all sessions: its
// broker may be new to this host, or have lost its disk.
func (r *routes) tell(b *running) {
	ctx := context.Background() // nothing waits: no session to the broker is up
	told := map[string]bool{}
	for _, req := range r.host.sessions.LiveRoutes() {
		pub, _, err := r.publication(b.broker.URL, req)
		if err == nil {
			err = b.conn.Publish(ctx, pub)
		}
		if err != nil && !errors.Is(err, connector.ErrOffline) {
			r.host.log.Error("route not published", "broker", b.broker.URL.HostPort(), "err", err)
		}
		told[req.CredentialID] = true
	}
	for _, req := range r.host.sessions.LiveRoutes() {
		delete(told, req.CredentialID)
	}
	for id := range told { // ended meanwhile: its withdrawal may have come before
		_ = b.conn.Revoke(ctx, wire.KindRoute, id) // remembered
	}
}

// Issue publishes the route of one session at every broker. A broker that is
// away learns of it when it is back; one that refuses is left out.
func (r *routes) Issue(ctx context.Context, req session.RouteRequest) ([]session.RouteCredential, error) {
	brokers := r.host.brokers()
	creds := make([]*session.RouteCredential, len(brokers))
	errs := make([]error, len(brokers))
	var all sync.WaitGroup
	for i, b := range brokers {
		all.Go(func() {
			pub, token, err := r.publication(b.broker.URL, req)
			if err != nil {
				errs[i] = err
				return
			}
			err = b.conn.Publish(ctx, pub)
			if _, refused := errors.AsType[*wire.RefusedError](err); refused {
				errs[i] = err
				return
			}
			creds[i] = &session.RouteCredential{
				BrokerURL: b.broker.URL.String(), HostID: b.broker.HostID.String(),
				CredentialID: req.CredentialID, Token: token, Expires: req.Expires,
			}
		})
	}
	all.Wait()
	var out []session.RouteCredential
	for i, c := range creds {
		switch {
		case c == nil:
		case brokers[i].broker.URL.HostPort() == req.Broker:
			out = append([]session.RouteCredential{*c}, out...)
		default:
			out = append(out, *c)
		}
	}
	if len(out) == 0 {
		return nil, errors.Join(errs...)
	}
	return out, nil
}

// Withdraw takes a route back: what is open by it ends at once, whatever the
// brokers do, and then every broker is told. While the brokers are not known,
// at the start and at the stop, it fails and is to be repeated: nobody would
// have been told.
func (r *routes) Withdraw(ctx context.Context, credentialID string) error {
	r.host.streams.cut(credentialID)
	if !r.host.serving() {
		return errors.New("no broker is asked yet, or any more")
	}
	brokers := r.host.brokers()
	errs := make([]error, len(brokers))
	var all sync.WaitGroup
	for i, b := range brokers {
		all.Go(func() { errs[i] = b.conn.Revoke(ctx, wire.KindRoute, credentialID) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// streams are the connections that came in by a route and are open. A broker
// that is away, or lies, does not end those of a revoked device; we do.
type streams struct {
	knows func(credentialID string) bool
	mu    sync.Mutex
	open  map[string]map[*stream]struct{}
}

// stream is a connection that is forgotten when it closes.
type stream struct {
	net.Conn
	end func()
}

func (s *stream) Close() error {
	s.end()
	return s.Conn.Close()
}

// CloseWrite ends our direction alone, where the connection can.
func (s *stream) CloseWrite() error {
	if c, ok := s.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return nil
}

func newStreams(knows func(string) bool) *streams {
	return &streams{knows: knows, open: make(map[string]map[*stream]struct{})}
}

// track notes a connection until it closes.
func (s *streams) track(c net.Conn) net.Conn {
	addr, ok := c.RemoteAddr().(connector.Addr)
	if !ok || addr.CredentialID == "" {
		return c
	}
	id := addr.CredentialID
	st := &stream{Conn: c}
	st.end = sync.OnceFunc(func() { s.forget(id, st) })
	s.mu.Lock()
	if s.open[id] == nil {
		s.open[id] = make(map[*stream]struct{})
	}
	s.open[id][st] = struct{}{}
	s.mu.Unlock()
	if !s.knows(id) { // revoked since it was admitted
		s.cut(id)
	}
	return st
}

func (s *streams) forget(id string, st *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open[id], st)
	if len(s.open[id]) == 0 {
		delete(s.open, id)
	}
}

// cut ends what is open by a route.
func (s *streams) cut(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for st := range s.open[id] {
		if a, ok := st.Conn.(interface{ Abort(wire.Code) }); ok {
			a.Abort(wire.CodeRevoked)
		}
	}
}
