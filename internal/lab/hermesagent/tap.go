package hermesagent

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"
)

// maxTapped bounds what a Tap remembers, both directions of all connections
// together. Beyond it bytes still cross, but Exchanges is an error.
const maxTapped = 64 << 20

// Tap is a TCP relay in front of a server. It changes nothing, and remembers
// each piece of the traffic with the time at which it came, before it is passed
// on: for the server's pieces that is when the server had sent them. Its methods
// may be called by many goroutines.
type Tap struct {
	ln     net.Listener
	target string
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu     sync.Mutex
	links  []*tapped
	stored int
}

// tapped is one connection; the Tap's lock guards it.
type tapped struct{ up, down []piece }

type piece struct {
	at   time.Time
	data []byte
}

// StartTap relays from a free port, at the same address as the target's, to the
// target (host:port, on loopback) until Close; ctx only bounds the start. The
// same address, because a server may look at the Host that it is called by.
func StartTap(ctx context.Context, target string) (*Tap, error) {
	host, _, err := net.SplitHostPort(target)
	if err != nil {
		return nil, fmt.Errorf("tap: %w", err)
	}
	if ip := net.ParseIP(host); !ip.IsLoopback() {
		return nil, fmt.Errorf("tap: %s is no loopback address", host)
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		return nil, fmt.Errorf("tap: %w", err)
	}
	life, cancel := context.WithCancel(context.Background())
	t := &Tap{ln: ln, target: target, cancel: cancel}
	t.work.Go(func() { t.accept(life) })
	return t, nil
}

// URL is where the tapped server is found: http, and nothing but the authority.
func (t *Tap) URL() *url.URL { return &url.URL{Scheme: "http", Host: t.ln.Addr().String()} }

// Close cuts all connections and returns when nothing of the tap is left. What it
// remembers stays.
func (t *Tap) Close() error {
	t.cancel()
	err := t.ln.Close()
	t.work.Wait()
	return err
}

func (t *Tap) accept(ctx context.Context) {
	for {
		client, err := t.ln.Accept()
		if err != nil {
			return // closed
		}
		t.work.Go(func() { t.serve(ctx, client) })
	}
}

func (t *Tap) serve(ctx context.Context, client net.Conn) {
	defer client.Close()
	server, err := new(net.Dialer).DialContext(ctx, "tcp", t.target)
	if err != nil {
		return // the client sees its connection closed
	}
	defer server.Close()
	defer context.AfterFunc(ctx, func() { client.Close(); server.Close() })()
	link := new(tapped)
	t.mu.Lock()
	t.links = append(t.links, link)
	t.mu.Unlock()
	var up sync.WaitGroup
	up.Go(func() { t.copy(server, client, &link.up) })
	t.copy(client, server, &link.down)
	up.Wait()
}

// copy relays one direction to its end. A half-closed connection stays one; one
// that breaks is broken on both sides.
func (t *Tap) copy(dst, src net.Conn, into *[]piece) {
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		at := time.Now()
		if n > 0 {
			t.remember(into, piece{at: at, data: bytes.Clone(buf[:n])})
			if _, werr := dst.Write(buf[:n]); werr != nil {
				src.Close()
				return
			}
		}
		if err == nil {
			continue
		}
		if half, ok := dst.(interface{ CloseWrite() error }); ok && errors.Is(err, io.EOF) {
			_ = half.CloseWrite() // the other end may be gone already
			return
		}
		dst.Close()
		return
	}
}

func (t *Tap) remember(into *[]piece, p piece) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stored += len(p.data)
	if t.stored <= maxTapped {
		*into = append(*into, p)
	}
}

// Exchange is one HTTP request and its response, as far as they have come.
type Exchange struct {
	Method, Path string
	Status       int     // 0 if no response has come
	Events       []Event // of a text/event-stream response
	Body         []byte  // of any other response
	Complete     bool    // the response has come to its end
}

// Exchanges returns the HTTP/1.1 requests that went through so far, connection
// by connection. On a connection that became a WebSocket the upgrade is the last.
func (t *Tap) Exchanges() ([]Exchange, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.stored > maxTapped {
		return nil, fmt.Errorf("tap: %d bytes went through, and it remembers %d", t.stored, maxTapped)
	}
	var out []Exchange
	for _, l := range t.links {
		out = append(out, exchanges(l.up, l.down)...)
	}
	return out, nil
}

// exchanges reads the two directions of a connection as HTTP. What it cannot
// read has not come yet, and ends the list.
func exchanges(up, down []piece) (out []Exchange) {
	requests := bufio.NewReader(&replay{left: slices.Clone(up)})
	answered := &replay{left: slices.Clone(down)}
	responses := bufio.NewReader(answered)
	for {
		req, err := http.ReadRequest(requests)
		if err != nil {
			return out
		}
		if _, err := io.Copy(io.Discard, req.Body); err != nil {
			return out
		}
		x := Exchange{Method: req.Method, Path: req.URL.Path}
		resp, err := finalResponse(responses, req)
		if err != nil {
			return append(out, x)
		}
		x.Status = resp.StatusCode
		if strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
			for e, eventErr := range events(resp.Body, func() time.Time { return answered.at }) {
				if err = eventErr; err == nil {
					x.Events = append(x.Events, e)
				}
			}
		} else {
			x.Body, err = io.ReadAll(resp.Body)
		}
		resp.Body.Close()
		x.Complete = err == nil
		out = append(out, x)
		if err != nil || resp.StatusCode == http.StatusSwitchingProtocols {
			return out
		}
	}
}

// finalResponse passes over 100 Continue and 103 Early Hints.
func finalResponse(r *bufio.Reader, req *http.Request) (*http.Response, error) {
	for {
		resp, err := http.ReadResponse(r, req)
		if err != nil || resp.StatusCode >= 200 || resp.StatusCode == http.StatusSwitchingProtocols {
			return resp, err
		}
	}
}

// replay reads remembered pieces one byte at a time, because what reads above it
// (net/http's chunk reader) looks ahead where it can: so at is the time of the last
// byte that was needed for what has been read.
type replay struct {
	left []piece
	at   time.Time
}

func (r *replay) Read(b []byte) (int, error) {
	for len(r.left) > 0 && len(r.left[0].data) == 0 {
		r.left = r.left[1:]
	}
	if len(r.left) == 0 {
		return 0, io.EOF
	}
	p := &r.left[0]
	r.at = p.at
	n := copy(b[:min(1, len(b))], p.data)
	p.data = p.data[n:]
	return n, nil
}
