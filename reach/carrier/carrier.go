// Package carrier brings one byte stream from a peer to a broker, whichever way
// the network between them allows: over TLS after an HTTP/1.1 upgrade, or in
// the binary messages of a WebSocket. What runs on the stream is package link's.
//
// Both ends are here: a Dialer tries the transports in order, Upgrade is the
// broker's answer (docs/protocol/reach-v2.md, section Transports).
package carrier

import (
	"crypto/tls"
	"io"
	"net"
	"sync"

	"github.com/hermes-reach/hermes-reach/reach/carrier/outer"
)

// A Transport says how a carrier crosses the network.
type Transport string

// The transports of protocol 2 that this package carries.
const (
	TLS Transport = "tls" // HTTP/1.1 upgrade, then the bytes as they are
	WSS Transport = "wss" // the same bytes in binary WebSocket messages
)

// UpgradeToken is what the tls transport asks for in its Upgrade header.
const UpgradeToken = "hermes-reach/2"

// Subprotocol is the WebSocket subprotocol of the wss transport.
const Subprotocol = "hermes-reach.v2"

// ConnectPath is where a broker takes sessions of protocol 2, below its base.
const ConnectPath = "/v2/connect"

// Carrier is one established byte stream between a peer and a broker. Close
// ends waiting reads and writes at once and may be called more than once.
type Carrier struct {
	rw        io.ReadWriter
	close     func() error
	once      sync.Once
	closeErr  error
	transport Transport
	local     net.Addr
	remote    net.Addr
}

// Listener is TLS on what ln accepts, as a broker of transports tls and wss
// serves it. cfg is cloned.
func Listener(ln net.Listener, cfg *tls.Config) net.Listener { return outer.NewListener(ln, cfg) }

// NewCarrier makes a carrier of any byte stream whose Close ends waiting calls.
func NewCarrier(c net.Conn, t Transport) *Carrier {
	return &Carrier{rw: c, close: c.Close, transport: t, local: c.LocalAddr(), remote: c.RemoteAddr()}
}

// Read reads the next bytes of the stream.
func (c *Carrier) Read(p []byte) (int, error) { return c.rw.Read(p) }

// Write writes all of p.
func (c *Carrier) Write(p []byte) (int, error) { return c.rw.Write(p) }

// Close ends the carrier at once.
func (c *Carrier) Close() error {
	c.once.Do(func() { c.closeErr = c.close() })
	return c.closeErr
}

// Transport says what carries the bytes.
func (c *Carrier) Transport() Transport { return c.transport }

// LocalAddr is this end's network address.
func (c *Carrier) LocalAddr() net.Addr { return c.local }

// RemoteAddr is the other end's network address.
func (c *Carrier) RemoteAddr() net.Addr { return c.remote }
