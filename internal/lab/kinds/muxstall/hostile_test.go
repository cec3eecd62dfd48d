package muxstall

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/internal/lab/kinds"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// Types and flags of yamux frames.
const (
	data, window, ping, goAway = 0, 1, 2, 3
	syn, ack, fin, rst         = 1, 2, 4, 8
)

// frame is a header as yamux writes it, and what follows.
func frame(typ byte, flags uint16, stream, length uint32, body ...byte) []byte {
	b := []byte{0, typ}
	b = binary.BigEndian.AppendUint16(b, flags)
	b = binary.BigEndian.AppendUint32(b, stream)
	b = binary.BigEndian.AppendUint32(b, length)
	return append(b, body...)
}

func sized(flags uint16, stream uint32, body []byte) []byte {
	return frame(data, flags, stream, uint32(len(body)), body...)
}

// repeat joins n results of f.
func repeat(n int, f func(i int) []byte) []byte {
	var b []byte
	for i := range n {
		b = append(b, f(i)...)
	}
	return b
}

// A hostile row is bytes on a session that has registered: stream 1 is its
// control stream. What does no harm may live on; it then still answers.
type hostile struct {
	bytes []byte
	lives bool
}

func hostileFrames() map[string]hostile {
	const next = 3 // the first stream after the control stream
	message := func(text string) []byte {
		return sized(0, 1, append(binary.BigEndian.AppendUint16(nil, uint16(len(text))), text...))
	}
	return map[string]hostile{
		"another version":             {bytes: []byte{1, ping, 0, syn, 0, 0, 0, 0, 0, 0, 0, 7}},
		"another type":                {bytes: frame(4, 0, 0, 0)},
		"the last type":               {bytes: frame(255, 0xffff, 1, 0)},
		"HTTP":                        {bytes: []byte("GET / HTTP/1.1\r\nHost: broker\r\n\r\n")},
		"TLS":                         {bytes: []byte("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\x00\x00\x00\x00\x00")},
		"a frame beyond the window":   {bytes: frame(data, syn, next, link.Window+1)},
		"a frame of 4 GiB":            {bytes: frame(data, syn, next, 1<<32-1)},
		"4 GiB for nobody":            {bytes: frame(data, 0, 4711, 1<<32-1)},
		"more than the window":        {bytes: overfull(next)},
		"a stream opened twice":       {bytes: append(frame(window, syn, next, 0), frame(window, syn, next, 0)...)},
		"the control stream again":    {bytes: frame(window, syn, 1, 0)},
		"an end that ends twice":      {bytes: repeat(2, func(int) []byte { return frame(window, fin, 1, 0) })},
		"the control stream ends":     {bytes: frame(window, fin, 1, 0)},
		"the control stream resets":   {bytes: frame(window, rst, 1, 0)},
		"a protocol error":            {bytes: frame(goAway, 0, 0, 1)},
		"an internal error":           {bytes: frame(goAway, 0, 0, 2)},
		"a going away of another why": {bytes: frame(goAway, 0, 0, 99)},
		"a flood of pings":            {bytes: repeat(5000, func(i int) []byte { return frame(ping, syn, 0, uint32(i)) })},
		"a flood of streams":          {bytes: repeat(1000, func(i int) []byte { return frame(window, syn, next+2*uint32(i), 0) })},
		"half a header":               {bytes: frame(window, 0, 1, 0)[:7]},
		"half a body":                 {bytes: frame(data, syn, next, 1000, 1, 2, 3)},
		"a message too long":          {bytes: sized(0, 1, []byte{0x10, 0x01, '{'})},
		"a message that is no JSON":   {bytes: message("hello")},
		"half a message":              {bytes: append(sized(0, 1, []byte{0, 100, '{'}), frame(window, fin, 1, 0)...)},

		"a message of another type": {bytes: message(`{"type":"coffee"}`), lives: true},
		"a ping of ours":            {bytes: message(`{"type":"ping","t":1}`), lives: true},
		"a window that overflows":   {bytes: repeat(9, func(int) []byte { return frame(window, 0, 1, 1<<32-1) }), lives: true},
		"an answer to no ping":      {bytes: repeat(5000, func(i int) []byte { return frame(ping, ack, 0, uint32(i)) }), lives: true},
		"bytes for nobody":          {bytes: repeat(100, func(i int) []byte { return sized(0, uint32(100+i), make([]byte, 1000)) }), lives: true},
		"resets for nobody":         {bytes: repeat(5000, func(i int) []byte { return frame(window, rst, uint32(100+i), 0) }), lives: true},
		"an end for nobody":         {bytes: frame(window, fin, 99, 0), lives: true},
		"stream 0":                  {bytes: frame(window, syn, 0, 0), lives: true},
		"a stream of the broker's":  {bytes: frame(window, syn, 2, 0), lives: true},
		"streams opened and reset": {bytes: repeat(100, func(i int) []byte {
			return append(frame(window, syn, next+2*uint32(i), 0), frame(window, rst, next+2*uint32(i), 0)...)
		}), lives: true},
		"a dial that says nothing": {bytes: sized(syn, next, []byte{0, 2, '{', '}'}), lives: true},
		"a dial of a megabyte":     {bytes: append(sized(syn, next, []byte{0, 15}), sized(0, next, []byte(`{"type":"dial"}`+strings.Repeat("x", 1<<18)))...), lives: true},
		"going away in order":      {bytes: frame(goAway, 0, 0, 0), lives: true},
		"empty frames":             {bytes: repeat(5000, func(int) []byte { return frame(data, 0, 1, 0) }), lives: true},
	}
}

