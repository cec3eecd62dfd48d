package store

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime/debug"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// inspect reads every page and record of an existing file without a chance to
// change it. The library maps the file and trusts it, so what is cut off or
// overwritten would fault, hang or panic in the middle of a broker's work: here
// it becomes an error before the work begins. fresh says that there is no file
// yet, or an empty one.
func inspect(path string) (fresh bool, err error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return true, nil
	case err != nil:
		return false, err
	case !info.Mode().IsRegular():
		return false, errors.New("it is not a regular file")
	case info.Size() == 0:
		return true, nil
	}
	db, err := openFile(path, true)
	if err != nil {
		return false, err
	}
	err = guarded(func() error { return db.View(checkFile) })
	return false, errors.Join(err, db.Close())
}

// checkFile looks at the pages first: records are read through the library.
func checkFile(tx *bbolt.Tx) error {
	f, err := os.Open(tx.DB().Path())
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := checkPages(f, int64(tx.DB().Info().PageSize), info.Size()); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	if err := checkSchema(tx); err != nil {
		return err
	}
	return errors.Join(checkHosts(tx), checkCredentials(tx), checkNames(tx))
}

// openFile opens the database. Should the library panic over a damaged file,
// its map and its lock stay with this process until it ends.
func openFile(path string, readOnly bool) (db *bbolt.DB, err error) {
	err = guarded(func() (err error) {
		db, err = bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: readOnly, Timeout: lockWait})
		return err
	})
	if err != nil {
		return nil, damaged(err)
	}
	return db, nil
}

// damaged marks the errors that the library has for a file it cannot use; the
// others are the operating system's.
func damaged(err error) error {
	var path *fs.PathError
	if errors.Is(err, berrors.ErrTimeout) || errors.Is(err, ErrDamaged) || errors.As(err, &path) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrDamaged, err)
}

// guarded turns a panic of the library, and an access beyond the mapped file,
// into ErrDamaged.
func guarded(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: %v", ErrDamaged, p)
		}
	}()
	return f()
}

// checkSchema takes a file that has nothing in it yet for a new one: a process
// may have been killed between making and filling it.
func checkSchema(tx *bbolt.Tx) error {
	meta := tx.Bucket(bucketMeta)
	if meta == nil {
		if k, _ := tx.Cursor().First(); k != nil {
			return fmt.Errorf("%w: it holds something else", ErrDamaged)
		}
		return nil
	}
	want := fmt.Append(nil, SchemaVersion)
	if have := meta.Get(keySchema); !bytes.Equal(have, want) {
		return fmt.Errorf("%w: schema %q, this program writes %s", ErrSchema, have, want)
	}
	for _, b := range [][]byte{bucketHosts, bucketCreds, bucketNames} {
		if tx.Bucket(b) == nil {
			return fmt.Errorf("%w: it has no %s", ErrDamaged, b)
		}
	}
	return nil
}

// each visits the records of a bucket that may not be there yet.
func each(tx *bbolt.Tx, bucket []byte, visit func(k, v []byte) error) error {
	b := tx.Bucket(bucket)
	if b == nil {
		return nil
	}
	return b.ForEach(func(k, v []byte) error {
		if v == nil {
			return fmt.Errorf("%w: a folder among the %s", ErrDamaged, bucket)
		}
		return visit(k, v)
	})
}

func checkHosts(tx *bbolt.Tx) error {
	return each(tx, bucketHosts, func(k, v []byte) error {
		h, err := decode[Host](v)
		if err == nil && (!bytes.Equal(k, h.ID[:]) || len(h.Tokens) == 0) {
			err = fmt.Errorf("%w: a host is not where it belongs", ErrDamaged)
		}
		return err
	})
}

func checkCredentials(tx *bbolt.Tx) error {
	return each(tx, bucketCreds, func(k, v []byte) error {
		c, err := decode[Credential](v)
		if err == nil && !bytes.Equal(k, credKey(c.Host, c.Digest)) {
			err = fmt.Errorf("%w: a credential is not where it belongs", ErrDamaged)
		}
		return err
	})
}

func checkNames(tx *bbolt.Tx) error {
	creds := tx.Bucket(bucketCreds)
	return each(tx, bucketNames, func(k, v []byte) error {
		if len(k) < len(wire.ID{}) || len(v) != len(wire.Digest{}) {
			return fmt.Errorf("%w: a name is not one", ErrDamaged)
		}
		c, ok, err := get[Credential](creds, credKey(wire.ID(k[:len(wire.ID{})]), wire.Digest(v)))
		if err == nil && (!ok || !bytes.Equal(k, nameKey(c.Host, c.Kind, c.ID))) {
			err = fmt.Errorf("%w: a name leads nowhere", ErrDamaged)
		}
		return err
	})
}
