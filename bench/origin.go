package bench

import (
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/pins"
)

// The first byte on a connection says what the origin does.
const (
	cmdDown  = 'D' // sends until the device sends a byte, then its end
	cmdUp    = 'U' // reads to the end, then says how many bytes it was
	cmdEcho  = 'E' // sends back messages of pingSize
	cmdHello = 'H' // sends one byte, then waits for the end
	cmdBurst = 'B' // sends burst bytes, then waits for the end
)

const (
	pingSize = 1 << 10
	chunk    = 256 << 10
	burst    = 256 << 10

	// originName is in the certificate of the origin.
	originName = "origin.test"
)

// newOrigin makes an identity and the two halves of the pinned TLS.
func newOrigin() (*pins.Identity, error) { return pins.New([]string{originName}, time.Now()) }

func innerClient(pin pins.Pin) *tls.Config {
	return pins.ClientConfig(pins.Client{Pin: pin, Host: originName})
}

// serveOrigin answers everything that ln accepts, until ln is closed, and waits
// for what it started.
func serveOrigin(ln net.Listener, id *pins.Identity) {
	cfg := id.ServerConfig()
	var conns sync.WaitGroup
	defer conns.Wait()
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		conns.Go(func() {
			conn := tls.Server(c, cfg)
			answer(conn)
			_ = conn.Close()
		})
	}
}

// answer serves one connection. What fails is seen at the other end.
func answer(c *tls.Conn) {
	cmd := make([]byte, 1)
	if _, err := io.ReadFull(c, cmd); err != nil {
		return
	}
	switch cmd[0] {
	case cmdDown:
		sendUntilAsked(c)
	case cmdUp:
		n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, c, make([]byte, chunk))
		if err == nil {
			_, _ = c.Write(binary.BigEndian.AppendUint64(nil, uint64(n))) //nolint:gosec // a count
		}
	case cmdEcho:
		buf := make([]byte, pingSize)
		for {
			if _, err := io.ReadFull(c, buf); err != nil {
				return
			}
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
	case cmdHello:
		_, _ = c.Write(cmd)
		_, _ = io.Copy(io.Discard, c)
	case cmdBurst:
		_, _ = c.Write(make([]byte, burst))
		_, _ = io.Copy(io.Discard, c)
	}
}

func sendUntilAsked(c *tls.Conn) {
	asked := make(chan struct{})
	go func() {
		defer close(asked)
		_, _ = c.Read(make([]byte, 1))
	}()
	buf := make([]byte, chunk)
	for {
		select {
		case <-asked:
			_ = c.CloseWrite()
			return
		default:
		}
		if _, err := c.Write(buf); err != nil {
			_ = c.Close()
			<-asked
			return
		}
	}
}
