package host_test

import (
	"bytes"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func ownerOnly(t *testing.T, dir string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		info, err := e.Info()
		if err == nil && info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v: others may open it", path, info.Mode())
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestStateIsOwnerOnly looks at all that a host with a device and a broker keeps.
func TestStateIsOwnerOnly(t *testing.T) {
	s := newSite(t)
	s.enroll(newBroker(t, s.ca))
	s.start()
	s.join(s.pair(host.PairRequest{}), "")
	ownerOnly(t, s.dir)
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	ownerOnly(t, s.dir)
	if left, err := filepath.Glob(filepath.Join(s.dir, ".*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %q, %v", left, err)
	}
}

func TestEpochCountsStarts(t *testing.T) {
	dir := t.TempDir()
	for want := int64(1); want < 4; want++ {
		if n, err := host.NextEpoch(dir); err != nil || n != want {
			t.Errorf("NextEpoch = %d, %v; want %d", n, err, want)
		}
	}
	for name, text := range map[string]string{"no number": "many", "empty": "", "negative": "-3", "at the end": "9223372036854775807", "half": "1 2"} {
		path := filepath.Join(dir, "epoch")
		write(t, path, text)
		if n, err := host.NextEpoch(dir); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: NextEpoch = %d, %v; want an error that names the file", name, n, err)
		}
		if left, _ := os.ReadFile(path); string(left) != text {
			t.Errorf("%s: the damaged file was replaced by %q", name, left)
		}
	}
}

func TestSecretIsNeverReplaced(t *testing.T) {
	dir := t.TempDir()
	first, err := host.LoadSecret(dir, "route-secret")
	if err != nil || len(first) != 32 {
		t.Fatalf("LoadSecret = %d bytes, %v", len(first), err)
	}
	again, err := host.LoadSecret(dir, "route-secret")
	if err != nil || !bytes.Equal(first, again) {
		t.Errorf("the second time it is another secret: %v", err)
	}
	ownerOnly(t, dir)
	path := filepath.Join(dir, "route-secret")
	for _, text := range []string{"", "short", strings.Repeat("x", 33)} {
		write(t, path, text)
		_, err := host.LoadSecret(dir, "route-secret")
		if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "backup") {
			t.Errorf("%d bytes: %v, want an error that names the file and says what to do", len(text), err)
		}
		if left, _ := os.ReadFile(path); string(left) != text {
			t.Errorf("%d bytes: the damaged file was replaced", len(text))
		}
		if text != "" && err != nil && strings.Contains(err.Error(), text) {
			t.Error("the error repeats the secret")
		}
	}
}

// TestDamagedStateStopsTheStart and is left as it is, whichever file it is.
func TestDamagedStateStopsTheStart(t *testing.T) {
	for _, name := range []string{"epoch", "route-secret", "brokers.json", "sessions/sessions.json", "identity/identity.pem"} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			s.start()
			if err := s.stop(); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(s.dir, filepath.FromSlash(name))
			if dir := filepath.Dir(path); dir != s.dir {
				if _, err := os.Stat(dir); err != nil {
					t.Fatal(err)
				}
			}
			write(t, path, "{damaged")
			if _, err := host.New(s.cfg); err == nil || !strings.Contains(err.Error(), filepath.Base(path)) {
				t.Errorf("New = %v, want an error that names %s", err, path)
			}
			if left, _ := os.ReadFile(path); string(left) != "{damaged" {
				t.Errorf("the damaged file was replaced by %q", left)
			}
		})
	}
}

// TestWriteFileIsAllOrNothing: what cannot be written leaves the old content
// and nothing beside it.
func TestWriteFileIsAllOrNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "state")
	if err := os.Mkdir(path, 0o700); err != nil { // nothing can be renamed over a folder
		t.Fatal(err)
	}
	write(t, filepath.Join(path, "in it"), "x")
	if err := host.WriteFile(path, []byte("new")); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("WriteFile = %v, want an error that names the file", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if err := host.WriteFile(filepath.Join(dir, "gone", "state"), nil); err == nil {
		t.Error("a file was written into a folder that is not there")
	}
}

func line(t *testing.T, url string) wire.HostLine {
	t.Helper()
	return wire.HostLine{URL: brokerURL(t, url), HostID: wire.NewID(), Token: wire.NewToken(), Name: "home"}
}

