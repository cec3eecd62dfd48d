package store

import (
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

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

// maxName bounds a host's name, in characters: it has to fit into the line that
// enrolls the host.
const maxName = 64

func checkName(name string) error {
	if n := utf8.RuneCountInString(name); n == 0 || n > maxName || !utf8.ValidString(name) ||
		strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }) {
		return fmt.Errorf("a host's name is 1 to %d printable characters", maxName)
	}
	return nil
}

// AddHost lets a host register with the token of that digest. Names and ids
// are unique (ErrHostName, ErrHostID).
func (s *Store) AddHost(name string, id wire.ID, token wire.Digest) error {
	if err := checkName(name); err != nil {
		return fmt.Errorf("add host: %w", err)
	}
	if id.IsZero() {
		return fmt.Errorf("add host %q: it has no id", name)
	}
	return s.db.Update(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketHosts)
		if _, ok, err := findHost(tx, name); err != nil || ok {
			return orErr(err, fmt.Errorf("add host %q: %w", name, ErrHostName))
		}
		if b.Get(id[:]) != nil {
			return fmt.Errorf("add host %q: %w", name, ErrHostID)
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
	err := tx.Bucket(bucketHosts).ForEach(func(_, v []byte) error {
		h, err := decode[Host](v)
		if err == nil && h.Name == name {
			found, ok = h, true
		}
		return err
	})
	return found, ok, err
}

// maxTokens bounds how many rotated-out tokens are kept beside the current one:
// of more, those that were rotated out first go.
const maxTokens = 8

// RotateHost gives a host a new token. The old one works for overlap more, not
// at all with 0; what an earlier rotation left is never prolonged.
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
		h.Tokens = kept[:min(len(kept), maxTokens)]
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
		return tx.Bucket(bucketHosts).ForEach(func(_, v []byte) error {
			h, err := decode[Host](v)
			hosts = append(hosts, h)
			return err
		})
	})
	return hosts, err
}

// Host gives the host of that id.
func (s *Store) Host(id wire.ID) (h Host, ok bool, err error) {
	err = s.db.View(func(tx *bbolt.Tx) (err error) {
		h, ok, err = get[Host](tx.Bucket(bucketHosts), id[:])
		return err
	})
	return h, ok, err
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
