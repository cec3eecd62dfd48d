package store

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/bbolt"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// A Credential is what a host published for one device, or for one pairing.
type Credential struct {
	Host    wire.ID     `json:"host"`
	Kind    wire.Kind   `json:"kind"` // wire.KindBootstrap or wire.KindRoute
	ID      string      `json:"id"`   // pairing_id or credential_id
	Digest  wire.Digest `json:"digest"`
	Expires time.Time   `json:"expires"`
	Device  wire.Digest `json:"device,omitzero"` // device_id_hash of a route
	// Instance is the client that a bootstrap is bound to, zero until its
	// first dial was accepted; Bound is when. Publish ignores what is given.
	Instance wire.ID   `json:"instance,omitzero"`
	Bound    time.Time `json:"bound,omitzero"`
	// Used is set when a bootstrap was bound and then revoked or replaced: what
	// is left is a tombstone, so that a replay is told apart from a stranger.
	Used bool `json:"used,omitempty"`
}

// Refusals of a credential. Each stands for one code on the wire.
var (
	ErrUnknown  = errors.New("no such credential")
	ErrExpired  = errors.New("the credential has expired")
	ErrReplayed = errors.New("the bootstrap was used by another client")
)

func (c Credential) consumed() bool { return !c.Instance.IsZero() }

// tombstone says that a bootstrap was used and opens nothing more.
func (c Credential) tombstone(now time.Time) bool {
	return c.consumed() && (c.Used || !c.Expires.After(now))
}

// end is when nothing needs to be known of c any more.
func (c Credential) end() time.Time {
	if !c.consumed() {
		return c.Expires.Add(keepExpired)
	}
	if used := c.Bound.Add(keepUsed); used.After(c.Expires) {
		return used
	}
	return c.Expires
}

func byEnd(a, b Credential) int     { return a.end().Compare(b.end()) }
func byExpiry(a, b Credential) int  { return a.Expires.Compare(b.Expires) }
func isBootstrap(c Credential) bool { return c.Kind == wire.KindBootstrap }

// Publish stores a credential, in place of an earlier one of the same kind and
// id, whose token then opens nothing more. A token that was published before
// stays bound to whom it was bound to; it cannot become another credential's
// (ErrToken). Past MaxCredentials the expired go first, then the bootstraps
// that expire first; then it is ErrQuota.
func (s *Store) Publish(c Credential) error {
	if c.Kind != wire.KindBootstrap && c.Kind != wire.KindRoute {
		return fmt.Errorf("publish: %q is no kind of a device's credential", string(c.Kind))
	}
	same := false
	err := s.db.View(func(tx *bbolt.Tx) error {
		old, ok, err := byName(tx, c.Host, c.Kind, c.ID)
		same = ok && old.Digest.Equal(c.Digest) && old.Expires.Equal(c.Expires) && old.Device == c.Device
		return err
	})
	if err != nil || same { // hosts repeat all they have whenever they reconnect
		return err
	}
	return s.db.Update(func(tx *bbolt.Tx) error { return s.publish(tx, c) })
}

func (s *Store) publish(tx *bbolt.Tx, c Credential) error {
	creds := tx.Bucket(bucketCreds)
	if tx.Bucket(bucketHosts).Get(c.Host[:]) == nil {
		return fmt.Errorf("publish: %w", ErrNoHost)
	}
	have, ok, err := get[Credential](creds, credKey(c.Host, c.Digest))
	if err != nil {
		return err
	}
	if ok && (have.Kind != c.Kind || have.ID != c.ID) {
		return fmt.Errorf("publish: %w", ErrToken)
	}
	c.Instance, c.Bound, c.Used = have.Instance, have.Bound, have.Used
	old, ok, err := byName(tx, c.Host, c.Kind, c.ID)
	if err == nil && ok {
		err = retire(tx, old)
	}
	if err == nil {
		err = s.makeRoom(tx, c.Host)
	}
	if err != nil {
		return err
	}
	if err := tx.Bucket(bucketNames).Put(nameKey(c.Host, c.Kind, c.ID), c.Digest[:]); err != nil {
		return err
	}
	return put(creds, credKey(c.Host, c.Digest), c)
}

// retire makes a credential open nothing more: a bootstrap that was used is
// kept as a tombstone, anything else is forgotten.
func retire(tx *bbolt.Tx, c Credential) error {
	if !c.consumed() {
		return drop(tx, c)
	}
	c.Used = true
	return put(tx.Bucket(bucketCreds), credKey(c.Host, c.Digest), c)
}

// makeRoom sees to it that one more credential fits, and now and then forgets
// what is past its end.
func (s *Store) makeRoom(tx *bbolt.Tx, host wire.ID) error {
	now := s.now()
	if last, ok := s.swept[host]; ok && now.Sub(last) < sweepEvery && count(tx, host) < MaxCredentials {
		return nil
	}
	all, err := credentialsOf(tx, host)
	if err != nil {
		return err
	}
	s.swept[host] = now
	var kept, tombs []Credential
	for _, c := range all {
		switch {
		case !c.end().After(now):
			err = errors.Join(err, drop(tx, c))
		case c.tombstone(now):
			tombs = append(tombs, c)
		default:
			kept = append(kept, c)
		}
	}
	if len(kept) >= MaxCredentials {
		c, ok := leastNeeded(kept, now)
		if !ok {
			return fmt.Errorf("publish: %w (%d)", ErrQuota, MaxCredentials)
		}
		err = errors.Join(err, retire(tx, c))
		if c.consumed() {
			tombs = append(tombs, c)
		}
	}
	slices.SortFunc(tombs, byEnd)
	for len(tombs) > MaxCredentials {
		err = errors.Join(err, drop(tx, tombs[0]))
		tombs = tombs[1:]
	}
	return err
}

