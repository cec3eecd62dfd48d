package session

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestParseTTL(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"never": Never, "NEVER ": Never, "0": Never, "0d": Never, "1d": day, " 7D": 7 * day, "30d": 30 * day,
		"90d": 90 * day, "1y": 365 * day, "3600": time.Hour, "5m": 5 * time.Minute, "2w": 14 * day, "12h": 12 * time.Hour, "9s": 9 * time.Second,
	} {
		if got, err := ParseTTL(in); err != nil || got != want {
			t.Errorf("ParseTTL(%q) = %v, %v; want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "1.5h", "-1d", "1mo", "d", "+1d", "1 d", "1dd", "٣d", "1e3", "0x10", "101y", "99999999999999999999", "1\n"} {
		if in == "1\n" { // blanks around are trimmed, as for the Python peer
			continue
		}
		if got, err := ParseTTL(in); err == nil {
			t.Errorf("ParseTTL(%q) = %v, want an error", in, got)
		}
	}
}

func TestParseGrants(t *testing.T) {
	for in, want := range map[string]map[string]time.Duration{
		"":                                {},
		" , ,":                            {},
		"terminal=1d,dashboard":           {"terminal": day, "dashboard": Never},
		" terminal = 1d , terminal=2d":    {"terminal": 2 * day},
		"voice:stt=never,something-new=0": {"voice:stt": Never, "something-new": Never},
	} {
		if got, err := ParseGrants(in); err != nil || !cmp.Equal(got, want) {
			t.Errorf("ParseGrants(%q) = %v, %v; want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"terminal", "=1d", "terminal=", "terminal=1d=2d", "a b=1d", "t\x1b[2J=1d", strings.Repeat("x", 65) + "=1d"} {
		if got, err := ParseGrants(in); err == nil {
			t.Errorf("ParseGrants(%q) = %v, want an error", in, got)
		}
	}
}

func TestFormatTTL(t *testing.T) {
	for want, d := range map[string]time.Duration{"indefinitely": Never, "1 year": 365 * day, "30 days": 30 * day, "1 hour": time.Hour, "90 seconds": 90 * time.Second} {
		if got := FormatTTL(d); got != want {
			t.Errorf("FormatTTL(%v) = %q, want %q", d, got, want)
		}
	}
}

func FuzzParseTTL(f *testing.F) {
	for _, s := range []string{"never", "30d", "1y", "0", "1.5h", "9223372036854775807", "100y"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		d, err := ParseTTL(in)
		if err == nil && checkTTL(d) != nil {
			t.Errorf("ParseTTL(%q) = %v, which no policy may hold", in, d)
		}
	})
}

func FuzzParseGrants(f *testing.F) {
	for _, s := range []string{"terminal=1d,dashboard", "a=1,b=2", "=,=", "voice:stt=never"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		grants, err := ParseGrants(in)
		if err != nil {
			return
		}
		if _, err := newPolicy(day, grants); err != nil {
			t.Errorf("ParseGrants(%q) gave what cannot be granted: %v", in, err)
		}
	})
}

func TestGrantsNeverOutliveTheSession(t *testing.T) {
	now := newClock().Now()
	rapid.Check(t, func(t *rapid.T) {
		ttl := rapid.Custom(func(t *rapid.T) time.Duration {
			if rapid.Bool().Draw(t, "never") {
				return Never
			}
			return time.Duration(rapid.Int64Range(1, int64(maxTTL/time.Second)).Draw(t, "seconds")) * time.Second
		})
		grants := rapid.MapOf(rapid.StringMatching(`[a-z:]{1,10}`), ttl).Draw(t, "grants")
		p, err := newPolicy(ttl.Draw(t, "ttl"), grants)
		if err != nil {
			t.Fatal(err)
		}
		end, got := p.session(now)
		for n, g := range got {
			if g.After(end) {
				t.Errorf("grant %s ends %v, after the session: %v", n, g, end)
			}
		}
	})
}

func TestDefaultGrants(t *testing.T) {
	now := newClock().Now()
	p, err := newPolicy(90*day, nil)
	if err != nil {
		t.Fatal(err)
	}
	end, got := p.session(now)
	want := map[string]time.Time{"relay": end, "api": end, "dashboard": end, "chat": end, "voice:config": end, "voice:stt": end,
		"voice:tts": end, "voice:realtime": end, "terminal": now.Add(30 * day), "bridge": now.Add(7 * day), "tui": now.Add(30 * day)}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	p, _ = newPolicy(90*day, map[string]time.Duration{"dashboard": day})
	_, got = p.session(now)
	if _, ok := got["api"]; ok || !got["dashboard"].Equal(now.Add(day)) || got["chat"].IsZero() {
		t.Errorf("naming one namespace gave %v: want that one only, and the channels", got)
	}
	if _, err := newPolicy(0, nil); err == nil {
		t.Error("a policy of no time was accepted")
	}
}

// Every byte that is used gives each character equally often.
func TestDrawCodeUnbiased(t *testing.T) {
	count := make(map[byte]int)
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	r := bytes.NewReader(bytes.Repeat(all, 7))
	for {
		// six bytes kept of each read of sixteen: feed one byte in six places
		s, err := drawCode(io.MultiReader(r))
		if err != nil {
			break
		}
		for _, c := range []byte(s) {
			count[c]++
		}
	}
	for _, c := range []byte(codeAlphabet) {
		if count[c] == 0 {
			t.Errorf("%c is never drawn", c)
		}
	}
	if len(count) != len(codeAlphabet) {
		t.Errorf("%d characters drawn, want %d", len(count), len(codeAlphabet))
	}
	for b := range 256 { // one byte at a time: who is taken, and as what
		s, err := drawCode(bytes.NewReader(bytes.Repeat([]byte{byte(b)}, 16)))
		if taken := err == nil; taken != (b < 252) {
			t.Errorf("byte %d taken: %v", b, taken)
		} else if taken && s != strings.Repeat(string(codeAlphabet[b%36]), 6) {
			t.Errorf("byte %d gives %q", b, s)
		}
	}
}

func TestMintAvoidsCollision(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	s.codes.rand = io.MultiReader(bytes.NewReader(bytes.Repeat([]byte{0}, 16*3)), bytes.NewReader(bytes.Repeat([]byte{1}, 16*40)))
	if a, b := mint(t, s, Mint{}), mint(t, s, Mint{}); a != "AAAAAA" || b != "BBBBBB" {
		t.Errorf("codes %q and %q: the second must not repeat the first", a, b)
	}
	if _, _, err := s.MintCode(Mint{}); err == nil {
		t.Error("a random source that repeats itself was believed")
	}
}

func TestCodeOnce(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	code := mint(t, s, Mint{})
	var wins atomic.Int32
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			_, _, err := s.Authenticate(AuthRequest{PairingCode: code, DeviceID: string(rune('a' + i))},
				Peer{Source: Source{Key: "192.0.2." + string(rune('0'+i%10))}})
			if err == nil {
				wins.Add(1)
			}
		})
	}
	wg.Wait()
	if wins.Load() != 1 || len(s.Devices()) != 1 {
		t.Errorf("one code paired %d times, %d devices", wins.Load(), len(s.Devices()))
	}
}

