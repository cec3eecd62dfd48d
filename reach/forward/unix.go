package forward

import (
	"fmt"
	"net"
	"path/filepath"

	"github.com/hermes-reach/hermes-reach/internal/localsock"
)

// ListenUnix listens on a Unix socket that only this user can open. A socket
// that a dead process left behind is replaced; one that answers, and any other
// kind of file, is refused. Closing the listener removes the socket. Programs
// are told the path, so one that is too long for a socket is refused too.
func ListenUnix(path string) (net.Listener, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("forward: %w", err)
	}
	if len(abs) > localsock.MaxPath {
		return nil, fmt.Errorf("forward: %s is longer than the %d bytes that a socket's path may have: choose a shorter one",
			abs, localsock.MaxPath)
	}
	ln, err := localsock.Listen(abs)
	if err != nil {
		return nil, fmt.Errorf("forward: %w", err)
	}
	return ln, nil
}
