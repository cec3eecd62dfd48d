package profile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/pins"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	aSession = "session-0a1b2c"
	aRefresh = "refresh-3d4e5f"
	aKey     = "sk-apikey-6789"
	aToken   = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
)

func full(name string) *Profile {
	return &Profile{
		Name: name, Pin: pins.Pin{1, 2, 3},
		Candidates: []endpoints.Candidate{
			{Role: endpoints.RolePluginProxy, Proxy: &endpoints.Proxy{
				URL: "https://192.168.1.10:9443", PinSHA256: pins.Pin{1, 2, 3}.String(), CertDER: "AAAA",
				Surfaces: []endpoints.Surface{endpoints.SurfaceRelay}}},
			{Role: "вне", Priority: 7, Broker: &endpoints.Broker{ProtocolVersion: 1, URL: "wss://b.example/v1/connect", HostID: "AAECAwQFBgcICQoLDA0ODw"}},
		},
		Routes: []Route{{BrokerURL: "wss://b.example/v1/connect", HostID: "AAECAwQFBgcICQoLDA0ODw", Kind: "route",
			CredentialID: "cred", Token: aToken, Expires: time.Unix(1790000000, 0).UTC()}},
		DeviceID: "AAECAwQFBgcICQoLDA0ODw", DeviceName: "laptop",
		Session: aSession, Refresh: aRefresh, APIKey: aKey, Expires: time.Unix(1790000000, 0).UTC(),
		Grants: map[string]time.Time{"terminal": time.Unix(1780000000, 0).UTC(), "chat": {}}, ServerVersion: "1.9.0",
		Paired: time.Unix(1770000000, 0).UTC(),
	}
}

func open(t *testing.T) *Store {
	t.Helper()
	s, err := Open(filepath.Join(t.TempDir(), "state"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func save(t *testing.T, s *Store, names ...string) {
	t.Helper()
	for _, n := range names {
		if err := s.Save(full(n)); err != nil {
			t.Fatal(err)
		}
	}
}

// Every field comes back, and full leaves none out: a field that is added and
// not stored, or stored and not read, fails here.
func TestRoundTrip(t *testing.T) {
	want := full("home")
	for i := range reflect.TypeFor[Profile]().NumField() {
		if reflect.ValueOf(*want).Field(i).IsZero() {
			t.Errorf("full() leaves %s out", reflect.TypeFor[Profile]().Field(i).Name)
		}
	}
	s := open(t)
	save(t, s, "home")
	got, err := s.Get("")
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(reveal(want), reveal(got)); d != "" {
		t.Error(d)
	}
}

// reveal makes secrets comparable and printable: they hide from cmp as well.
func reveal(p *Profile) map[string]any {
	out := map[string]any{"p": *p, "s": p.Session.Reveal(), "r": p.Refresh.Reveal(), "k": p.APIKey.Reveal()}
	for i, r := range p.Routes {
		out[fmt.Sprint("route", i)] = r.Token.Reveal()
	}
	return out
}

func TestSecretsDoNotShow(t *testing.T) {
	p := full("home")
	var log bytes.Buffer
	for _, h := range []slog.Handler{slog.NewTextHandler(&log, nil), slog.NewJSONHandler(&log, nil)} {
		slog.New(h).Info("x", "profile", p, "value", *p, "routes", p.Routes, "token", p.Routes[0].Token)
	}
	js, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	shown := fmt.Sprintf("%v %+v %#v %s %q %x %d %v %#v", p, *p, *p, p.Session, p.APIKey, p.Refresh, p.Session, p.Routes, p.Routes) +
		string(js) + log.String()
	for _, secret := range []string{aSession, aRefresh, aKey, aToken} {
		if strings.Contains(shown, secret) || strings.Contains(shown, fmt.Sprintf("%x", secret)) {
			t.Errorf("%s… shows in %s", secret[:4], shown)
		}
	}
	if text, err := encode(p); err != nil || !strings.Contains(string(text), aToken) {
		t.Errorf("the search would find nothing: %v", err)
	}
}

func TestFilesAreOwnerOnly(t *testing.T) {
	s := open(t)
	save(t, s, "home")
	if _, err := s.DeviceID(); err != nil {
		t.Fatal(err)
	}
	if err := s.Use("home"); err != nil {
		t.Fatal(err)
	}
	files := 0
	err := filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if d.IsDir() && info.Mode().Perm() != 0o700 || !d.IsDir() && info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		if !d.IsDir() {
			files++
		}
		return nil
	})
	if err != nil || files != 3 {
		t.Errorf("%d files, %v; want the profile, the device id and the pointer, and no temporary", files, err)
	}
}

func TestNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"home": true, "a": true, "my-host-2": true, strings.Repeat("a", MaxName): true,
		"": false, strings.Repeat("a", MaxName+1): false, "..": false, "a/b": false, `a\b`: false, "Home": false, "-a": false,
		"a-": false, "a.json": false, "a b": false, "é": false, "con": false, "com1": false, "lpt9": false, "com": true, "a\x00": false,
	} {
		if err := CheckName(name); (err == nil) != ok || err != nil && !errors.Is(err, ErrName) {
			t.Errorf("%q: %v", name, err)
		}
	}
	s := open(t)
	save(t, s, "home")
	for what, err := range map[string]error{
		"save": s.Save(full("../x")), "use": s.Use("../x"), "rename": s.Rename("home", "../x"), "rename from": s.Rename("../x", "a"),
		"remove": s.Remove("../x"), "get": func() error { _, err := s.Get("../x"); return err }(),
	} {
		if !errors.Is(err, ErrName) {
			t.Errorf("%s: %v, want %v", what, err, ErrName)
		}
	}
}

