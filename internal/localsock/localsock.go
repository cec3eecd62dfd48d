// Package localsock gives one process of a user a door that only the same user
// can open: a Unix socket with owner-only rights, and plain HTTP over it. Power
// over a host or a broker goes by who may open the file, never by an address:
// a connection from loopback may be anybody's.
package localsock

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// MaxPath is the longest path that a Unix socket may have on every platform.
const MaxPath = 103

// Place is where the socket for path really is: at path, or, where that is
// longer than a socket's name may be, in a folder of this user's own below the
// system's temporary folder, under a name made from path.
func Place(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("socket: %w", err)
	}
	if len(abs) <= MaxPath {
		return abs, nil
	}
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("hermes-reach-%d", os.Getuid()))
	if err := privateDir(dir); err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(abs))
	return filepath.Join(dir, hex.EncodeToString(sum[:12])), nil
}

// Listen listens on the socket for path. A socket that a dead process left
// behind is replaced; one that answers, and any other kind of file, is
// refused. Closing the listener removes the socket.
//
// The socket is bound inside a private folder and moved to its place with its
// final mode: there is no moment in which others could connect.
func Listen(path string) (net.Listener, error) {
	place, err := Place(path)
	if err != nil {
		return nil, err
	}
	if err := makeRoom(place); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(filepath.Dir(place), ".s")
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", place, err)
	}
	defer func() { _ = os.Remove(dir) }() // empty by then
	tmp := filepath.Join(dir, "s")
	if len(tmp) > MaxPath {
		tmp = place // no room for the detour: the folder must be private, and ours are
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", place, err)
	}
	ln.SetUnlinkOnClose(false) // it would unlink the name it was bound to
	err = os.Chmod(tmp, 0o600)
	if err == nil && tmp != place {
		err = os.Rename(tmp, place)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("socket %s: %w", place, err), ln.Close(), os.Remove(tmp))
	}
	return &listener{Listener: ln, place: place}, nil
}

// makeRoom makes room at place, or says what is there.
func makeRoom(place string) error {
	info, err := os.Lstat(place)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("socket: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s exists and is not a socket: choose another path", place)
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: place, Net: "unix"})
	if err == nil {
		return errors.Join(fmt.Errorf("%s: %w", place, ErrServed), c.Close())
	}
	if !nobodyThere(err) { // such as a live process whose queue is full
		return fmt.Errorf("%s: %w, or cannot be asked: %w", place, ErrServed, err)
	}
	if err := os.Remove(place); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the socket of a dead process: %w", err)
	}
	return nil
}

// Errors a caller acts on.
var (
	ErrServed = errors.New("another process of yours serves it") // the socket
	ErrLocked = errors.New("another process of yours uses it")   // what Lock guards
)

// Lock keeps every other process that asks for the same lock out until it is
// closed or this process ends, however it ends. The file stays: removing it
// would let two processes hold a lock of one name. Where the file system knows
// no locks, everybody gets it.
func Lock(path string) (io.Closer, error) {
	f, err := lock(path)
	switch {
	case errors.Is(err, ErrLocked):
		return nil, fmt.Errorf("%s: %w", path, err)
	case err != nil:
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// privateDir makes dir for this user alone, and refuses one that is not.
func privateDir(dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("socket folder: %w", err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return fmt.Errorf("socket folder: %w", err)
	}
	if !info.IsDir() || info.Mode().Perm()&0o077 != 0 || !ownedByUs(info) {
		return fmt.Errorf("socket folder %s is not private to you: remove it", dir)
	}
	return nil
}

// A listener removes its socket when it closes.
type listener struct {
	net.Listener
	place string
	once  sync.Once
}

// Close removes the socket first: as long as it answers, nobody else takes its
// place, and afterwards it may be somebody else's.
func (l *listener) Close() error {
	err := net.ErrClosed
	l.once.Do(func() { err = errors.Join(os.Remove(l.place), l.Listener.Close()) })
	return err
}

// Client is an HTTP client whose every request goes to the socket for path,
// whatever host it names.
func Client(path string) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			place, err := Place(path)
			if err != nil {
				return nil, err
			}
			return (&net.Dialer{}).DialContext(ctx, "unix", place)
		},
		DisableKeepAlives: true,
	}}
}

// Wait waits until somebody answers on the socket for path, or ctx ends.
func Wait(ctx context.Context, path string) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		place, err := Place(path)
		if err != nil {
			return err
		}
		c, err := (&net.Dialer{}).DialContext(ctx, "unix", place)
		if err == nil {
			return c.Close()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("nothing answers on %s: %w", place, err)
		}
	}
}
