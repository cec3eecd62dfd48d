package store

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.etcd.io/bbolt"
	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func TestMain(m *testing.M) {
	if os.Getenv(crashChild) != "" {
		workUntilKilled()
	}
	goleak.VerifyTestMain(m)
}

// clock is a clock that only moves when it is told to.
type clock struct{ t time.Time }

func newClock() *clock               { return &clock{time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)} }
func (c *clock) now() time.Time      { return c.t }
func (c *clock) add(d time.Duration) { c.t = c.t.Add(d) }

func openAt(t testing.TB, path string, now func() time.Time) *Store {
	t.Helper()
	s, err := Open(path, now)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// newStore is a store with one host, on a clock of its own.
func newStore(t testing.TB) (*Store, *clock, wire.ID) {
	t.Helper()
	c, host := newClock(), wire.NewID()
	s := openAt(t, filepath.Join(t.TempDir(), "broker.db"), c.now)
	if err := s.AddHost("home", host, wire.DigestOf("host token")); err != nil {
		t.Fatal(err)
	}
	return s, c, host
}

func TestFileAndFolderAreTheOwnersAlone(t *testing.T) {
	if runtime.GOOS == "windows" {
		return // access lists there, not modes
	}
	dir := filepath.Join(t.TempDir(), "a", "b")
	path := filepath.Join(dir, "broker.db")
	_ = openAt(t, path, nil).Close()
	mode := func(p string) fs.FileMode {
		info, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		return info.Mode().Perm()
	}
	if m := mode(path); m != 0o600 {
		t.Errorf("the file's mode is %o, want 600", m)
	}
	for _, p := range []string{dir, filepath.Dir(dir)} {
		if m := mode(p); m != 0o700 {
			t.Errorf("the mode of the folder %s is %o, want 700", p, m)
		}
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	_ = openAt(t, path, nil).Close()
	if m := mode(path); m != 0o600 {
		t.Errorf("a file that others could read is opened and stays %o, want 600", m)
	}
	open := filepath.Join(t.TempDir(), "open")
	if err := errors.Join(os.Mkdir(open, 0o700), os.Chmod(open, 0o777)); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(filepath.Join(open, "broker.db"), nil); err == nil || !strings.Contains(err.Error(), "chmod") {
		t.Errorf("Open in a folder that everybody may write = %v, want a refusal that says what to do", err)
	}
}

func TestOneProcessAtATime(t *testing.T) {
	path := filepath.Join(t.TempDir(), "broker.db")
	s := openAt(t, path, nil)
	if _, err := Open(path, nil); !errors.Is(err, ErrLocked) {
		t.Errorf("Open of a file that is open = %v, want ErrLocked", err)
	}
	_ = s.Close()
	_ = openAt(t, path, nil).Close()
}

func TestEverythingSurvivesReopening(t *testing.T) {
	path := filepath.Join(t.TempDir(), "broker.db")
	host, token := wire.NewID(), wire.DigestOf("t")
	s := openAt(t, path, nil)
	c := Credential{Host: host, Kind: wire.KindBootstrap, ID: "p", Digest: token, Expires: time.Now().Add(time.Hour)}
	me := wire.NewID()
	if err := errors.Join(s.AddHost("home", host, wire.DigestOf("h")), s.Publish(c), s.Bind(host, token, me), s.Close()); err != nil {
		t.Fatal(err)
	}
	s = openAt(t, path, nil)
	if ok, err := s.CheckHost(host, wire.DigestOf("h")); !ok || err != nil {
		t.Errorf("CheckHost = %v, %v", ok, err)
	}
	if _, err := s.Check(host, wire.KindBootstrap, token, me); err != nil {
		t.Errorf("Check by who bound it = %v", err)
	}
	if _, err := s.Check(host, wire.KindBootstrap, token, wire.NewID()); !errors.Is(err, ErrReplayed) {
		t.Errorf("Check by another = %v, want ErrReplayed", err)
	}
}

func TestSchemaOfAnotherVersionIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "broker.db")
	s := openAt(t, path, nil)
	err := s.db.Update(func(tx *bbolt.Tx) error { return tx.Bucket(bucketMeta).Put(keySchema, []byte("2")) })
	if err := errors.Join(err, s.Close()); err != nil {
		t.Fatal(err)
	}
	before := read(t, path)
	if _, err := Open(path, nil); !errors.Is(err, ErrSchema) || !strings.Contains(err.Error(), `"2"`) {
		t.Errorf("Open = %v, want ErrSchema with both versions", err)
	}
	if !bytes.Equal(read(t, path), before) {
		t.Error("the file was changed")
	}
}

