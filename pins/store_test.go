package pins

import (
	"bytes"
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io/fs"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

func TestLoadOrCreate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "deep", "identity")
	if _, err := Load(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("Load of nothing: %v", err)
	}
	id, err := LoadOrCreate(dir, []string{"home.example"}, now)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]fs.FileMode{dir: 0o700, filepath.Join(dir, identityFile): 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want mode %o", path, info, err, want)
		}
	}
	before, _ := os.ReadFile(filepath.Join(dir, identityFile))
	again, err := LoadOrCreate(dir, []string{"new.example"}, now)
	if err != nil {
		t.Fatal(err)
	}
	if again.Pin() != id.Pin() || !bytes.Equal(again.LeafDER(), id.LeafDER()) {
		t.Error("the second start has another identity")
	}
	if !again.Covers("new.example") || !again.Covers("home.example") {
		t.Errorf("covers %v", again.Authorities())
	}
	third, err := Load(dir)
	if err != nil || !slices.Equal(third.Authorities(), again.Authorities()) {
		t.Errorf("names after a restart: %v, %v; want %v", third.Authorities(), err, again.Authorities())
	}
	if after, _ := os.ReadFile(filepath.Join(dir, identityFile)); !bytes.Equal(before, after) {
		t.Error("the identity file was written again")
	}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".tmp") {
			t.Errorf("left behind: %s", e.Name())
		}
	}
}

// Two hosts objects on one folder, as two processes have them: neither loses
// the names of the other.
func TestAddHostsTakesUpOthers(t *testing.T) {
	dir := t.TempDir()
	a, err := LoadOrCreate(dir, []string{"home.example"}, now)
	if err != nil {
		t.Fatal(err)
	}
	b, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	for id, host := range map[*Identity]string{a: "a.example", b: "b.example"} {
		if _, err := id.AddHosts([]string{host}, now); err != nil {
			t.Fatal(err)
		}
	}
	c, err := Load(dir)
	if err != nil || !c.Covers("a.example") || !c.Covers("b.example") {
		t.Errorf("kept %v, %v", c.Authorities(), err)
	}
}

func TestThreadsAgree(t *testing.T) {
	dir := t.TempDir()
	found := make([]Pin, 16)
	var all sync.WaitGroup
	for i := range found {
		all.Go(func() {
			id, err := LoadOrCreate(dir, []string{"localhost"}, now)
			if err != nil {
				t.Error(err)
				return
			}
			found[i] = id.Pin()
		})
	}
	all.Wait()
	if slices.ContainsFunc(found, func(p Pin) bool { return p != found[0] }) {
		t.Errorf("several identities came out of one folder: %v", found)
	}
}

func TestProcessesAgree(t *testing.T) {
	dir := t.TempDir()
	out := make([]bytes.Buffer, 6)
	var children []*exec.Cmd
	for i := range out {
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), createIn+"="+dir)
		c.Stdout, c.Stderr = &out[i], os.Stderr
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		children = append(children, c)
	}
	for i, c := range children {
		if err := c.Wait(); err != nil {
			t.Errorf("process %d: %v", i, err)
		}
		if _, err := Parse(out[i].String()); err != nil || out[i].String() != out[0].String() {
			t.Errorf("process %d made %q, process 0 %q (%v)", i, &out[i], &out[0], err)
		}
	}
}

func TestDamagedIdentityIsKept(t *testing.T) {
	dir := t.TempDir()
	if _, err := LoadOrCreate(dir, []string{"localhost"}, now); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, identityFile)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	other := newID(t, "localhost")
	otherLeaf := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: other.LeafDER()})
	keyEnd := bytes.Index(good, []byte("-----BEGIN CERTIFICATE"))
	cases := map[string][]byte{
		"empty":         {},
		"noise":         []byte("noise"),
		"key only":      good[:keyEnd],
		"leaf only":     good[keyEnd:],
		"another leaf":  append(slices.Clone(good[:keyEnd]), otherLeaf...),
		"flipped bit":   flip(good, keyEnd+200),
		"cut at middle": good[:len(good)/2],
	}
	for n := 0; n < len(strings.TrimSpace(string(good))); n += 37 {
		cases["cut "+string(rune('0'+n/37))] = good[:n]
	}
	for name, data := range cases {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			id, err := LoadOrCreate(dir, []string{"localhost"}, now)
			if err == nil || !strings.Contains(err.Error(), path) {
				t.Errorf("LoadOrCreate = %v, %v; want an error that names %s", id, err, path)
			}
			if after, _ := os.ReadFile(path); !bytes.Equal(after, data) {
				t.Error("the file was replaced")
			}
		})
	}
}

func flip(b []byte, at int) []byte {
	b = slices.Clone(b)
	b[at] ^= 1
	return b
}

