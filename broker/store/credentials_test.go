package store

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// tokenOf is the token of the credential with that name in these tests.
func tokenOf(kind wire.Kind, id string) wire.Digest { return wire.DigestOf(string(kind) + " " + id) }

func route(s *Store, host wire.ID, id string) Credential {
	return Credential{Host: host, Kind: wire.KindRoute, ID: id, Digest: tokenOf(wire.KindRoute, id), Expires: s.now().Add(time.Hour), Device: wire.DigestOf("device")}
}

func bootstrap(s *Store, host wire.ID, id string) Credential {
	return Credential{Host: host, Kind: wire.KindBootstrap, ID: id, Digest: tokenOf(wire.KindBootstrap, id), Expires: s.now().Add(time.Hour)}
}

func mustPublish(t *testing.T, s *Store, c Credential) {
	t.Helper()
	if err := s.Publish(c); err != nil {
		t.Fatal(err)
	}
}

func mustBind(t *testing.T, s *Store, c Credential) wire.ID {
	t.Helper()
	me := wire.NewID()
	if err := s.Bind(c.Host, c.Digest, me); err != nil {
		t.Fatal(err)
	}
	return me
}

// check is what a stranger with the token of c gets.
func (s *Store) check(c Credential) error { return s.checkAs(c, wire.NewID()) }

func (s *Store) checkAs(c Credential, who wire.ID) error {
	_, err := s.Check(c.Host, c.Kind, c.Digest, who)
	return err
}

func wantCheck(t *testing.T, s *Store, what string, c Credential, want error) {
	t.Helper()
	if err := s.check(c); !errors.Is(err, want) {
		t.Errorf("%s: Check = %v, want %v", what, err, want)
	}
}

func TestCheckAsksForEverything(t *testing.T) {
	s, clock, host := newStore(t)
	c := route(s, host, "d")
	mustPublish(t, s, c)
	wantCheck(t, s, "the right one", c, nil)
	for what, change := range map[string]func(*Credential){
		"another host":  func(c *Credential) { c.Host = wire.NewID() },
		"another kind":  func(c *Credential) { c.Kind = wire.KindBootstrap },
		"another token": func(c *Credential) { c.Digest = wire.DigestOf("x") },
	} {
		wrong := c
		change(&wrong)
		wantCheck(t, s, what, wrong, ErrUnknown)
	}
	if got, err := s.Check(host, c.Kind, c.Digest, wire.NewID()); err != nil || got.ID != "d" || !got.Expires.Equal(c.Expires) || got.Device != c.Device {
		t.Errorf("Check = %+v, %v", got, err)
	}
	clock.add(time.Hour)
	wantCheck(t, s, "at its expiry", c, ErrExpired)
	if err := s.Publish(Credential{Host: host, Kind: wire.KindHost, ID: "x"}); err == nil {
		t.Error("a host's token is published as a device's")
	}
	_ = s.Close()
	if err := s.check(c); err == nil || errors.Is(err, ErrUnknown) || errors.Is(err, ErrExpired) || errors.Is(err, ErrReplayed) {
		t.Errorf("with the file closed: %v, want an error that is no refusal", err)
	}
}

// TestPublishingAgainReplaces: the old token opens nothing more, a later expiry
// holds, and nothing of the other kind with the same id is touched.
func TestPublishingAgainReplaces(t *testing.T) {
	s, clock, host := newStore(t)
	old, pairing := route(s, host, "same"), bootstrap(s, host, "same")
	mustPublish(t, s, old)
	mustPublish(t, s, pairing)
	newer := old
	newer.Digest = wire.DigestOf("newer")
	mustPublish(t, s, newer)
	wantCheck(t, s, "the old token", old, ErrUnknown)
	wantCheck(t, s, "the new token", newer, nil)
	wantCheck(t, s, "the other kind", pairing, nil)
	newer.Expires = newer.Expires.Add(time.Hour)
	mustPublish(t, s, newer)
	clock.add(90 * time.Minute)
	wantCheck(t, s, "renewed", newer, nil)
	if creds, err := s.Credentials(host); err != nil || len(creds) != 2 {
		t.Errorf("the host has %d credentials, %v; want 2", len(creds), err)
	}
}

