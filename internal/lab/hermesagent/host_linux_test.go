package hermesagent

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

var entry = regexp.MustCompile(`^[a-z0-9.-]+==[0-9][0-9a-z.]* \\$`)

// TestLock holds the lock file to what pip is told: every requirement is one
// version with hashes, and nothing names a place to get it from.
func TestLock(t *testing.T) {
	if Version() == "" {
		t.Error("no version of hermes-agent")
	}
	entries := 0
	for i, line := range strings.Split(string(requirements), "\n") {
		switch {
		case strings.HasPrefix(line, "    --hash=sha256:"), line == "":
		case entry.MatchString(line):
			entries++
		default:
			t.Errorf("requirements.txt:%d: %q is neither a version with hashes nor a hash", i+1, line)
		}
	}
	if entries < 20 {
		t.Errorf("only %d packages", entries)
	}
}

// fakePython writes a program that stands in for an interpreter: "-m venv DIR"
// makes DIR/bin/python of itself, "-m pip install" does what is given.
func fakePython(t *testing.T, install string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "python3.11")
	script := "#!/bin/sh\necho run $2 $3 >>" + filepath.Dir(name) + "/calls\n" +
		"case $2 in venv) mkdir -p $3/bin; cp $0 $3/bin/python;; pip) case $3 in install) " + install + ";; esac;; esac\n"
	if err := os.WriteFile(name, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestInstallOnce(t *testing.T) {
	python := fakePython(t, "echo Collecting a; echo Installing collected packages")
	dir := filepath.Join(t.TempDir(), "cache", "env")
	var said bytes.Buffer
	for range 2 {
		got, err := installAt(t.Context(), &said, python, dir)
		if err != nil || got != dir {
			t.Fatalf("%s, %v", got, err)
		}
	}
	if n := strings.Count(said.String(), "interop: installed in"); n != 1 || !strings.Contains(said.String(), "interop: the Python environment is there") {
		t.Errorf("installed %d times: %s", n, &said)
	}
}

// A half-made environment, of a run that was interrupted or went wrong, is made
// anew, and a failure is a failure that tells what pip said.
func TestInstallFails(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "env")
	_, err := installAt(t.Context(), io.Discard, fakePython(t, "echo THESE PACKAGES DO NOT MATCH THE HASHES; exit 1"), dir)
	if err == nil || !strings.Contains(err.Error(), "DO NOT MATCH THE HASHES") || !strings.Contains(err.Error(), "package index") {
		t.Fatalf("the error does not help: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "left-over"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := installAt(t.Context(), io.Discard, fakePython(t, "true"), dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "left-over")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what a failed run left is still there: %v", err)
	}
}

func TestProgress(t *testing.T) {
	var said strings.Builder
	p := &progress{w: &said}
	for range 25 {
		io.WriteString(p, "Collecting x\n  Down")
		io.WriteString(p, "loading x\n")
	}
	if n := strings.Count(said.String(), "\n"); n != 2 || !strings.HasPrefix(said.String(), "interop: 10 of ") {
		t.Errorf("said %q", said.String())
	}
	if len(p.last) != 10 || p.last[9] != "  Downloading x" {
		t.Errorf("keeps %q", p.last)
	}
}

func TestNoRoutes(t *testing.T) {
	const v4 = "Ip: Forwarding OutDiscards OutNoRoutes ReasmTimeout\nIp: 2 0 7 0\nIcmp: InMsgs\nIcmp: 5\n"
	const v6 = "Ip6OutDiscards                  \t3\nIp6OutNoRoutes                  \t4\n"
	for name, tt := range map[string]struct {
		v4, v6 string
		want   int
		ok     bool
	}{
		"both":         {v4, v6, 11, true},
		"no IPv6":      {v4, "", 7, true},
		"no counter":   {"Ip: Forwarding\nIp: 2\n", "", 0, false},
		"not a number": {"Ip: OutNoRoutes\nIp: many\n", "", 0, false},
		"empty":        {"", v6, 0, false},
	} {
		if got, err := noRoutes(tt.v4, tt.v6); got != tt.want && tt.ok || (err == nil) != tt.ok {
			t.Errorf("%s: %d, %v", name, got, err)
		}
	}
}

func TestStartNeedsMain(t *testing.T) {
	t.Setenv(envInside, "")
	if _, err := Start(t.Context(), t.TempDir(), Options{}); err == nil || !strings.Contains(err.Error(), "hermesagent.Main") {
		t.Errorf("Start without Main: %v", err)
	}
}

// stop leaves nothing: not the program, not what it started, and not one that
// does not listen.
func TestStopTakesTheGroup(t *testing.T) {
	dir := t.TempDir()
	p, err := start(dir, "parent", nil, "/bin/sh", "-c", "trap 'exit 0' TERM; /bin/sleep 600 & echo $!; wait")
	if err != nil {
		t.Fatal(err)
	}
	child := firstLine(t, p)
	if err := p.stop(); err != nil {
		t.Error(err)
	}
	pace := time.NewTicker(5 * time.Millisecond)
	defer pace.Stop()
	deadline := time.Now().Add(5 * time.Second) // to die of SIGKILL takes a moment
	for processState(child) != "" && processState(child) != "Z" {
		if time.Now().After(deadline) {
			t.Fatalf("what the program started, %s, lives on, state %s", child, processState(child))
		}
		<-pace.C
	}
	if err := syscall.Kill(p.pid, 0); !errors.Is(err, syscall.ESRCH) {
		t.Errorf("the program is still there: %v", err)
	}
	if err := p.stop(); err != nil {
		t.Errorf("a second stop: %v", err)
	}
}

// firstLine waits for a program's first line of output.
func firstLine(t *testing.T, p *process) string {
	t.Helper()
	pace := time.NewTicker(5 * time.Millisecond)
	defer pace.Stop()
	for {
		if line, _, whole := strings.Cut(p.said(100)+"\n", "\n"); whole && line != "" {
			return line
		}
		select {
		case <-pace.C:
		case <-p.ended:
			t.Fatalf("ended: %s", p.exit)
		case <-t.Context().Done():
			t.Fatal("no output")
		}
	}
}

// processState is the letter that the kernel gives, "" for no such process.
func processState(pid string) string {
	b, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	if err != nil {
		return ""
	}
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	return fields[0]
}
