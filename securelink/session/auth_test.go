package session

import (
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A pairing that cannot be saved did not happen, and its code is still good.
func TestPairingNeedsDisk(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	code := mint(t, s, Mint{})
	mend := breakDisk(t, dir)
	_, _, err := s.Authenticate(AuthRequest{PairingCode: code, DeviceID: "d"}, phone)
	if _, refusal := errors.AsType[*AuthError](err); err == nil || refusal {
		t.Fatalf("error = %v, want one of the disk and no refusal", err)
	}
	if len(s.Devices()) != 0 {
		t.Error("a device is listed that would be gone after a restart")
	}
	mend()
	if _, _, err := s.Authenticate(AuthRequest{PairingCode: code, DeviceID: "d"}, phone); err != nil {
		t.Errorf("the code was lost with the disk: %v", err)
	}
}

func TestPairAgainReplaces(t *testing.T) { synctest.Test(t, pairAgainReplaces) }

func pairAgainReplaces(t *testing.T) {
	r := new(fakeRoutes)
	s := open(t, t.TempDir(), Options{Routes: r})
	sess, first := pair(t, s, "phone", Mint{})
	ended := make(chan EndReason, 1)
	if _, err := s.Track(sess, "", func(e EndReason) { ended <- e }); err != nil {
		t.Fatal(err)
	}
	_, second := pair(t, s, "phone", Mint{})
	if _, err := s.Check(first.SessionToken); !errors.Is(err, ErrUnauthorized) {
		t.Error("the old session lives on")
	}
	_, _, err := s.Authenticate(AuthRequest{RefreshToken: first.RefreshToken, DeviceID: "phone"}, phone)
	refused(t, err)
	if _, err := s.Check(second.SessionToken); err != nil {
		t.Error(err)
	}
	if got := <-ended; got != EndReplaced {
		t.Errorf("what was live ended as %q", got)
	}
	if got := s.Devices(); len(got) != 1 || got[0].ID != sess.Device.ID {
		t.Errorf("devices = %+v, want the same one", got)
	}
	synctest.Wait()
	if got := r.taken(); !slices.Equal(got, []string{sess.ID}) {
		t.Errorf("withdrawn %v, want %v", got, sess.ID)
	}
}

// Devices that name themselves nothing do not replace each other.
func TestNamelessDevices(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	for _, id := range []string{"", "unknown", "None", "null", " UNKNOWN "} {
		pair(t, s, id, Mint{})
	}
	if n := len(s.Devices()); n != 5 {
		t.Errorf("%d devices, want 5", n)
	}
}

func TestRefresh(t *testing.T) {
	c := newClock()
	s := open(t, t.TempDir(), Options{Now: c.Now})
	_, first := pair(t, s, "phone", Mint{TTL: day})
	for _, id := range []string{"", "unknown", "other", "Phone"} {
		_, _, err := s.Authenticate(AuthRequest{RefreshToken: first.RefreshToken, DeviceID: id}, Peer{Source: Source{Key: id}})
		refused(t, err)
	}
	c.add(25 * time.Hour)
	_, _, err := s.Authenticate(AuthRequest{SessionToken: first.SessionToken, DeviceID: "phone"}, phone)
	refused(t, err)
	_, second, err := s.Authenticate(AuthRequest{SessionToken: first.SessionToken, RefreshToken: first.RefreshToken, DeviceID: "phone"}, phone)
	if err != nil {
		t.Fatal(err)
	}
	if second.RefreshToken == "" || second.RefreshToken == first.RefreshToken || second.SessionToken == first.SessionToken {
		t.Error("tokens did not rotate")
	}
	if !second.ExpiresAt.Equal(c.Now().Add(day)) {
		t.Errorf("new session ends %v, want a day from now", second.ExpiresAt)
	}
	_, _, err = s.Authenticate(AuthRequest{RefreshToken: first.RefreshToken, DeviceID: "phone"}, phone)
	refused(t, err)
	// The end of the refresh token is fixed at pairing.
	c.add(179*day - 26*time.Hour + 23*time.Hour)
	_, third, err := s.Authenticate(AuthRequest{RefreshToken: second.RefreshToken, DeviceID: "phone"}, phone)
	if err != nil {
		t.Fatal(err)
	}
	c.add(2 * day)
	_, _, err = s.Authenticate(AuthRequest{RefreshToken: third.RefreshToken, DeviceID: "phone"}, phone)
	refused(t, err)
}

func TestRefreshOnce(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	_, ok := pair(t, s, "phone", Mint{})
	var wins atomic.Int32
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			if _, _, err := s.Authenticate(AuthRequest{RefreshToken: ok.RefreshToken, DeviceID: "phone"}, Peer{Source: Source{Key: string(rune('a' + i))}}); err == nil {
				wins.Add(1)
			}
		})
	}
	wg.Wait()
	if wins.Load() != 1 {
		t.Errorf("one refresh token was used %d times", wins.Load())
	}
}