// TestRepeatingCostsNoWrite: a host repeats all it has at each reconnect.
func TestRepeatingCostsNoWrite(t *testing.T) {
	s, _, host := newStore(t)
	c := route(s, host, "d")
	mustPublish(t, s, c)
	before := s.db.Stats()
	mustPublish(t, s, c)
	if _, found, err := s.Revoke(host, wire.KindRoute, "nobody"); found || err != nil {
		t.Errorf("Revoke of nothing = %v, %v", found, err)
	}
	if after := s.db.Stats(); after.TxStats.GetWrite() != before.TxStats.GetWrite() {
		t.Error("something was written")
	}
}

func TestOneTokenIsOneCredential(t *testing.T) {
	s, _, host := newStore(t)
	c := bootstrap(s, host, "p")
	mustPublish(t, s, c)
	mustBind(t, s, c)
	for what, change := range map[string]func(*Credential){
		"another pairing": func(c *Credential) { c.ID = "q" },
		"a route":         func(c *Credential) { c.Kind = wire.KindRoute },
	} {
		again := c
		change(&again)
		if err := s.Publish(again); !errors.Is(err, ErrToken) {
			t.Errorf("the token of a used bootstrap as that of %s: %v, want ErrToken", what, err)
		}
	}
	wantCheck(t, s, "afterwards", c, ErrReplayed)
}

func TestBindHasOneWinner(t *testing.T) {
	s, _, host := newStore(t)
	for i := range 10 {
		c := bootstrap(s, host, fmt.Sprint(i))
		mustPublish(t, s, c)
		raceToBind(t, s, c)
	}
}

func raceToBind(t *testing.T, s *Store, c Credential) {
	t.Helper()
	host := c.Host
	var won, lost atomic.Int32
	var winner atomic.Value
	var all sync.WaitGroup
	start := make(chan struct{})
	for range 30 {
		all.Go(func() {
			me := wire.NewID()
			<-start
			switch err := s.Bind(host, c.Digest, me); {
			case err == nil:
				won.Add(1)
				winner.Store(me)
			case errors.Is(err, ErrReplayed):
				lost.Add(1)
			default:
				t.Error(err)
			}
		})
	}
	close(start)
	all.Wait()
	if won.Load() != 1 || lost.Load() != 29 {
		t.Fatalf("%d bound it and %d got ErrReplayed, want 1 and 29", won.Load(), lost.Load())
	}
	me := winner.Load().(wire.ID)
	if err := errors.Join(s.checkAs(c, me), s.Bind(host, c.Digest, me)); err != nil {
		t.Errorf("the winner again: %v", err)
	}
	wantCheck(t, s, "another", c, ErrReplayed)
}

func TestBindAsksAsCheckDoes(t *testing.T) {
	s, clock, host := newStore(t)
	c, r := bootstrap(s, host, "p"), route(s, host, "d")
	mustPublish(t, s, c)
	mustPublish(t, s, r)
	if err := s.Bind(host, r.Digest, wire.NewID()); !errors.Is(err, ErrUnknown) {
		t.Errorf("binding a route: %v, want ErrUnknown", err)
	}
	if err := s.Bind(host, c.Digest, wire.ID{}); err == nil {
		t.Error("a client without an instance id binds a bootstrap: it would stay unused")
	}
	wantCheck(t, s, "after refused binds", c, nil)
	clock.add(time.Hour)
	if err := s.Bind(host, c.Digest, wire.NewID()); !errors.Is(err, ErrExpired) {
		t.Errorf("binding late: %v, want ErrExpired", err)
	}
}

func TestRevoke(t *testing.T) {
	s, _, host := newStore(t)
	r, unused, used := route(s, host, "d"), bootstrap(s, host, "unused"), bootstrap(s, host, "used")
	for _, c := range []Credential{r, unused, used} {
		mustPublish(t, s, c)
	}
	me := mustBind(t, s, used)
	for _, c := range []Credential{r, unused, used} {
		if got, found, err := s.Revoke(host, c.Kind, c.ID); err != nil || !found || got.Digest != c.Digest {
			t.Errorf("Revoke(%s) = %+v, %v, %v", c.ID, got, found, err)
		}
	}
	wantCheck(t, s, "the route", r, ErrUnknown)
	wantCheck(t, s, "the unused bootstrap", unused, ErrUnknown)
	wantCheck(t, s, "the used bootstrap", used, ErrReplayed)
	if err := s.checkAs(used, me); !errors.Is(err, ErrReplayed) {
		t.Errorf("the used bootstrap by who used it: %v, want ErrReplayed", err)
	}
	if _, found, err := s.Revoke(host, wire.KindBootstrap, "used"); !found || err != nil {
		t.Errorf("revoking again = %v, %v", found, err)
	}
}

