package store

import (
	"bufio"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// crashChild names the state file to a copy of this test program that works on
// it until it is killed.
const crashChild = "BROKER_STORE_CRASH_CHILD"

var childInstance = wire.ID{1}

// workUntilKilled publishes and binds and revokes, and says so only when the
// store has said that it is done.
func workUntilKilled() {
	s, err := Open(os.Getenv(crashChild), nil)
	if err != nil {
		fmt.Println("FAIL", err)
		os.Exit(1)
	}
	var out sync.Mutex
	say := func(err error, what ...any) {
		if err != nil {
			what = []any{"FAIL", err}
		}
		out.Lock()
		defer out.Unlock()
		fmt.Println(what...)
	}
	for range 3 {
		go func() {
			host := wire.NewID()
			say(s.AddHost(host.String(), host, wire.DigestOf(host.String())), "host", host)
			for i := range MaxCredentials {
				name := fmt.Sprint(i)
				c := Credential{Host: host, Kind: wire.KindBootstrap, ID: name, Digest: tokenOf(wire.KindBootstrap, name), Expires: time.Now().Add(time.Hour)}
				say(s.Publish(c), "published", host, name)
				if i%3 != 0 {
					say(s.Bind(host, c.Digest, childInstance), "bound", host, name)
				}
				if i%3 == 2 {
					_, _, err := s.Revoke(host, c.Kind, name)
					say(err, "revoked", host, name)
				}
			}
		}()
	}
	select {} // the parent kills us
}

// TestKilledProcessLosesNothing kills a working process at random moments:
// what was acknowledged is there afterwards, and what was used stays used. It
// cannot show that bytes reach the disk when the power fails; for that the
// library's own sync must be on.
func TestKilledProcessLosesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "broker.db")
	acked := map[string]string{} // "host name" to the last thing that was said of it
	hosts := map[string]bool{}
	start := time.Now()
	for round := range 30 {
		if round >= 10 && time.Since(start) > 7*time.Second {
			break // a slow machine
		}
		crash(t, path, acked, hosts)
		s := openAt(t, path, nil)
		if s.db.NoSync || s.db.NoGrowSync {
			t.Error("the file is not synced")
		}
		for h := range hosts {
			id, _ := wire.ParseID(h)
			if !s.knows(t, id, h) {
				t.Fatalf("host %s was acknowledged and is lost", h)
			}
		}
		for key, last := range acked {
			checkAfterCrash(t, s, key, last)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(acked) < 100 {
		t.Errorf("only %d publications were tried", len(acked))
	}
}

// crash runs the child until it has said a random number of things, and reads
// on what it still said before it died.
func crash(t *testing.T, path string, acked map[string]string, hosts map[string]bool) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), crashChild+"="+path)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for left := 1 + rand.IntN(60); lines.Scan(); left-- {
		if left == 0 { // not always just after an answer, but anywhere in a write
			<-time.After(time.Duration(rand.IntN(3000)) * time.Microsecond)
			_ = cmd.Process.Kill()
		}
		what := strings.Fields(lines.Text())
		switch {
		case what[0] == "FAIL":
			t.Errorf("the child: %s", lines.Text())
		case what[0] == "host" && len(what) == 2:
			hosts[what[1]] = true
		case len(what) == 3:
			acked[what[1]+" "+what[2]] = what[0]
		}
	}
	_ = cmd.Wait()
}

func checkAfterCrash(t *testing.T, s *Store, key, last string) {
	t.Helper()
	host, name, _ := strings.Cut(key, " ")
	id, err := wire.ParseID(host)
	if err != nil {
		return // a line that the death cut off
	}
	c := Credential{Host: id, Kind: wire.KindBootstrap, Digest: tokenOf(wire.KindBootstrap, name)}
	stranger, owner := s.check(c), s.checkAs(c, childInstance)
	// The next step may have been done without being said any more.
	switch last {
	case "published":
		if owner != nil && !errors.Is(owner, ErrReplayed) {
			t.Errorf("%s was published: %v", key, owner)
		}
	case "bound":
		if !errors.Is(stranger, ErrReplayed) || owner != nil && !errors.Is(owner, ErrReplayed) {
			t.Errorf("%s was bound: a stranger gets %v, its owner %v", key, stranger, owner)
		}
	case "revoked":
		if !errors.Is(stranger, ErrReplayed) || !errors.Is(owner, ErrReplayed) {
			t.Errorf("%s was used and revoked: a stranger gets %v, its owner %v", key, stranger, owner)
		}
	}
}