func TestIdentityReadableByOthers(t *testing.T) {
	dir := t.TempDir()
	if _, err := LoadOrCreate(dir, []string{"localhost"}, now); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, identityFile)
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("Load of a world-readable key: %v", err)
	}
}

func TestNamesFile(t *testing.T) {
	dir := t.TempDir()
	id, err := LoadOrCreate(dir, []string{"home.example"}, now)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := id.AddHosts([]string{"new.example"}, now); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, namesFile)
	good, _ := os.ReadFile(path)
	stranger := newID(t, "home.example")
	fewer, err := makeFurther(id.first.Leaf, id.first.PrivateKey.(crypto.Signer), []string{"new.example"}, now)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		data []byte
		ok   bool
		sees bool // new.example
	}{
		"good":          {good, true, true},
		"another key's": {certPEM(stranger.LeafDER()), true, false},
		"noise":         {[]byte("noise"), false, false},
		"cut":           {good[:len(good)/2], false, false},
		"fewer names":   {certPEM(fewer.Raw), false, false},
		"broken seal":   {certPEM(flip(id.current().Leaf.Raw, len(id.current().Leaf.Raw)-1)), false, false},
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(path, tt.data, 0o600); err != nil {
				t.Fatal(err)
			}
			got, err := Load(dir)
			if (err == nil) != tt.ok {
				t.Fatalf("Load = %v", err)
			}
			if err != nil && !strings.Contains(err.Error(), path) {
				t.Errorf("%v does not name %s", err, path)
			}
			if err == nil && got.Covers("new.example") != tt.sees {
				t.Errorf("covers %v", got.Authorities())
			}
		})
	}
}

func certPEM(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// writePlugin leaves what the Python plugin does: RSA-3072, one name.
func writePlugin(t *testing.T, dir string) *rsa.PrivateKey {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 3072)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(4711), Subject: pkix.Name{CommonName: "Hermes Secure Link"},
		NotBefore: now, NotAfter: now.AddDate(0, 0, 3650), IPAddresses: []net.IP{net.IPv4(192, 168, 1, 10)},
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{
		pluginCert: certPEM(der), pluginKey: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return key
}

func TestPluginIdentity(t *testing.T) {
	dir := t.TempDir()
	key := writePlugin(t, dir)
	id, err := LoadOrCreate(dir, []string{"10.0.0.5"}, now)
	if err != nil {
		t.Fatal(err)
	}
	if !key.PublicKey.Equal(id.first.Leaf.PublicKey) || !id.Covers("192.168.1.10") || !id.Covers("10.0.0.5") {
		t.Errorf("not the plugin's identity: %v", id.Authorities())
	}
	if _, err := os.Stat(filepath.Join(dir, identityFile)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a second identity was made beside it: %v", err)
	}
	if _, err := handshake(t, id.ServerConfig(), ClientConfig(Client{Pin: id.Pin(), Host: "10.0.0.5", Now: atNow})); err != nil {
		t.Errorf("handshake: %v", err)
	}

	// Elsewhere than the plugin's folder: names go where we keep ours.
	ours := t.TempDir()
	other, err := LoadPEM(filepath.Join(dir, pluginCert), filepath.Join(dir, pluginKey))
	if err != nil || other.Pin() != id.Pin() {
		t.Fatalf("LoadPEM: %v", err)
	}
	if err := other.KeepNames(ours); err != nil {
		t.Fatal(err)
	}
	if _, err := other.AddHosts([]string{"new.example"}, now); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(ours, namesFile)); err != nil {
		t.Error(err)
	}

	for _, gone := range []string{pluginKey, pluginCert} {
		t.Run("without "+gone, func(t *testing.T) {
			half := t.TempDir()
			if err := os.CopyFS(half, os.DirFS(dir)); err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(filepath.Join(half, gone)); err != nil {
				t.Fatal(err)
			}
			if _, err := LoadOrCreate(half, []string{"localhost"}, now); err == nil || !strings.Contains(err.Error(), gone) {
				t.Errorf("half a pair: %v; want an error that names %s", err, gone)
			}
		})
	}
}

func FuzzIdentityFile(f *testing.F) {
	dir := f.TempDir()
	if _, err := LoadOrCreate(dir, []string{"localhost"}, now); err != nil {
		f.Fatal(err)
	}
	good, err := os.ReadFile(filepath.Join(dir, identityFile))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(good[:100])
	f.Fuzz(func(t *testing.T, in []byte) {
		id, err := parsePair(in, in)
		if err == nil && (id.Pin() != Of(id.first.Leaf) || len(id.Authorities()) == 0) {
			t.Error("an identity without a pin or names")
		}
		if leaf, err := parseLeaf(in); err == nil && leaf == nil {
			t.Error("neither a leaf nor an error")
		}
	})
}