// overfull is a message that never ends on a stream that is not read on: more
// than any window, without waiting for room.
func overfull(stream uint32) []byte {
	b := frame(window, syn, stream, 0)
	return append(b, repeat(40, func(int) []byte { return sized(0, stream, make([]byte, 60<<10)) })...)
}

// maxGrowth bounds what the whole table may cost the process, attackers
// included, at any time.
const maxGrowth = 128 << 20

// TestHostileFrames: whoever speaks yamux wrong loses his session, soon and with
// bounded memory; the sessions beside him do not notice.
func TestHostileFrames(t *testing.T) {
	s := kinds.NewSite(t, func(c *broker.Config) {
		c.Limits = broker.Limits{Register: time.Second, Drain: time.Second}
		c.Link.DeadAfter = 3 * time.Second // of a peer that stops in the middle
	})
	n := s.Neighbour()
	kinds.Echo(t, n.Host(nil))
	d := n.Device(n.Route("neighbour"), nil)
	e := newEchoer(t)
	e.add(kinds.Dial(t, d))
	kinds.Await(t, "the first echoes", func() bool { return e.count() > 20 })
	before := runtime.NumGoroutine()
	grown := growth(t)
	for _, registered := range []bool{true, false} {
		attackers := make(map[string]*attacker)
		for name, row := range hostileFrames() {
			a := attack(t, s)
			if registered {
				a.register(t, s)
			}
			a.send(append(row.bytes, frame(ping, syn, 0, mark)...))
			attackers[name] = a
		}
		for _, name := range livesFirst() {
			row := hostileFrames()[name]
			t.Run(fmt.Sprintf("%s, registered %t", name, registered), func(t *testing.T) {
				// Who does not register is out after a second anyway.
				attackers[name].judge(t, row.lives && registered)
			})
			attackers[name].close()
		}
	}
	if n := grown(); n > maxGrowth {
		t.Errorf("the heap grew by %d MB, want at most %d", n>>20, maxGrowth>>20)
	}
	settle(t, before)
	e.end()
}

// growth watches the heap until the result is called, which tells its peak.
func growth(t *testing.T) func() uint64 {
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapInuse
	}
	runtime.GC()
	start, peak := heap(), uint64(0)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				peak = max(peak, heap())
			case <-stop:
				return
			}
		}
	}()
	return func() uint64 {
		close(stop)
		<-done
		t.Logf("the heap grew by %d MB at most", (max(peak, start)-start)>>20)
		return max(peak, start) - start
	}
}

// An attacker holds a carrier and writes what it likes.
type attacker struct {
	c     *carrier.Carrier
	pong  chan struct{}
	first chan string // what the registration was answered with
	over  chan error
	done  chan struct{}
}

func (a *attacker) close() { _ = a.c.Close(); <-a.done }

func attack(t *testing.T, s *kinds.Site) *attacker {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), kinds.Patience)
	defer cancel()
	c, err := (&carrier.Dialer{URL: s.URL(s.Addr), TLS: s.CA.Client()}).Dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	a := &attacker{c: c, pong: make(chan struct{}, 1), first: make(chan string, 1), over: make(chan error, 1), done: make(chan struct{})}
	go func() { defer close(a.done); a.over <- a.read() }()
	t.Cleanup(a.close)
	return a
}