// A record from before the device had an id takes the id it is shown, unless
// another device has it.
func TestRefreshAdoptsID(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	_, ok := pair(t, s, "unknown", Mint{})
	pair(t, s, "taken", Mint{})
	_, ok, err := s.Authenticate(AuthRequest{RefreshToken: ok.RefreshToken, DeviceID: "taken"}, phone)
	if err != nil {
		t.Fatal(err)
	}
	sess, ok, err := s.Authenticate(AuthRequest{RefreshToken: ok.RefreshToken, DeviceID: "laptop"}, phone)
	if err != nil || sess.Device.DeviceID != "laptop" {
		t.Fatalf("device %+v, %v", sess.Device, err)
	}
	_, _, err = s.Authenticate(AuthRequest{RefreshToken: ok.RefreshToken, DeviceID: "other"}, phone)
	refused(t, err)
}

func TestAuthorize(t *testing.T) {
	c := newClock()
	s := open(t, t.TempDir(), Options{Now: c.Now})
	_, ok := pair(t, s, "phone", Mint{TTL: day, Grants: map[string]time.Duration{"dashboard": time.Hour}})
	for name, tt := range map[string]struct {
		token, ns string
		after     time.Duration
		want      error
	}{
		"good":       {ok.SessionToken, "dashboard", 0, nil},
		"grant over": {ok.SessionToken, "dashboard", time.Hour, ErrGrant},
		"no grant":   {ok.SessionToken, "api", 0, ErrGrant},
		"over":       {ok.SessionToken, "dashboard", day, ErrUnauthorized},
		"empty":      {"", "dashboard", 0, ErrUnauthorized},
		"refresh":    {ok.RefreshToken, "dashboard", 0, ErrUnauthorized},
	} {
		if _, err := s.Authorize(tt.token, tt.ns, c.Now().Add(tt.after)); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
}

// Sessions of one device and devices of one host are bounded.
func TestBounds(t *testing.T) {
	s := open(t, t.TempDir(), Options{Limits: Limits{Sessions: 2, Devices: 2}})
	_, first := pair(t, s, "phone", Mint{})
	ok := first
	for range 3 {
		var err error
		if _, ok, err = s.Authenticate(AuthRequest{RefreshToken: ok.RefreshToken, DeviceID: "phone"}, phone); err != nil {
			t.Fatal(err)
		}
	}
	if d, _ := s.Device("phone"); d.Sessions != 2 {
		t.Errorf("%d sessions, want 2", d.Sessions)
	}
	if _, err := s.Check(first.SessionToken); !errors.Is(err, ErrUnauthorized) {
		t.Error("the oldest session did not go")
	}
	pair(t, s, "laptop", Mint{})
	code := mint(t, s, Mint{})
	_, _, err := s.Authenticate(AuthRequest{PairingCode: code, DeviceID: "third"}, phone)
	if !errors.Is(err, ErrFull) {
		t.Errorf("third device: %v, want %v", err, ErrFull)
	}
	pair(t, s, "phone", Mint{}) // replacing is always possible
}

// A session without refresh token gets one, with what the session has and not
// with the defaults.
func TestLoginIssuesRefresh(t *testing.T) {
	c := newClock()
	s := open(t, t.TempDir(), Options{Now: c.Now, Limits: Limits{RefreshTTL: time.Hour}})
	_, ok := pair(t, s, "phone", Mint{TTL: day, Grants: map[string]time.Duration{"api": day}})
	c.add(time.Hour)
	sess, again, err := s.Authenticate(AuthRequest{SessionToken: ok.SessionToken, DeviceID: "phone", DeviceName: "new\x1b[2J name"}, phone)
	if err != nil || again.RefreshToken == "" || again.SessionToken != ok.SessionToken {
		t.Fatalf("%+v, %v; want a refresh token", again, err)
	}
	if sess.Device.Name != "new[2J name" {
		t.Errorf("name %q: want it updated and fit for a terminal", sess.Device.Name)
	}
	sess, _, err = s.Authenticate(AuthRequest{RefreshToken: again.RefreshToken, DeviceID: "phone"}, phone)
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := sess.Grants["dashboard"]; ok || !slices.Contains(slices.Collect(maps.Keys(sess.Grants)), "api") {
		t.Errorf("refreshed grants %v: want those of the pairing", sess.Grants)
	}
}

// One phone's wrong tokens block its own address only; pairing from an
// operator's code for that device lifts it.
func TestBlocksAreBySource(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	_, ok := pair(t, s, "good", Mint{})
	bad := Peer{Source: Source{Key: "2001:db8::1"}}
	for range 5 {
		_, _, err := s.Authenticate(AuthRequest{SessionToken: "wrong", DeviceID: "bad"}, bad)
		refused(t, err)
	}
	if s.Blocked(Source{Key: "2001:db8::ffff"}) == 0 || s.Blocked(Source{Key: "2001:db8:0:1::1"}) != 0 {
		t.Error("IPv6 peers are not counted by their /64")
	}
	_, _, err := s.Authenticate(AuthRequest{SessionToken: ok.SessionToken, DeviceID: "good"}, bad)
	refused(t, err) // a socket opened before the block is no way around it
	if _, _, err := s.Authenticate(AuthRequest{SessionToken: ok.SessionToken, DeviceID: "good"}, phone); err != nil {
		t.Error(err)
	}
	mint(t, s, Mint{DeviceID: "somebody else"})
	if s.Blocked(bad.Source) == 0 {
		t.Error("a code for another device lifted the block")
	}
	mint(t, s, Mint{DeviceID: "bad"})
	if s.Blocked(bad.Source) != 0 {
		t.Error("a code for this device did not lift the block")
	}
}
