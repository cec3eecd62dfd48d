package session

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	codeAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
	codeLen      = 6
)

// Mint is what a new pairing code will give to the device that uses it.
type Mint struct {
	TTL    time.Duration            // life of its sessions; 0: Limits.SessionTTL; [Never] for no end
	Grants map[string]time.Duration // as [ParseGrants] gives; nil: the defaults
	// PairingID is the caller's name for this code, such as the pairing id of
	// the bootstrap published with it; it comes back in [Joined] and [CodeEnd].
	PairingID string
	// TransportHint is told to the device in auth.ok; empty: wss.
	TransportHint string
	// DeviceID names the device this code is for, when the operator knows it:
	// blocks on sources where that device failed are lifted, and on no other.
	DeviceID string
}

// A code is a live pairing code. The code itself is not kept: a keyed digest
// tells whether a guess is right and is no use to who reads our memory later.
type code struct {
	mac       digest
	pairingID string
	hint      string
	policy    policy
	expires   time.Time
	guesses   int // wrong codes seen while this one lived
}

type codes struct {
	mu   sync.Mutex
	key  [32]byte
	rand io.Reader
	live []*code
}

func newCodes() *codes {
	c := &codes{rand: rand.Reader}
	_, _ = rand.Read(c.key[:]) // never fails: the program ends first
	return c
}

// normalCode brings a code to its one form. What is no code at all is not a
// guess at one.
func normalCode(s string) (string, bool) {
	b := []byte(strings.TrimSpace(s))
	if len(b) != codeLen {
		return "", false
	}
	for i, c := range b {
		if 'a' <= c && c <= 'z' {
			b[i] = c - 'a' + 'A'
		}
		if strings.IndexByte(codeAlphabet, b[i]) < 0 {
			return "", false
		}
	}
	return string(b), true
}

// drawCode draws a code of which every character is equally likely: bytes
// beyond the last whole multiple of the alphabet are thrown away.
func drawCode(r io.Reader) (string, error) {
	const limit = 256 - 256%len(codeAlphabet)
	out := make([]byte, 0, codeLen)
	var b [16]byte
	for {
		if _, err := io.ReadFull(r, b[:]); err != nil {
			return "", fmt.Errorf("draw a pairing code: %w", err)
		}
		for _, c := range b {
			if int(c) < limit {
				out = append(out, codeAlphabet[int(c)%len(codeAlphabet)])
			}
			if len(out) == codeLen {
				return string(out), nil
			}
		}
	}
}

func (c *codes) mac(text string) (d digest) {
	h := hmac.New(sha256.New, c.key[:])
	h.Write([]byte(text))
	h.Sum(d[:0])
	return d
}

// mint adds e under a fresh code. Codes that ended meanwhile are returned.
func (c *codes) mint(e *code, now time.Time, limit int) (text string, ended []CodeEnd, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ended = c.expire(now)
	if len(c.live) >= limit {
		return "", ended, fmt.Errorf("%w: %d pairing codes are waiting to be used: cancel one or wait until it expires", ErrFull, limit)
	}
	for range 16 { // a collision has odds of 64 in 2 billion: more in a row is a broken source
		if text, err = drawCode(c.rand); err != nil {
			return "", ended, err
		}
		e.mac = c.mac(text)
		if c.find(e.mac) == nil {
			c.live = append(c.live, e)
			return text, ended, nil
		}
	}
	return "", ended, errors.New("session: no free pairing code could be drawn: the random source repeats itself")
}

// find compares with every live code, always all of them, so that the time
// taken says nothing.
func (c *codes) find(mac digest) (found *code) {
	for _, e := range c.live {
		if subtle.ConstantTimeCompare(e.mac[:], mac[:]) == 1 {
			found = e
		}
	}
	return found
}

// take uses up the code that text spells; at most one caller gets it. A wrong
// guess counts against every live code, since it was a guess at each.
func (c *codes) take(text string, now time.Time, guesses int) (*code, []CodeEnd) {
	norm, ok := normalCode(text)
	if !ok {
		return nil, nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	ended := c.expire(now)
	if e := c.find(c.mac(norm)); e != nil {
		c.remove(e)
		return e, ended
	}
	for _, e := range slices.Clone(c.live) {
		if e.guesses++; e.guesses >= guesses {
			c.remove(e)
			ended = append(ended, CodeEnd{e.pairingID, CodeVoided})
		}
	}
	return nil, ended
}

// restore puts back a code whose use could not be made durable.
func (c *codes) restore(e *code) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.live = append(c.live, e)
}

func (c *codes) cancel(text string) (*code, bool) {
	norm, ok := normalCode(text)
	if !ok {
		return nil, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.find(c.mac(norm))
	if e != nil {
		c.remove(e)
	}
	return e, e != nil
}

func (c *codes) remove(e *code) {
	c.live = slices.DeleteFunc(c.live, func(o *code) bool { return o == e })
}

// expire drops what has run out. The caller holds mu.
func (c *codes) expire(now time.Time) (ended []CodeEnd) {
	c.live = slices.DeleteFunc(c.live, func(e *code) bool {
		if now.Before(e.expires) {
			return false
		}
		ended = append(ended, CodeEnd{e.pairingID, CodeExpired})
		return true
	})
	return ended
}

func (c *codes) sweep(now time.Time) []CodeEnd {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.expire(now)
}

// next says when the next code runs out; ok is false when there is none.
func (c *codes) next() (next time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next = Forever
	for _, e := range c.live {
		next = earlier(next, e.expires)
	}
	return next, len(c.live) > 0
}

// Never is a lifetime without end.
const Never = time.Duration(math.MaxInt64)

// Forever is the end of what has no end. A far day and not the zero time, so
// that an end nobody set is one that has passed.
var Forever = time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC)

