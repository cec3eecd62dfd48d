package carrier

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/coder/websocket"

	"github.com/hermes-reach/hermes-reach/reach/carrier/outer"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// handshakeTimeout bounds one transport's way to an established carrier.
const handshakeTimeout = 5 * time.Second

// aLongTimeAgo is a deadline that has passed: it wakes what waits.
var aLongTimeAgo = time.Unix(1, 0)

// ErrNoProtocol2 says that what answers at the broker's address does not
// speak protocol 2.
var ErrNoProtocol2 = errors.New("no Reach broker of protocol 2 answers there")

// Dialer says how to reach a broker.
type Dialer struct {
	// URL is the broker's address.
	URL wire.BrokerURL
	// TLS checks the broker's certificate: roots, and nothing of the inner
	// identity. Nil means the system's roots. It is cloned.
	TLS *tls.Config
	// NetDial opens TCP connections; nil means a net.Dialer.
	NetDial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Transports are tried in order; nil means TLS, then WSS.
	Transports []Transport
}

// Dial connects by the first transport that works. What goes wrong with each
// is in the error. A certificate that does not hold ends the attempt: another
// transport would meet the same one.
func (d *Dialer) Dial(ctx context.Context) (*Carrier, error) {
	transports := d.Transports
	if transports == nil {
		transports = []Transport{TLS, WSS}
	}
	var errs []error
	for _, t := range transports {
		c, err := d.dial(ctx, t)
		if err == nil {
			return c, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", t, err))
		if ctx.Err() != nil || isCertificateError(err) {
			break
		}
	}
	return nil, fmt.Errorf("connect to broker %s: %w", d.URL.HostPort(), errors.Join(errs...))
}

func isCertificateError(err error) bool {
	var e *tls.CertificateVerificationError
	return errors.As(err, &e)
}

func (d *Dialer) dial(ctx context.Context, t Transport) (*Carrier, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	switch t {
	case TLS:
		return d.dialTLS(ctx)
	case WSS:
		return d.dialWSS(ctx)
	}
	return nil, fmt.Errorf("unknown transport %q", string(t))
}

// outer opens the outer TLS connection.
func (d *Dialer) outer(ctx context.Context) (*tls.Conn, error) {
	netDial := d.NetDial
	if netDial == nil {
		netDial = (&net.Dialer{}).DialContext
	}
	raw, err := netDial(ctx, "tcp", d.URL.HostPort())
	if err != nil {
		return nil, err
	}
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if d.TLS != nil {
		cfg = d.TLS.Clone()
	}
	cfg.ServerName = d.URL.Host()
	conn := outer.Client(raw, cfg)
	if err := conn.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(err, raw.Close())
	}
	return conn, nil
}

// dialTLS makes the byte stream of transport tls: an HTTP/1.1 upgrade, then
// the connection as it is.
func (d *Dialer) dialTLS(ctx context.Context) (*Carrier, error) {
	conn, err := d.outer(ctx)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(aLongTimeAgo) })
	r, err := d.upgrade(conn)
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, conn.NetConn().Close())
	}
	return &Carrier{
		rw: &readerConn{r, &corked{conn, outer.Under(conn)}}, close: conn.NetConn().Close, transport: TLS,
		local: conn.LocalAddr(), remote: conn.RemoteAddr(),
	}, nil
}

func (d *Dialer) upgrade(conn *tls.Conn) (io.Reader, error) {
	u, err := url.Parse(d.URL.V2())
	if err != nil {
		return nil, err
	}
	_, err = fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n",
		u.EscapedPath(), u.Host, UpgradeToken)
	if err != nil {
		return nil, fmt.Errorf("ask for the upgrade: %w", err)
	}
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, &http.Request{Method: http.MethodGet})
	if err != nil {
		return nil, fmt.Errorf("read the answer to the upgrade: %w", err)
	}
	if err := checkAnswer(resp); err != nil {
		return nil, err
	}
	if !strings.EqualFold(resp.Header.Get("Upgrade"), UpgradeToken) {
		return nil, fmt.Errorf("%w: it switches to %q", ErrNoProtocol2, resp.Header.Get("Upgrade"))
	}
	return drainFirst(br, conn), nil
}

// checkAnswer accepts 101 and explains anything else.
func checkAnswer(resp *http.Response) error {
	switch resp.StatusCode {
	case http.StatusSwitchingProtocols:
		return nil
	case http.StatusTooManyRequests:
		return &wire.RefusedError{Code: wire.CodeRateLimited, RetryAfter: retryAfter(resp)}
	}
	return fmt.Errorf("%w: HTTP status %s", ErrNoProtocol2, resp.Status)
}

func retryAfter(resp *http.Response) time.Duration {
	s, err := time.ParseDuration(resp.Header.Get("Retry-After") + "s")
	if err != nil || s < 0 {
		return 0
	}
	return min(s, time.Hour)
}

// dialWSS makes the same byte stream out of binary WebSocket messages.
func (d *Dialer) dialWSS(ctx context.Context) (*Carrier, error) {
	var over *outer.Cork
	transport := &http.Transport{
		DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			conn, err := d.outer(ctx)
			if err != nil {
				return nil, err
			}
			over = outer.NewCork(conn)
			return over, nil
		},
		Proxy: nil,
	}
	ws, resp, err := websocket.Dial(ctx, "https"+strings.TrimPrefix(d.URL.V2(), "wss"), &websocket.DialOptions{
		HTTPClient:      &http.Client{Transport: transport, CheckRedirect: noRedirect},
		Subprotocols:    []string{Subprotocol},
		CompressionMode: websocket.CompressionDisabled,
	})
	if err != nil {
		if resp != nil {
			return nil, errors.Join(checkAnswer(resp), err)
		}
		return nil, err
	}
	return newWSCarrier(ws, over)
}

// noRedirect keeps a credential's way from being chosen by whoever answers.
func noRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// readerConn reads what the handshake left in its buffer first.
type readerConn struct {
	io.Reader
	io.Writer
}

// corked writes to a TLS connection so that the records of one call leave in
// one. It is for one writer, as the joiner is.
type corked struct {
	conn net.Conn
	cork *outer.Cork
}

func (c *corked) Write(p []byte) (int, error) {
	c.cork.Hold()
	n, err := c.conn.Write(p)
	if err = errors.Join(err, c.cork.Release()); err != nil {
		return 0, err
	}
	return n, nil
}

// drainFirst gives what br holds, then the connection itself.
func drainFirst(br *bufio.Reader, conn io.Reader) io.Reader {
	if br.Buffered() == 0 {
		return conn
	}
	left, _ := br.Peek(br.Buffered())
	return io.MultiReader(strings.NewReader(string(left)), conn)
}