func enrolled(t *testing.T, e *host.Enrolled) []host.EnrolledBroker {
	t.Helper()
	list, err := e.List()
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestEnrolled(t *testing.T) {
	dir := t.TempDir()
	e, err := host.OpenEnrolled(dir)
	if err != nil || len(enrolled(t, e)) != 0 {
		t.Fatalf("OpenEnrolled of nothing: %v", err)
	}
	first := line(t, "wss://reach.example.com")
	for _, l := range []wire.HostLine{first, line(t, "wss://other.example.com:9444/base/v1/connect")} {
		if _, err := e.Add(l); err != nil {
			t.Fatal(err)
		}
	}
	list := enrolled(t, e)
	if len(list) != 2 || list[0].URL.String() != "wss://reach.example.com/v1/connect" || list[0].Token != first.Token || list[0].HostID != first.HostID {
		t.Fatalf("enrolled with %d brokers, want both, as phones spell them", len(list))
	}
	ownerOnly(t, dir)
	for _, spelling := range []string{"wss://reach.example.com", "wss://REACH.example.com:443/v1/connect"} {
		again := line(t, spelling)
		if _, err := e.Add(again); err != nil {
			t.Fatal(err)
		}
		if list = enrolled(t, e); len(list) != 2 || list[1].Token != again.Token {
			t.Errorf("%s: %d brokers, want its token replaced", spelling, len(list))
		}
	}
	other, err := host.OpenEnrolled(dir)
	if err != nil || len(enrolled(t, other)) != 2 {
		t.Errorf("read anew: %v", err)
	}
}

// TestPinnedBrokerIsRefused with the sentence that says what to do instead.
func TestPinnedBrokerIsRefused(t *testing.T) {
	e, err := host.OpenEnrolled(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	l := line(t, "wss://reach.example.com")
	l.Pin = "sha256/" + strings.Repeat("A", 43) + "="
	if _, err := e.Add(l); err == nil || !strings.Contains(err.Error(), "--tls-cert") {
		t.Errorf("Add = %v, want the sentence about --tls-cert", err)
	}
	if len(enrolled(t, e)) != 0 {
		t.Error("it was enrolled all the same")
	}
}

func TestUnenroll(t *testing.T) {
	for name, left := range map[string]int{
		"wss://reach.example.com": 2, "wss://reach.example.com/v1/connect": 2, "wss://Reach.Example.com:443/": 2,
		"reach.example.com": 2, "REACH.example.com:443": 2, "two.example.com:9444": 2,
		"two.example.com": 3, "nobody.example.com": 3, "": 3, "wss://two.example.com": 3, "reach.example.com:80": 3,
	} {
		t.Run(name, func(t *testing.T) {
			e, err := host.OpenEnrolled(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			for _, u := range []string{"wss://reach.example.com", "wss://two.example.com:9444", "wss://two.example.com:9445"} {
				if _, err := e.Add(line(t, u)); err != nil {
					t.Fatal(err)
				}
			}
			err = e.Remove(name)
			if n := len(enrolled(t, e)); n != left || (err == nil) != (left == 2) {
				t.Errorf("%d brokers left, %v; want %d", n, err, left)
			}
			if err != nil && !strings.Contains(err.Error(), "two.example.com:9445") {
				t.Errorf("the error does not say what there is: %v", err)
			}
		})
	}
	e, err := host.OpenEnrolled(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Add(line(t, "wss://reach.example.com")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(e.Remove("reach.example.com")); err != nil || len(enrolled(t, e)) != 0 {
		t.Errorf("the last one: %v", err)
	}
}

// TestDamagedListIsLeftAlone by everything that would write it.
func TestDamagedListIsLeftAlone(t *testing.T) {
	secret := wire.NewToken()
	for name, text := range map[string]string{
		"cut":           `{"version":1,"brokers":[{"url":"wss://reach.example.com/v1/connect","token":"` + secret,
		"newer":         `{"version":2}`,
		"no token":      `{"version":1,"brokers":[{"url":"wss://reach.example.com","host_id":"AAECAwQFBgcICQoLDA0ODw"}]}`,
		"bad URL":       `{"version":1,"brokers":[{"url":"http://reach.example.com","host_id":"AAECAwQFBgcICQoLDA0ODw","token":"` + secret + `"}]}`,
		"no host id":    `{"version":1,"brokers":[{"url":"wss://reach.example.com","token":"` + secret + `"}]}`,
		"something odd": `[]`,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			e, err := host.OpenEnrolled(dir)
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, "brokers.json")
			write(t, path, text)
			_, opened := host.OpenEnrolled(dir)
			_, added := e.Add(line(t, "wss://reach.example.com"))
			for _, err := range []error{opened, added, e.Remove("reach.example.com")} {
				if err == nil || !strings.Contains(err.Error(), path) || strings.Contains(err.Error(), secret) {
					t.Errorf("%v, want an error that names the file and no secret", err)
				}
			}
			if left, _ := os.ReadFile(path); string(left) != text {
				t.Error("the damaged list was replaced")
			}
		})
	}
}

type addr string

func (a addr) Network() string { return "tcp" }
func (a addr) String() string  { return string(a) }

type fakeListener struct {
	net.Listener
	addr addr
}

func (l fakeListener) Addr() net.Addr { return l.addr }

func TestAdvertised(t *testing.T) {
	for name, tt := range map[string]struct {
		named, listen, want []string
	}{
		"one listener":          {nil, []string{"192.168.1.5:9443"}, []string{"192.168.1.5:9443"}},
		"named first":           {[]string{"home.example.com"}, []string{"192.168.1.5:9000"}, []string{"home.example.com:9000", "192.168.1.5:9000"}},
		"own port":              {[]string{"home.example.com:443"}, []string{"192.168.1.5:9000"}, []string{"home.example.com:443", "192.168.1.5:9000"}},
		"IPv6 in any spelling":  {[]string{"fd00::1", "[fd00::2]", "[fd00::3]:1"}, []string{"[::1]:9443"}, []string{"[fd00::1]:9443", "[fd00::2]:9443", "[fd00::3]:1", "[::1]:9443"}},
		"each once":             {[]string{"192.168.1.5"}, []string{"192.168.1.5:9443", "192.168.1.5:9443"}, []string{"192.168.1.5:9443"}},
		"mapped":                {nil, []string{"[::ffff:192.168.1.5]:9443"}, []string{"192.168.1.5:9443"}},
		"several":               {nil, []string{"192.168.1.5:1", "10.0.0.1:2"}, []string{"192.168.1.5:1", "10.0.0.1:2"}},
		"named without any":     {[]string{"home.example.com"}, nil, []string{"home.example.com:9443"}},
		"not an address of TCP": {[]string{"home.example.com:1"}, []string{"somewhere"}, []string{"home.example.com:1"}},
	} {
		t.Run(name, func(t *testing.T) {
			var listeners []net.Listener
			for _, a := range tt.listen {
				listeners = append(listeners, fakeListener{addr: addr(a)})
			}
			if got := host.Advertised(tt.named, listeners); !slices.Equal(got, tt.want) {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
	if got := host.Advertised(nil, nil); len(got) != 1 || !strings.HasSuffix(got[0], ".local:9443") {
		t.Errorf("a host behind brokers only: %q, want one name of its own", got)
	}
	for _, got := range host.Advertised(nil, []net.Listener{fakeListener{addr: "[::]:9443"}}) {
		if h, p, err := net.SplitHostPort(got); err != nil || p != "9443" || h == "::" || h == "0.0.0.0" || host.ThisMachineOnly(got) {
			t.Errorf("a listener on every address gives %q", got)
		}
	}
}

func TestCheckAdvertise(t *testing.T) {
	good := []string{"home.example.com", "home.example.com:443", "203.0.113.7", "203.0.113.7:1", "fd00::1", "[fd00::1]", "[fd00::1]:65535"}
	if err := host.CheckAdvertise(good); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"", ":9443", "https://home.example.com", "home.example.com:", "home.example.com:0", "home.example.com:65536", "home.example.com:https", "a b", "[fd00::1", "home/path"} {
		if err := host.CheckAdvertise([]string{bad}); err == nil || !strings.Contains(err.Error(), "HOST:PORT") {
			t.Errorf("%q: %v, want a refusal", bad, err)
		}
	}
}

func TestThisMachineOnly(t *testing.T) {
	for text, want := range map[string]bool{"127.0.0.1:1": true, "[::1]:1": true, "localhost:1": true, "127.9.9.9:1": true, "192.168.1.1:1": false, "home.example.com:1": false, "nonsense": false} {
		if got := host.ThisMachineOnly(text); got != want {
			t.Errorf("%s: %v", text, got)
		}
	}
}
