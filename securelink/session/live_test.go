package session

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// Revoking ends every socket of the device at once, and no other.
func TestRevokeEndsSockets(t *testing.T) {
	r := new(fakeRoutes)
	inBubble(t, Options{Routes: r}, func(t *testing.T, b bench) {
		c, ok := b.join("lost", Mint{})
		other, _ := b.join("kept", Mint{})
		defer other.CloseNow()
		second := b.srv.mustDial()
		if _, err := Authenticate(t.Context(), second, AuthRequest{SessionToken: ok.SessionToken}); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if _, err := b.s.Revoke("lost"); err != nil {
			t.Fatal(err)
		}
		for _, c := range []*websocket.Conn{c, second} {
			if code, reason := b.closed(c); code != websocket.StatusPolicyViolation || reason != "revoked" || time.Since(start) != 0 {
				t.Errorf("closed with %v %q after %v", code, reason, time.Since(start))
			}
		}
		synctest.Wait()
		if got := r.taken(); len(got) != 1 {
			t.Errorf("routes withdrawn: %v", got)
		}
		if m := b.ask(other, `{"channel":"system","type":"ping","id":"1"}`); m["type"] != "pong" {
			t.Errorf("the other device: %v", m)
		}
	})
}

// A peer that does not answer the close, and one that does not even read, are
// gone a second later.
func TestRevokeDeafPeer(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, b bench) {
		c, _ := b.join("deaf", Mint{})
		defer c.CloseNow()
		go func() { _ = c.Write(t.Context(), websocket.MessageText, []byte(`{"channel":"chat","type":"x"}`)) }()
		synctest.Wait() // its answer is being written, and nobody reads it
		start := time.Now()
		if _, err := b.s.Revoke("deaf"); err != nil {
			t.Fatal(err)
		}
		b.s.wg.Wait()
		if after := time.Since(start); after > time.Second {
			t.Errorf("the socket lived on for %v", after)
		}
	})
}

// Sessions end on time on an idle socket, and routes with them.
func TestExpiryEndsSocket(t *testing.T) {
	r := new(fakeRoutes)
	inBubble(t, Options{Routes: r}, func(t *testing.T, b bench) {
		c, ok := b.join("d", Mint{TTL: 95 * time.Second})
		if code, reason := b.closed(c); code != websocket.StatusPolicyViolation || reason != "expired" || time.Since(ok.ExpiresAt) > time.Millisecond {
			t.Errorf("closed with %v %q, %v after the end", code, reason, time.Since(ok.ExpiresAt))
		}
		synctest.Wait()
		if len(r.taken()) != 1 {
			t.Error("the route stays")
		}
	})
}

// A grant that ends, or is shortened, ends what rests on it at that moment.
func TestGrantEndsWhatRestsOnIt(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, b bench) {
		sess, _ := pair(t, b.s, "d", Mint{Grants: map[string]time.Duration{"api": time.Hour, "dashboard": day}})
		ended := make(chan string, 9)
		start := time.Now()
		for _, ns := range []string{"api", "dashboard"} {
			if _, err := b.s.Track(sess, ns, func(e EndReason) { ended <- ns + " " + string(e) + " " + time.Since(start).String() }); err != nil {
				t.Fatal(err)
			}
		}
		untrack, err := b.s.Track(sess, "", func(EndReason) { t.Error("ended after untrack") })
		if err != nil {
			t.Fatal(err)
		}
		untrack()
		if _, err := b.s.Shorten("d", Reduction{Grants: map[string]time.Duration{"dashboard": 10 * time.Minute}}); err != nil {
			t.Fatal(err)
		}
		if a, b := <-ended, <-ended; a != "dashboard expired 10m0s" || b != "api expired 1h0m0s" {
			t.Errorf("ended: %s, %s", a, b)
		}
		if _, err := b.s.Track(sess, "api", nil); !errors.Is(err, ErrGrant) {
			t.Errorf("tracking after the end: %v", err)
		}
	})
}

// A clock that jumps ahead is noticed within half a minute.
func TestClockJump(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var skew atomic.Int64
		s, err := Open(t.TempDir(), Options{Now: func() time.Time { return time.Now().Add(time.Duration(skew.Load())) }})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		sess, _ := pair(t, s, "d", Mint{TTL: day})
		ended := make(chan struct{})
		if _, err := s.Track(sess, "", func(EndReason) { close(ended) }); err != nil {
			t.Fatal(err)
		}
		skew.Store(int64(2 * day))
		start := time.Now()
		<-ended
		if after := time.Since(start); after > 30*time.Second {
			t.Errorf("noticed after %v", after)
		}
	})
}

