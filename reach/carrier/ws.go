package carrier

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/coder/websocket"

	"github.com/hermes-reach/hermes-reach/reach/carrier/outer"
)

// wsStream is the payloads of binary messages, joined, as a byte stream. It is
// for one reader and one writer, as yamux is.
type wsStream struct {
	ws  *websocket.Conn
	msg io.Reader
	// over is between the WebSocket and TLS: the client's library masks through
	// a buffer of 4 KiB, and TLS should see whole messages. Nil on the broker's
	// end, where the library's writes are large already.
	over  *outer.Cork
	under *outer.Cork // below TLS
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
	s.over.Hold()
	s.under.Hold()
	err := s.ws.Write(context.Background(), websocket.MessageBinary, p)
	if err = errors.Join(err, s.over.Release(), s.under.Release()); err != nil {
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
	if s.over, _ = conn.(*outer.Cork); s.over != nil {
		conn = s.over.Conn
	}
	s.under = outer.Under(conn)
	abrupt := abruptClose(conn)
	return &Carrier{
		rw: s, transport: WSS, local: conn.LocalAddr(), remote: conn.RemoteAddr(),
		close: func() error { return errors.Join(abrupt(), ignoreClosed(ws.CloseNow())) },
	}, nil
}

// abruptClose closes the TCP connection below TLS: an alert would wait for a
// link that hangs, and yamux says by itself what has ended.
func abruptClose(conn net.Conn) func() error {
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
