package pins

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"
)

// ExpiryTolerance is how long after its last day a certificate is still taken,
// when everything else is right. The pin is what proves the host; a date that
// is judged by a clock we cannot trust must not lock its owner out.
const ExpiryTolerance = 5 * 365 * 24 * time.Hour

// Why a host was not trusted. Each is wrapped in a [TrustError].
var (
	ErrPin     = errors.New("the host has another key than the paired one")
	ErrName    = errors.New("the host's certificate does not name this host")
	ErrExpired = errors.New("the host's certificate expired long ago")
	ErrVersion = errors.New("the link does not use TLS 1.3")
)

// TrustError says why a handshake was refused. Err is one of ErrPin, ErrName,
// ErrExpired and ErrVersion; Detail is for people and holds no secret.
type TrustError struct {
	Err    error
	Detail string
}

func (e *TrustError) Error() string { return fmt.Sprintf("%v: %s", e.Err, e.Detail) }

// Unwrap gives Err, for errors.Is.
func (e *TrustError) Unwrap() error { return e.Err }

// IsTrust says whether err means that the host was reached and not trusted, as
// against not reached. A server that cannot speak TLS 1.3 at all ends the
// handshake itself, before there is anything to trust: that is not reached.
func IsTrust(err error) bool {
	_, ok := errors.AsType[*TrustError](err)
	return ok
}

// Client says which host a device means to reach.
type Client struct {
	Pin  Pin              // the paired key; the zero Pin accepts nobody
	Host string           // the paired authority without port; must be in the certificate
	SNI  string           // sent as the server name; "" = Host. Addresses are never sent
	Now  func() time.Time // nil = time.Now

	// Resume lets a second connection of the same config skip the key exchange
	// of the first. The whole check runs on resumed connections too.
	Resume bool
}

// ClientConfig gives the device's half of the pinned link. The handshake fails
// with a [TrustError] before a byte of the application is sent unless all of
// this holds: TLS 1.3, the paired key, the paired host among the certificate's
// names, and a date that is not more than [ExpiryTolerance] past. A clock that
// is behind refuses nobody.
//
// Keep one config for each paired host: its session cache belongs to it.
func ClientConfig(c Client) *tls.Config {
	name := c.SNI
	if name == "" {
		// An address is not sent, but still keys the session cache, so that a
		// session made on one path can be resumed on another.
		name, _ = CleanHost(c.Host)
	}
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS13,
		ServerName: name,
		// This turns off the check against certificate authorities, which know
		// nothing of this key. VerifyConnection replaces it, and unlike
		// VerifyPeerCertificate it also runs when a session is resumed.
		InsecureSkipVerify: true,
		VerifyConnection:   c.verify,
	}
	if c.Resume {
		cfg.ClientSessionCache = tls.NewLRUClientSessionCache(4)
	}
	return cfg
}

// verify is the whole check of the device.
func (c Client) verify(cs tls.ConnectionState) error {
	if cs.Version != tls.VersionTLS13 {
		return &TrustError{ErrVersion, tls.VersionName(cs.Version)}
	}
	if len(cs.PeerCertificates) == 0 {
		return &TrustError{ErrPin, "it sent no certificate"}
	}
	leaf := cs.PeerCertificates[0]
	if got := Of(leaf); !got.Equal(c.Pin) {
		return &TrustError{ErrPin, fmt.Sprintf("got %v, paired with %v; if the host was set up anew on purpose, pair again", got, c.Pin)}
	}
	if !covers(leaf, c.Host) {
		return &TrustError{ErrName, fmt.Sprintf("%.80q is not among %d names", c.Host, len(sans(leaf)))}
	}
	now := time.Now
	if c.Now != nil {
		now = c.Now
	}
	if limit := leaf.NotAfter.Add(ExpiryTolerance); now().After(limit) {
		return &TrustError{ErrExpired, fmt.Sprintf("it was valid until %s; make a new identity on the host and pair again, or set this device's clock",
			leaf.NotAfter.Format(time.DateOnly))}
	}
	return nil
}

// ServerConfig gives the host's half: TLS 1.3 only, Go's choice of key exchange
// (hybrid post-quantum first), the leaf chosen for each handshake. NextProtos is
// the caller's. All configs of one identity share their session tickets, so a
// device that changes its path may still resume.
func (id *Identity) ServerConfig() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			return id.choose(asked(hello)), nil
		},
		WrapSession: func(cs tls.ConnectionState, ss *tls.SessionState) ([]byte, error) {
			ss.Extra = append(ss.Extra, id.ticketMark())
			return id.tickets.EncryptTicket(cs, ss)
		},
		UnwrapSession: func(ticket []byte, cs tls.ConnectionState) (*tls.SessionState, error) {
			ss, err := id.tickets.DecryptTicket(ticket, cs)
			if err != nil || ss == nil {
				return nil, err
			}
			// A ticket proves that the client once spoke to whoever holds the
			// ticket keys. Resume only what this very identity began: otherwise
			// another one with the same ticket keys would pass for it.
			for _, extra := range ss.Extra {
				if bytes.Equal(extra, id.ticketMark()) {
					return ss, nil
				}
			}
			return nil, nil // a full handshake
		},
	}
}

// ticketMark binds a session ticket to the identity. The prefix keeps it apart
// from what other layers put into SessionState.Extra.
func (id *Identity) ticketMark() []byte {
	return append([]byte("hermes-reach pin "), id.pin[:]...)
}

// asked is the host a handshake means, "" when that cannot be told: a stream
// from a connector has no local address.
func asked(hello *tls.ClientHelloInfo) string {
	if hello.ServerName != "" {
		return hello.ServerName
	}
	if hello.Conn == nil {
		return ""
	}
	switch local := hello.Conn.LocalAddr().(type) {
	case *net.TCPAddr:
		return addrHost(local.AddrPort())
	case *net.UDPAddr:
		return addrHost(local.AddrPort())
	}
	return ""
}

func addrHost(ap netip.AddrPort) string {
	if !ap.IsValid() {
		return ""
	}
	return ap.Addr().Unmap().WithZone("").String()
}