// A code that nobody uses ends on time, and pair hears of it.
func TestCodeExpiryIsTold(t *testing.T) {
	var ends chan CodeEnd // of the bubble
	inBubble(t, Options{OnCode: func(e CodeEnd) { ends <- e }}, func(t *testing.T, b bench) {
		ends = make(chan CodeEnd, 1)
		start := time.Now()
		mint(t, b.s, Mint{PairingID: "p"})
		if e := <-ends; e != (CodeEnd{"p", CodeExpired}) || time.Since(start).Round(time.Second) != 10*time.Minute {
			t.Errorf("%v after %v", e, time.Since(start))
		}
	})
}

// A peer that stops answering pings is dropped.
func TestHeartbeat(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, b bench) {
		c, _ := b.join("d", Mint{})
		defer c.CloseNow() // nobody reads it: no pong
		start := time.Now()
		b.s.mu.Lock()
		n := len(b.s.live)
		b.s.mu.Unlock()
		b.srv.waitHandlers(b.s)
		if after := time.Since(start); n != 1 || after < 30*time.Second || after > 62*time.Second {
			t.Errorf("%d live; dropped after %v", n, after)
		}
	})
}

// waitHandlers waits until no socket is open.
func (r *relayServer) waitHandlers(s *Store) { s.wg.Wait() }

// A session revoked while its route is being made does not keep the route.
func TestRevokedDuringIssue(t *testing.T) {
	r := new(fakeRoutes)
	o := Options{Routes: r}
	inBubble(t, o, func(t *testing.T, b bench) {
		r.onIssue = func() {
			if _, err := b.s.Revoke("d"); err != nil {
				t.Error(err)
			}
			<-time.After(time.Second) // its withdrawal goes first
		}
		c := b.srv.mustDial()
		ok, err := Authenticate(t.Context(), c, AuthRequest{PairingCode: mint(t, b.s, Mint{}), DeviceID: "d"})
		if err == nil && len(ok.Routes) > 0 {
			t.Error("a route was given to a revoked device")
		}
		_ = c.CloseNow()
		<-time.After(2 * time.Second)
		if n := len(r.taken()); n != 2 {
			t.Errorf("withdrawn %d times, want once for the revocation and once after the issue", n)
		}
	})
}

// A socket that is being shown out is not listened to any more.
func TestEndedSocketIsNotHeard(t *testing.T) {
	inBubble(t, Options{Limits: Limits{Sockets: 1}}, func(t *testing.T, b bench) {
		old, ok := b.join("d", Mint{TTL: day})
		defer old.CloseNow()
		c := b.srv.mustDial()
		defer c.CloseNow()
		if _, err := Authenticate(t.Context(), c, AuthRequest{SessionToken: ok.SessionToken}); err != nil {
			t.Fatal(err)
		}
		go func() { // not reading: its side of the close never comes
			_ = old.Write(t.Context(), websocket.MessageText, []byte(`{"channel":"system","type":"session","payload":{"action":"shorten","ttl_seconds":60}}`))
		}()
		<-time.After(10 * time.Second)
		if d := b.s.Devices()[0]; !d.Expires.Equal(ok.ExpiresAt) {
			t.Errorf("a socket that was replaced shortened its device to %v", d.Expires)
		}
	})
}

// Routes that could not be taken back are taken back when the broker is there
// again, at the next try or when the connector says so.
func TestWithdrawalWithoutRestart(t *testing.T) {
	for name, back := range map[string]func(*Store){
		"by itself": func(*Store) { <-time.After(retryMost + time.Second) },
		"told":      func(s *Store) { s.RetryWithdrawals() },
	} {
		t.Run(name, func(t *testing.T) {
			r := &fakeRoutes{}
			inBubble(t, Options{Routes: r}, func(t *testing.T, b bench) {
				sess, _ := pair(t, b.s, "one", Mint{})
				r.setDown(errors.New("broker is down"))
				if _, err := b.s.Revoke("one"); err != nil {
					t.Fatal(err)
				}
				<-time.After(time.Hour)
				r.setDown(nil)
				back(b.s)
				synctest.Wait()
				if diff := cmp.Diff([]string{sess.ID}, r.taken()); diff != "" {
					t.Error(diff)
				}
			})
		})
	}
}

