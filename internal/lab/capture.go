package lab

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
)

// captureLimit bounds the bytes that one Capture keeps.
const captureLimit = 64 << 20

// A Capture is a TCP relay that keeps every byte that passes. With TLS it ends
// one TLS connection and begins another, and keeps what stood between: what
// whoever holds the broker's certificate could read.
type Capture struct {
	ln     net.Listener
	target string
	client *tls.Config // nil: bytes are passed as they are
	tasks  sync.WaitGroup
	life   context.Context
	end    context.CancelFunc

	mu      sync.Mutex
	streams []*bytes.Buffer
	size    int
}

// NewCapture listens on a loopback port and passes everything to target.
func NewCapture(target string) (*Capture, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	return startCapture(ln, target, nil), nil
}

// NewTLSCapture does the same inside TLS: it shows server to those who connect
// and checks target by client.
func NewTLSCapture(target string, server, client *tls.Config) (*Capture, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	server = server.Clone()
	server.NextProtos = []string{"http/1.1"}
	return startCapture(tls.NewListener(ln, server), target, client), nil
}

func startCapture(ln net.Listener, target string, client *tls.Config) *Capture {
	c := &Capture{ln: ln, target: target, client: client}
	c.life, c.end = context.WithCancel(context.Background())
	c.tasks.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			c.tasks.Go(func() { c.relay(conn) })
		}
	})
	return c
}

// Addr is where the capture listens.
func (c *Capture) Addr() string { return c.ln.Addr().String() }

// Port is the port of Addr.
func (c *Capture) Port() string {
	_, port, _ := net.SplitHostPort(c.Addr())
	return port
}

func (c *Capture) dial() (net.Conn, error) {
	var d net.Dialer
	if c.client == nil {
		return d.DialContext(c.life, "tcp", c.target)
	}
	cfg := c.client.Clone()
	cfg.NextProtos = []string{"http/1.1"}
	return (&tls.Dialer{NetDialer: &d, Config: cfg}).DialContext(c.life, "tcp", c.target)
}

func (c *Capture) relay(near net.Conn) {
	defer func() { _ = near.Close() }()
	far, err := c.dial()
	if err != nil {
		return
	}
	defer func() { _ = far.Close() }()
	defer context.AfterFunc(c.life, func() { _ = near.Close(); _ = far.Close() })()
	var both sync.WaitGroup
	both.Go(func() { c.copy(far, near) })
	both.Go(func() { c.copy(near, far) })
	both.Wait()
}

func (c *Capture) copy(dst, src net.Conn) {
	_, _ = io.Copy(io.MultiWriter(c.record(), dst), src)
	if half, ok := dst.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
		return
	}
	_ = dst.Close()
}

// record starts a stream of its own, so that what is searched for is not torn
// apart by what passed beside it.
func (c *Capture) record() io.Writer {
	c.mu.Lock()
	defer c.mu.Unlock()
	b := &bytes.Buffer{}
	c.streams = append(c.streams, b)
	return &recorder{c, b}
}

type recorder struct {
	c *Capture
	b *bytes.Buffer
}

func (r *recorder) Write(p []byte) (int, error) {
	r.c.mu.Lock()
	defer r.c.mu.Unlock()
	if r.c.size+len(p) > captureLimit {
		return 0, errors.New("the capture is full")
	}
	r.c.size += len(p)
	return r.b.Write(p)
}

// Size is how many bytes were kept.
func (c *Capture) Size() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.size
}

// Contains says whether text passed, in any one direction of any connection.
func (c *Capture) Contains(text string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, b := range c.streams {
		if bytes.Contains(b.Bytes(), []byte(text)) {
			return true
		}
	}
	return false
}

// Close ends everything that runs through the capture. What was kept stays.
func (c *Capture) Close() error {
	err := c.ln.Close()
	c.end()
	c.tasks.Wait()
	return err
}

// A Gate is a listener that can be shut as a network path is cut: the port is
// closed, connections through it break, and whoever accepts from it waits on.
type Gate struct {
	net.Listener
	mu    sync.Mutex
	conns map[net.Conn]struct{}
	shut  bool
	done  chan struct{}
	once  sync.Once
}

// NewGate wraps ln.
func NewGate(ln net.Listener) *Gate {
	return &Gate{Listener: ln, conns: make(map[net.Conn]struct{}), done: make(chan struct{})}
}

// Accept waits for a connection; after Shut, until Close.
func (g *Gate) Accept() (net.Conn, error) {
	c, err := g.Listener.Accept()
	if err != nil {
		g.mu.Lock()
		shut := g.shut
		g.mu.Unlock()
		if shut {
			<-g.done
		}
		return nil, err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.conns[c] = struct{}{}
	return c, nil
}

// Shut cuts the path.
func (g *Gate) Shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = true
	_ = g.Listener.Close()
	for c := range g.conns {
		_ = c.Close()
	}
}

// Close closes the listener for good.
func (g *Gate) Close() error {
	g.once.Do(func() { close(g.done) })
	if err := g.Listener.Close(); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}
