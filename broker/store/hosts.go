package store

import (
	"fmt"
	"time"

	"go.etcd.io/bbolt"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// A HostToken is one registration token of a host, as its digest.
type HostToken struct {
	Digest wire.Digest `json:"digest"`
	// Until is when a token that was rotated out stops working; zero for the
	// current one.
	Until time.Time `json:"until,omitzero"`
}

// A Host may register with this broker.
type Host struct {
	ID      wire.ID     `json:"id"`
	Name    string      `json:"name"`
	Created time.Time   `json:"created"`
	Tokens  []HostToken `json:"tokens"`
}

// AddHost lets a host register with the token of that digest. Names are unique.
func (s *Store) AddHost(name string, id wire.ID, token wire.Digest) error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketHosts)
		if _, ok, err := findHost(tx, name); err != nil || ok {
			return orErr(err, fmt.Errorf("add host %q: %w", name, ErrHostName))
		}
		if b.Get(id[:]) != nil {
			return fmt.Errorf("add host %q: the id %s is another host's", name, id)
		}
		return put(b, id[:], Host{ID: id, Name: name, Created: s.now().UTC(), Tokens: []HostToken{{Digest: token}}})
	})
}

func orErr(err, otherwise error) error {
	if err != nil {
		return err
	}
	return otherwise
}

func findHost(tx *bbolt.Tx, name string) (Host, bool, error) {
	var found Host
	ok := false
	err := tx.Bucket(bucketHosts).ForEach(func(k, _ []byte) error {
		h, _, err := get[Host](tx.Bucket(bucketHosts), k)
		if err == nil && h.Name == name {
			found, ok = h, true
		}
		return err
	})
	return found, ok, err
}

// RotateHost gives a host a new token. The old one works for overlap more.
func (s *Store) RotateHost(name string, token wire.Digest, overlap time.Duration) (Host, error) {
	var h Host
	err := s.db.Update(func(tx *bbolt.Tx) error {
		found, ok, err := findHost(tx, name)
		if err != nil || !ok {
			return orErr(err, fmt.Errorf("rotate the token of %q: %w", name, ErrNoHost))
		}
		h = found
		until := s.now().Add(overlap).UTC()
		kept := []HostToken{{Digest: token}}
		for _, t := range h.Tokens {
			if t.Until.IsZero() || t.Until.After(until) {
				t.Until = until
			}
			if overlap > 0 && t.Until.After(s.now()) {
				kept = append(kept, t)
			}
		}
		h.Tokens = kept
		return put(tx.Bucket(bucketHosts), h.ID[:], h)
	})
	return h, err
}

// RemoveHost forgets a host and every credential it published.
func (s *Store) RemoveHost(name string) (Host, error) {
	var h Host
	err := s.db.Update(func(tx *bbolt.Tx) error {
		found, ok, err := findHost(tx, name)
		if err != nil || !ok {
			return orErr(err, fmt.Errorf("remove host %q: %w", name, ErrNoHost))
		}
		h = found
		creds, err := credentialsOf(tx, h.ID)
		if err != nil {
			return err
		}
		for _, c := range creds {
			if err := drop(tx, c); err != nil {
				return err
			}
		}
		return tx.Bucket(bucketHosts).Delete(h.ID[:])
	})
	return h, err
}

// Hosts lists the hosts in the order of their ids.
func (s *Store) Hosts() ([]Host, error) {
	var hosts []Host
	err := s.db.View(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketHosts)
		return b.ForEach(func(k, _ []byte) error {
			h, _, err := get[Host](b, k)
			hosts = append(hosts, h)
			return err
		})
	})
	return hosts, err
}

// CheckHost tells whether the token of that digest registers the host now.
func (s *Store) CheckHost(id wire.ID, token wire.Digest) (bool, error) {
	good := false
	err := s.db.View(func(tx *bbolt.Tx) error {
		h, ok, err := get[Host](tx.Bucket(bucketHosts), id[:])
		if err != nil || !ok {
			return err
		}
		for _, t := range h.Tokens {
			live := t.Until.IsZero() || t.Until.After(s.now())
			good = (t.Digest.Equal(token) && live) || good
		}
		return nil
	})
	return good, err
}
