package session

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"
)

// A bench is one host with its relay socket in a synctest bubble.
type bench struct {
	*testing.T
	s   *Store
	srv *relayServer
}

// inBubble runs f in virtual time and closes everything after it.
func inBubble(t *testing.T, o Options, f func(t *testing.T, b bench)) {
	synctest.Test(t, func(t *testing.T) {
		s, err := Open(t.TempDir(), o)
		if err != nil {
			t.Fatal(err)
		}
		srv := serveRelay(t, s, func() Peer { return phone })
		defer func() {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			srv.close()
		}()
		f(t, bench{t, s, srv})
	})
}

// join pairs a device over the socket.
func (b bench) join(id string, m Mint) (*websocket.Conn, AuthOK) {
	b.Helper()
	c := b.srv.mustDial()
	ok, err := Authenticate(b.Context(), c, AuthRequest{PairingCode: mint(b.T, b.s, m), DeviceID: id, DeviceName: id})
	if err != nil {
		b.Fatal(err)
	}
	return c, ok
}

// ask sends a raw message and gives the next one.
func (b bench) ask(c *websocket.Conn, text string) map[string]any {
	b.Helper()
	if err := c.Write(b.Context(), websocket.MessageText, []byte(text)); err != nil {
		b.Fatal(err)
	}
	return b.next(c)
}

func (b bench) next(c *websocket.Conn) map[string]any {
	b.Helper()
	_, data, err := c.Read(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	var m map[string]any
	if err := json.Unmarshal(data, &m); err != nil {
		b.Fatal(err)
	}
	return m
}

// closed reads until the socket ends and gives how.
func (b bench) closed(c *websocket.Conn) (websocket.StatusCode, string) {
	b.Helper()
	for {
		if _, _, err := c.Read(b.Context()); err != nil {
			e, _ := errors.AsType[websocket.CloseError](err)
			_ = c.CloseNow()
			return e.Code, e.Reason
		}
	}
}

func TestRelayAnswers(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, b bench) {
		c, _ := b.join("d", Mint{Grants: map[string]time.Duration{"terminal": time.Hour}})
		defer c.CloseNow()
		say := func(in, typ, text string) {
			t.Helper()
			m := b.ask(c, in)
			if p := m["payload"].(map[string]any); m["channel"] != "system" || m["type"] != typ || m["id"] != "7" || text != "" && p["message"] != text {
				t.Errorf("%s\nanswered %v, want %s %q", in, m, typ, text)
			}
		}
		say(`{"channel":"system","type":"ping","id":"7","payload":{"ts":12.5}}`, "pong", "")
		for ch := range channels {
			say(`{"channel":"`+ch+`","type":"x","id":"7","payload":{}}`, "error", notHere)
		}
		say(`{"channel":"nope","type":"x","id":"7"}`, "error", "Unknown channel: nope")
		say(`{"channel":7,"type":"x","id":"7"}`, "error", "Unknown channel: ")
		say(`{"channel":"a\u001b[2J`+strings.Repeat("b", 100)+`","id":"7"}`, "error", "Unknown channel: a[2J"+strings.Repeat("b", 60)+"…")
		// Dropped without an answer: the next answer is to the next message.
		for _, drop := range []string{`hello`, `[]`, `{"channel":"system","type":"pong","id":"9"}`} {
			if err := c.Write(t.Context(), websocket.MessageText, []byte(drop)); err != nil {
				t.Fatal(err)
			}
		}
		_ = c.Write(t.Context(), websocket.MessageBinary, []byte{1})
		go func() { // keep the clock company: pings are answered while we read
			<-time.After(time.Hour + time.Second) // not with a ping: the pipe has no buffer
			_ = c.Write(t.Context(), websocket.MessageText, []byte(`{"channel":"terminal","type":"x","id":"7"}`))
		}()
		if m := b.next(c); m["payload"].(map[string]any)["message"] != "Terminal grant expired for this device" {
			t.Errorf("after its hour: %v", m)
		}
		say(`{"channel":"chat","type":"x","id":"7"}`, "error", notHere)
	})
}

// The relay namespace is a grant like any other; the device's own session stays
// within reach without it.
func TestRelayNeedsGrant(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, b bench) {
		c, _ := b.join("d", Mint{Grants: map[string]time.Duration{"dashboard": Never}})
		defer c.CloseNow()
		if m := b.ask(c, `{"channel":"chat","type":"x"}`); m["payload"].(map[string]any)["message"] != "Relay grant expired for this device" {
			t.Errorf("chat without the relay grant: %v", m)
		}
		if _, err := OwnSession(t.Context(), c); err != nil {
			t.Error(err)
		}
	})
}

func TestBlockedPeerGets429(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, b bench) {
		for range 5 {
			c := b.srv.mustDial()
			_, err := Authenticate(t.Context(), c, AuthRequest{SessionToken: "wrong"})
			refused(t, err)
			_ = c.CloseNow()
		}
		_, resp, err := b.srv.dial(nil)
		if err == nil || resp == nil || resp.StatusCode != http.StatusTooManyRequests || resp.Header.Get("Retry-After") != "300" {
			t.Errorf("%v, %+v", err, resp)
		}
		<-time.After(300 * time.Second)
		c := b.srv.mustDial()
		_ = c.CloseNow()
	})
}

