package host

import (
	"net"
	"testing"

	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// routed is a connection that came in by a route.
type routed struct {
	net.Conn
	id   string
	code wire.Code
}

func (r *routed) RemoteAddr() net.Addr { return connector.Addr{CredentialID: r.id} }
func (r *routed) Abort(c wire.Code)    { r.code = c }
func (r *routed) Close() error         { return nil }

// TestStreamsOfARevokedRoute: what a device has open ends when its route is
// taken back, and only that; nothing is kept of what has closed.
func TestStreamsOfARevokedRoute(t *testing.T) {
	known := map[string]bool{"phone": true, "laptop": true}
	s := newStreams(func(id string) bool { return known[id] })
	phone, laptop := &routed{id: "phone"}, &routed{id: "laptop"}
	tracked := s.track(phone)
	s.track(laptop)
	s.cut("phone")
	if phone.code != wire.CodeRevoked || laptop.code != "" {
		t.Errorf("phone %q, laptop %q; want the phone's alone revoked", phone.code, laptop.code)
	}
	_ = tracked.Close()
	_ = tracked.Close()
	if len(s.open["phone"]) != 0 || len(s.open) != 1 {
		t.Errorf("%v is kept, want the laptop's alone", s.open)
	}
	late := &routed{id: "gone"} // revoked between its admission and now
	s.track(late)
	if late.code != wire.CodeRevoked {
		t.Error("a stream of a route that was revoked meanwhile is served")
	}
}
