package securelink

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"sync"
	"time"
)

// lane is a namespace with its upstream.
type lane struct {
	ns   string
	up   *upstream // nil: none is configured, and the gate says so
	gate *gate
}

// errIdle ends a request in which nothing moved for too long.
var errIdle = errors.New("securelink: nothing moved for too long")

// forward passes one request to the upstream of its namespace.
func (s *Server) forward(w http.ResponseWriter, r *http.Request, peer Peer, l lane, t target, rest string) {
	upgrade, bad := wantsUpgrade(r)
	if bad == nil && upgrade && foreignOrigin(r) {
		bad = errOrigin
	}
	if bad == nil && r.ContentLength > s.conf.Limits.BodyBytes {
		bad = s.bodyTooLarge()
	}
	if bad == nil {
		// A gate that wants proof of a device belongs here, beside the one that
		// wants proof of the upstream.
		if v := l.gate.check(r.Context()); !v.open {
			bad = refusing(http.StatusServiceUnavailable, v.code, v.text)
		}
	}
	if bad != nil {
		refuse(w, bad)
		return
	}
	streams, release := l.gate.hold()
	defer release()
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer context.AfterFunc(streams, func() { cancel(context.Cause(streams)) })()

	p := &pass{s: s, lane: l, in: r, peer: peer, target: t, rest: rest, upgrade: upgrade, ctx: ctx, cancel: cancel}
	p.w = &writer{ResponseWriter: w, rc: http.NewResponseController(w), idle: s.conf.Limits.Idle}
	defer p.w.done()
	proxy := httputil.ReverseProxy{
		Rewrite: p.rewrite, ModifyResponse: p.modify, ErrorHandler: p.fail,
		Transport: l.up, FlushInterval: -1, BufferPool: &buffers,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug), // its texts may quote an upstream
	}
	proxy.ServeHTTP(p.w, p.request())
}

var errOrigin = refusing(http.StatusForbidden, "foreign_origin", "a page of another origin may not open a WebSocket here")

func foreignOrigin(r *http.Request) bool {
	origin := r.Header["Origin"]
	return len(origin) > 1 || len(origin) == 1 && !sameOrigin(origin[0], r.Host)
}

func (s *Server) bodyTooLarge() *refusal {
	return refusing(http.StatusRequestEntityTooLarge, "body_too_large", "the request body is larger than the limit of "+size(s.conf.Limits.BodyBytes), "Connection", "close")
}

// pass is one request on its way through.
type pass struct {
	s       *Server
	lane    lane
	in      *http.Request
	peer    Peer
	target  target
	rest    string
	upgrade bool
	w       *writer
	ctx     context.Context
	cancel  context.CancelCauseFunc

	trailer http.Header // of the forwarded request, filled when its body ends
}

// request is the incoming request as the proxy shall see it: with our context
// and a body that is bounded in size and idle time.
func (p *pass) request() *http.Request {
	r := p.in.WithContext(p.ctx)
	if r.Body == nil || r.Body == http.NoBody || r.ContentLength == 0 {
		return r
	}
	// An answer may come before the upload is over: do not hold it back.
	_ = p.w.rc.EnableFullDuplex()
	if r.ProtoMajor == 1 && r.ContentLength < 0 {
		// net/http takes Transfer-Encoding for the truth when a Content-Length
		// stands beside it, and does not tell us. What we forward is unambiguous;
		// the connection is not used again, whatever else may lie in it.
		p.w.Header().Set("Connection", "close")
	}
	p.trailer = http.Header{}
	for name := range r.Trailer {
		if name != "Cookie" && !dropped(requestRules, p.lane.ns, name) {
			p.trailer[name] = nil
		}
	}
	r.Body = &upload{
		ReadCloser: http.MaxBytesReader(p.w.ResponseWriter, r.Body, p.s.conf.Limits.BodyBytes),
		rc:         p.w.rc, idle: p.s.conf.Limits.Idle,
		atEnd: func() {
			for name := range p.trailer {
				p.trailer[name] = p.in.Trailer[name]
			}
			connOf(p.ctx).unread.Store(false)
		},
	}
	return r
}

