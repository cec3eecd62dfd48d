package endpoints

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/endpoints/pyjson"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type vector struct{ ID, Name, Input, Canonical, Sig string }

func vectors(t testing.TB) (secret []byte, vs map[string]vector) {
	t.Helper()
	text, err := os.ReadFile("testdata/pairing-hmac.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		SecretHex string `json:"secret_hex"`
		Vectors   []vector
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	if secret, err = hex.DecodeString(file.SecretHex); err != nil || len(secret) != 32 || len(file.Vectors) != 6 {
		t.Fatalf("pairing-hmac.json: %v, %d vectors", err, len(file.Vectors))
	}
	vs = map[string]vector{}
	for _, v := range file.Vectors {
		vs[v.ID] = v
	}
	return secret, vs
}

// withSig puts sig into a payload in place of whatever stands there.
func withSig(t testing.TB, text, sig string) []byte {
	t.Helper()
	quoted, err := json.Marshal(sig)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Appendf(nil, "%s,\"sig\":%s}", strings.TrimSuffix(text, "}"), quoted)
}

func TestVectors(t *testing.T) {
	secret, vs := vectors(t)
	for _, v := range vs {
		t.Run(v.ID, func(t *testing.T) {
			c, err := Canonical([]byte(v.Input))
			if err != nil || string(c) != v.Canonical {
				t.Errorf("Canonical = %s, %v\nwant %s", c, err, v.Canonical)
			}
			if sig, err := Sign(secret, []byte(v.Input)); err != nil || sig != v.Sig {
				t.Errorf("Sign = %s, %v; want %s", sig, err, v.Sig)
			}
			signed := withSig(t, v.Input, v.Sig)
			if !Verify(secret, signed) {
				t.Error("Verify refuses the vector's own signature")
			}
			other := bytes.Clone(secret)
			other[31] ^= 1
			if Verify(other, signed) {
				t.Error("Verify takes the signature for another secret's")
			}
		})
	}
}

func TestDerivedVectors(t *testing.T) {
	secret, vs := vectors(t)
	v2 := vs["V2"].Input
	var swapped map[string]json.RawMessage
	if err := json.Unmarshal([]byte(v2), &swapped); err != nil {
		t.Fatal(err)
	}
	var list []json.RawMessage
	if err := json.Unmarshal(swapped["endpoints"], &list); err != nil || len(list) != 2 {
		t.Fatal(err, len(list))
	}
	var err error
	if swapped["endpoints"], err = json.Marshal([]json.RawMessage{list[1], list[0]}); err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(swapped)
	if err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string]string{
		string(text): "gsGcZh8KIzHQAbMwY9k2A/vvdR05hFuAnvu8T+hZ+3A=",
		strings.Replace(v2, "2592000.0", "2592000", 1): "qyUt4oItUmkNkLSrdoLK7QUNjksPe5ZifPClCxDc8hI=",
	} {
		if sig, err := Sign(secret, []byte(in)); err != nil || sig != want {
			t.Errorf("Sign = %s, %v; want %s", sig, err, want)
		}
	}
}

func TestVerifyRefuses(t *testing.T) {
	secret, vs := vectors(t)
	v := vs["V4"]
	raw := strings.TrimSuffix(v.Sig, "=")
	stray := raw[:len(raw)-1] + string(raw[len(raw)-1]+1) + "=" // the same bytes with stray low bits
	for name, sig := range map[string]string{
		"empty": "", "no padding": raw, "stray bits": stray, "two signatures": v.Sig + v.Sig, "space": " " + v.Sig, "line break": v.Sig[:20] + "\n" + v.Sig[20:],
		"line break for a character": v.Sig[:20] + "\n" + v.Sig[21:], "url alphabet": strings.NewReplacer("+", "-", "/", "_").Replace(v.Sig), "hex": strings.Repeat("ab", 22),
	} {
		if Verify(secret, withSig(t, v.Input, sig)) {
			t.Errorf("%s: verified", name)
		}
	}
	for name, text := range map[string]string{
		"no sig": v.Input, "sig is a number": strings.TrimSuffix(v.Input, "}") + `,"sig":1}`, "not JSON": "{", "an array": "[]", "nothing": "", "a string": `"sig"`,
		"NaN beside it": `{"x":NaN,"sig":"` + v.Sig + `"}`,
	} {
		if Verify(secret, []byte(text)) {
			t.Errorf("%s: verified", name)
		}
	}
	signed := withSig(t, strings.Replace(vs["V1"].Input, `"sig":"IGNORED",`, "", 1), vs["V1"].Sig)
	if !Verify(secret, signed) {
		t.Fatal("the sample itself does not verify")
	}
	c, err := Canonical(signed)
	if err != nil {
		t.Fatal(err)
	}
	short := withSig(t, string(c), base64.StdEncoding.EncodeToString(mac(secret[:15], c)))
	if Verify(nil, signed) || Verify(secret[:15], short) {
		t.Error("verified with a secret too short to be one")
	}
	for i := range signed { // one changed byte anywhere: a different payload, or the same meaning
		changed := bytes.Clone(signed)
		changed[i] ^= 1
		if Verify(secret, changed) {
			t.Errorf("verified with byte %d (%q) changed to %q", i, signed[i], changed[i])
		}
	}
}

