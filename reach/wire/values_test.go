package wire

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestID(t *testing.T) {
	id := NewID()
	if NewID() == id || id.IsZero() || len(id.String()) != IDLen {
		t.Fatalf("NewID = %v", id)
	}
	if got, err := ParseID(id.String()); err != nil || got != id {
		t.Errorf("ParseID = %v, %v", got, err)
	}
	b, err := json.Marshal(map[string]any{"id": id, "digest": DigestOf("x")})
	var back struct {
		ID     ID
		Digest Digest
	}
	if err != nil || json.Unmarshal(b, &back) != nil || back.ID != id || !back.Digest.Equal(DigestOf("x")) {
		t.Errorf("JSON %s came back as %+v (%v)", b, back, err)
	}
	for _, bad := range []string{
		"", "AAAAAAAAAAAAAAAAAAAAA", "AAAAAAAAAAAAAAAAAAAAAAA", "AAAAAAAAAAAAAAAAAAAAA=", "AAAAAAAAAAAAAAAAAAAAAB",
		"AAAAAAAAAAAAAAAAAAAAA\n", "\rAAAAAAAAAAAAAAAAAAAAA", "AAAAAAAAAA AAAAAAAAAAA", "++++++++++++++++++++++",
		"AAAAAAAAAAAAAAAAAAAAA\u00e9", strings.Repeat("A", 1<<20),
	} {
		before := id
		if err := id.UnmarshalText([]byte(bad)); !errors.Is(err, ErrMalformed) || id != before {
			t.Errorf("ParseID(%d bytes) = %v", len(bad), err)
		}
	}
}

// Each of the 64 possible last characters is tried: one in four is canonical
// for 32 bytes, one in sixteen for 16.
func TestOnlyCanonicalSpellings(t *testing.T) {
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	var ids, tokens, digests, raws int
	for _, c := range alphabet {
		short, long := strings.Repeat("A", 21)+string(c), strings.Repeat("A", 42)+string(c)
		if _, err := ParseID(short); err == nil {
			ids++
		}
		if CheckToken(long) == nil {
			tokens++
		}
		if _, err := ParseDigest(long); err == nil {
			digests++
		}
		if _, err := ParseRawToken(long); err == nil {
			raws++
		}
	}
	if ids != 4 || tokens != 16 || digests != 16 || raws != 16 {
		t.Errorf("accepted %d ids, %d tokens, %d digests, %d raw tokens; want 4, 16, 16, 16", ids, tokens, digests, raws)
	}
}

func TestTokens(t *testing.T) {
	token := NewToken()
	if err := CheckToken(token); err != nil || NewToken() == token || len(token) != TokenLen {
		t.Errorf("NewToken: %d characters, %v", len(token), err)
	}
	for name, tt := range map[string]struct {
		token string
		ok    bool
	}{
		"31":            {strings.Repeat("x", 31), false},
		"32":            {strings.Repeat("x", 32), true},
		"512":           {strings.Repeat("x", 512), true},
		"513":           {strings.Repeat("x", 513), false},
		"32 of 2 bytes": {strings.Repeat("é", 32), true},
		"16 of 2 bytes": {strings.Repeat("é", 16), false},
		"line break":    {strings.Repeat("x", 40) + "\n", false},
		"not UTF-8":     {strings.Repeat("x", 40) + "\xff", false},
		"replacement":   {strings.Repeat("x", 40) + "\ufffd", false},
	} {
		if err := CheckHostToken(tt.token); (err == nil) != tt.ok {
			t.Errorf("CheckHostToken(%s) = %v", name, err)
		}
	}
}

func TestDigest(t *testing.T) {
	const empty = "47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU" // SHA-256 of nothing, from FIPS 180-4 examples
	if got := DigestOf("").String(); got != empty {
		t.Errorf("DigestOf(\"\") = %s", got)
	}
	d, err := ParseDigest(empty)
	if err != nil || !d.Equal(DigestOf("")) || d.Equal(DigestOf("x")) {
		t.Errorf("ParseDigest = %v, %v", d, err)
	}
}

