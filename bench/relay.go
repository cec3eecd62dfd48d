package bench

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"

	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/reach/carrier/outer"
)

// relayBuffer is what a relay copies at a time, as the broker's splice does.
const relayBuffer = 64 << 10

// hop is one outer TLS connection of the path relay.
type hop struct{ *tls.Conn }

func (h hop) Write(p []byte) (int, error) {
	k := outer.Under(h.Conn)
	k.Hold()
	n, err := h.Conn.Write(p)
	return n, errors.Join(err, k.Release())
}

func dialHop(ctx context.Context, addr string, ca []byte) (hop, error) {
	cfg, err := roots(ca)
	if err != nil {
		return hop{}, err
	}
	cfg.ServerName = "localhost"
	raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return hop{}, err
	}
	c := outer.Client(raw, cfg)
	if err := c.HandshakeContext(ctx); err != nil {
		return hop{}, errors.Join(err, raw.Close())
	}
	return hop{c}, nil
}

// hops accepts outer TLS connections; the handshake is part of the first use.
type hops struct{ net.Listener }

func (h hops) Accept() (net.Conn, error) {
	c, err := h.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return hop{c.(*tls.Conn)}, nil
}

// listenHops listens with an authority of its own.
func listenHops() (ln net.Listener, ca []byte, err error) {
	authority, err := lab.NewCA()
	if err != nil {
		return nil, nil, err
	}
	cfg, err := authority.Server("localhost")
	if err != nil {
		return nil, nil, err
	}
	tcp, err := listen()
	if err != nil {
		return nil, nil, err
	}
	return hops{outer.NewListener(tcp, cfg)}, authority.PEM(), nil
}

// relayTo joins a with a new hop to the origin.
func relayTo(a hop, at place) {
	defer a.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if a.HandshakeContext(ctx) != nil {
		return
	}
	b, err := dialHop(ctx, at.Outer, at.OuterCA)
	if err != nil {
		return
	}
	defer b.Close()
	var both sync.WaitGroup
	one := func(dst, src hop) {
		_, _ = io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, make([]byte, relayBuffer))
		_ = dst.CloseWrite()
	}
	both.Go(func() { one(a, b) })
	both.Go(func() { one(b, a) })
	both.Wait()
}
