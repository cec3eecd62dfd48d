package session

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"
)

// The state file, in the folder given to [Open].
const (
	stateFile    = "sessions.json"
	stateTemp    = "sessions.json.new"
	stateVersion = 1

	// maxPending bounds the routes that wait to be taken back. Brokers forget
	// them at their expiry anyway; the oldest are dropped first.
	maxPending = 4096
)

// A digest is the SHA-256 of a token: what is kept in its place. Tokens are
// long and random, so finding one by its digest in a map tells an observer of
// time nothing that helps to guess another.
type digest [sha256.Size]byte

func digestOf(text string) digest { return sha256.Sum256([]byte(text)) }

// MarshalText writes 64 hex digits.
func (d digest) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, d[:]), nil }

// UnmarshalText reads exactly those.
func (d *digest) UnmarshalText(b []byte) error {
	if len(b) != hex.EncodedLen(len(d)) {
		return errors.New("bad digest")
	}
	if _, err := hex.Decode(d[:], b); err != nil {
		return errors.New("bad digest")
	}
	return nil
}

// state is all that survives a restart. Records are never changed in place: a
// change copies, so that readers may hold what they found.
type state struct {
	devices map[string]*deviceRec
	pending []string // credential ids of routes still to be taken back
}

type deviceRec struct {
	ID         string       `json:"id"`
	DeviceID   string       `json:"device_id,omitempty"`
	Name       string       `json:"name,omitempty"`
	Model      string       `json:"model,omitempty"`
	Platform   string       `json:"platform,omitempty"`
	Surface    string       `json:"surface,omitempty"`
	FormFactor string       `json:"form_factor,omitempty"`
	Hint       string       `json:"transport_hint,omitempty"`
	Created    time.Time    `json:"created"`
	LastSeen   time.Time    `json:"last_seen"`
	Path       string       `json:"path,omitempty"`
	Policy     policy       `json:"policy"`
	Sessions   []sessionRec `json:"sessions,omitempty"`
	Refresh    *refreshRec  `json:"refresh,omitempty"`
}

type sessionRec struct {
	Token   digest               `json:"token_sha256"`
	Created time.Time            `json:"created"`
	Expires time.Time            `json:"expires"`
	Grants  map[string]time.Time `json:"grants"`
}

type refreshRec struct {
	Token   digest    `json:"token_sha256"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires"`
}

type document struct {
	Version  int          `json:"version"`
	Devices  []*deviceRec `json:"devices"`
	Withdraw []string     `json:"withdraw,omitempty"`
}

func (s state) clone() state {
	return state{devices: maps.Clone(s.devices), pending: slices.Clone(s.pending)}
}

// edit gives a copy of a device to change; the copy takes its place.
func (s *state) edit(d *deviceRec) *deviceRec {
	c := *d
	c.Sessions = slices.Clone(d.Sessions)
	c.Policy = d.Policy.clone()
	s.devices[c.ID] = &c
	return &c
}

// encode writes the state in one stable order, so that equal states are equal
// files.
func (s state) encode() ([]byte, error) {
	doc := document{Version: stateVersion, Withdraw: s.pending, Devices: make([]*deviceRec, 0, len(s.devices))}
	for _, id := range slices.Sorted(maps.Keys(s.devices)) {
		doc.Devices = append(doc.Devices, s.devices[id])
	}
	b, err := json.MarshalIndent(doc, "", " ")
	if err != nil {
		return nil, err
	}
	return append(b, '\n'), nil
}

// decodeState reads a state file. It takes all of it or nothing: a record that
// cannot be read may be the one that says a device was revoked.
func decodeState(b []byte, l Limits) (state, error) {
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return state{}, errors.New("it is not JSON, or not all of it is there")
	}
	if head.Version != stateVersion {
		return state{}, fmt.Errorf("its version is %d and this program knows version %d only", head.Version, stateVersion)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var doc document
	if err := dec.Decode(&doc); err != nil {
		return state{}, fmt.Errorf("it does not have the form of version %d", stateVersion)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return state{}, errors.New("something follows the end of it")
	}
	if len(doc.Withdraw) > maxPending {
		return state{}, errors.New("it lists too many routes")
	}
	st := state{devices: make(map[string]*deviceRec, len(doc.Devices)), pending: doc.Withdraw}
	seen := make(map[digest]bool)
	for _, d := range doc.Devices {
		if err := d.check(l, seen); err != nil {
			return state{}, err
		}
		if st.devices[d.ID] != nil {
			return state{}, errors.New("a device is there twice")
		}
		st.devices[d.ID] = d
	}
	return st, nil
}

func (d *deviceRec) check(l Limits, seen map[digest]bool) error {
	if d == nil || len(d.ID) != deviceIDLen {
		return errors.New("a device has no id")
	}
	if len(d.DeviceID) > maxDeviceID || len(d.Policy.Grants) > maxGrants+len(defaultGrants) {
		return errors.New("a device is out of bounds")
	}
	tokens := make([]digest, 0, len(d.Sessions)+1)
	for _, s := range d.Sessions {
		tokens = append(tokens, s.Token)
	}
	if d.Refresh != nil {
		tokens = append(tokens, d.Refresh.Token)
	}
	for _, t := range tokens {
		if seen[t] || t == (digest{}) {
			return errors.New("a token is there twice, or empty")
		}
		seen[t] = true
	}
	return nil
}