func TestExpiry(t *testing.T) {
	e := Expiry(1780000000)
	if e.Past(time.Unix(1779999999, 999999999)) || !e.Past(time.Unix(1780000000, 0)) {
		t.Error("an expiry is past from its second on, and not before")
	}
	if got := ExpiryAt(time.Unix(1780000000, 999)); got != e || !got.Time().Equal(time.Unix(1780000000, 0)) {
		t.Errorf("ExpiryAt = %d", got)
	}
	type doc struct {
		E Expiry `json:"e,omitzero"`
	}
	for in, want := range map[string]string{
		`{"e":1}`: `{"e":1}`, `{"e":1.9}`: `{"e":1}`, `{"e":17.8e8}`: `{"e":1780000000}`, `{}`: `{}`,
		`{"e":"9999-12-31T23:59:59Z"}`: `{"e":253402300799}`, `{"e": 253402300799 }`: `{"e":253402300799}`,
	} {
		var d doc
		if err := json.Unmarshal([]byte(in), &d); err != nil {
			t.Errorf("%s: %v", in, err)
		}
		if out, err := json.Marshal(d); err != nil || string(out) != want {
			t.Errorf("%s is written as %s, %v", in, out, err)
		}
	}
	for _, in := range []string{
		`NaN`, `Infinity`, `-Infinity`, `1e400`, `-1e400`, `0`, `-0`, `-5`, `0.99`, `253402300800`, `253402300799.1`, `1e18`, `""`, `"1"`,
		`"2026-01-01T00:00:00"`, `"2026-01-01"`, `"2026-1-01T00:00:00Z"`, `"2026-01-01T24:00:00Z"`, `"1970-01-01T00:00:00Z"`,
		`null`, `true`, `[]`, `{}`, `0x10`, `1_000`, `+5`, `inf`, ``, ` 5`, `5 `, `5,5`, strings.Repeat("1", 100),
	} {
		if got, err := ParseExpiry([]byte(in)); !errors.Is(err, ErrMalformed) {
			t.Errorf("ParseExpiry(%s) = %d, %v", in, got, err)
		}
	}
	if _, err := json.Marshal(Expiry(0)); err == nil {
		t.Error("the zero expiry was written")
	}
}

func TestCodes(t *testing.T) {
	for code := range meanings {
		if !code.Valid() {
			t.Errorf("%q is no code", code)
		}
	}
	for code, ok := range map[Code]bool{
		"": false, "a": true, "_": true, "host_busy": true, "Host": false, "a1": false, "a-b": false, "a b": false, "é": false, "a\n": false,
		Code(strings.Repeat("a", 32)): true, Code(strings.Repeat("a", 33)): false,
	} {
		if code.Valid() != ok {
			t.Errorf("%q valid = %v", code, !ok)
		}
	}
	err := fmt.Errorf("dial: %w", (&Error{Code: CodeDraining, RetryAfter: time.Minute, RequestID: "r"}).Refused())
	if CodeOf(err) != CodeDraining || CodeOf(errors.New("x")) != "" || CodeOf(nil) != "" {
		t.Errorf("CodeOf(%v) = %q", err, CodeOf(err))
	}
	if text := err.Error(); !strings.Contains(text, "draining") || !strings.Contains(text, "1m0s") {
		t.Errorf("the error says %q", text)
	}
	if got := (&Error1{CodeRevoked}).Refused(); got.Code != CodeRevoked || !strings.Contains(got.Error(), "pair again") {
		t.Errorf("Refused = %v", got)
	}
	if got := (&RefusedError{Code: "later_code"}).Error(); got != "refused: later_code" {
		t.Errorf("an unknown code says %q", got)
	}
}

func TestFrameBounds(t *testing.T) {
	full := AppendFrame(nil, sampleID(1), FlagData, make([]byte, MaxHostPayload))
	if _, _, p, err := ParseFrame(full); len(full) != MaxHostFrame || err != nil || len(p) != MaxHostPayload {
		t.Errorf("the largest frame has %d bytes: %v", len(full), err)
	}
	if _, _, _, err := ParseFrame(append(full, 0)); !errors.Is(err, ErrFrameSize) {
		t.Errorf("one byte more: %v", err)
	}
	small := AppendFrame(nil, sampleID(1), FlagData, []byte("x"))
	for n := range small {
		if _, _, _, err := ParseFrame(small[:n]); !errors.Is(err, ErrFrameSize) {
			t.Errorf("cut to %d bytes: %v", n, err)
		}
	}
	for f := range 256 {
		in := slices.Clone(small)
		in[1] = byte(f)
		if _, flags, _, err := ParseFrame(in); (err == nil) != (f == 2) || err == nil && flags != FlagData {
			t.Errorf("flags %d with a payload: %v", f, err)
		}
		in[0], in[1] = byte(f), byte(FlagData)
		if _, _, _, err := ParseFrame(in); (err == nil) != (f == 1) {
			t.Errorf("version %d: %v", f, err)
		}
	}
}

