package localsock

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestListenAndAsk(t *testing.T) {
	for name, dir := range map[string]string{
		"short": t.TempDir(),
		"long":  filepath.Join(t.TempDir(), strings.Repeat("long/", 30)),
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, "control.sock")
			ln, err := Listen(path)
			if err != nil {
				t.Fatal(err)
			}
			srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "here") })}
			done := make(chan struct{})
			go func() { _ = srv.Serve(ln); close(done) }()
			if err := Wait(t.Context(), path); err != nil {
				t.Error(err)
			}
			res, err := Client(path).Get("http://host/")
			if err != nil {
				t.Fatal(err)
			}
			body, _ := io.ReadAll(res.Body)
			_ = res.Body.Close()
			if string(body) != "here" {
				t.Errorf("answer = %q", body)
			}
			place, _ := Place(path)
			if info, err := os.Stat(place); err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("socket: %v, %v; want mode 0600", info, err)
			}
			if _, err := Listen(path); !errors.Is(err, ErrServed) {
				t.Errorf("a second Listen = %v, want ErrServed", err)
			}
			_ = srv.Close()
			<-done
			if _, err := os.Stat(place); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the socket is still there after Close: %v", err)
			}
		})
	}
}

func TestStaleSocketIsReplacedAndFilesAreNot(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	_ = ln.Close() // as a process that was killed leaves it
	again, err := Listen(path)
	if err != nil {
		t.Fatalf("stale socket: %v", err)
	}
	_ = again.Close()
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path); err == nil {
		t.Error("a file that is no socket was replaced")
	}
}

// TestOldListenerLeavesTheNewSocketAlone: a process that stops must not take
// away the socket of the one that came after it.
func TestOldListenerLeavesTheNewSocketAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	old, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	next, err := Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = next.Close() }()
	if err := old.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("the second Close = %v, want net.ErrClosed", err)
	}
	if err := Wait(t.Context(), path); err != nil {
		t.Error(err)
	}
}

// TestLock: one holder at a time, and the next when it is gone.
func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := Lock(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(path); !errors.Is(err, ErrLocked) {
		t.Errorf("a second Lock = %v, want ErrLocked", err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("lock: %v, %v; want mode 0600", info, err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Lock(path)
	if err != nil {
		t.Fatalf("Lock after the first holder is gone: %v", err)
	}
	_ = again.Close()
	if _, err := Lock(filepath.Join(path, "nowhere")); err == nil || errors.Is(err, ErrLocked) {
		t.Errorf("a lock that cannot be made = %v, want another error", err)
	}
}

func TestWaitEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Wait(ctx, filepath.Join(t.TempDir(), "nobody")); err == nil {
		t.Error("Wait found somebody where nobody is")
	}
}

func TestPrivateDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	if err := privateDir(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // what must be refused
		t.Fatal(err)
	}
	if err := privateDir(dir); err == nil {
		t.Error("a folder that others can enter was taken")
	}
}