// rewrite makes the outgoing request. Only what is set here goes out.
func (p *pass) rewrite(pr *httputil.ProxyRequest) {
	out, base := pr.Out, p.lane.up.base
	out.URL, out.Host = upstreamURL(base, p.rest, p.target), base.Host
	out.Trailer = p.trailer
	h := forwardHeaders(p.lane.ns, p.in.Header)
	if p.upgrade {
		h.Set("Connection", "Upgrade")
		h.Set("Upgrade", "websocket")
	}
	if origin := p.in.Header["Origin"]; len(origin) == 1 && sameOrigin(origin[0], p.in.Host) {
		h.Set("Origin", "http://"+base.Host) // the upstream compares it with the Host it sees
	}
	if p.lane.ns == nsDashboard {
		h.Set("X-Forwarded-Proto", "https")
		h.Set("X-Forwarded-Host", p.s.conf.Authority)
		h.Set("X-Forwarded-Prefix", "/"+nsDashboard)
		h.Set("X-Forwarded-For", peerAddress(p.peer))
	}
	out.Header = h
}

// peerAddress is the peer's address, or one that stands for it. Upstreams want
// an address, and must not take a device behind a broker for this machine, nor
// all of them for one: so such a peer gets an address of its own from a private
// range that nothing uses (fd5a:c3e1:9b70::/48).
func peerAddress(p Peer) string {
	if p.Addr.IsValid() {
		return p.Addr.String()
	}
	a := [16]byte{0xfd, 0x5a, 0xc3, 0xe1, 0x9b, 0x70}
	sum := sha256.Sum256([]byte(p.Key))
	copy(a[6:], sum[:])
	return netip.AddrFrom16(a).String()
}

// modify strips and maps the answer before its first byte goes out.
func (p *pass) modify(resp *http.Response) error {
	returnHeaders(p.lane.ns, resp.Header)
	for name := range resp.Trailer {
		if droppedTrailer(p.lane.ns, name) {
			delete(resp.Trailer, name)
		}
	}
	if loc := resp.Header["Location"]; p.lane.ns == nsDashboard && len(loc) > 0 {
		mapped, err := mapLocation(loc[0], p.lane.up.base, p.rest)
		switch {
		case err == nil && len(loc) == 1:
			resp.Header.Set("Location", mapped)
		case resp.StatusCode/100 == 3:
			return refusing(http.StatusBadGateway, "bad_redirect", "the Dashboard sent a redirect that cannot be followed from outside")
		default:
			resp.Header.Del("Location")
		}
	}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		return nil // the body is the connection, and has no idle limit of ours
	}
	resp.Body = &download{
		ReadCloser: resp.Body, idle: p.s.conf.Limits.Idle,
		timer: time.AfterFunc(p.s.conf.Limits.Idle, func() { p.cancel(errIdle) }),
		atEnd: func() {
			for name := range resp.Trailer {
				if droppedTrailer(p.lane.ns, name) {
					delete(resp.Trailer, name)
				}
			}
		},
	}
	return nil
}

func droppedTrailer(ns, name string) bool {
	return name == "Set-Cookie" || name == "Location" || dropped(responseRules, ns, name)
}

// fail answers when the upstream did not. Nothing has been sent yet, unless the
// connection was taken over.
func (p *pass) fail(_ http.ResponseWriter, _ *http.Request, err error) {
	if p.w.hijacked {
		return
	}
	answer := p.explain(err)
	if answer == nil {
		panic(http.ErrAbortHandler) // nobody is there to read an answer
	}
	p.s.log.Info("request failed", "namespace", p.lane.ns, "code", answer.code)
	refuse(p.w.ResponseWriter, answer)
}

// explain finds the answer to an error; nil when the client is gone.
func (p *pass) explain(err error) *refusal {
	if own, ok := errors.AsType[*refusal](err); ok {
		return own
	}
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return p.s.bodyTooLarge()
	}
	if p.in.Context().Err() != nil {
		return nil
	}
	if cut, ok := errors.AsType[*refusal](context.Cause(p.ctx)); ok {
		return cut
	}
	if t, ok := errors.AsType[net.Error](err); ok && t.Timeout() {
		return refusing(http.StatusGatewayTimeout, "upstream_timeout", "the service behind /"+p.lane.ns+" did not answer in time")
	}
	if nobodyListens(err) {
		return refusing(http.StatusBadGateway, "upstream_unavailable", "the service behind /"+p.lane.ns+" is not running")
	}
	return refusing(http.StatusBadGateway, "upstream_failed", "the service behind /"+p.lane.ns+" broke off before it answered")
}

