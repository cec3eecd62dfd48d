package link

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/coder/websocket"
)

// wsStream is the payloads of binary messages, joined, as a byte stream. It is
// for one reader and one writer, as yamux is.
type wsStream struct {
	ws   *websocket.Conn
	cork *cork // nil where the library's writes are large already
	msg  io.Reader
}

var errTextMessage = errors.New("a text message came where only binary ones may")

func (s *wsStream) Read(p []byte) (int, error) {
	for {
		if s.msg == nil {
			typ, r, err := s.ws.Reader(context.Background())
			if err != nil {
				return 0, err
			}
			if typ != websocket.MessageBinary {
				return 0, errTextMessage
			}
			s.msg = r
		}
		n, err := s.msg.Read(p)
		if errors.Is(err, io.EOF) {
			s.msg = nil
			if n == 0 {
				continue
			}
			err = nil
		}
		return n, err
	}
}

func (s *wsStream) Write(p []byte) (int, error) {
	if s.cork != nil {
		s.cork.hold()
	}
	err := s.ws.Write(context.Background(), websocket.MessageBinary, p)
	if s.cork != nil {
		err = errors.Join(err, s.cork.release())
	}
	if err != nil {
		return 0, err
	}
	return len(p), nil
}

// newWSCarrier wraps an established WebSocket whose connection is conn.
func newWSCarrier(ws *websocket.Conn, conn net.Conn) (*Carrier, error) {
	if conn == nil {
		return nil, errors.Join(errors.New("the WebSocket has no connection"), ws.CloseNow())
	}
	ws.SetReadLimit(-1) // messages are read as they come and never held whole
	s := &wsStream{ws: ws}
	s.cork, _ = conn.(*cork)
	abrupt := abruptClose(conn)
	return &Carrier{
		rw: s, transport: WSS, local: conn.LocalAddr(), remote: conn.RemoteAddr(),
		close: func() error { return errors.Join(abrupt(), ignoreClosed(ws.CloseNow())) },
	}, nil
}

// abruptClose closes the TCP connection below TLS: an alert would wait for a
// link that hangs, and yamux says by itself what has ended.
func abruptClose(conn net.Conn) func() error {
	if c, ok := conn.(*cork); ok {
		conn = c.Conn
	}
	if t, ok := conn.(*tls.Conn); ok {
		conn = t.NetConn()
	}
	return func() error { return ignoreClosed(conn.Close()) }
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// hijackSpy notes the connection that a WebSocket library hijacks, so that
// closing can reach below it.
type hijackSpy struct {
	http.ResponseWriter
	got *net.Conn
}

func (h *hijackSpy) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(h.ResponseWriter).Hijack()
	if err == nil {
		err = conn.SetDeadline(time.Time{})
		*h.got = conn
	}
	return conn, rw, err
}

// cork gathers the small writes of the WebSocket client library, which masks
// through a 4 KiB buffer, so that TLS sees whole messages.
type cork struct {
	net.Conn
	mu   sync.Mutex // the library answers pings from its reader
	held bool
	buf  []byte
}

func newCork(c net.Conn) *cork { return &cork{Conn: c} }

// hold keeps what is written until release.
func (c *cork) hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = true
}

func (c *cork) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.held {
		return c.Conn.Write(p)
	}
	c.buf = append(c.buf, p...)
	return len(p), nil
}

func (c *cork) release() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = false
	_, err := c.Conn.Write(c.buf)
	if c.buf = c.buf[:0]; cap(c.buf) > 2*maxJoin {
		c.buf = nil
	}
	return err
}
