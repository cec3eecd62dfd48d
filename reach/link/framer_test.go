package link

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"
	"testing/iotest"
)

// frame is a yamux frame as bytes.
func frame(typ byte, flags uint16, length uint32, body string) []byte {
	h := make([]byte, yamuxHeader, yamuxHeader+len(body))
	h[1] = typ
	binary.BigEndian.PutUint16(h[2:], flags)
	binary.BigEndian.PutUint32(h[4:], 1)
	binary.BigEndian.PutUint32(h[8:], length)
	return append(h, body...)
}

func join(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func TestFramerPassesWholeFramesUnchanged(t *testing.T) {
	in := join(frame(typeData, 0, 5, "hello"), frame(1, flagSYN, 1<<20, ""), frame(typeData, 0, 0, ""), frame(typePing, flagSYN, 7, ""), frame(typeData, 0, 3, "end"))
	for name, r := range map[string]io.Reader{"at once": bytes.NewReader(in), "a byte at a time": iotest.OneByteReader(bytes.NewReader(in))} {
		got, err := io.ReadAll(newFramer(r, 1<<20))
		if err != nil || !bytes.Equal(got, in) {
			t.Errorf("%s: %x, %v; want the bytes as they came", name, got, err)
		}
	}
}

// TestFramerHoldsBackPartOfAFrame: yamux must not see a header whose body has
// not arrived, because it would hold the stream's lock until it has.
func TestFramerHoldsBackPartOfAFrame(t *testing.T) {
	pr, pw := io.Pipe()
	f := newFramer(pr, 1<<20)
	got := make(chan int, 1)
	go func() {
		n, _ := f.Read(make([]byte, 64))
		got <- n
	}()
	whole := frame(typeData, 0, 5, "hello")
	if _, err := pw.Write(whole[:len(whole)-1]); err != nil {
		t.Fatal(err)
	}
	select {
	case n := <-got:
		t.Fatalf("%d bytes of a frame that is not whole", n)
	default:
	}
	if _, err := pw.Write(whole[len(whole)-1:]); err != nil {
		t.Fatal(err)
	}
	if n := <-got; n != len(whole) {
		t.Errorf("read %d bytes, want the frame", n)
	}
	_ = pw.Close()
}

func TestFramerRefusesWhatOnlyAHostilePeerSends(t *testing.T) {
	var pings [][]byte
	for range pingBurst + 10 {
		pings = append(pings, frame(typePing, flagSYN, 1, ""))
	}
	for name, tt := range map[string]struct {
		in   []byte
		want error
	}{
		"a frame beyond the window": {frame(typeData, 0, 1<<20+1, ""), errFrameTooLong},
		"a frame of 4 GiB":          {frame(typeData, 0, 1<<32-1, ""), errFrameTooLong},
		"a flood of pings":          {join(pings...), errPingFlood},
		"a frame cut in its body":   {frame(typeData, 0, 9, "half"), io.ErrUnexpectedEOF},
		"a frame cut in its header": {frame(typeData, 0, 9, "")[:7], io.ErrUnexpectedEOF},
	} {
		if _, err := io.ReadAll(newFramer(bytes.NewReader(tt.in), 1<<20)); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
}

func TestFramerLeavesAnswersToPingsAlone(t *testing.T) {
	var pongs [][]byte
	for range 10 * pingBurst {
		pongs = append(pongs, frame(typePing, 2, 1, ""))
	}
	if _, err := io.ReadAll(newFramer(bytes.NewReader(join(pongs...)), 1<<20)); err != nil {
		t.Errorf("answers to our own pings: %v", err)
	}
}

func FuzzFramer(f *testing.F) {
	f.Add(frame(typeData, 0, 5, "hello"))
	f.Add(join(frame(typePing, flagSYN, 7, ""), frame(typeData, 1, 3, "abc")))
	f.Add(frame(typeData, 0, 1<<31, "short"))
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := io.ReadAll(newFramer(bytes.NewReader(in), 4096))
		if !bytes.HasPrefix(in, got) {
			t.Errorf("read %x of %x", got, in)
		}
		if err == nil && len(got) != len(in) {
			t.Errorf("%d of %d bytes and no error", len(got), len(in))
		}
	})
}

// counting counts the writes it gets.
type counting struct {
	bytes.Buffer
	writes int
}

func (c *counting) Write(p []byte) (int, error) {
	c.writes++
	return c.Buffer.Write(p)
}

// TestJoinerJoinsHeaderAndBody: a header alone never leaves, and a frame is one
// write.
func TestJoinerJoinsHeaderAndBody(t *testing.T) {
	var out counting
	j := newJoiner(&out)
	done := make(chan struct{})
	go func() { j.run(); close(done) }()
	in := frame(typeData, 0, 5, "hello")
	for range 3 {
		_, _ = j.Write(in[:yamuxHeader])
		_, _ = j.Write(in[yamuxHeader:])
		j.flush()
	}
	_, _ = j.Write(frame(typePing, 0, 1, "")) // a header without a body leaves alone
	j.flush()
	if out.writes != 4 || out.Len() != 3*len(in)+yamuxHeader {
		t.Errorf("%d writes of %d bytes in all, want 4 of %d", out.writes, out.Len(), 3*len(in)+yamuxHeader)
	}
	j.close(ErrSessionClosed)
	<-done
	if _, err := j.Write(in); !errors.Is(err, ErrSessionClosed) {
		t.Errorf("Write after close = %v", err)
	}
}

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, io.ErrShortWrite }

func TestJoinerTellsWhatWentWrong(t *testing.T) {
	j := newJoiner(failing{})
	done := make(chan struct{})
	go func() { j.run(); close(done) }()
	_, _ = j.Write(frame(typePing, 0, 1, ""))
	<-done
	if _, err := j.Write(frame(typePing, 0, 1, "")); !errors.Is(err, io.ErrShortWrite) {
		t.Errorf("Write = %v, want the carrier's error", err)
	}
}