func TestCodeForms(t *testing.T) {
	c := newClock()
	s := open(t, t.TempDir(), Options{Now: c.Now})
	code := mint(t, s, Mint{})
	if _, _, err := s.Authenticate(AuthRequest{PairingCode: "  " + strings.ToLower(code) + "\n", DeviceID: "d"}, phone); err != nil {
		t.Errorf("lower case with blanks: %v", err)
	}
	code = mint(t, s, Mint{})
	c.add(10 * time.Minute)
	_, _, err := s.Authenticate(AuthRequest{PairingCode: code, DeviceID: "d"}, phone)
	refused(t, err)
	for _, bad := range []string{"ABC12", "ABC1234", "ABC12!", "ABCı23", "ÀBC12", ""} {
		if got, ok := normalCode(bad); ok {
			t.Errorf("normalCode(%q) = %q", bad, got)
		}
	}
}

func TestCancelCode(t *testing.T) {
	var ends []CodeEnd
	s := open(t, t.TempDir(), Options{OnCode: func(e CodeEnd) { ends = append(ends, e) }})
	code := mint(t, s, Mint{PairingID: "p1"})
	if !s.CancelCode(strings.ToLower(code)) || s.CancelCode(code) {
		t.Error("a live code is cancelled once")
	}
	_, _, err := s.Authenticate(AuthRequest{PairingCode: code}, phone)
	refused(t, err)
	pair(t, s, "d", Mint{PairingID: "p2"})
	if diff := cmp.Diff([]CodeEnd{{"p1", CodeCancelled}, {"p2", CodeUsed}}, ends); diff != "" {
		t.Error(diff)
	}
}