func read(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// sample is the bytes of a file with a few hosts and enough credentials for
// several pages.
func sample(t testing.TB, pageSize int) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "broker.db")
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{PageSize: pageSize})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	s := openAt(t, path, nil)
	for h := range 3 {
		host := wire.NewID()
		if err := s.AddHost(fmt.Sprint("host", h), host, wire.DigestOf(fmt.Sprint(h))); err != nil {
			t.Fatal(err)
		}
		for i := range 20 {
			c := Credential{Host: host, Kind: wire.KindRoute, ID: fmt.Sprint("device", i), Digest: wire.DigestOf(fmt.Sprint(h, i)), Expires: time.Now().Add(time.Hour)}
			if err := s.Publish(c); err != nil {
				t.Fatal(err)
			}
		}
	}
	var used int64
	err = s.db.View(func(tx *bbolt.Tx) error { used = tx.Size(); return nil })
	if err := errors.Join(err, s.Close()); err != nil {
		t.Fatal(err)
	}
	return read(t, path)[:used] // the file grows ahead of its pages
}

// tryDamaged opens a file of those bytes. Whatever they are, Open says that the
// file is damaged and leaves it alone, or it works; must says that it may not.
func tryDamaged(t *testing.T, data []byte, must bool) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "broker.db") // a new one: see openFile
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := Open(path, nil)
	if err == nil {
		if must {
			t.Error("it opens")
		}
		_ = s.Close()
		return
	}
	if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrSchema) || !strings.Contains(err.Error(), path) {
		t.Errorf("Open = %v, want ErrDamaged and the path", err)
	}
	if !bytes.Equal(read(t, path), data) {
		t.Error("the damaged file was changed")
	}
}

func TestDamagedFileIsNamedAndLeftAlone(t *testing.T) {
	good := sample(t, os.Getpagesize())
	page := os.Getpagesize()
	cases := map[string][]byte{
		"text":             []byte("hosts:\n  home: token\n"),
		"long text":        bytes.Repeat([]byte("not a database. "), 4096),
		"zeros":            make([]byte, len(good)),
		"first page only":  good[:page],
		"half a page less": good[:len(good)-page/2],
	}
	for n := page; n < len(good); n += page {
		cases[fmt.Sprintf("cut after %d of %d", n, len(good))] = good[:n]
	}
	meta := bytes.Clone(good)
	copy(meta[16:], make([]byte, 2*page-16))
	cases["both heads lost"] = meta
	for name, data := range cases {
		t.Run(name, func(t *testing.T) { tryDamaged(t, data, true) })
	}
}

// TestNoDamageCrashes overwrites pages and bits: what can be noticed is an
// error, nothing is a crash.
func TestNoDamageCrashes(t *testing.T) {
	good := sample(t, os.Getpagesize())
	page := os.Getpagesize()
	rng := rand.New(rand.NewPCG(1, 2))
	for n := range len(good) / page {
		for _, fill := range []byte{0x00, 0xff, 0x5a} {
			bad := bytes.Clone(good)
			copy(bad[n*page:], bytes.Repeat([]byte{fill}, page))
			tryDamaged(t, bad, false)
			head := bytes.Clone(good) // only what describes the page
			copy(head[n*page:], bytes.Repeat([]byte{fill}, 48))
			tryDamaged(t, head, false)
		}
	}
	for range 150 {
		bad := bytes.Clone(good)
		bad[rng.IntN(len(bad))] ^= 1 << rng.IntN(8)
		tryDamaged(t, bad, false)
	}
}

func TestForeignDatabaseIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "other.db")
	db, err := bbolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bbolt.Tx) error {
		_, err := tx.CreateBucket([]byte("somebody else's"))
		return err
	})
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	before := read(t, path)
	if _, err := Open(path, nil); !errors.Is(err, ErrDamaged) || !bytes.Equal(read(t, path), before) {
		t.Errorf("Open = %v, want a refusal and an unchanged file", err)
	}
}

// FuzzCheckPages: no bytes make the check crash or go on for ever.
func FuzzCheckPages(f *testing.F) {
	const page = 1024 // small inputs are tried more often
	good := sample(f, page)
	if err := checkPages(bytes.NewReader(good), page, int64(len(good))); err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Fuzz(func(_ *testing.T, data []byte) {
		_ = checkPages(bytes.NewReader(data), page, int64(len(data)))
	})
}

func FuzzOpen(f *testing.F) {
	f.Add(sample(f, 1024))
	f.Add([]byte("{}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) == 0 {
			return // a new file
		}
		tryDamaged(t, data, false)
	})
}