const (
	day = 24 * time.Hour

	// maxTTL keeps sums of times and lifetimes far from overflow.
	maxTTL = 100 * 365 * day

	maxGrants    = 64
	maxGrantName = 64
)

// Namespaces of the pinned origin that a grant can name.
const (
	NamespaceRelay     = "relay"
	NamespaceAPI       = "api"
	NamespaceDashboard = "dashboard"
)

var namespaces = []string{NamespaceRelay, NamespaceAPI, NamespaceDashboard}

// defaultGrants are what a pairing without grants of its own gives; none of
// them outlives the session.
var defaultGrants = map[string]time.Duration{
	NamespaceRelay:     Never,
	NamespaceAPI:       Never,
	NamespaceDashboard: Never,
	"chat":             Never,
	"voice:config":     Never,
	"voice:stt":        Never,
	"voice:tts":        Never,
	"voice:realtime":   Never,
	"terminal":         30 * day,
	"bridge":           7 * day,
	"tui":              30 * day,
}

// ParseTTL reads a lifetime as people type it: "never", digits for seconds, or
// digits with one unit of s m h d w y (a year is 365 days). "0" is never too.
func ParseTTL(s string) (time.Duration, error) {
	text := strings.ToLower(strings.TrimSpace(s))
	if text == "never" {
		return Never, nil
	}
	digits := strings.TrimRight(text, "smhdwy")
	unit := time.Second
	switch text[len(digits):] {
	case "", "s":
	case "m":
		unit = time.Minute
	case "h":
		unit = time.Hour
	case "d":
		unit = day
	case "w":
		unit = 7 * day
	case "y":
		unit = 365 * day
	default:
		return 0, badTTL(s)
	}
	if digits == "" || strings.Trim(digits, "0123456789") != "" { // no sign, no fraction, no other digits
		return 0, badTTL(s)
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n > int64(maxTTL/unit) {
		return 0, fmt.Errorf("lifetime %q is longer than 100 years: use never", clip(s, 32))
	}
	if n == 0 {
		return Never, nil
	}
	return time.Duration(n) * unit, nil
}

func badTTL(s string) error {
	return fmt.Errorf("%q is no lifetime: use never, seconds, or a whole number with s, m, h, d, w or y (30d)", clip(s, 32))
}

// ParseGrants reads "name=lifetime" items joined by commas. Blanks and empty
// items are ignored, of a name given twice the last counts, unknown names are
// kept. A namespace may stand alone ("dashboard"): as long as the session.
func ParseGrants(s string) (map[string]time.Duration, error) {
	grants := make(map[string]time.Duration)
	for item := range strings.SplitSeq(s, ",") {
		item = strings.TrimSpace(item)
		if item == "" {
			continue
		}
		name, ttl, timed := strings.Cut(item, "=")
		name = strings.TrimSpace(name)
		if !timed {
			if !slices.Contains(namespaces, name) {
				return nil, fmt.Errorf("grant %q needs a lifetime, as in %s=7d", clip(item, 32), clip(item, 32))
			}
			ttl = "never"
		}
		if err := checkGrantName(name); err != nil {
			return nil, err
		}
		d, err := ParseTTL(ttl)
		if err != nil {
			return nil, fmt.Errorf("grant %s: %w", name, err)
		}
		grants[name] = d
		if len(grants) > maxGrants {
			return nil, fmt.Errorf("more than %d grants", maxGrants)
		}
	}
	return grants, nil
}

// checkGrantName keeps names printable: they are shown on terminals.
func checkGrantName(name string) error {
	if name == "" {
		return errors.New("a grant has no name: write it as terminal=7d")
	}
	for _, c := range []byte(name) {
		if c <= ' ' || c >= 0x7f || c == ',' || c == '=' || c == '"' {
			return fmt.Errorf("grant name %q: use printable ASCII without blanks", clip(name, 32))
		}
	}
	if len(name) > maxGrantName {
		return fmt.Errorf("grant name %q is longer than %d characters", clip(name, 32), maxGrantName)
	}
	return nil
}

// FormatTTL says a lifetime for people: "indefinitely", "2 years", "30 days",
// "1 hour", "90 seconds".
func FormatTTL(d time.Duration) string {
	if d == Never {
		return "indefinitely"
	}
	for _, u := range []struct {
		d    time.Duration
		name string
	}{{365 * day, "year"}, {day, "day"}, {time.Hour, "hour"}} {
		if d >= u.d && d%u.d == 0 {
			return plural(int64(d/u.d), u.name)
		}
	}
	return plural(int64(d/time.Second), "second")
}

func plural(n int64, unit string) string {
	if n == 1 {
		return "1 " + unit
	}
	return fmt.Sprintf("%d %ss", n, unit)
}

// TTLSeconds is a lifetime as the pairing payload writes it: whole seconds, 0
// for one without end.
func TTLSeconds(d time.Duration) int64 {
	if d == Never {
		return 0
	}
	return int64(d / time.Second)
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// stamp is a time as it is kept: wall clock, UTC. A monotonic reading would
// make times compare differently before and after a restart.
func stamp(t time.Time) time.Time { return t.Round(0).UTC() }

// clip bounds text from outside before it is repeated in a message.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}
