package session

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// breakDisk makes every save fail, for root too.
func breakDisk(t *testing.T, dir string) (mend func()) {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(dir, stateTemp, "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := os.RemoveAll(filepath.Join(dir, stateTemp)); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSurvivesRestart(t *testing.T) {
	dir, c := filepath.Join(t.TempDir(), "state"), newClock()
	s := open(t, dir, Options{Now: c.Now})
	sess, ok := pair(t, s, "phone-1", Mint{TTL: day})
	c.add(time.Hour)
	s.Touch(sess, "outbound_broker")
	want := s.Devices()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = open(t, dir, Options{Now: c.Now})
	if diff := cmp.Diff(want, s.Devices()); diff != "" {
		t.Error(diff)
	}
	if _, err := s.Check(ok.SessionToken); err != nil {
		t.Error(err)
	}
	if want[0].Path != "outbound_broker" || !want[0].LastSeen.Equal(c.Now()) {
		t.Errorf("last use %s by %q is lost", want[0].LastSeen, want[0].Path)
	}
	checkModes(t, dir)
}

func checkModes(t *testing.T, dir string) {
	t.Helper()
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, stateFile): 0o600} {
		if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want %v", path, fi.Mode().Perm(), err, want)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, stateTemp)); left != nil {
		t.Error("a temporary file is left")
	}
}

func TestOpenTightensModes(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	pair(t, s, "d", Mint{})
	_ = s.Close()
	_ = os.Chmod(dir, 0o755)
	_ = os.Chmod(filepath.Join(dir, stateFile), 0o644)
	open(t, dir, Options{})
	checkModes(t, dir)
}

// Seeing a device is not worth a write.
func TestTouchDoesNotWrite(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	sess, _ := pair(t, s, "d", Mint{})
	breakDisk(t, dir)
	before, _ := os.Stat(filepath.Join(dir, stateFile))
	for range 100 {
		s.Touch(sess, "plugin_proxy")
	}
	if after, _ := os.Stat(filepath.Join(dir, stateFile)); !after.ModTime().Equal(before.ModTime()) {
		t.Error("touching wrote the file")
	}
}

// The file holds digests: nothing a device could show.
func TestNothingRawAtRest(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	code := mint(t, s, Mint{})
	_, ok, err := s.Authenticate(AuthRequest{PairingCode: code, DeviceID: "d"}, phone)
	if err != nil {
		t.Fatal(err)
	}
	checkModes(t, dir) // as it was written, before any start corrects it
	b, err := os.ReadFile(filepath.Join(dir, stateFile))
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{ok.SessionToken, ok.RefreshToken, code} {
		if strings.Contains(string(b), secret) {
			t.Errorf("%q is in the file", secret)
		}
	}
	if d := digestOf(ok.SessionToken); !strings.Contains(string(b), mustText(d)) {
		t.Error("the digest is not there: this test looks at the wrong file")
	}
	uuid := regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$`)
	if !uuid.MatchString(ok.SessionToken) || len(ok.RefreshToken) != 43 {
		t.Error("tokens do not have the form that devices know")
	}
}

func mustText(d digest) string { b, _ := d.MarshalText(); return string(b) }

// A file that cannot be trusted stops this start and the next one, and stays.
func TestCorruptFile(t *testing.T) {
	good := func() string {
		dir := t.TempDir()
		s := open(t, dir, Options{})
		pair(t, s, "d", Mint{})
		_ = s.Close()
		b, _ := os.ReadFile(filepath.Join(dir, stateFile))
		return string(b)
	}()
	twice := strings.Replace(good, `"devices": [`, `"devices": [`+good[strings.Index(good, "  {"):strings.LastIndex(good, "\n ]")]+",", 1)
	for name, text := range map[string]string{
		"empty": "", "cut": good[:len(good)/2], "array": "[]", "null": "null", "newer": strings.Replace(good, `"version": 1`, `"version": 2`, 1),
		"no version": "{}", "more after it": good + "{}", "unknown member": strings.Replace(good, `"version": 1`, `"version": 1, "x": 1`, 1),
		"short digest": strings.Replace(good, `"token_sha256": "`, `"token_sha256": "00`, 1), "wrong type": strings.Replace(good, `"devices": [`, `"devices": [7,`, 1),
		"null device": strings.Replace(good, `"devices": [`, `"devices": [null,`, 1), "twice": twice, "huge": good + strings.Repeat(" ", 16<<20),
		"bad lifetime": strings.Replace(good, `"ttl": "720h0m0s"`, `"ttl": "-1s"`, 1),
	} {
		t.Run(name, func(t *testing.T) {
			if text == good {
				t.Fatal("the case damages nothing")
			}
			dir := t.TempDir()
			path := filepath.Join(dir, stateFile)
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			for range 2 {
				s, err := Open(dir, Options{})
				if err == nil {
					_ = s.Close()
					t.Fatal("started from a file that cannot be trusted")
				}
				if !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "pair again") {
					t.Errorf("error does not say what and where and what to do: %v", err)
				}
			}
			if b, _ := os.ReadFile(path); string(b) != text {
				t.Error("the file was changed")
			}
		})
	}
}

// What decodes encodes to what decodes to the same.
func FuzzStateFile(f *testing.F) {
	p, _ := newPolicy(day, nil)
	st := state{devices: make(map[string]*deviceRec), pending: []string{"x"}}
	d := &deviceRec{ID: "0123456789abcdef", DeviceID: "d", Policy: p, Refresh: &refreshRec{Token: digestOf("r")}}
	_ = d.addSession(digestOf("s"), newClock().Now(), 8)
	st.devices[d.ID] = d
	b, err := st.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(`{"version":1,"devices":[]}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		st, err := decodeState(in, Limits{}.withDefaults())
		if err != nil {
			return
		}
		out, err := st.encode()
		if err != nil {
			return // a year beyond 9999: refused at the next save
		}
		again, err := decodeState(out, Limits{}.withDefaults())
		if err != nil {
			t.Fatalf("what was written cannot be read: %v\n%s", err, out)
		}
		out2, _ := again.encode()
		if string(out) != string(out2) {
			t.Errorf("%s\nbecame\n%s", out, out2)
		}
		st.prune(newClock().Now())
	})
}

func TestClosedStore(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	sess, _ := pair(t, s, "d", Mint{})
	_ = s.Close()
	if _, err := s.Revoke(sess.Device.ID); !errors.Is(err, ErrClosed) {
		t.Errorf("revoke after close: %v", err)
	}
	if _, err := s.Track(sess, "", nil); !errors.Is(err, ErrClosed) {
		t.Errorf("track after close: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// Devices print as the JSON that the command line promises.
func TestDeviceJSON(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	pair(t, s, "d", Mint{})
	b, err := json.Marshal(s.Devices()[0])
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"id", "name", "grants", "path", "last_seen"} {
		if !strings.Contains(string(b), `"`+key+`":`) {
			t.Errorf("%s is missing: %s", key, b)
		}
	}
}
