package profile

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/hermes-reach/hermes-reach/pins"
)

// Files of a device's state folder.
const (
	profilesDir  = "profiles" // NAME.json each
	deviceIDFile = "device-id"
	currentFile  = "current-profile"
)

const maxFile = 1 << 20 // bytes of one of our files; a larger one is not ours

// A Store keeps profiles in a folder: files of mode 0600, each replaced as a
// whole and synced, so that a crash leaves the old or the new one. Its methods
// may be called from any goroutine. Two processes may share a folder: of two
// that save the same profile at once, the later wins.
type Store struct {
	dir  string
	root *os.Root
	mu   sync.Mutex // makes read-then-write steps of this process one
}

// Open opens the folder, and makes it if need be. Close it after use.
func Open(dir string) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("profile: state folder: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("profile: state folder: %w", err)
	}
	if err := root.Mkdir(profilesDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, errors.Join(fmt.Errorf("profile: state folder %s: %w", dir, err), root.Close())
	}
	return &Store{dir: dir, root: root}, nil
}

// Close releases the folder.
func (s *Store) Close() error { return s.root.Close() }

// DeviceID is this device's id towards every host: 22 characters of base64url,
// made at the first call.
func (s *Store) DeviceID() (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text, err := s.read(deviceIDFile)
	if err == nil {
		id := strings.TrimSpace(string(text))
		if raw, err := base64.RawURLEncoding.Strict().DecodeString(id); err != nil || len(raw) != 16 {
			return "", fmt.Errorf("profile: %s in %s is damaged: remove it and pair this device again", deviceIDFile, s.dir)
		}
		return id, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	var raw [16]byte
	rand.Read(raw[:]) // never fails
	id := base64.RawURLEncoding.EncodeToString(raw[:])
	return id, s.write(deviceIDFile, []byte(id+"\n"))
}

// Names lists the profiles in alphabetical order.
func (s *Store) Names() ([]string, error) {
	dir, err := s.root.Open(profilesDir)
	if err != nil {
		return nil, fmt.Errorf("profile: list: %w", err)
	}
	defer dir.Close()
	entries, err := dir.ReadDir(-1)
	if err != nil {
		return nil, fmt.Errorf("profile: list: %w", err)
	}
	var names []string
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), ".json"); ok && CheckName(name) == nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// Get reads a profile; the empty name means the current one.
func (s *Store) Get(name string) (*Profile, error) {
	if name == "" {
		var err error
		if name, err = s.Current(); err != nil {
			return nil, err
		}
	}
	if err := CheckName(name); err != nil {
		return nil, err
	}
	text, err := s.read(file(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: no profile %q here: see `hermes-reach profile list`, or pair with `hermes-reach join`", ErrNotFound, name)
	}
	if err != nil {
		return nil, err
	}
	p, err := decode(text)
	if err != nil {
		return nil, fmt.Errorf("profile %s: %w", name, err)
	}
	p.Name = name // the file's name rules: somebody may have moved it
	return p, nil
}

// Current is the name that Get uses for "": the one chosen, or the only one.
func (s *Store) Current() (string, error) {
	text, err := s.read(currentFile)
	if err == nil {
		if name := strings.TrimSpace(string(text)); s.has(name) {
			return name, nil
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	names, err := s.Names()
	switch {
	case err != nil:
		return "", err
	case len(names) == 0:
		return "", fmt.Errorf("%w: this device is paired with no host: use `hermes-reach join`", ErrNotFound)
	case len(names) > 1:
		return "", fmt.Errorf("%w: none of %s is current: choose one with `hermes-reach profile use NAME` or --profile",
			ErrNotFound, strings.Join(names, ", "))
	}
	return names[0], nil
}

// Save writes a profile under its name. The first one becomes the current one.
func (s *Store) Save(p *Profile) error {
	if err := CheckName(p.Name); err != nil {
		return err
	}
	text, err := encode(p)
	if err != nil {
		return fmt.Errorf("profile %s: %w", p.Name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	names, err := s.Names()
	if err != nil {
		return err
	}
	if err := s.write(file(p.Name), text); err != nil {
		return err
	}
	if len(names) == 0 {
		return s.write(currentFile, []byte(p.Name+"\n"))
	}
	return nil
}

// Use makes a profile the current one.
func (s *Store) Use(name string) error {
	if err := s.mustHave(name); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.write(currentFile, []byte(name+"\n"))
}

// Rename gives a profile another name, which must be free.
func (s *Store) Rename(from, to string) error {
	if err := s.mustHave(from); err != nil {
		return err
	}
	if err := CheckName(to); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.has(to) {
		return fmt.Errorf("%w: there is a profile %q already", ErrExists, to)
	}
	current, _ := s.read(currentFile) // unreadable: then it names nobody
	if err := s.root.Rename(file(from), file(to)); err != nil {
		return fmt.Errorf("profile: rename: %w", err)
	}
	if strings.TrimSpace(string(current)) == from {
		return s.write(currentFile, []byte(to+"\n"))
	}
	return s.sync(profilesDir)
}

// Remove forgets a profile and its secrets. If it was the current one, the only
// one left takes its place, or none does.
func (s *Store) Remove(name string) error {
	if err := s.mustHave(name); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.root.Remove(file(name)); err != nil {
		return fmt.Errorf("profile: remove: %w", err)
	}
	if current, err := s.read(currentFile); err == nil && strings.TrimSpace(string(current)) == name {
		if err := s.root.Remove(currentFile); err != nil {
			return fmt.Errorf("profile: remove: %w", err)
		}
	}
	return s.sync(profilesDir)
}

// ByPin finds the profile of a host by its key: a device has one for each host.
// A damaged profile is passed over, because nobody can tell whose it is.
func (s *Store) ByPin(pin pins.Pin) (*Profile, error) {
	names, err := s.Names()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if p, err := s.Get(name); err == nil && p.Pin.Equal(pin) {
			return p, nil
		}
	}
	return nil, fmt.Errorf("%w: no profile of the host %v", ErrNotFound, pin)
}

// FreeName is wish, cut into a usable name, with a number if it is taken.
func (s *Store) FreeName(wish string) string {
	base := tidy(wish)
	for i := 1; ; i++ {
		name := base
		if i > 1 {
			tail := "-" + strconv.Itoa(i)
			name = strings.TrimRight(base[:min(len(base), MaxName-len(tail))], "-") + tail
		}
		if CheckName(name) == nil && !s.has(name) {
			return name
		}
	}
}

// tidy keeps the letters, digits and hyphens of a wish.
func tidy(wish string) string {
	out := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9', r == '-':
			return r
		case r == ' ' || r == '_' || r == '.':
			return '-'
		}
		return -1
	}, strings.ToLower(wish))
	out = strings.Trim(out[:min(len(out), MaxName)], "-")
	if out == "" {
		return "hermes"
	}
	return out
}

func file(name string) string { return path.Join(profilesDir, name+".json") }

func (s *Store) has(name string) bool {
	if CheckName(name) != nil {
		return false
	}
	_, err := s.root.Stat(file(name))
	return err == nil
}

func (s *Store) mustHave(name string) error {
	if err := CheckName(name); err != nil {
		return err
	}
	if !s.has(name) {
		return fmt.Errorf("%w: no profile %q here", ErrNotFound, name)
	}
	return nil
}

func (s *Store) read(name string) ([]byte, error) {
	f, err := s.root.Open(name)
	if err != nil {
		return nil, fmt.Errorf("profile: read: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("profile: read %s: %w", name, err)
	}
	if len(text) > maxFile {
		return nil, fmt.Errorf("profile: %s is larger than %d bytes: it is not ours", name, maxFile)
	}
	return text, nil
}

// write replaces a file as a whole. What it was stays until the new one is on
// the disk.
func (s *Store) write(name string, text []byte) error {
	tmp := path.Join(path.Dir(name), ".new-"+rand.Text())
	if err := s.fill(tmp, text); err != nil {
		_ = s.root.Remove(tmp) // it may not exist; the first error tells more
		return fmt.Errorf("profile: write %s: %w", name, err)
	}
	if err := s.root.Rename(tmp, name); err != nil {
		_ = s.root.Remove(tmp)
		return fmt.Errorf("profile: write %s: %w", name, err)
	}
	return s.sync(path.Dir(name))
}

func (s *Store) fill(tmp string, text []byte) error {
	f, err := s.root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// sync makes a rename last. Windows has no such thing for folders.
func (s *Store) sync(dir string) error {
	if runtime.GOOS == "windows" {
		return nil
	}
	f, err := s.root.Open(dir)
	if err != nil {
		return fmt.Errorf("profile: sync: %w", err)
	}
	return errors.Join(f.Sync(), f.Close())
}

// stored is a profile as it lies on the disk: the one form that shows secrets.
// Its fields shadow those of the embedded Profile.
type stored struct {
	Version int `json:"version"`
	bare
	Session string        `json:"session,omitempty"`
	Refresh string        `json:"refresh,omitempty"`
	APIKey  string        `json:"api_key,omitempty"`
	Routes  []storedRoute `json:"routes,omitempty"`
}

type (
	bare        Profile
	bareRoute   Route
	storedRoute struct {
		bareRoute
		Token string `json:"token"`
	}
)

const version = 1

func encode(p *Profile) ([]byte, error) {
	out := stored{
		Version: version, bare: bare(*p),
		Session: p.Session.Reveal(), Refresh: p.Refresh.Reveal(), APIKey: p.APIKey.Reveal(),
	}
	for _, r := range p.Routes {
		out.Routes = append(out.Routes, storedRoute{bareRoute(r), r.Token.Reveal()})
	}
	text, err := json.MarshalIndent(out, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	if len(text) >= maxFile {
		return nil, fmt.Errorf("encode: larger than %d bytes", maxFile)
	}
	return append(text, '\n'), nil
}

// decode reads what encode wrote. Its errors quote nothing of the text.
func decode(text []byte) (*Profile, error) {
	var in stored
	if err := json.Unmarshal(text, &in); err != nil || in.Version < 1 || in.Version <= version && in.Pin == (pins.Pin{}) {
		return nil, errors.New("the file is damaged: remove it and pair with `hermes-reach join` again")
	}
	if in.Version > version {
		return nil, fmt.Errorf("the file was written by a newer version (format %d, this one reads %d)", in.Version, version)
	}
	p := Profile(in.bare)
	p.Session, p.Refresh, p.APIKey = Secret(in.Session), Secret(in.Refresh), Secret(in.APIKey)
	p.Routes = nil
	for _, r := range in.Routes {
		out := Route(r.bareRoute)
		out.Token = Secret(r.Token)
		p.Routes = append(p.Routes, out)
	}
	return &p, nil
}
