package securelink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hermes-reach/hermes-reach/securelink/session"
)

// Limits bound what one server spends. The zero value of a field means its
// default; a negative value is refused, and so is one that cannot work.
type Limits struct {
	HeaderBytes int64         // request line and headers of one request, default 32 KiB, 1 KiB to 1 MiB
	HeaderTime  time.Duration // to finish the TLS handshake, and again to send the headers, default 10 s
	BodyBytes   int64         // one request body, default 128 MiB

	// Idle is how long a request or an answer may stand still while both ends
	// are there: no first byte of the answer, no next one, no byte of an upload
	// taken. Default 15 min. Bytes that flow are never cut, however long.
	Idle time.Duration

	ConnectTime time.Duration // to connect to an upstream, default 5 s
	Connections int           // open connections, WebSockets included, default 256
	PeerConns   int           // of one peer, default 64, at most Connections

	ProbeEvery time.Duration // how long the answer of a gate's probe holds, default 15 s
	ProbeTime  time.Duration // for one probe, default 3 s, below ProbeEvery
}

func (l Limits) withDefaults() (Limits, error) {
	for _, f := range []struct {
		name string
		v    *time.Duration
		def  time.Duration
	}{
		{"HeaderTime", &l.HeaderTime, 10 * time.Second},
		{"Idle", &l.Idle, 15 * time.Minute},
		{"ConnectTime", &l.ConnectTime, 5 * time.Second},
		{"ProbeEvery", &l.ProbeEvery, 15 * time.Second},
		{"ProbeTime", &l.ProbeTime, 3 * time.Second},
	} {
		if *f.v < 0 {
			return l, fmt.Errorf("limit %s is negative: %v", f.name, *f.v)
		}
		if *f.v == 0 {
			*f.v = f.def
		}
	}
	if l.HeaderBytes == 0 {
		l.HeaderBytes = 32 << 10
	}
	if l.BodyBytes == 0 {
		l.BodyBytes = 128 << 20
	}
	if l.Connections == 0 {
		l.Connections = 256
	}
	if l.PeerConns == 0 {
		l.PeerConns = min(64, l.Connections)
	}
	switch {
	case l.HeaderBytes < 1<<10 || l.HeaderBytes > 1<<20:
		return l, fmt.Errorf("limit HeaderBytes is %d, want 1 KiB to 1 MiB", l.HeaderBytes)
	case l.BodyBytes < 0:
		return l, fmt.Errorf("limit BodyBytes is negative: %d", l.BodyBytes)
	case l.Connections < 0:
		return l, fmt.Errorf("limit Connections is negative: %d", l.Connections)
	case l.PeerConns < 0 || l.PeerConns > l.Connections:
		return l, fmt.Errorf("limit PeerConns is %d, want 1 to Connections (%d)", l.PeerConns, l.Connections)
	case l.ProbeTime >= l.ProbeEvery:
		return l, fmt.Errorf("limit ProbeTime (%v) is not below ProbeEvery (%v)", l.ProbeTime, l.ProbeEvery)
	}
	return l, nil
}

