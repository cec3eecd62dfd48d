package wire

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"time"
)

// MaxExpiry is the last second of the year 9999, the last that RFC 3339 can say.
const MaxExpiry Expiry = 253402300799

// An Expiry is the second, in Unix time, from which a credential is no longer
// good: 1 to [MaxExpiry]. Zero is no expiry at all and is never on the wire.
type Expiry int64

// ExpiryAt returns the expiry at t, its fraction of a second dropped. A time
// outside 1970 to 9999 gives an Expiry that no message accepts.
func ExpiryAt(t time.Time) Expiry { return Expiry(t.Unix()) }

// Time returns the expiry as a UTC time.
func (e Expiry) Time() time.Time { return time.Unix(int64(e), 0).UTC() }

// Past says whether the credential has expired at now.
func (e Expiry) Past(now time.Time) bool { return !now.Before(e.Time()) }

// Valid says whether e can be on the wire.
func (e Expiry) Valid() bool { return 0 < e && e <= MaxExpiry }

// ParseExpiry reads a JSON value: a finite number (a fraction is dropped,
// which only ever ends a credential early) or a string in RFC 3339 with a zone.
func ParseExpiry(raw []byte) (Expiry, error) {
	e, ok := parseExpiry(raw)
	if !ok {
		return 0, fmt.Errorf("%w: an expiry is Unix seconds from 1 to %d, or RFC 3339 with a zone", ErrMalformed, MaxExpiry)
	}
	return e, nil
}

func parseExpiry(raw []byte) (Expiry, bool) {
	const longest = 64 // more than any sensible spelling needs
	if len(raw) == 0 || len(raw) > longest || !json.Valid(raw) {
		return 0, false
	}
	if s, ok := stringOf(raw); ok {
		var t time.Time
		if t.UnmarshalText([]byte(s)) != nil { // stricter than time.Parse: exactly RFC 3339
			return 0, false
		}
		e := ExpiryAt(t)
		return e, e.Valid()
	}
	v, err := strconv.ParseFloat(string(raw), 64) // seconds are far below 2^53: exact
	if err != nil || !(v >= 1 && v <= float64(MaxExpiry)) {
		return 0, false
	}
	return Expiry(math.Floor(v)), true
}

// MarshalJSON writes an integer.
func (e Expiry) MarshalJSON() ([]byte, error) {
	if !e.Valid() {
		return nil, fmt.Errorf("%w: an expiry is Unix seconds from 1 to %d", ErrMalformed, MaxExpiry)
	}
	return strconv.AppendInt(nil, int64(e), 10), nil
}

// UnmarshalJSON implements [json.Unmarshaler]; see [ParseExpiry].
func (e *Expiry) UnmarshalJSON(raw []byte) error {
	got, err := ParseExpiry(raw)
	if err == nil {
		*e = got
	}
	return err
}