// writer is the client's side of an answer.
type writer struct {
	http.ResponseWriter
	rc       *http.ResponseController
	idle     time.Duration
	armed    time.Time // when the write deadline was last moved
	hijacked bool
}

// Unwrap is for http.ResponseController.
func (w *writer) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *writer) WriteHeader(status int) {
	h := w.Header()
	if status/100 == 1 && status != http.StatusSwitchingProtocols {
		for name := range h { // an early hint is a hint, nothing else
			if name != "Link" {
				delete(h, name)
			}
		}
	} else if _, ok := h["Content-Type"]; !ok {
		h["Content-Type"] = nil // do not guess what the upstream did not say
	}
	w.arm()
	w.ResponseWriter.WriteHeader(status)
}

func (w *writer) Write(b []byte) (int, error) {
	w.arm()
	return w.ResponseWriter.Write(b)
}

// FlushError is for http.ResponseController.
func (w *writer) FlushError() error {
	w.arm()
	return w.rc.Flush()
}

// arm moves the write deadline along. A deadline that stands still would be a
// limit on the whole answer. It is moved in coarse steps, because on HTTP/2
// each move is a message to the connection.
func (w *writer) arm() {
	if now := time.Now(); now.Sub(w.armed) > w.idle/16 {
		w.armed = now
		_ = w.rc.SetWriteDeadline(now.Add(w.idle))
	}
}

// done takes the deadlines away: the connection may be used again.
func (w *writer) done() {
	if !w.hijacked {
		_ = w.rc.SetWriteDeadline(time.Time{})
		_ = w.rc.SetReadDeadline(time.Time{})
	}
}

// Hijack is for WebSockets. Bytes that the client sent along with its
// handshake lie in the reader; they belong to the stream.
func (w *writer) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, rw, err := w.rc.Hijack()
	if err != nil {
		return nil, nil, err
	}
	w.hijacked = true
	if n := rw.Reader.Buffered(); n > 0 {
		c = &earlyConn{Conn: c, early: io.LimitReader(rw.Reader, int64(n))}
	}
	return c, rw, nil
}

// earlyConn gives bytes that were read already before those of the connection.
type earlyConn struct {
	net.Conn
	early io.Reader
}

func (c *earlyConn) Read(b []byte) (int, error) {
	if c.early != nil {
		if n, err := c.early.Read(b); err == nil {
			return n, nil
		}
		c.early = nil
	}
	return c.Conn.Read(b)
}

// CloseWrite keeps half-close working.
func (c *earlyConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}

// upload is a request body with a deadline that moves along.
type upload struct {
	io.ReadCloser
	rc    *http.ResponseController
	idle  time.Duration
	armed time.Time
	atEnd func()
}

func (u *upload) Read(b []byte) (int, error) {
	if now := time.Now(); now.Sub(u.armed) > u.idle/16 {
		u.armed = now
		_ = u.rc.SetReadDeadline(now.Add(u.idle))
	}
	n, err := u.ReadCloser.Read(b)
	if err == io.EOF {
		_ = u.rc.SetReadDeadline(time.Time{}) // net/http now listens for the client's going away
		u.atEnd()
	}
	return n, err
}

// download is an answer's body that ends the request when it stands still.
type download struct {
	io.ReadCloser
	idle  time.Duration
	timer *time.Timer
	atEnd func()
}

func (d *download) Read(b []byte) (int, error) {
	d.timer.Reset(d.idle)
	n, err := d.ReadCloser.Read(b)
	if err == io.EOF {
		d.atEnd()
	}
	return n, err
}

func (d *download) Close() error {
	d.timer.Stop()
	return d.ReadCloser.Close()
}

// buffers are what answers are copied through.
var buffers bufferPool

type bufferPool struct{ pool sync.Pool }

const bufferSize = 32 << 10

func (p *bufferPool) Get() []byte {
	if b, ok := p.pool.Get().(*[bufferSize]byte); ok {
		return b[:]
	}
	return make([]byte, bufferSize)
}

func (p *bufferPool) Put(b []byte) {
	if len(b) == bufferSize {
		p.pool.Put((*[bufferSize]byte)(b))
	}
}
