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
	"runtime"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// SchemaVersion is written into every file; another one is refused.
const SchemaVersion = 1

// MaxCredentials is how many credentials one host may have at a time. As many
// tombstones of used bootstraps are kept beside them.
const MaxCredentials = 1024

const (
	// keepUsed is how long the digest of a bootstrap that was used is kept at
	// the least, so that a replay gets its own answer.
	keepUsed = 24 * time.Hour

	// keepExpired is how long an expired credential is kept while there is
	// room, so that its device is told "expired" and not "unknown".
	keepExpired = 7 * 24 * time.Hour

	// sweepEvery is how often a host that has room is cleaned up: it costs a
	// look at all that it published.
	sweepEvery = time.Hour
)

// Errors a caller acts on.
var (
	ErrLocked   = errors.New("the state file is in use by another process")
	ErrSchema   = errors.New("the state file was written by another version")
	ErrDamaged  = errors.New("the file is damaged, or no broker's state: it was left as it is; put a copy in its place, or move it away and enroll the hosts again")
	ErrNoHost   = errors.New("no such host")
	ErrHostName = errors.New("a host of that name exists")
	ErrHostID   = errors.New("a host of that id exists")
	ErrQuota    = errors.New("the host has too many live credentials")
	ErrToken    = errors.New("the token is another credential's")
)

var (
	bucketMeta  = []byte("meta")
	bucketHosts = []byte("hosts")       // host id -> Host
	bucketCreds = []byte("credentials") // host id ‖ token digest -> Credential
	bucketNames = []byte("names")       // host id ‖ kind ‖ 0 ‖ id -> digest of its current token
	keySchema   = []byte("schema")
)

// Store is an open state file. Its methods may be called by any number of
// goroutines.
type Store struct {
	db    *bbolt.DB
	now   func() time.Time
	swept map[wire.ID]time.Time // when a host's credentials were cleaned up; the writer's
}

// lockWait is how long Open waits for another process.
const lockWait = time.Second

// Open opens or creates the file at path, with mode 0600, and checks every
// record in it. A folder that is missing is made with mode 0700; one that
// everybody may write is refused. It waits a second for another process that
// has the file open (ErrLocked). A file that does not hold is ErrDamaged or
// ErrSchema, and Open has not changed it.
func Open(path string, now func() time.Time) (*Store, error) {
	if now == nil {
		now = time.Now
	}
	s, err := open(path, now)
	if errors.Is(err, berrors.ErrTimeout) {
		err = ErrLocked
	}
	if err != nil {
		return nil, fmt.Errorf("broker state %s: %w", path, err)
	}
	return s, nil
}

func open(path string, now func() time.Time) (*Store, error) {
	if err := prepareFolder(filepath.Dir(path)); err != nil {
		return nil, err
	}
	fresh, err := inspect(path)
	if err != nil {
		return nil, err
	}
	db, err := openFile(path, false)
	if err != nil {
		return nil, err
	}
	s := &Store{db: db, now: now, swept: make(map[wire.ID]time.Time)}
	if err := s.init(); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	if fresh { // the file's name must survive a power failure too
		err = syncFolder(filepath.Dir(path))
	}
	if err == nil {
		err = os.Chmod(path, 0o600)
	}
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return s, nil
}

func prepareFolder(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if runtime.GOOS != "windows" && info.Mode().Perm()&0o002 != 0 && info.Mode()&os.ModeSticky == 0 {
		return fmt.Errorf("everybody may replace files in %s: chmod o-w it, or choose another folder", dir)
	}
	return nil
}

func syncFolder(dir string) error {
	if runtime.GOOS == "windows" {
		return nil // it has no such call
	}
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// init writes the schema into a new file, all of it or nothing.
func (s *Store) init() error {
	ready := false
	err := s.db.View(func(tx *bbolt.Tx) error {
		ready = tx.Bucket(bucketMeta) != nil // inspect has seen the rest
		return nil
	})
	if err != nil || ready {
		return err
	}
	return s.db.Update(func(tx *bbolt.Tx) error {
		for _, b := range [][]byte{bucketMeta, bucketHosts, bucketCreds, bucketNames} {
			if _, err := tx.CreateBucket(b); err != nil {
				return err
			}
		}
		return tx.Bucket(bucketMeta).Put(keySchema, fmt.Append(nil, SchemaVersion))
	})
}

// Close closes the file.
func (s *Store) Close() error { return s.db.Close() }

func get[T any](b *bbolt.Bucket, key []byte) (T, bool, error) {
	raw := b.Get(key)
	if raw == nil {
		var none T
		return none, false, nil
	}
	v, err := decode[T](raw)
	return v, err == nil, err
}

func decode[T any](raw []byte) (T, error) {
	var v T
	if err := json.Unmarshal(raw, &v); err != nil {
		return v, fmt.Errorf("%w: a record does not parse: %w", ErrDamaged, err)
	}
	return v, nil
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