// Routes that cannot be taken back now are taken back later, and after a
// restart.
func TestWithdrawalIsRetried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, r := t.TempDir(), &fakeRoutes{}
		s := open(t, dir, Options{Routes: r})
		one, _ := pair(t, s, "one", Mint{})
		two, _ := pair(t, s, "two", Mint{})
		r.setDown(errors.New("broker is down"))
		for _, id := range []string{"one", "two"} {
			if _, err := s.Revoke(id); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		<-time.After(time.Minute)
		synctest.Wait()
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		r.setDown(nil)
		s = open(t, dir, Options{Routes: r})
		<-time.After(time.Second)
		synctest.Wait()
		if diff := cmp.Diff([]string{one.ID, two.ID}, r.taken()); diff != "" {
			t.Error(diff)
		}
		if len(s.st.pending) != 0 {
			t.Error("still pending")
		}
		_ = s.Close()
	})
}

// A route that cannot be taken back at one broker keeps no other back: neither
// in the same round nor while the next round is still far away.
func TestWithdrawalOfOthersGoesOn(t *testing.T) {
	r := &fakeRoutes{}
	inBubble(t, Options{Routes: r}, func(t *testing.T, b bench) {
		stuck, _ := pair(t, b.s, "stuck", Mint{})
		two, _ := pair(t, b.s, "two", Mint{})
		r.setStuck(stuck.ID)
		for _, id := range []string{"stuck", "two"} {
			if _, err := b.s.Revoke(id); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		if diff := cmp.Diff([]string{two.ID}, r.taken()); diff != "" {
			t.Error(diff)
		}
		r.setStuck("")
		<-time.After(retryMost + time.Second)
		if diff := cmp.Diff([]string{two.ID, stuck.ID}, r.taken()); diff != "" {
			t.Error(diff)
		}
	})
}

// LiveRoutes names what Issue was asked for, for each session that lives.
func TestLiveRoutes(t *testing.T) {
	r, c := &fakeRoutes{}, newClock()
	s := open(t, t.TempDir(), Options{Routes: r, Now: c.Now})
	sess, _ := pair(t, s, "one", Mint{TTL: 30 * day})
	_ = s.issueRoutes(t.Context(), sess, "")
	brief, _ := pair(t, s, "", Mint{TTL: time.Hour}) // names no device: its token stands in
	_ = s.issueRoutes(t.Context(), brief, "")
	gone, _ := pair(t, s, "gone", Mint{})
	if _, err := s.Revoke(gone.Device.ID); err != nil {
		t.Fatal(err)
	}
	byID := cmpopts.SortSlices(func(a, b RouteRequest) bool { return a.CredentialID < b.CredentialID })
	if diff := cmp.Diff(r.issued, s.LiveRoutes(), byID); diff != "" {
		t.Error(diff)
	}
	c.add(2 * time.Hour)
	if diff := cmp.Diff(r.issued[:1], s.LiveRoutes()); diff != "" {
		t.Error(diff)
	}
	forever, _ := pair(t, s, "forever", Mint{TTL: Never})
	for _, got := range s.LiveRoutes() {
		if got.CredentialID == forever.ID && !got.Expires.Equal(c.Now().Add(routeTTL)) {
			t.Errorf("the route of a session without end ends %v, want in %v", got.Expires, routeTTL)
		}
	}
}

// A revocation holds whatever the disk says, and says what the disk said.
func TestRevokeWithoutDisk(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, Options{})
	sess, ok := pair(t, s, "d", Mint{})
	breakDisk(t, dir)
	if _, err := s.Revoke(sess.Device.ID); err == nil {
		t.Error("no error though nothing was saved")
	}
	if _, err := s.Check(ok.SessionToken); !errors.Is(err, ErrUnauthorized) {
		t.Error("the session lives on")
	}
}

// A revocation that could not be saved is saved as soon as that is possible, by
// itself or at the stop: no restart brings the device back.
func TestRevokeIsSavedLater(t *testing.T) {
	for name, wait := range map[string]time.Duration{"by itself": maxWait + time.Second, "at the stop": 0} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				s := open(t, dir, Options{})
				sess, _ := pair(t, s, "d", Mint{})
				mend := breakDisk(t, dir)
				if gone, err := s.Revoke(sess.Device.ID); err == nil || gone.ID != sess.Device.ID {
					t.Errorf("Revoke = %v, %v; want the device and what the disk said", gone.ID, err)
				}
				<-time.After(3*maxWait + time.Second) // and not in the middle of a try
				synctest.Wait()
				mend()
				<-time.After(wait)
				synctest.Wait()
				if wait == 0 {
					if err := s.Close(); err != nil {
						t.Fatal(err)
					}
				}
				b, err := os.ReadFile(filepath.Join(dir, stateFile))
				if err != nil || strings.Contains(string(b), sess.Device.ID) {
					t.Errorf("the file still holds the device: %v", err)
				}
				_ = s.Close()
			})
		})
	}
}

