package connector

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// TestBackoff: at once, then a random part of a growing time that stays small
// enough for a host to be back within 15 s of any outage's end; a broker that
// names a time is obeyed, within reason.
func TestBackoff(t *testing.T) {
	broken := errors.New("broken")
	if got := backoff(0, broken); got != 0 {
		t.Errorf("the first retry waits %v", got)
	}
	for failures := 1; failures < 100; failures++ {
		var longest time.Duration
		for range 200 {
			longest = max(longest, backoff(failures, broken))
		}
		if bound := min(maxDelay, firstDelay<<min(failures-1, 10)); longest > bound || longest < bound/2 {
			t.Errorf("after %d failures the longest of 200 waits is %v, want up to %v", failures, longest, bound)
		}
	}
	for name, tt := range map[string]struct {
		refusal wire.RefusedError
		lo, hi  time.Duration
	}{
		"replaced":       {wire.RefusedError{Code: wire.CodeReplaced}, time.Minute, time.Minute},
		"a wait":         {wire.RefusedError{Code: wire.CodeRateLimited, RetryAfter: 30 * time.Second}, 30 * time.Second, 30 * time.Second},
		"a wait of days": {wire.RefusedError{Code: wire.CodeRateLimited, RetryAfter: 48 * time.Hour}, 5 * time.Minute, 5 * time.Minute},
		"another no":     {wire.RefusedError{Code: wire.CodeUnauthorized}, 0, 0},
	} {
		if got := backoff(0, fmt.Errorf("register: %w", &tt.refusal)); got < tt.lo || got > tt.hi {
			t.Errorf("%s: waits %v, want %v to %v", name, got, tt.lo, tt.hi)
		}
	}
}
