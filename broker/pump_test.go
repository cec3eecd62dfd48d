package broker

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
)

// script is a source that gives one message a read and notes what it was asked.
type script struct {
	messages [][]byte
	last     error
	asked    []int // the sizes of the buffers
}

func (s *script) Read(p []byte) (int, error) {
	s.asked = append(s.asked, len(p))
	switch {
	case len(s.messages) == 0:
		return 0, s.last
	case len(p) == 0:
		return 0, nil
	}
	n := copy(p, s.messages[0])
	if s.messages[0] = s.messages[0][n:]; len(s.messages[0]) == 0 {
		s.messages = s.messages[1:]
	}
	return n, nil
}

type refuser struct{ err error }

func (r refuser) Write([]byte) (int, error) { return 0, r.err }

func TestPump(t *testing.T) {
	broken := errors.New("broken")
	long := bytes.Repeat([]byte("hermes "), 30_000)
	for name, tt := range map[string]struct {
		last error
		dst  io.Writer
		rerr error
		werr error
	}{
		"orderly end":       {io.EOF, &bytes.Buffer{}, nil, nil},
		"source fails":      {broken, &bytes.Buffer{}, broken, nil},
		"destination fails": {io.EOF, refuser{broken}, nil, broken},
		"both would fail":   {errors.New("not reached"), refuser{broken}, nil, broken},
	} {
		t.Run(name, func(t *testing.T) {
			src := &script{messages: [][]byte{[]byte("a"), long, []byte("b")}, last: tt.last}
			var count atomic.Int64
			rerr, werr := pump(tt.dst, src, &count)
			if !errors.Is(rerr, tt.rerr) || !errors.Is(werr, tt.werr) {
				t.Errorf("pump = %v, %v; want %v, %v", rerr, werr, tt.rerr, tt.werr)
			}
			want := "a" + string(long) + "b"
			if buf, ok := tt.dst.(*bytes.Buffer); ok && (buf.String() != want || count.Load() != int64(len(want))) {
				t.Errorf("%d bytes arrived, %d counted; want the %d that were sent", buf.Len(), count.Load(), len(want))
			}
			for i, n := range src.asked { // a source that has nothing is not given a buffer
				if empty := n == 0; empty != (i%2 == 0) && i < len(src.asked)-1 {
					t.Errorf("read %d had a buffer of %d bytes; want an empty one before each", i, n)
				}
			}
		})
	}
}

// endless gives n messages of a size, as a stream with a full window does.
type endless struct{ left, size int }

func (e *endless) Read(p []byte) (int, error) {
	if e.left == 0 {
		return 0, io.EOF
	}
	if len(p) == 0 {
		return 0, nil
	}
	e.left--
	return e.size, nil
}

// BenchmarkPump is what the splice itself costs for each message, whatever
// carries the streams: package bench measures the whole broker.
func BenchmarkPump(b *testing.B) {
	for _, size := range []int{1 << 10, bufferSize} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			b.SetBytes(int64(size))
			b.ReportAllocs()
			var count atomic.Int64
			if rerr, werr := pump(io.Discard, &endless{b.N, size}, &count); rerr != nil || werr != nil {
				b.Fatal(rerr, werr)
			}
		})
	}
}