func TestCurrent(t *testing.T) {
	s := open(t)
	if _, err := s.Get(""); !errors.Is(err, ErrNotFound) {
		t.Errorf("empty store: %v", err)
	}
	save(t, s, "home", "work")
	if name, err := s.Current(); name != "home" || err != nil {
		t.Errorf("after the first save: %q, %v", name, err)
	}
	if err := s.Use("work"); err != nil {
		t.Fatal(err)
	}
	if err := s.Rename("work", "office"); err != nil {
		t.Fatal(err)
	}
	if name, err := s.Current(); name != "office" || err != nil {
		t.Errorf("the pointer did not follow the rename: %q, %v", name, err)
	}
	if err := s.Rename("home", "office"); !errors.Is(err, ErrExists) {
		t.Errorf("rename onto another: %v", err)
	}
	save(t, s, "third")
	if err := s.Remove("office"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Current(); !errors.Is(err, ErrNotFound) {
		t.Errorf("two left and none chosen: %v", err)
	}
	if err := s.Remove("third"); err != nil {
		t.Fatal(err)
	}
	if name, err := s.Current(); name != "home" || err != nil {
		t.Errorf("the only one left: %q, %v", name, err)
	}
	if err := s.Use("third"); !errors.Is(err, ErrNotFound) {
		t.Errorf("use of a removed one: %v", err)
	}
	if names, err := s.Names(); err != nil || !cmp.Equal(names, []string{"home"}) {
		t.Errorf("names: %v, %v", names, err)
	}
}

func TestDeviceID(t *testing.T) {
	s := open(t)
	a, err := s.DeviceID()
	if err != nil || len(a) != 22 {
		t.Fatalf("%q, %v", a, err)
	}
	if b, err := s.DeviceID(); b != a || err != nil {
		t.Errorf("second call: %q, %v; want %q", b, err, a)
	}
	if err := os.WriteFile(filepath.Join(s.dir, deviceIDFile), []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.DeviceID(); err == nil {
		t.Error("a damaged id was replaced: every host would see a new device")
	}
}

func TestByPinAndFreeName(t *testing.T) {
	s := open(t)
	save(t, s, "home")
	if p, err := s.ByPin(pins.Pin{1, 2, 3}); err != nil || p.Name != "home" {
		t.Errorf("%v, %v", p, err)
	}
	if _, err := s.ByPin(pins.Pin{9}); !errors.Is(err, ErrNotFound) {
		t.Errorf("unknown pin: %v", err)
	}
	for wish, want := range map[string]string{"home": "home-2", "Living Room.Box": "living-room-box", "": "hermes", "../..": "hermes", "日本": "hermes", "con": "con-2"} {
		if got := s.FreeName(wish); got != want {
			t.Errorf("FreeName(%q) = %q, want %q", wish, got, want)
		}
	}
	long := strings.Repeat("x", 60)
	save(t, s, strings.Repeat("x", MaxName))
	if got := s.FreeName(long); CheckName(got) != nil || !strings.HasSuffix(got, "-2") {
		t.Errorf("FreeName(long) = %q", got)
	}
}

// A file that cannot be read is an error with a way out that quotes nothing.
func TestDamaged(t *testing.T) {
	s := open(t)
	save(t, s, "home")
	path := filepath.Join(s.dir, profilesDir, "home.json")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"empty": "", "cut": string(whole[:len(whole)/2]), "other": `{"session":"` + aSession + `"}`, "null": "null",
		"no pin": `{"version":1}`, "wrong type": `{"version":1,"expires":"` + aSession + `"}`, "newer": `{"version":99}`, "huge": strings.Repeat(" ", maxFile+1),
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Get("home"); err == nil || strings.Contains(err.Error(), aSession) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestClone(t *testing.T) {
	p := full("home")
	c := p.Clone()
	c.Candidates[0].Role, c.Routes[0].Token, c.Grants["chat"] = "x", "y", time.Unix(1, 0)
	c.SetRoute(Route{BrokerURL: "wss://b.example/v1/connect", HostID: "AAECAwQFBgcICQoLDA0ODw", Token: "z"})
	if d := cmp.Diff(reveal(full("home")), reveal(p)); d != "" || len(c.Routes) != 1 || c.Routes[0].Token != "z" {
		t.Errorf("%s %d", d, len(c.Routes))
	}
	c.SetRoute(Route{BrokerURL: "wss://other.example/v1/connect"})
	if len(c.Routes) != 2 {
		t.Error("a route of another broker replaced one")
	}
}

func FuzzDecode(f *testing.F) {
	good, err := encode(full("home"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := decode(text)
		if err != nil {
			return
		}
		again, err := encode(p)
		if err != nil {
			return // larger than the limit, or a time that JSON cannot hold
		}
		q, err := decode(again)
		if err != nil {
			t.Fatal(err)
		}
		if thrice, err := encode(q); err != nil || !bytes.Equal(again, thrice) {
			t.Errorf("%v: %s, then %s", err, again, thrice)
		}
	})
}
