package outer

import (
	"net"
	"sync"
)

// keep is the largest buffer that a Cork keeps for the next time.
const keep = 512 << 10

// A Cork is a connection whose writes can be gathered and sent as one. Hold and
// Release of a nil Cork do nothing.
type Cork struct {
	net.Conn
	mu   sync.Mutex // TLS and WebSocket answer from their readers, too
	held bool
	buf  []byte
}

// NewCork makes a Cork that lets everything through.
func NewCork(c net.Conn) *Cork { return &Cork{Conn: c} }

// Hold keeps what is written until Release.
func (c *Cork) Hold() {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = true
}

// Write writes p, or takes it for Release to write.
func (c *Cork) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.held {
		return c.Conn.Write(p)
	}
	c.buf = append(c.buf, p...)
	return len(p), nil
}

// Release sends what was held, in one write.
func (c *Cork) Release() error {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = false
	if len(c.buf) == 0 {
		return nil
	}
	_, err := c.Conn.Write(c.buf)
	if c.buf = c.buf[:0]; cap(c.buf) > keep {
		c.buf = nil
	}
	return err
}
