package forward

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
)

// ListenUnix listens on a Unix socket that only this user can open. A socket
// that a dead process left behind is replaced; one that answers, and any other
// kind of file, is refused. Closing the listener removes the socket.
//
// The socket is bound inside a private folder and moved to its place with its
// final mode: there is no moment in which others could connect.
func ListenUnix(path string) (net.Listener, error) {
	if err := makeRoom(path); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), ".reach-")
	if err != nil {
		return nil, fmt.Errorf("forward: socket %s: %w", path, err)
	}
	defer os.Remove(dir) // empty by then
	tmp := filepath.Join(dir, "s")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("forward: socket %s: %w", path, err)
	}
	ln.SetUnlinkOnClose(false) // it would unlink the name it was bound to
	if err = os.Chmod(tmp, 0o600); err == nil {
		err = os.Rename(tmp, path)
		if err == nil {
			return &unixListener{Listener: ln, path: path}, nil
		}
	}
	return nil, errors.Join(fmt.Errorf("forward: socket %s: %w", path, err), ln.Close(), os.Remove(tmp))
}

// makeRoom makes room at path, or says what is there.
func makeRoom(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("forward: socket: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("forward: %s exists and is not a socket: choose another path", path)
	}
	if c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"}); err == nil {
		return errors.Join(fmt.Errorf("forward: %s is served by another process: choose another path", path), c.Close())
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("forward: stale socket: %w", err)
	}
	return nil
}

// A unixListener removes its socket when it closes.
type unixListener struct {
	net.Listener
	path string
}

func (l *unixListener) Close() error {
	err := l.Listener.Close()
	if err != nil {
		return err // closed before: the path may be somebody else's by now
	}
	return os.Remove(l.path)
}
