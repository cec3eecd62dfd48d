package hermesagent

import (
	"bufio"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"time"
)

// maxEvent bounds one server-sent event. The agent's longest holds a whole answer.
const maxEvent = 1 << 20

// Event is one server-sent event as it stood on the wire, comments (the agent's
// keepalives) included.
type Event struct {
	Text string    // without the empty line that ends it
	At   time.Time // when that empty line had been read, with a monotonic reading
}

// ReadEvents gives the events of a stream, each as soon as it is complete. It
// ends at the end of the stream, or with an error: io.ErrUnexpectedEOF if the
// stream ends inside an event.
func ReadEvents(body io.Reader) iter.Seq2[Event, error] { return events(body, time.Now) }

// events stamps with a clock of the caller's.
func events(body io.Reader, now func() time.Time) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		lines := bufio.NewScanner(body)
		lines.Buffer(nil, maxEvent)
		var text []string
		for lines.Scan() {
			line := strings.TrimSuffix(lines.Text(), "\r")
			if line != "" {
				text = append(text, line)
				continue
			}
			if len(text) == 0 {
				continue // nothing to dispatch, says the format
			}
			if !yield(Event{Text: strings.Join(text, "\n"), At: now()}, nil) {
				return
			}
			text = nil
		}
		err := lines.Err()
		if err == nil && len(text) > 0 {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			yield(Event{}, fmt.Errorf("read server-sent events: %w", err))
		}
	}
}

// Delays compares a stream at two places: how much later than at the first did
// each event come at the second? It is an error if the events are not the same
// ones in the same order.
func Delays(first, second []Event) ([]time.Duration, error) {
	if len(first) != len(second) {
		return nil, fmt.Errorf("%d events were sent and %d seen", len(first), len(second))
	}
	out := make([]time.Duration, len(first))
	for i, e := range first {
		if second[i].Text != e.Text {
			return nil, fmt.Errorf("event %d was sent as %.200q and seen as %.200q", i, e.Text, second[i].Text)
		}
		out[i] = second[i].At.Sub(e.At)
	}
	return out, nil
}

// Spread says in one line how delays are distributed.
func Spread(delays []time.Duration) string {
	if len(delays) == 0 {
		return "no delays"
	}
	d := slices.Sorted(slices.Values(delays))
	at := func(q int) time.Duration { return d[(len(d)-1)*q/100].Round(10 * time.Microsecond) }
	return fmt.Sprintf("n=%d min=%v p50=%v p95=%v max=%v", len(d), at(0), at(50), at(95), at(100))
}
