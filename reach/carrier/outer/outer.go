// Package outer is the outer TLS connection between a peer and a broker, tuned
// for what a session does with it: many small messages beside a few large
// streams.
//
// crypto/tls makes one system call for each record of 16 KiB. Below it lies a
// Cork here, so that all records of one write leave in one; and the socket is
// told to keep little that is not under way yet, so that a small message does
// not queue in the kernel behind what a large stream wrote before it.
package outer

import (
	"crypto/tls"
	"net"
)

// config is what both ends set: the session writes whole frames, so that
// starting with small records would only cost, and HTTP/1.1 carries the upgrade.
func config(cfg *tls.Config) *tls.Config {
	cfg = cfg.Clone()
	cfg.NextProtos = []string{"http/1.1"}
	cfg.DynamicRecordSizingDisabled = true
	return cfg
}

// Client is the dialling end on a connection that was just made. The handshake
// is the caller's to run. cfg is cloned.
func Client(raw net.Conn, cfg *tls.Config) *tls.Conn {
	return tls.Client(prepare(raw), config(cfg))
}

// NewListener gives the accepting end of what ln accepts. cfg is cloned.
func NewListener(ln net.Listener, cfg *tls.Config) net.Listener {
	return tls.NewListener(listener{ln}, config(cfg))
}

type listener struct{ net.Listener }

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return prepare(c), nil
}

func prepare(c net.Conn) net.Conn {
	limitUnsent(c)
	return NewCork(c)
}

// Under is the Cork below the TLS connection c, nil if there is none.
func Under(c net.Conn) *Cork {
	if t, ok := c.(*tls.Conn); ok {
		k, _ := t.NetConn().(*Cork)
		return k
	}
	return nil
}
