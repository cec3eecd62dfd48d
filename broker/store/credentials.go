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
	// first dial was accepted.
	Instance wire.ID `json:"instance,omitzero"`
	// Used is set when a bootstrap was bound and then revoked: what is left is
	// a tombstone, so that a replay is told apart from a stranger.
	Used bool `json:"used,omitempty"`
}

// Refusals of a credential. Each stands for one code on the wire.
var (
	ErrUnknown  = errors.New("no such credential")
	ErrExpired  = errors.New("the credential has expired")
	ErrReplayed = errors.New("the bootstrap was used by another client")
)

// Publish stores a credential, in place of an earlier one of the same kind and
// id, whose token then opens nothing more. Past MaxCredentials the expired go
// first, then the bootstraps that expire first; then it is ErrQuota.
func (s *Store) Publish(c Credential) error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		if tx.Bucket(bucketHosts).Get(c.Host[:]) == nil {
			return fmt.Errorf("publish: %w", ErrNoHost)
		}
		old, ok, err := byName(tx, c.Host, c.Kind, c.ID)
		if err != nil {
			return err
		}
		if ok {
			if old.Digest.Equal(c.Digest) { // published again: what it is bound to stays
				c.Instance, c.Used = old.Instance, old.Used
			}
			if err := drop(tx, old); err != nil {
				return err
			}
		}
		if err := s.makeRoom(tx, c.Host); err != nil {
			return err
		}
		if err := tx.Bucket(bucketNames).Put(nameKey(c.Host, c.Kind, c.ID), c.Digest[:]); err != nil {
			return err
		}
		return put(tx.Bucket(bucketCreds), credKey(c.Host, c.Digest), c)
	})
}

// makeRoom forgets what has expired and, if need be, one bootstrap.
func (s *Store) makeRoom(tx *bbolt.Tx, host wire.ID) error {
	creds, err := credentialsOf(tx, host)
	if err != nil {
		return err
	}
	live := creds[:0]
	for _, c := range creds {
		if c.forgettable(s.now()) {
			if err := drop(tx, c); err != nil {
				return err
			}
			continue
		}
		live = append(live, c)
	}
	if len(live) < MaxCredentials {
		return nil
	}
	slices.SortFunc(live, func(a, b Credential) int { return a.Expires.Compare(b.Expires) })
	i := slices.IndexFunc(live, func(c Credential) bool { return c.Kind == wire.KindBootstrap })
	if i < 0 {
		return fmt.Errorf("publish: %w (%d)", ErrQuota, MaxCredentials)
	}
	return drop(tx, live[i])
}

func (c Credential) forgettable(now time.Time) bool {
	end := c.Expires
	if c.Kind == wire.KindBootstrap && c.Instance != (wire.ID{}) {
		end = end.Add(keepUsed)
	}
	return !end.After(now)
}

// Revoke takes a credential back. A bootstrap that was used leaves a tombstone.
// Revoking what is not there is no error.
func (s *Store) Revoke(host wire.ID, kind wire.Kind, id string) (Credential, bool, error) {
	var c Credential
	var found bool
	err := s.db.Update(func(tx *bbolt.Tx) (err error) {
		c, found, err = byName(tx, host, kind, id)
		if err != nil || !found {
			return err
		}
		if kind == wire.KindBootstrap && c.Instance != (wire.ID{}) {
			c.Used = true
			return put(tx.Bucket(bucketCreds), credKey(c.Host, c.Digest), c)
		}
		return drop(tx, c)
	})
	return c, found, err
}

// Check looks a token up and says whether instance may use it now. The
// credential is returned with ErrReplayed and ErrExpired too.
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
	case c.Used, c.Instance != (wire.ID{}) && c.Instance != instance:
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
	return s.db.Update(func(tx *bbolt.Tx) error {
		c, err := check(tx, host, wire.KindBootstrap, token, instance, s.now())
		if err != nil {
			return err
		}
		c.Instance = instance
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

func credentialsOf(tx *bbolt.Tx, host wire.ID) ([]Credential, error) {
	var creds []Credential
	b := tx.Bucket(bucketCreds)
	cur := b.Cursor()
	for k, _ := cur.Seek(host[:]); bytes.HasPrefix(k, host[:]); k, _ = cur.Next() {
		c, _, err := get[Credential](b, k)
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

func drop(tx *bbolt.Tx, c Credential) error {
	return errors.Join(
		tx.Bucket(bucketCreds).Delete(credKey(c.Host, c.Digest)),
		tx.Bucket(bucketNames).Delete(nameKey(c.Host, c.Kind, c.ID)),
	)
}