func TestCanonicalRefuses(t *testing.T) {
	for _, in := range []string{``, `[]`, `1`, `"x"`, `null`, `{"a":NaN}`, `{"a":Infinity}`, `{"a":-Infinity}`, `{"a":1e400}`, `{"sig":1e400}`, `{} {}`} {
		if c, err := Canonical([]byte(in)); !errors.Is(err, pyjson.ErrSyntax) {
			t.Errorf("Canonical(%s) = %s, %v", in, c, err)
		}
	}
	long := `{"a":"` + strings.Repeat("\u007f", pyjson.MaxText/3) + `"}` // grows sixfold
	if _, err := Canonical([]byte(long)); !errors.Is(err, pyjson.ErrSyntax) {
		t.Errorf("a canonical form over the bound: %v", err)
	}
	if _, err := Sign(make([]byte, 15), []byte("{}")); err == nil {
		t.Error("signed with 15 bytes")
	}
	if c, err := Canonical([]byte(`{"\u0073ig":1,"a":{"sig":2}}`)); err != nil || string(c) != `{"a":{"sig":2}}` {
		t.Errorf("sig by an escaped name: %s, %v", c, err)
	}
}

func FuzzCanonical(f *testing.F) {
	secret, vs := vectors(f)
	for _, v := range vs {
		f.Add([]byte(v.Input))
		f.Add(withSig(f, v.Input, v.Sig))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		c, err := Canonical(in)
		if err != nil {
			if Verify(secret, in) {
				t.Error("verified what has no canonical form")
			}
			return
		}
		if twice, err := Canonical(c); err != nil || !bytes.Equal(c, twice) {
			t.Errorf("canonical %q, then %q, %v", c, twice, err)
		}
		sig, err := Sign(secret, in)
		if err != nil {
			t.Fatal(err)
		}
		if string(c) != "{}" && !Verify(secret, withSig(t, string(c), sig)) {
			t.Errorf("own signature over %q refused", c)
		}
	})
}

func TestSecretFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	path := filepath.Join(dir, "hermes-relay-qr-secret")
	first, err := LoadOrCreateSecret(path)
	if err != nil || len(first) != 32 || bytes.Equal(first, make([]byte, 32)) {
		t.Fatalf("%d bytes, %v", len(first), err)
	}
	wantMode(t, path, 0o600)
	wantMode(t, dir, 0o700)
	if again, err := LoadOrCreateSecret(path); err != nil || !bytes.Equal(first, again) {
		t.Errorf("a second read differs: %v", err)
	}
	for size, kept := range map[int]bool{0: false, 15: false, 16: true, 33: true} {
		old := bytes.Repeat([]byte("x"), size)
		if err := os.WriteFile(path, old, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, 0o644); err != nil {
			t.Fatal(err)
		}
		got, err := LoadOrCreateSecret(path)
		if err != nil || kept != bytes.Equal(got, old) || !kept && len(got) != 32 {
			t.Errorf("a file of %d bytes: kept %v, %d bytes, %v", size, bytes.Equal(got, old), len(got), err)
		}
		wantMode(t, path, 0o600)
	}
	// Whoever comes second takes what the first one made.
	if err := replaceFile(path, []byte("mine"), false); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a new secret over an existing one: %v", err)
	}
	wantFiles(t, dir, 1) // no temporary files left
}

func TestSecretFileRefuses(t *testing.T) {
	dir := t.TempDir()
	big := filepath.Join(dir, "big")
	if err := os.WriteFile(big, make([]byte, maxSecret+1), 0o600); err != nil {
		t.Fatal(err)
	}
	shared := filepath.Join(dir, "shared")
	if err := os.Mkdir(shared, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(shared, 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{big, dir, filepath.Join(shared, "secret"), filepath.Join(big, "secret")} {
		if got, err := LoadOrCreateSecret(path); err == nil {
			t.Errorf("%s: %d bytes", path, len(got))
		}
	}
	wantFiles(t, shared, 0)
}

func TestSecretFileRace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sub", "secret")
	var wg sync.WaitGroup
	got := make([][]byte, 16)
	for i := range got {
		wg.Go(func() {
			var err error
			if got[i], err = LoadOrCreateSecret(path); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for i := range got {
		if len(got[i]) != 32 || !bytes.Equal(got[0], got[i]) {
			t.Fatal("two callers have different secrets")
		}
	}
	wantFiles(t, filepath.Dir(path), 1)
}

func wantMode(t *testing.T, path string, want os.FileMode) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := info.Mode().Perm(); got != want {
		t.Errorf("%s has mode %o, want %o", path, got, want)
	}
}

func wantFiles(t *testing.T, dir string, want int) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(list) != want {
		t.Errorf("%s has %d entries, want %d: %v", dir, len(list), want, list)
	}
}
