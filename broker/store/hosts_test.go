package store

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func (s *Store) knows(t *testing.T, id wire.ID, token string) bool {
	t.Helper()
	ok, err := s.CheckHost(id, wire.DigestOf(token))
	if err != nil {
		t.Fatal(err)
	}
	return ok
}

func TestHostsAreUnique(t *testing.T) {
	s, _, id := newStore(t)
	if err := s.AddHost("home", wire.NewID(), wire.DigestOf("b")); !errors.Is(err, ErrHostName) {
		t.Errorf("a second host of that name: %v, want ErrHostName", err)
	}
	if err := s.AddHost("other", id, wire.DigestOf("b")); !errors.Is(err, ErrHostID) {
		t.Errorf("a second host of that id: %v, want ErrHostID", err)
	}
	if s.knows(t, id, "b") || !s.knows(t, id, "host token") {
		t.Error("a refused host changed the one that is there")
	}
	for _, name := range []string{"", "a\nb", "\x1b[31m", strings.Repeat("x", 65), "\xff"} {
		if err := s.AddHost(name, wire.NewID(), wire.DigestOf("c")); err == nil {
			t.Errorf("a host is named %q", name)
		}
	}
	if err := s.AddHost("zero", wire.ID{}, wire.DigestOf("c")); err == nil {
		t.Error("a host has no id")
	}
	hosts, err := s.Hosts()
	if err != nil || len(hosts) != 1 || hosts[0].Name != "home" || hosts[0].ID != id {
		t.Errorf("Hosts = %+v, %v", hosts, err)
	}
}

func TestOnlyTheRightTokenRegistersAHost(t *testing.T) {
	s, _, id := newStore(t)
	if s.knows(t, id, "wrong") || s.knows(t, wire.NewID(), "host token") {
		t.Error("a wrong token, or a wrong host, is known")
	}
}

// TestRotationOverlaps: the old token works until the overlap is over, and a
// second rotation prolongs nothing.
func TestRotationOverlaps(t *testing.T) {
	s, clock, id := newStore(t)
	rotate := func(token string, overlap time.Duration) {
		t.Helper()
		if _, err := s.RotateHost("home", wire.DigestOf(token), overlap); err != nil {
			t.Fatal(err)
		}
	}
	want := func(when string, tokens map[string]bool) {
		t.Helper()
		for token, ok := range tokens {
			if s.knows(t, id, token) != ok {
				t.Errorf("%s: token %q is known: %v, want %v", when, token, !ok, ok)
			}
		}
	}
	rotate("second", time.Hour)
	want("in the overlap", map[string]bool{"host token": true, "second": true})
	clock.add(30 * time.Minute)
	rotate("third", 2*time.Hour)
	want("after two rotations", map[string]bool{"host token": true, "second": true, "third": true})
	clock.add(30 * time.Minute)
	want("an hour after the first", map[string]bool{"host token": false, "second": true, "third": true})
	clock.add(90 * time.Minute)
	want("two hours after the second", map[string]bool{"second": false, "third": true})
	rotate("fourth", 0)
	want("without overlap", map[string]bool{"third": false, "fourth": true})
	rotate("fifth", time.Hour)
	rotate("sixth", time.Minute) // shorter: also for those that had more
	clock.add(time.Minute)
	want("a shorter overlap", map[string]bool{"fourth": false, "fifth": false, "sixth": true})
	for i := range 20 {
		rotate(fmt.Sprint("many", i), time.Hour)
	}
	h, ok, err := s.Host(id)
	if err != nil || !ok || len(h.Tokens) != maxTokens || !s.knows(t, id, "many19") || !s.knows(t, id, "many18") || s.knows(t, id, "many0") {
		t.Errorf("after many rotations the host has %d tokens, want %d and the latest of them", len(h.Tokens), maxTokens)
	}
	if _, err := s.RotateHost("nobody", wire.DigestOf("x"), 0); !errors.Is(err, ErrNoHost) {
		t.Errorf("rotating a host that is not there: %v, want ErrNoHost", err)
	}
}

func TestRemovedHostTakesItsCredentialsAlong(t *testing.T) {
	s, _, id := newStore(t)
	other := wire.NewID()
	if err := s.AddHost("other", other, wire.DigestOf("o")); err != nil {
		t.Fatal(err)
	}
	for _, h := range []wire.ID{id, other} {
		mustPublish(t, s, route(s, h, "d"))
		mustPublish(t, s, bootstrap(s, h, "p"))
	}
	if h, err := s.RemoveHost("home"); err != nil || h.ID != id {
		t.Fatalf("RemoveHost = %+v, %v", h, err)
	}
	if s.knows(t, id, "host token") {
		t.Error("its token is still known")
	}
	if creds, err := s.Credentials(id); len(creds) != 0 || err != nil {
		t.Errorf("it left %d credentials, %v", len(creds), err)
	}
	if creds, err := s.Credentials(other); len(creds) != 2 || err != nil {
		t.Errorf("the other host has %d credentials, %v; want its 2", len(creds), err)
	}
	if _, ok, err := s.Host(id); ok || err != nil {
		t.Errorf("Host = %v, %v", ok, err)
	}
	if _, err := s.RemoveHost("home"); !errors.Is(err, ErrNoHost) {
		t.Errorf("removing it again: %v, want ErrNoHost", err)
	}
	if err := s.Publish(route(s, id, "d")); !errors.Is(err, ErrNoHost) {
		t.Errorf("publishing for it: %v, want ErrNoHost", err)
	}
	if err := s.AddHost("home", id, wire.DigestOf("again")); err != nil {
		t.Errorf("adding it again: %v", err)
	}
}