// size prints a number of bytes for people.
func size(n int64) string {
	if n >= 1<<20 && n%(1<<20) == 0 {
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d bytes", n)
}

// Peer is what is known of the other end of a connection.
type Peer struct {
	Key     string         // peers with the same key share PeerConns
	Addr    netip.Addr     // the real address; invalid when only a broker knows it
	Session session.Source // by which failed proofs are counted
	Path    string         // the role of the path, shown to people
}

// DefaultPeer reads a peer from its address alone: TCP and UDP peers by their
// address without port, anything else by the text of the address, as one that
// came through a broker.
func DefaultPeer(a net.Addr) Peer {
	var ip netip.Addr
	switch a := a.(type) {
	case *net.TCPAddr:
		ip = a.AddrPort().Addr()
	case *net.UDPAddr:
		ip = a.AddrPort().Addr()
	}
	if !ip.IsValid() {
		key := a.String()
		return Peer{Key: key, Path: "outbound_broker", Session: session.Source{Kind: session.Reach, Key: key}}
	}
	ip = ip.Unmap().WithZone("")
	return Peer{Key: ip.String(), Addr: ip, Path: "plugin_proxy", Session: session.Source{Kind: session.Direct, Key: ip.String()}}
}

// Over the limit, a few connections are still taken so that they can be told
// why; the rest is closed without a word.
const (
	excuses     = 16
	peerExcuses = 4
)

var errTooMany = errors.New("too many connections")

// crowd counts open connections and can end them all.
type crowd struct {
	total, each int

	mu     sync.Mutex
	conns  map[*conn]struct{}
	peers  map[string]int
	closed bool
}

func newCrowd(l Limits) *crowd {
	return &crowd{total: l.Connections, each: l.PeerConns, conns: map[*conn]struct{}{}, peers: map[string]int{}}
}

// admit takes c in. excuse says that it is above the limit and only there to
// be refused politely; an error, that it must be closed.
func (w *crowd) admit(c *conn) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, of := len(w.conns), w.peers[c.peer.Key]
	if w.closed || n >= w.total+excuses || of >= w.each+peerExcuses {
		return errTooMany
	}
	c.excuse = n >= w.total || of >= w.each
	w.conns[c] = struct{}{}
	w.peers[c.peer.Key]++
	return nil
}

func (w *crowd) leave(c *conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, ok := w.conns[c]; !ok {
		return
	}
	delete(w.conns, c)
	if w.peers[c.peer.Key]--; w.peers[c.peer.Key] == 0 {
		delete(w.peers, c.peer.Key)
	}
}

func (w *crowd) size() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.conns)
}

// end closes every connection and admits no more.
func (w *crowd) end() {
	w.mu.Lock()
	w.closed = true
	all := make([]*conn, 0, len(w.conns))
	for c := range w.conns {
		all = append(all, c)
	}
	w.mu.Unlock()
	for _, c := range all {
		_ = c.Conn.Close() // also wakes one that lingers
		_ = c.Close()
	}
}

func (w *crowd) open() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return !w.closed
}

// conn is an accepted connection below TLS.
type conn struct {
	net.Conn
	peer   Peer
	excuse bool
	end    *time.Timer // of an excuse that nobody fetches
	crowd  *crowd
	unread atomic.Bool // an HTTP/1 request body is, or may be, still on its way
}

// How long, and for how many bytes, a client that is still sending may go on
// after it was answered.
const (
	lingerTime  = time.Second
	lingerBytes = 8 << 20
)

// Close ends the connection. When the client is still sending a body that
// nobody wants, closing at once would reset the connection, and the reset may
// overtake the answer that says why. So the answer is left to arrive first.
func (c *conn) Close() error {
	if c.end != nil {
		c.end.Stop()
	}
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if ok && c.unread.Swap(false) && c.crowd.open() && half.CloseWrite() == nil {
		_ = c.Conn.SetReadDeadline(time.Now().Add(lingerTime))
		_, _ = io.CopyN(io.Discard, c.Conn, lingerBytes)
	}
	c.crowd.leave(c)
	return c.Conn.Close()
}

// door is a listener that counts.
type door struct {
	net.Listener
	crowd     *crowd
	peer      func(net.Addr) Peer
	excuseFor time.Duration
}

func (d *door) Accept() (net.Conn, error) {
	for {
		raw, err := d.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &conn{Conn: raw, crowd: d.crowd, peer: d.peer(raw.RemoteAddr())}
		if d.crowd.admit(c) != nil {
			_ = raw.Close()
			continue
		}
		if c.excuse {
			c.end = time.AfterFunc(d.excuseFor, func() { _ = raw.Close() })
		}
		return c, nil
	}
}

type connKey struct{}

// withConn remembers the connection of a request.
func withConn(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = t.NetConn()
	}
	own, ok := c.(*conn)
	if !ok {
		return ctx
	}
	return context.WithValue(ctx, connKey{}, own)
}

func connOf(ctx context.Context) *conn {
	c, _ := ctx.Value(connKey{}).(*conn)
	return c
}