// read takes what the broker sends, for its pings' sake nothing is answered.
func (a *attacker) read() error {
	head := make([]byte, 12)
	for heard := false; ; {
		if _, err := io.ReadFull(a.c, head); err != nil {
			return err
		}
		stream, length := binary.BigEndian.Uint32(head[4:]), binary.BigEndian.Uint32(head[8:])
		switch {
		case head[1] == ping && head[3]&ack != 0 && length == mark:
			a.pong <- struct{}{}
		case head[1] == data:
			body := make([]byte, length)
			if _, err := io.ReadFull(a.c, body); err != nil {
				return err
			}
			if stream == 1 && !heard {
				heard = true
				a.first <- string(body)
			}
		}
	}
}

func (a *attacker) register(t *testing.T, s *kinds.Site) {
	t.Helper()
	var body bytes.Buffer
	if err := wire.WriteMessage(&body, asDevice(s, wire.NewID().String())); err != nil {
		t.Fatal(err)
	}
	a.send(append(frame(window, syn, 1, link.Window-256<<10), sized(0, 1, body.Bytes())...))
	select {
	case answer := <-a.first:
		if !strings.Contains(answer, `"registered"`) {
			t.Fatalf("the registration was answered with %q", answer)
		}
	case err := <-a.over:
		t.Fatalf("the registration was not taken: %v", err)
	case <-time.After(kinds.Patience):
		t.Fatal("the registration was not answered")
	}
}

// send may fail: the broker hangs up when it has read enough.
func (a *attacker) send(b []byte) { _, _ = a.c.Write(b) }

// mark is the last ping of each row; what is answered lives.
const mark = 0xabcdef

// livesFirst orders the rows: who is idle for long is dead, too.
func livesFirst() []string {
	rows := hostileFrames()
	return slices.SortedFunc(maps.Keys(rows), func(a, b string) int {
		return cmp.Or(-cmp.Compare(fmt.Sprint(rows[a].lives), fmt.Sprint(rows[b].lives)), strings.Compare(a, b))
	})
}

// judge wants the session to end, or to answer.
func (a *attacker) judge(t *testing.T, lives bool) {
	t.Helper()
	timeout := time.NewTimer(kinds.Patience)
	defer timeout.Stop()
	if lives {
		select {
		case <-a.pong:
		case <-timeout.C:
			t.Errorf("after %v there is no answer", kinds.Patience)
		case err := <-a.over:
			if len(a.pong) == 0 {
				t.Errorf("the session ended with %v, though nothing bad had come", err)
			}
		}
		return
	}
	select {
	case <-a.over:
	case <-timeout.C:
		t.Errorf("after %v the session is not over", kinds.Patience)
	}
}

// FuzzFrames: whatever bytes come, on either side of a session, it ends with an
// error when they do, and nothing waits for it any more.
func FuzzFrames(f *testing.F) {
	for _, row := range hostileFrames() {
		f.Add(true, row.bytes)
		f.Add(false, row.bytes)
	}
	f.Fuzz(func(t *testing.T, server bool, in []byte) {
		near, far := net.Pipe()
		side := link.Client
		if server {
			side = link.Server
		}
		sess, err := side(carrier.NewCarrier(near, carrier.TLS), link.Config{})
		if err != nil {
			t.Fatal(err)
		}
		drained := make(chan struct{})
		go func() { defer close(drained); _, _ = io.Copy(io.Discard, far) }()
		served := make(chan error, 1)
		go func() { served <- serve(sess) }()
		_, _ = far.Write(in)
		_ = far.Close()
		if err := <-served; !errors.Is(err, link.ErrSessionClosed) {
			t.Errorf("AcceptStream = %v, want the session's end", err)
		}
		<-sess.Done()
		if sess.Err() == nil {
			t.Error("the session ended without an error")
		}
		_ = sess.Close()
		<-drained
	})
}

// serve takes streams and reads them, as any end does.
func serve(sess *link.Session) error {
	var readers []chan struct{}
	for {
		st, err := sess.AcceptStream(context.Background())
		if err != nil {
			for _, r := range readers {
				<-r
			}
			return err
		}
		done := make(chan struct{})
		readers = append(readers, done)
		go func() { defer close(done); _, _ = io.Copy(io.Discard, reader{st}); _ = st.Close() }()
	}
}