// TestUsedBootstrapIsNeverRevived: whatever the host publishes after it.
func TestUsedBootstrapIsNeverRevived(t *testing.T) {
	for what, after := range map[string]func(t *testing.T, s *Store, c Credential){
		"published again": func(t *testing.T, s *Store, c Credential) { mustPublish(t, s, c) },
		"published with years": func(t *testing.T, s *Store, c Credential) {
			c.Expires = c.Expires.AddDate(9, 0, 0)
			mustPublish(t, s, c)
		},
		"published as new": func(t *testing.T, s *Store, c Credential) {
			c.Used, c.Instance = false, wire.NewID()
			mustPublish(t, s, c)
		},
		"replaced and back": func(t *testing.T, s *Store, c Credential) {
			other := c
			other.Digest = wire.DigestOf("other")
			mustPublish(t, s, other)
			wantCheck(t, s, "while replaced", c, ErrReplayed)
			mustPublish(t, s, c)
		},
		"revoked and back": func(t *testing.T, s *Store, c Credential) {
			if _, _, err := s.Revoke(c.Host, c.Kind, c.ID); err != nil {
				t.Fatal(err)
			}
			mustPublish(t, s, c)
		},
	} {
		t.Run(what, func(t *testing.T) {
			s, _, host := newStore(t)
			c := bootstrap(s, host, "p")
			mustPublish(t, s, c)
			mustBind(t, s, c)
			after(t, s, c)
			wantCheck(t, s, what, c, ErrReplayed)
			if err := s.Bind(host, c.Digest, wire.NewID()); !errors.Is(err, ErrReplayed) {
				t.Errorf("Bind = %v, want ErrReplayed", err)
			}
		})
	}
}

// TestTombstonesAreKeptADay: to the expiry and at least 24 h after the use,
// whatever room is needed.
func TestTombstonesAreKeptADay(t *testing.T) {
	s, clock, host := newStore(t)
	c := bootstrap(s, host, "p")
	c.Expires = s.now().Add(10 * time.Minute)
	mustPublish(t, s, c)
	mustBind(t, s, c)
	c.Expires = s.now().Add(time.Second) // the host cannot shorten it
	mustPublish(t, s, c)
	stir := func() { mustPublish(t, s, route(s, host, fmt.Sprint(s.now().UnixNano()))) } // makes the store clean up
	clock.add(24*time.Hour - time.Second)
	stir()
	wantCheck(t, s, "a second before a day", c, ErrReplayed)
	clock.add(sweepEvery)
	stir()
	wantCheck(t, s, "a day after its use", c, ErrUnknown)

	long := bootstrap(s, host, "long")
	long.Expires = s.now().Add(72 * time.Hour)
	mustPublish(t, s, long)
	mustBind(t, s, long)
	if _, _, err := s.Revoke(host, wire.KindBootstrap, "long"); err != nil {
		t.Fatal(err)
	}
	clock.add(72*time.Hour - time.Second)
	stir()
	wantCheck(t, s, "until its own expiry", long, ErrReplayed)
}

// TestNameLeadsToItsLatestToken: also after the tombstone of an earlier one of
// that name is gone.
func TestNameLeadsToItsLatestToken(t *testing.T) {
	s, clock, host := newStore(t)
	old := bootstrap(s, host, "p")
	mustPublish(t, s, old)
	mustBind(t, s, old)
	newer := old
	newer.Digest, newer.Expires = wire.DigestOf("newer"), s.now().Add(1000*time.Hour)
	mustPublish(t, s, newer)
	clock.add(25 * time.Hour)
	mustPublish(t, s, route(s, host, "stir"))
	wantCheck(t, s, "the tombstone after a day", old, ErrUnknown)
	if _, found, err := s.Revoke(host, wire.KindBootstrap, "p"); !found || err != nil {
		t.Fatalf("Revoke = %v, %v", found, err)
	}
	wantCheck(t, s, "after Revoke", newer, ErrUnknown)
}

func TestExpiredIsToldApartForAWeek(t *testing.T) {
	s, clock, host := newStore(t)
	c := route(s, host, "d")
	mustPublish(t, s, c)
	clock.add(time.Hour + 7*24*time.Hour - time.Second)
	mustPublish(t, s, route(s, host, "x"))
	wantCheck(t, s, "in the week after", c, ErrExpired)
	clock.add(sweepEvery)
	mustPublish(t, s, route(s, host, "y"))
	wantCheck(t, s, "later", c, ErrUnknown)
}
