package hermesagent

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed" // the lock file
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// requirements pins every package that is installed, by version and hash.
//
//go:embed requirements.txt
var requirements []byte

// pythonVersion is the one that the lock file was made with. Another may need
// other packages than it lists.
const pythonVersion = "3.11"

// stamp is the file whose presence says that an environment is whole. It is
// written last.
const stamp = "complete"

var pinned = regexp.MustCompile(`(?m)^hermes-agent==([0-9][0-9a-z.]*) `)

// Version is the version of Hermes Agent that requirements.txt pins.
func Version() string { return string(pinned.FindSubmatch(requirements)[1]) }

// Install returns the path of a virtual environment with exactly what
// requirements.txt pins, made now if the cache has none. It reports its progress
// to w. It needs a package index the first time, and takes one to two minutes and
// 240 MB then; later calls only look. Several processes may call it at once: one
// installs, the others wait.
func Install(ctx context.Context, w io.Writer) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a place for the Python environment: %w", err)
	}
	python, version, err := findPython(ctx)
	if err != nil {
		return "", err
	}
	// The interpreter's path counts: an environment only links to it.
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n%s", python, version, requirements))
	return installAt(ctx, w, python, filepath.Join(cache, "hermes-reach", "interop", hex.EncodeToString(sum[:8])))
}

func installAt(ctx context.Context, w io.Writer, python, dir string) (string, error) {
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return "", err
	}
	unlock, err := lock(dir + ".lock")
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(filepath.Join(dir, stamp)); err == nil {
		fmt.Fprintf(w, "interop: the Python environment is there: %s\n", dir)
		return dir, nil
	}
	if err := os.RemoveAll(dir); err != nil { // what an interrupted run has left
		return "", err
	}
	list := dir + ".txt"
	if err := os.WriteFile(list, requirements, 0o600); err != nil {
		return "", err
	}
	start := time.Now()
	fmt.Fprintf(w, "interop: installing Hermes Agent into %s (one to two minutes, 240 MB, kept for later runs)\n", dir)
	bin := filepath.Join(dir, "bin", "python")
	for _, step := range [][]string{
		{python, "-m", "venv", dir},
		// Wheels only: a source archive would run code of its own to build,
		// and fetch tools for that, which no hash here pins.
		{bin, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar=off",
			"--timeout=60", "--no-deps", "--only-binary=:all:", "--require-hashes", "-r", list},
		{bin, "-m", "pip", "check", "--disable-pip-version-check"},
	} {
		if err := run(ctx, &progress{w: w}, step); err != nil {
			return "", fmt.Errorf("install Hermes Agent (needed: Python %s with venv, and a package index that pip can reach): %w", pythonVersion, err)
		}
	}
	fmt.Fprintf(w, "interop: installed in %v\n", time.Since(start).Round(time.Second))
	return dir, os.WriteFile(filepath.Join(dir, stamp), nil, 0o600)
}

// run carries out one step. An error ends with the last lines of what it said.
func run(ctx context.Context, p *progress, args []string) error {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = p, p // the same, so that it is written to by one goroutine
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w:\n%s", strings.Join(args[:min(4, len(args))], " "), err, strings.Join(p.last, "\n"))
	}
	return nil
}

// progress is written to by pip: it shows where pip is, a line for every ten
// packages, and keeps the last lines for the case that pip fails.
type progress struct {
	w       io.Writer
	partial []byte
	last    []string
	seen    int
}

func (p *progress) Write(b []byte) (int, error) {
	p.partial = append(p.partial, b...)
	for {
		line, rest, whole := bytes.Cut(p.partial, []byte("\n"))
		if !whole {
			return len(b), nil
		}
		p.partial = rest
		p.last = append(p.last[max(0, len(p.last)-9):], string(line))
		if bytes.HasPrefix(line, []byte("Collecting ")) {
			if p.seen++; p.seen%10 == 0 {
				fmt.Fprintf(p.w, "interop: %d of %d packages\n", p.seen, bytes.Count(requirements, []byte("==")))
			}
		} else if bytes.HasPrefix(line, []byte("Installing ")) {
			fmt.Fprintln(p.w, "interop: unpacking them")
		}
	}
}

// findPython returns an interpreter of the right version and what it calls itself.
func findPython(ctx context.Context) (path, version string, err error) {
	var tried []error
	for _, name := range []string{"python" + pythonVersion, "python3"} {
		out, err := exec.CommandContext(ctx, name, "-c", "import sys; print(sys.executable, sys.version_info[:3])").Output()
		if err != nil {
			tried = append(tried, fmt.Errorf("%s: %w", name, err))
			continue
		}
		path, version, _ := strings.Cut(string(bytes.TrimSpace(out)), " ")
		if !strings.HasPrefix(version, "("+strings.Replace(pythonVersion, ".", ", ", 1)+",") {
			tried = append(tried, fmt.Errorf("%s is version %s", name, version))
			continue
		}
		return path, version, nil
	}
	return "", "", fmt.Errorf("no Python %s found (Debian: apt-get install python3-venv): %w", pythonVersion, errors.Join(tried...))
}

// lock holds the file until the returned function is called, or this process
// ends in any way.
func lock(name string) (unlock func(), err error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", name, err)
	}
	return func() { f.Close() }, nil
}
