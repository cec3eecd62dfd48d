// Package store keeps what a broker must not forget: which hosts may register
// and which credentials they published, as digests only. It is one bbolt file.
//
// Every change is on disk before the call that made it returns: a bootstrap
// that was bound stays bound and a publication that was acknowledged stays
// published, whenever the process is killed.
package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/bbolt"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// SchemaVersion is written into every file; another one is refused.
const SchemaVersion = 1

// MaxCredentials is how many credentials one host may have at a time.
const MaxCredentials = 1024

// keepUsed is how long the digest of a bootstrap that was used is kept at the
// least, so that a replay gets its own answer.
const keepUsed = 24 * time.Hour

// Errors a caller acts on.
var (
	ErrLocked   = errors.New("the state file is in use by another process")
	ErrSchema   = errors.New("the state file was written by another version")
	ErrNoHost   = errors.New("no such host")
	ErrHostName = errors.New("a host of that name exists")
	ErrQuota    = errors.New("the host has too many live credentials")
)

var (
	bucketMeta  = []byte("meta")
	bucketHosts = []byte("hosts")       // host id -> Host
	bucketCreds = []byte("credentials") // host id ‖ token digest -> Credential
	bucketNames = []byte("names")       // host id ‖ kind ‖ 0 ‖ id -> token digest
	keySchema   = []byte("schema")
)

// Store is an open state file. Its methods may be called by any number of
// goroutines.
type Store struct {
	db  *bbolt.DB
	now func() time.Time
}

// Open opens or creates the file at path with mode 0600 in a folder that only
// the owner may enter, and checks it. It waits at most a second for another
// process that has it open (ErrLocked).
func Open(path string, now func() time.Time) (*Store, error) {
	if now == nil {
		now = time.Now
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("broker state: %w", err)
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: time.Second})
	if errors.Is(err, bbolt.ErrTimeout) {
		return nil, fmt.Errorf("broker state %s: %w", path, ErrLocked)
	}
	if err != nil {
		return nil, fmt.Errorf("broker state %s: %w", path, err)
	}
	s := &Store{db: db, now: now}
	if err := s.init(); err != nil {
		return nil, errors.Join(fmt.Errorf("broker state %s: %w", path, err), db.Close())
	}
	return s, nil
}

func (s *Store) init() error {
	return s.db.Update(func(tx *bbolt.Tx) error {
		meta, err := tx.CreateBucketIfNotExists(bucketMeta)
		if err != nil {
			return err
		}
		want := fmt.Append(nil, SchemaVersion)
		switch have := meta.Get(keySchema); {
		case have == nil:
			if err := meta.Put(keySchema, want); err != nil {
				return err
			}
		case string(have) != string(want):
			return fmt.Errorf("%w: schema %s, this program writes %s", ErrSchema, have, want)
		}
		for _, b := range [][]byte{bucketHosts, bucketCreds, bucketNames} {
			if _, err := tx.CreateBucketIfNotExists(b); err != nil {
				return err
			}
		}
		return nil
	})
}

// Close closes the file.
func (s *Store) Close() error { return s.db.Close() }

func get[T any](b *bbolt.Bucket, key []byte) (T, bool, error) {
	var v T
	raw := b.Get(key)
	if raw == nil {
		return v, false, nil
	}
	if err := json.Unmarshal(raw, &v); err != nil {
		return v, false, fmt.Errorf("broker state: record is damaged: %w", err)
	}
	return v, true, nil
}

func put(b *bbolt.Bucket, key []byte, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return b.Put(key, raw)
}

func credKey(host wire.ID, digest wire.Digest) []byte {
	return append(append(make([]byte, 0, 48), host[:]...), digest[:]...)
}

func nameKey(host wire.ID, kind wire.Kind, id string) []byte {
	k := append(make([]byte, 0, 64), host[:]...)
	k = append(k, kind...)
	k = append(k, 0)
	return append(k, id...)
}