func TestSplitPayload(t *testing.T) {
	data := bytes.Repeat([]byte("0123456789"), 1<<18/10*9)
	for _, n := range []int{0, 1, MaxHostPayload, MaxHostPayload + 1, MaxClientFrame, len(data)} {
		var joined []byte
		for piece := range SplitPayload(data[:n], 0) {
			frame := AppendFrame(nil, ID{}, FlagData, piece)
			if _, _, p, err := ParseFrame(frame); err != nil || &p[0] == &piece[0] {
				t.Fatalf("a piece of %d of %d bytes: %v", len(piece), n, err)
			}
			joined = append(joined, piece...)
		}
		if !bytes.Equal(joined, data[:n]) {
			t.Errorf("%d bytes came back as %d", n, len(joined))
		}
	}
	if got := slices.Collect(SplitPayload([]byte("abcde"), 2)); len(got) != 3 || string(got[2]) != "e" {
		t.Errorf("SplitPayload = %q", got)
	}
}

func TestRaw(t *testing.T) {
	token := NewRawToken()
	if back, err := ParseRawToken(token.Text()); err != nil || back != token || token.IsZero() {
		t.Errorf("ParseRawToken = %v", err)
	}
	name := RawServerName(token)
	for _, s := range []string{name, strings.ToUpper(name)} {
		if got, ok := ParseRawServerName(s); !ok || got != token {
			t.Errorf("ParseRawServerName of our own name fails (%v)", ok)
		}
	}
	label, _, _ := strings.Cut(name, ".")
	if len(label) != 52 {
		t.Errorf("label of %d characters", len(label))
	}
	canonical := 0
	for _, c := range "abcdefghijklmnopqrstuvwxyz234567" {
		if _, ok := ParseRawServerName(strings.Repeat("a", 51) + string(c) + rawSuffix); ok {
			canonical++
		}
	}
	if canonical != 2 {
		t.Errorf("%d spellings of a last character, want 2", canonical)
	}
	for _, bad := range []string{
		"", "link.invalid", "raw.invalid", rawSuffix, name[1:], "a" + name, name + ".", label + ".raw.invalie", label, "1" + name[1:],
		strings.Repeat("a", 51) + "\n" + rawSuffix, "\u212a" + name[3:],
	} {
		if _, ok := ParseRawServerName(bad); ok {
			t.Errorf("%q is taken for a token", bad)
		}
	}
	for _, flags := range []RawFlags{0, RawPool} {
		b := AppendPreamble(nil, Preamble{flags, token})
		if got, err := ParsePreamble(b); err != nil || got.Flags != flags || got.Token != token || string(b[:4]) != "HRR2" {
			t.Errorf("ParsePreamble = %v, %v", got, err)
		}
		for n := range b {
			if _, err := ParsePreamble(b[:n]); err == nil || !IsPreamble(b[:n]) {
				t.Errorf("cut to %d bytes: %v", n, err)
			}
		}
	}
	if _, err := ParsePreamble(AppendPreamble(nil, Preamble{2, token})); err == nil {
		t.Error("unknown flags are accepted")
	}
	if IsPreamble([]byte{0x16}) || IsPreamble([]byte("HRR1")) || IsPreamble([]byte("GET ")) {
		t.Error("IsPreamble takes TLS, another version or HTTP")
	}
	if _, err := ParsePreamble(append([]byte("HRR1"), make([]byte, 36)...)); err == nil {
		t.Error("another magic is accepted")
	}
}

// Base64 of the standard alphabet is another text for the same bytes: refused.
func TestStandardBase64IsRefused(t *testing.T) {
	b := bytes.Repeat([]byte{0xfb}, 32)
	if err := CheckToken(base64.RawStdEncoding.EncodeToString(b)); err == nil {
		t.Error("CheckToken takes + and /")
	}
	if err := CheckToken(base64.RawURLEncoding.EncodeToString(b)); err != nil {
		t.Error(err)
	}
}