// A policy is what pairing gave to a device, less what was taken back since.
// Every session of the device is made from it, the first and the refreshed, so
// that a refresh cannot give back what was taken.
type policy struct {
	TTL    span            `json:"ttl"`
	Grants map[string]span `json:"grants"`
	// Until and GrantUntil are ends that no session may pass. Forever, or
	// absent, until somebody shortens the device.
	Until      time.Time            `json:"until"`
	GrantUntil map[string]time.Time `json:"grant_until,omitempty"`
}

// newPolicy turns what the operator chose into a policy. Grants given change
// the defaults one by one; but once a namespace is named, the namespaces that
// are not named are not granted.
func newPolicy(ttl time.Duration, grants map[string]time.Duration) (policy, error) {
	p := policy{TTL: span(ttl), Grants: make(map[string]span), Until: Forever}
	if err := checkTTL(ttl); err != nil {
		return policy{}, err
	}
	if len(grants) > maxGrants {
		return policy{}, fmt.Errorf("more than %d grants", maxGrants)
	}
	named := slices.ContainsFunc(namespaces, func(n string) bool { _, ok := grants[n]; return ok })
	for name, d := range defaultGrants {
		if !named || !slices.Contains(namespaces, name) {
			p.Grants[name] = span(d)
		}
	}
	for name, d := range grants {
		if err := errors.Join(checkGrantName(name), checkTTL(d)); err != nil {
			return policy{}, fmt.Errorf("grant %s: %w", clip(name, 32), err)
		}
		p.Grants[name] = span(d)
	}
	return p, nil
}

func checkTTL(d time.Duration) error {
	if d != Never && (d < time.Second || d > maxTTL) {
		return fmt.Errorf("lifetime %v: at least a second, at most 100 years, or never", d)
	}
	return nil
}

func (p policy) clone() policy {
	p.Grants = maps.Clone(p.Grants)
	p.GrantUntil = maps.Clone(p.GrantUntil)
	return p
}

// session gives the end and the grants of a session made now. No grant
// outlives it.
func (p policy) session(now time.Time) (end time.Time, grants map[string]time.Time) {
	end = earlier(p.TTL.from(now), p.Until)
	grants = make(map[string]time.Time, len(p.Grants))
	for name, d := range p.Grants {
		g := earlier(d.from(now), end)
		if until, ok := p.GrantUntil[name]; ok {
			g = earlier(g, until)
		}
		grants[name] = g
	}
	return end, grants
}

// A span is a lifetime in the state file: "never", or as time.Duration prints.
type span time.Duration

func (s span) from(now time.Time) time.Time {
	if time.Duration(s) == Never {
		return Forever
	}
	return stamp(now.Add(time.Duration(s)))
}

// MarshalText writes the span for the state file.
func (s span) MarshalText() ([]byte, error) {
	if time.Duration(s) == Never {
		return []byte("never"), nil
	}
	return []byte(time.Duration(s).String()), nil
}

// UnmarshalText reads it back; what no policy can hold is an error.
func (s *span) UnmarshalText(b []byte) error {
	d := Never
	if string(b) != "never" {
		var err error
		if d, err = time.ParseDuration(string(b)); err != nil {
			return errors.New("bad lifetime")
		}
	}
	*s = span(d)
	return checkTTL(d)
}

// disk is the folder of the state file.
type disk struct {
	dir  string
	root *os.Root
	max  int64
}

// openDisk makes the folder, or makes it owner-only.
func openDisk(dir string, maxBytes int64) (*disk, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("session folder: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, fmt.Errorf("session folder: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("session folder: %w", err)
	}
	return &disk{dir: dir, root: root, max: maxBytes}, nil
}

// load reads the state; a folder without a file is an empty state. A file that
// cannot be read is left exactly as it is and stops every later start as well.
func (d *disk) load(l Limits) (state, error) {
	path := filepath.Join(d.dir, stateFile)
	f, err := d.root.Open(stateFile)
	if errors.Is(err, fs.ErrNotExist) {
		return state{devices: make(map[string]*deviceRec)}, nil
	}
	if err != nil {
		return state{}, fmt.Errorf("read the paired devices: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, d.max+1))
	if err != nil {
		return state{}, fmt.Errorf("read the paired devices: %w", err)
	}
	if int64(len(b)) > d.max {
		err = fmt.Errorf("it is larger than %d bytes", d.max)
	}
	var st state
	if err == nil {
		st, err = decodeState(b, l)
	}
	if err != nil {
		return state{}, fmt.Errorf("%w: %s: %w; it was left as it is. Put back a good copy, or move it "+
			"away to start with no paired device: every device must then pair again", ErrCorrupt, path, err)
	}
	// A restored backup may be readable by others.
	if err := d.root.Chmod(stateFile, 0o600); err != nil {
		return state{}, fmt.Errorf("make %s owner-only: %w", path, err)
	}
	return st, nil
}

// save replaces the file as a whole and returns when that would survive a
// power cut.
func (d *disk) save(st state) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("save the paired devices in %s: %w", d.dir, err)
		}
	}()
	b, err := st.encode()
	if err != nil {
		return err
	}
	if int64(len(b)) > d.max {
		return fmt.Errorf("%w: the state file would grow beyond %d bytes", ErrFull, d.max)
	}
	// What a crash left behind may have other modes, or be no plain file.
	if err := d.root.Remove(stateTemp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := d.root.OpenFile(stateTemp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = d.root.Rename(stateTemp, stateFile)
	}
	if err != nil {
		return errors.Join(err, d.root.Remove(stateTemp))
	}
	return d.syncDir()
}

// syncDir makes the rename durable. Windows cannot sync a folder and does not
// need to: its rename is journaled.
func (d *disk) syncDir() error {
	if runtime.GOOS == "windows" {
		return nil
	}
	f, err := d.root.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