// What was shortened stays so: a refresh gives neither time nor grant back.
func TestShortenOutlivesRefresh(t *testing.T) {
	c := newClock()
	s := open(t, t.TempDir(), Options{Now: c.Now})
	sess, ok := pair(t, s, "phone", Mint{TTL: 30 * day, Grants: map[string]time.Duration{"terminal": 7 * day}})
	start := c.Now()
	if _, err := s.Shorten(sess.Device.ID, Reduction{TTL: time.Hour, Grants: map[string]time.Duration{"terminal": time.Minute, "bridge": 0}}); err != nil {
		t.Fatal(err)
	}
	c.add(30 * time.Minute)
	now, ok, err := s.Authenticate(AuthRequest{RefreshToken: ok.RefreshToken, DeviceID: "phone"}, phone)
	if err != nil {
		t.Fatal(err)
	}
	if !now.Expires.Equal(start.Add(time.Hour)) || !now.Grants["terminal"].Equal(start.Add(time.Minute)) || !now.Grants["bridge"].Equal(start) {
		t.Errorf("after a refresh: until %v, grants %v", now.Expires, now.Grants)
	}
	if _, err := s.Authorize(ok.SessionToken, "terminal", c.Now()); !errors.Is(err, ErrGrant) {
		t.Errorf("terminal: %v, want %v", err, ErrGrant)
	}
	c.add(31 * time.Minute)
	_, _, err = s.Authenticate(AuthRequest{SessionToken: ok.SessionToken, RefreshToken: ok.RefreshToken, DeviceID: "phone"}, phone)
	refused(t, err)
}

func TestShortenOnlyReduces(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	sess, _ := pair(t, s, "phone", Mint{TTL: day})
	for name, r := range map[string]Reduction{
		"longer": {TTL: 2 * day}, "never": {TTL: Never}, "grant longer": {Grants: map[string]time.Duration{"chat": 2 * day}},
		"grant never": {Grants: map[string]time.Duration{"chat": Never}},
	} {
		if _, err := s.Shorten(sess.Device.ID, r); !errors.Is(err, ErrIncrease) {
			t.Errorf("%s: %v, want %v", name, err, ErrIncrease)
		}
	}
	for name, r := range map[string]Reduction{"nothing": {}, "below zero": {TTL: -1}, "unknown grant": {Grants: map[string]time.Duration{"x": 1}}} {
		if _, err := s.Shorten(sess.Device.ID, r); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	endless, _ := pair(t, s, "endless", Mint{TTL: Never})
	if d, err := s.Shorten(endless.Device.ID, Reduction{TTL: Never}); err != nil || !d.Expires.Equal(Forever) {
		t.Errorf("never to never: %v, %v", d.Expires, err)
	}
}

func TestRevokeByPrefix(t *testing.T) {
	s := open(t, t.TempDir(), Options{})
	sess, ok := pair(t, s, "phone", Mint{})
	other, _ := pair(t, s, "laptop", Mint{})
	id := sess.Device.ID
	if _, err := s.Revoke(id[:3]); !errors.Is(err, ErrShortID) {
		t.Errorf("three characters: %v", err)
	}
	if _, err := s.Revoke("ffff" + id); !errors.Is(err, ErrNoDevice) {
		t.Errorf("no such device: %v", err)
	}
	if _, err := s.Revoke(strings.ToUpper(id[:4])); err != nil {
		t.Errorf("four characters: %v", err)
	}
	if _, err := s.Check(ok.SessionToken); !errors.Is(err, ErrUnauthorized) {
		t.Error("still in")
	}
	_, _, err := s.Authenticate(AuthRequest{RefreshToken: ok.RefreshToken, DeviceID: "phone"}, phone)
	refused(t, err)
	if d, err := s.Revoke("laptop"); err != nil || d.ID != other.Device.ID {
		t.Errorf("by its own id: %v", err)
	}

	st := state{devices: map[string]*deviceRec{"aaaa000000000000": {ID: "aaaa000000000000"}, "aaaa111111111111": {ID: "aaaa111111111111"}}}
	if _, err := s.find(st, "aaaa"); !errors.Is(err, ErrAmbiguous) {
		t.Errorf("two devices: %v", err)
	}
}
