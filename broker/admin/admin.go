// Package admin is how an operator changes which hosts a broker serves, beside
// the running broker and on a stopped one alike.
//
// The state file belongs to one process at a time. A running broker holds it
// and listens on a Unix socket next to it that only the same user may open;
// what is asked there takes effect at once, on live sessions too. When no broker
// runs, the file is opened directly. Open finds out which.
//
// Tokens are made here, on the asking side: the socket and the file see digests
// only.
package admin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/internal/localsock"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// MaxOverlap bounds how long a rotated token goes on to work.
const MaxOverlap = 30 * 24 * time.Hour

// openWait is how long Open waits for a broker that is just starting or
// stopping.
const openWait = 10 * time.Second

// Host is what an operator sees of a host. It holds no digest.
type Host struct {
	ID      wire.ID   `json:"host_id"`
	Name    string    `json:"name"`
	Created time.Time `json:"created"`
	// OldTokenUntil is when the last token that was rotated out stops working;
	// zero when none works any more.
	OldTokenUntil time.Time `json:"old_token_until,omitzero"`
	Credentials   int       `json:"credentials"` // of its devices and pairings, not expired
	Sessions      int       `json:"sessions"`    // registered now; 0 when no broker runs
	Streams       int       `json:"streams"`     // matched now
}

// An Admin changes the hosts of one broker. Its methods may be called by any
// number of goroutines. Errors of a host that is missing or there already are
// store.ErrNoHost, store.ErrHostName and store.ErrHostID.
type Admin struct {
	do      backend
	running bool
	close   func() error
}

// backend is the running broker, or the file itself.
type backend interface {
	add(context.Context, addRequest) (Host, error)
	list(context.Context) ([]Host, error)
	rotate(context.Context, rotateRequest) (Host, error)
	remove(context.Context, removeRequest) (Host, error)
}

type addRequest struct {
	Name   string      `json:"name"`
	HostID wire.ID     `json:"host_id"`
	Token  wire.Digest `json:"token_sha256"`
}

type rotateRequest struct {
	Name    string        `json:"name"`
	Token   wire.Digest   `json:"token_sha256"`
	Overlap time.Duration `json:"overlap_ns"`
}

type removeRequest struct {
	Name string `json:"name"`
}

// Open finds the broker of a state file: the running one, or else the file,
// which it then holds until Close. A file that is missing is made. It waits up
// to 10 s where a broker has the file but does not answer yet.
func Open(statePath string) (*Admin, error) {
	ctx, cancel := context.WithTimeout(context.Background(), openWait)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	socket, err := socketOf(statePath)
	if err != nil {
		return nil, err
	}
	for {
		if there, err := answers(ctx, socket); err != nil {
			return nil, fmt.Errorf("ask the running broker: %w", err)
		} else if there {
			c := newClient(socket)
			return &Admin{do: c, running: true, close: c.close}, nil
		}
		s, err := store.Open(statePath, nil)
		if err == nil {
			return &Admin{do: &local{store: s}, close: s.Close}, nil
		}
		if !errors.Is(err, store.ErrLocked) || !hasSocket {
			return nil, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w, which does not answer on %s: use the same user and TMPDIR as the broker, or stop it", err, socket)
		}
	}
}

// Running says whether a running broker is asked, which obeys at once.
func (a *Admin) Running() bool { return a.running }

// Close lets go of the state file.
func (a *Admin) Close() error { return a.close() }

// Add lets a host register, with a new token, and with a new id if id is zero.
// The answer holds the token, which nobody can be told again; its URL and Pin
// are the caller's to fill in.
func (a *Admin) Add(ctx context.Context, name string, id wire.ID) (wire.HostLine, error) {
	if id.IsZero() {
		id = wire.NewID()
	}
	line := wire.HostLine{HostID: id, Token: wire.NewToken(), Name: name}
	return line, a.AddDigest(ctx, name, id, wire.DigestOf(line.Token))
}

// AddDigest is Add for a host that has its token already: only the digest is
// known here.
func (a *Admin) AddDigest(ctx context.Context, name string, id wire.ID, token wire.Digest) error {
	_, err := a.do.add(ctx, addRequest{Name: name, HostID: id, Token: token})
	return err
}

// List gives all hosts in the order of their ids.
func (a *Admin) List(ctx context.Context) ([]Host, error) { return a.do.list(ctx) }

// Rotate gives a host a new token, as Add does. The old one works for overlap
// more, at most MaxOverlap; with 0 it stops now, and sessions that registered
// with it end.
func (a *Admin) Rotate(ctx context.Context, name string, overlap time.Duration) (wire.HostLine, error) {
	token := wire.NewToken()
	h, err := a.do.rotate(ctx, rotateRequest{Name: name, Token: wire.DigestOf(token), Overlap: overlap})
	if err != nil {
		return wire.HostLine{}, err
	}
	return wire.HostLine{HostID: h.ID, Token: token, Name: name}, nil
}

// Remove forgets a host and every credential of its devices; its sessions and
// streams end.
func (a *Admin) Remove(ctx context.Context, name string) error {
	_, err := a.do.remove(ctx, removeRequest{Name: name})
	return err
}

// hasSocket: elsewhere brokers are administered while they are stopped.
const hasSocket = runtime.GOOS != "windows"

// socketOf is where the broker of a state file listens: beside the file, which
// may have been named through links.
func socketOf(statePath string) (string, error) {
	abs, err := filepath.Abs(statePath)
	if err != nil {
		return "", fmt.Errorf("broker state %s: %w", statePath, err)
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(abs))
	if errors.Is(err, fs.ErrNotExist) {
		dir, err = filepath.Dir(abs), nil // nobody listens there; the store will make it
	}
	if err != nil {
		return "", fmt.Errorf("broker state %s: %w", statePath, err)
	}
	return filepath.Join(dir, filepath.Base(abs)+".sock"), nil
}

// answers says whether a broker listens. A socket that a dead one left is as
// good as none; one that is not ours alone is refused before a word is said.
func answers(ctx context.Context, socket string) (bool, error) {
	if !hasSocket {
		return false, nil
	}
	place, err := localsock.Place(socket)
	if err != nil {
		return false, err
	}
	info, err := os.Lstat(place)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	}
	if err := ours(info); err != nil {
		return false, fmt.Errorf("%s %w", place, err)
	}
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", place)
	if err != nil {
		return false, nil // nobody is there, or a broker that is about to go or to come
	}
	return true, c.Close()
}

// ours refuses a socket that anybody but this user could have made or opened.
func ours(info fs.FileInfo) error {
	switch {
	case info.Mode().Type() != fs.ModeSocket:
		return errors.New("is not a socket: remove it")
	case !ownedByUs(info):
		return errors.New("belongs to another user: run this as the user that runs the broker")
	case info.Mode().Perm()&0o077 != 0:
		return errors.New("may be opened by other users: remove it and restart the broker")
	}
	return nil
}
