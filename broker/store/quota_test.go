package store

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"go.etcd.io/bbolt"

	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// fill stores n credentials in one write, made by one.
func fill(t *testing.T, s *Store, n int, one func(i int) Credential) {
	t.Helper()
	err := s.db.Update(func(tx *bbolt.Tx) error {
		for i := range n {
			c := one(i)
			err := errors.Join(tx.Bucket(bucketNames).Put(nameKey(c.Host, c.Kind, c.ID), c.Digest[:]),
				put(tx.Bucket(bucketCreds), credKey(c.Host, c.Digest), c))
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestQuotaOrder: when there is no room the expired go first, then the
// bootstraps that expire first; a live route never.
func TestQuotaOrder(t *testing.T) {
	s, clock, host := newStore(t)
	fill(t, s, MaxCredentials-4, func(i int) Credential {
		c := route(s, host, fmt.Sprint("r", i))
		c.Expires = s.now().Add(1000 * time.Hour)
		return c
	})
	late, soon := bootstrap(s, host, "late"), bootstrap(s, host, "soon")
	late.Expires, soon.Expires = s.now().Add(3*time.Hour), s.now().Add(2*time.Hour)
	gone, longGone := route(s, host, "gone"), bootstrap(s, host, "long gone")
	gone.Expires, longGone.Expires = s.now().Add(2*time.Minute), s.now().Add(time.Minute)
	for _, c := range []Credential{late, soon, gone, longGone} {
		mustPublish(t, s, c)
	}
	clock.add(5 * time.Minute)
	used := mustBind(t, s, soon)

	add := func(i int) error {
		c := route(s, host, fmt.Sprint("more", i))
		c.Expires = s.now().Add(1000 * time.Hour)
		return s.Publish(c)
	}
	state := func(when string, wantLongGone, wantGone, wantSoon, wantLate error) {
		t.Helper()
		wantCheck(t, s, when+", expired first", longGone, wantLongGone)
		wantCheck(t, s, when+", expired later", gone, wantGone)
		if err := s.checkAs(soon, used); !errors.Is(err, wantSoon) {
			t.Errorf("%s, bootstrap that expires soon: %v, want %v", when, err, wantSoon)
		}
		wantCheck(t, s, when+", bootstrap that expires late", late, wantLate)
	}
	state("full", ErrExpired, ErrExpired, nil, nil)
	for i, want := range [][4]error{
		{ErrUnknown, ErrExpired, nil, nil},
		{ErrUnknown, ErrUnknown, nil, nil},
		{ErrUnknown, ErrUnknown, ErrReplayed, nil}, // it was used: its place is free, its digest stays
		{ErrUnknown, ErrUnknown, ErrReplayed, ErrUnknown},
	} {
		if err := add(i); err != nil {
			t.Fatalf("credential %d past the limit: %v", i+1, err)
		}
		state(fmt.Sprintf("%d more", i+1), want[0], want[1], want[2], want[3])
	}
	if err := add(99); !errors.Is(err, ErrQuota) {
		t.Errorf("with nothing but live routes: %v, want ErrQuota", err)
	}
	again := route(s, host, "r0")
	again.Expires, again.Digest = s.now().Add(time.Hour), wire.DigestOf("rotated")
	if err := s.Publish(again); err != nil {
		t.Errorf("replacing one of them: %v", err)
	}
	other := wire.NewID()
	if err := errors.Join(s.AddHost("other", other, wire.DigestOf("o")), s.Publish(route(s, other, "d"))); err != nil {
		t.Errorf("another host: %v", err)
	}
}

// TestTombstonesTakeNoRoom: a host that pairs all day long can still publish,
// and what it leaves is bounded.
func TestTombstonesTakeNoRoom(t *testing.T) {
	s, _, host := newStore(t)
	fill(t, s, MaxCredentials+10, func(i int) Credential {
		c := bootstrap(s, host, fmt.Sprint("p", i))
		c.Instance, c.Used = wire.NewID(), true
		c.Bound = s.now().Add(time.Duration(i) * time.Second)
		return c
	})
	mustPublish(t, s, route(s, host, "d"))
	creds, err := s.Credentials(host)
	if err != nil || len(creds) != MaxCredentials+1 {
		t.Fatalf("%d records, %v; want %d", len(creds), err, MaxCredentials+1)
	}
	wantCheck(t, s, "the oldest tombstone", bootstrap(s, host, "p0"), ErrUnknown)
	wantCheck(t, s, "a later one", bootstrap(s, host, "p10"), ErrReplayed)
}