func TestUpgradeOnly(t *testing.T) {
	inBubble(t, Options{Limits: Limits{Waiting: 1}}, func(t *testing.T, b bench) {
		_, resp, err := b.srv.dial(http.Header{"Origin": {"https://evil.example"}})
		if err == nil || resp.StatusCode != http.StatusForbidden {
			t.Errorf("foreign origin: %v", err)
		}
		synctest.Wait()
		waiting := b.srv.mustDial()
		if _, resp, err := b.srv.dial(nil); err == nil || resp.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("one more than may wait: %v", err)
		}
		if _, err := Authenticate(t.Context(), waiting, AuthRequest{PairingCode: mint(t, b.s, Mint{}), DeviceID: "d"}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		next := b.srv.mustDial() // who has proved itself waits no more
		_ = waiting.CloseNow()
		_ = next.CloseNow()
		rec := httptest.NewRecorder()
		b.s.ServeRelay(rec, httptest.NewRequest("GET", "/relay/session", nil), phone)
		if rec.Code != http.StatusBadRequest {
			t.Errorf("plain GET: %d, want 400", rec.Code)
		}
	})
}

// An Origin that the caller has judged is not judged again by another rule.
func TestOriginChecked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t, t.TempDir(), Options{})
		checked := phone
		checked.OriginChecked = true
		srv := serveRelay(t, s, func() Peer { return checked })
		c, _, err := srv.dial(http.Header{"Origin": {"https://another-name-of-ours.example"}})
		if err != nil {
			t.Error(err)
		} else {
			_ = c.CloseNow()
		}
		_ = s.Close()
		srv.close()
	})
}

// One peer cannot keep all others from authenticating.
func TestWaitingByPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t, t.TempDir(), Options{Limits: Limits{WaitingPeer: 2}})
		var from atomic.Pointer[Peer]
		from.Store(&phone)
		srv := serveRelay(t, s, func() Peer { return *from.Load() })
		for range 2 {
			defer srv.mustDial().CloseNow()
		}
		if _, _, err := srv.dial(nil); err == nil {
			t.Error("a third socket was let wait")
		}
		from.Store(&Peer{Source: Source{Key: "192.0.2.8"}})
		defer srv.mustDial().CloseNow()
		_ = s.Close()
		srv.close()
	})
}

// A device that comes back again and again keeps its newest sockets.
func TestSocketsOfOneDevice(t *testing.T) {
	inBubble(t, Options{Limits: Limits{Sockets: 2}}, func(t *testing.T, b bench) {
		first, ok := b.join("d", Mint{})
		var rest []*websocket.Conn
		for range 2 {
			<-time.After(time.Second)
			c := b.srv.mustDial()
			if _, err := Authenticate(t.Context(), c, AuthRequest{SessionToken: ok.SessionToken}); err != nil {
				t.Fatal(err)
			}
			rest = append(rest, c)
		}
		if code, reason := b.closed(first); code != websocket.StatusPolicyViolation || reason != "replaced" {
			t.Errorf("the oldest closed with %v %q", code, reason)
		}
		for _, c := range rest {
			if m := b.ask(c, `{"channel":"system","type":"ping","id":"1"}`); m["type"] != "pong" {
				t.Errorf("%v", m)
			}
			_ = c.CloseNow()
		}
	})
}

func TestOwnSession(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, b bench) {
		c, ok := b.join("mine", Mint{TTL: day})
		other, _ := b.join("other", Mint{TTL: day})
		defer other.CloseNow()
		d, err := OwnSession(t.Context(), c)
		if err != nil || d.Name != "mine" || !d.Expires.Equal(ok.ExpiresAt) || d.Path != phone.Path {
			t.Errorf("own session %+v, %v", d, err)
		}
		if _, err := ShortenSession(t.Context(), c, Reduction{TTL: Never}); err == nil || !strings.Contains(err.Error(), "pair the device again") {
			t.Errorf("to never: %v", err)
		}
		d, err = ShortenSession(t.Context(), c, Reduction{TTL: time.Hour, Grants: map[string]time.Duration{"bridge": time.Minute}})
		if err != nil || time.Until(d.Expires) > time.Hour || time.Until(d.Grants["bridge"]) > time.Minute {
			t.Errorf("shortened: %+v, %v", d, err)
		}
		for _, bad := range []string{`{}`, `{"action":"shorten","ttl_seconds":true}`, `{"action":"shorten","ttl_seconds":-1}`, `{"action":"shorten","ttl_seconds":1.5}`,
			`{"action":"shorten","ttl_seconds":null}`, `{"action":"shorten","grants":[]}`, `{"action":"shorten","grants":{"chat":"1"}}`, `{"action":"shorten"}`} {
			if m := b.ask(c, `{"channel":"system","type":"session","id":"1","payload":`+bad+`}`); m["type"] != "error" {
				t.Errorf("%s: %v", bad, m)
			}
		}
		if err := RevokeSession(t.Context(), c); err != nil {
			t.Error(err)
		}
		if code, reason := b.closed(c); code != websocket.StatusNormalClosure || reason != "revoked" {
			t.Errorf("closed with %v %q", code, reason)
		}
		if left := b.s.Devices(); len(left) != 1 || left[0].Name != "other" {
			t.Errorf("left: %+v", left)
		}
	})
}
