package hermesagent

import (
	"bufio"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

func TestReadEvents(t *testing.T) {
	cut := errors.New("cut")
	for name, tt := range map[string]struct {
		in   io.Reader
		want []string
		err  error
	}{
		"two":             {strings.NewReader("data: a\n\nevent: x\ndata: b\n\n"), []string{"data: a", "event: x\ndata: b"}, nil},
		"nothing":         {strings.NewReader(""), nil, nil},
		"a comment":       {strings.NewReader(": keepalive\n\n"), []string{": keepalive"}, nil},
		"CR LF":           {strings.NewReader("data: a\r\n\r\n"), []string{"data: a"}, nil},
		"empty lines":     {strings.NewReader("\n\ndata: a\n\n\n\n"), []string{"data: a"}, nil},
		"one by one":      {iotest.OneByteReader(strings.NewReader("data: a\n\ndata: b\n\n")), []string{"data: a", "data: b"}, nil},
		"ends inside":     {strings.NewReader("data: a\n\ndata: b\n"), []string{"data: a"}, io.ErrUnexpectedEOF},
		"ends in a line":  {strings.NewReader("data: a\n\nda"), []string{"data: a"}, io.ErrUnexpectedEOF},
		"cut":             {io.MultiReader(strings.NewReader("data: a\n\n"), iotest.ErrReader(cut)), []string{"data: a"}, cut},
		"a line too long": {strings.NewReader(strings.Repeat("x", maxEvent+1)), nil, bufio.ErrTooLong},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			var err error
			for e, eventErr := range ReadEvents(tt.in) {
				if err = eventErr; err == nil {
					got = append(got, e.Text)
				}
			}
			if !slices.Equal(got, tt.want) || !errors.Is(err, tt.err) {
				t.Errorf("got %q, %v; want %q, %v", got, err, tt.want, tt.err)
			}
		})
	}
}

// An event must be there before the next one is: otherwise the measurement would
// call the reader's own waiting a delay of the path.
func TestEventsComeAtOnce(t *testing.T) {
	r, w := io.Pipe()
	read := make(chan Event)
	go func() {
		defer close(read)
		for e := range ReadEvents(r) {
			read <- e
		}
	}()
	for _, text := range []string{"data: a", "data: b"} {
		if _, err := io.WriteString(w, text+"\n\n"); err != nil {
			t.Fatal(err)
		}
		if e := <-read; e.Text != text {
			t.Errorf("got %q, want %q", e.Text, text)
		}
	}
	w.Close()
	if e, more := <-read; more {
		t.Errorf("%q after the end", e.Text)
	}
}

func TestDelays(t *testing.T) {
	at := func(ms int, text string) Event {
		return Event{Text: text, At: time.UnixMilli(int64(ms))}
	}
	got, err := Delays([]Event{at(10, "a"), at(20, "b")}, []Event{at(12, "a"), at(80, "b")})
	if want := []time.Duration{2 * time.Millisecond, 60 * time.Millisecond}; err != nil || !slices.Equal(got, want) {
		t.Errorf("Delays = %v, %v, want %v", got, err, want)
	}
	for name, seen := range map[string][]Event{
		"lost":    {at(12, "a")},
		"other":   {at(12, "a"), at(22, "c")},
		"swapped": {at(12, "b"), at(22, "a")},
		"doubled": {at(12, "a"), at(12, "a"), at(22, "b")},
	} {
		if _, err := Delays([]Event{at(10, "a"), at(20, "b")}, seen); err == nil {
			t.Errorf("an event that is %s goes unnoticed", name)
		}
	}
	if got, want := Spread([]time.Duration{3e6, 1e6, 2e6}), "n=3 min=1ms p50=2ms p95=2ms max=3ms"; got != want {
		t.Errorf("Spread = %s, want %s", got, want)
	}
}