// leastNeeded chooses what goes when there is no room: what expired first, or
// else the bootstrap that expires first. A route that is live never goes.
func leastNeeded(kept []Credential, now time.Time) (Credential, bool) {
	slices.SortFunc(kept, byExpiry)
	if !kept[0].Expires.After(now) {
		return kept[0], true
	}
	i := slices.IndexFunc(kept, isBootstrap)
	if i < 0 {
		return Credential{}, false
	}
	return kept[i], true
}

// Revoke takes a credential back. A bootstrap that was used leaves a tombstone.
// Revoking what is not there is no error.
func (s *Store) Revoke(host wire.ID, kind wire.Kind, id string) (Credential, bool, error) {
	var c Credential
	var found bool
	find := func(tx *bbolt.Tx) (err error) {
		c, found, err = byName(tx, host, kind, id)
		return err
	}
	if err := s.db.View(find); err != nil || !found || c.Used {
		return c, found, err
	}
	err := s.db.Update(func(tx *bbolt.Tx) error {
		if err := find(tx); err != nil || !found {
			return err
		}
		return retire(tx, c)
	})
	return c, found, err
}

// Check looks a token up and says whether instance may use it now. The
// credential is returned with ErrReplayed and ErrExpired too. Any error but
// these and ErrUnknown is the disk's.
func (s *Store) Check(host wire.ID, kind wire.Kind, token wire.Digest, instance wire.ID) (Credential, error) {
	var c Credential
	err := s.db.View(func(tx *bbolt.Tx) (err error) {
		c, err = check(tx, host, kind, token, instance, s.now())
		return err
	})
	return c, err
}

func check(tx *bbolt.Tx, host wire.ID, kind wire.Kind, token wire.Digest, instance wire.ID, now time.Time) (Credential, error) {
	c, ok, err := get[Credential](tx.Bucket(bucketCreds), credKey(host, token))
	switch {
	case err != nil:
		return c, err
	case !ok || c.Kind != kind || !c.Digest.Equal(token):
		return Credential{}, ErrUnknown
	case c.Used, c.consumed() && c.Instance != instance:
		return c, ErrReplayed
	case !c.Expires.After(now):
		return c, ErrExpired
	}
	return c, nil
}

// Bind consumes a bootstrap: from now on only instance may use it. It is
// atomic and on disk when it returns; of many callers one wins, the others get
// ErrReplayed. Binding again for the same instance is no error.
func (s *Store) Bind(host wire.ID, token wire.Digest, instance wire.ID) error {
	if instance.IsZero() { // a zero instance is what marks an unused bootstrap
		return errors.New("bind a bootstrap: the client has no instance id")
	}
	if c, err := s.Check(host, wire.KindBootstrap, token, instance); err != nil || c.consumed() {
		return err
	}
	return s.db.Update(func(tx *bbolt.Tx) error {
		c, err := check(tx, host, wire.KindBootstrap, token, instance, s.now())
		if err != nil || c.consumed() {
			return err
		}
		c.Instance, c.Bound = instance, s.now().UTC()
		return put(tx.Bucket(bucketCreds), credKey(host, token), c)
	})
}

// Credentials lists what a host has published.
func (s *Store) Credentials(host wire.ID) ([]Credential, error) {
	var creds []Credential
	err := s.db.View(func(tx *bbolt.Tx) (err error) {
		creds, err = credentialsOf(tx, host)
		return err
	})
	return creds, err
}

// count is the number of a host's records, tombstones included.
func count(tx *bbolt.Tx, host wire.ID) (n int) {
	cur := tx.Bucket(bucketCreds).Cursor()
	for k, _ := cur.Seek(host[:]); bytes.HasPrefix(k, host[:]); k, _ = cur.Next() {
		n++
	}
	return n
}

func credentialsOf(tx *bbolt.Tx, host wire.ID) ([]Credential, error) {
	var creds []Credential
	cur := tx.Bucket(bucketCreds).Cursor()
	for k, v := cur.Seek(host[:]); bytes.HasPrefix(k, host[:]); k, v = cur.Next() {
		c, err := decode[Credential](v)
		if err != nil {
			return nil, err
		}
		creds = append(creds, c)
	}
	return creds, nil
}

func byName(tx *bbolt.Tx, host wire.ID, kind wire.Kind, id string) (Credential, bool, error) {
	digest := tx.Bucket(bucketNames).Get(nameKey(host, kind, id))
	if len(digest) != len(wire.Digest{}) {
		return Credential{}, false, nil
	}
	return get[Credential](tx.Bucket(bucketCreds), credKey(host, wire.Digest(digest)))
}

// drop forgets a credential, and its name if that is not another token's by now.
func drop(tx *bbolt.Tx, c Credential) error {
	err := tx.Bucket(bucketCreds).Delete(credKey(c.Host, c.Digest))
	names, name := tx.Bucket(bucketNames), nameKey(c.Host, c.Kind, c.ID)
	if bytes.Equal(names.Get(name), c.Digest[:]) {
		err = errors.Join(err, names.Delete(name))
	}
	return err
}