// 300 wrong guesses, from wherever they come, void a code; pair hears of it.
func TestGuessesVoidCode(t *testing.T) {
	var ends []CodeEnd
	c := newClock()
	s := open(t, t.TempDir(), Options{Now: c.Now, OnCode: func(e CodeEnd) { ends = append(ends, e) }})
	code := mint(t, s, Mint{PairingID: "p1"})
	wrong := "AAAAAA"
	if code == wrong {
		wrong = "BBBBBB"
	}
	for i := range 300 {
		if i%50 == 0 {
			c.add(61 * time.Second) // the broker as a whole has 60 a minute
		}
		p := Peer{Source: Source{Kind: Reach, Broker: "b", Key: "tag" + string(rune('A'+i/5))}}
		if i == 299 && len(ends) != 0 {
			t.Fatal("voided too early")
		}
		_, _, err := s.Authenticate(AuthRequest{PairingCode: wrong}, p)
		refused(t, err)
	}
	if diff := cmp.Diff([]CodeEnd{{"p1", CodeVoided}}, ends); diff != "" {
		t.Error(diff)
	}
	_, _, err := s.Authenticate(AuthRequest{PairingCode: code}, phone)
	refused(t, err)
}

// Many sockets at once buy no more guesses than one.
func TestGuessesAtOnce(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	code := mint(t, s, Mint{})
	wrong := "AAAAAA"
	if code == wrong {
		wrong = "BBBBBB"
	}
	start := make(chan struct{})
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			<-start
			_, _, _ = s.Authenticate(AuthRequest{PairingCode: wrong}, phone)
		})
	}
	close(start)
	wg.Wait()
	if n := s.codes.live[0].guesses; n != 10 {
		t.Errorf("%d guesses were looked at, want 10", n)
	}
}

// A broker that invents tags gets 60 guesses a minute, and is then deaf to the
// right code as well; a direct peer is not.
func TestBrokerCannotGuessOn(t *testing.T) {
	c := newClock()
	s := open(t, t.TempDir(), Options{Now: c.Now})
	code := mint(t, s, Mint{})
	for i := range 60 {
		_, _, err := s.Authenticate(AuthRequest{PairingCode: "ZZZZZ" + string(rune('0'+i%10))},
			Peer{Source: Source{Kind: Reach, Broker: "b", Key: string(rune(0x4e00 + i))}})
		refused(t, err)
	}
	_, _, err := s.Authenticate(AuthRequest{PairingCode: code}, Peer{Source: Source{Kind: Reach, Broker: "b", Key: "honest"}})
	refused(t, err)
	if _, _, err := s.Authenticate(AuthRequest{PairingCode: code, DeviceID: "d"}, phone); err != nil {
		t.Errorf("the direct peer pays for the broker: %v", err)
	}
}

func TestMintBounded(t *testing.T) {
	s := open(t, t.TempDir(), Options{Limits: Limits{Codes: 2}})
	mint(t, s, Mint{})
	mint(t, s, Mint{})
	if _, _, err := s.MintCode(Mint{}); !errors.Is(err, ErrFull) {
		t.Errorf("third code: %v, want %v", err, ErrFull)
	}
}
