package host_test

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/internal/host/operator"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/wire"
	"github.com/hermes-reach/hermes-reach/securelink/session"
)

func parse(t *testing.T, text string) *endpoints.Payload {
	t.Helper()
	p, err := endpoints.ParseInvite(text)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// integersOnly walks JSON: phones refuse a whole QR code for one "600.0".
func integersOnly(t *testing.T, text string) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	for {
		tok, err := d.Token()
		if err != nil {
			return
		}
		if n, ok := tok.(json.Number); ok && strings.ContainsAny(n.String(), ".eE") {
			t.Errorf("the payload holds the number %s", n)
		}
	}
}

// TestInviteForms: four direct addresses and a broker fit a QR code that phones
// scan, and both forms say the same and are signed.
func TestInviteForms(t *testing.T) {
	s := newSite(t)
	s.cfg.Advertise = []string{"me.example.com", "203.0.113.77:9443", "192.168.178.23"}
	s.enroll(newBroker(t, s.ca))
	s.start()
	inv := s.pair(host.PairRequest{TTL: "7d", Grants: "terminal=1d,dashboard"})
	if v, err := endpoints.QRVersion(inv.QR); err != nil || v > host.MaxScanned {
		t.Errorf("the QR code has version %d (%d bytes), %v; want at most %d", v, len(inv.QR), err, host.MaxScanned)
	}
	secret, err := os.ReadFile(filepath.Join(s.dir, "qr-secret"))
	if err != nil {
		t.Fatal(err)
	}
	for form, p := range map[string]*endpoints.Payload{"QR": parse(t, inv.QR), "invite": parse(t, inv.Text)} {
		if !endpoints.Verify(secret, p.Raw) {
			t.Errorf("%s: the signature does not verify", form)
		}
		integersOnly(t, string(p.Raw))
		var roles []string
		for i, c := range p.Endpoints {
			if c.Priority != i {
				t.Errorf("%s: candidate %d has priority %d", form, i, c.Priority)
			}
			if c.Proxy == nil || c.Proxy.PinSHA256 != s.host.Identity().Pin().String() {
				t.Errorf("%s: candidate %d has not the host's pin", form, i)
			}
			roles = append(roles, string(c.Role))
		}
		if want := "plugin_proxy plugin_proxy plugin_proxy plugin_proxy outbound_broker"; strings.Join(roles, " ") != want {
			t.Errorf("%s: candidates %v, want brokers last: %s", form, roles, want)
		}
		if *p.Relay.TTLSeconds != 7*24*3600 || p.Relay.Grants["terminal"] != 24*3600 {
			t.Errorf("%s: lifetime %d, grants %v", form, *p.Relay.TTLSeconds, p.Relay.Grants)
		}
	}
	if !slices.Contains(inv.Candidates, "plugin_proxy me.example.com:"+port(s)) {
		t.Errorf("candidates for people = %q", inv.Candidates)
	}
	if len(inv.Notes) != 0 || time.Until(inv.Expires) < 9*time.Minute || time.Until(inv.Expires) > 10*time.Minute {
		t.Errorf("notes %q, expires %v", inv.Notes, inv.Expires)
	}
}

func port(s *site) string {
	addr := s.host.Addrs()[0].String()
	return addr[strings.LastIndexByte(addr, ':')+1:]
}

// TestManyAddresses: what would make the QR code too large for phones is left
// out of it, the worst direct addresses first and never a broker, and it says so.
func TestManyAddresses(t *testing.T) {
	s := newSite(t)
	for n := range strings.FieldsSeq("a b c d e f g h i j k l") {
		s.cfg.Advertise = append(s.cfg.Advertise, n+".a-rather-long-name.example.com")
	}
	s.enroll(newBroker(t, s.ca))
	s.start()
	inv := s.pair(host.PairRequest{})
	if v, err := endpoints.QRVersion(inv.QR); err != nil || v > host.MaxScanned {
		t.Errorf("the QR code has version %d (%d bytes), %v; want at most %d", v, len(inv.QR), err, host.MaxScanned)
	}
	all, scanned := parse(t, inv.Text).Endpoints, parse(t, inv.QR).Endpoints
	if len(all) != 14 || len(scanned) < 4 || scanned[len(scanned)-1].Role != throughBroker || scanned[len(scanned)-1].Priority != len(scanned)-1 {
		t.Errorf("%d candidates in the invite and %d in the QR code, the last %v; want 14, some, and the broker", len(all), len(scanned), scanned[len(scanned)-1])
	}
	if scanned[0].Proxy.URL != all[0].Proxy.URL {
		t.Error("the best address was left out")
	}
	if len(inv.Notes) != 1 || !strings.Contains(inv.Notes[0], "QR") {
		t.Errorf("notes = %q, want one about the QR code", inv.Notes)
	}
}

// TestNoWayIn: without any candidate there is no invite, and no code is left
// that could be guessed.
func TestNoWayIn(t *testing.T) {
	s := newSite(t)
	s.cfg.Listen = []string{}
	s.start()
	for range 100 { // more than there may be live codes: each was cancelled
		_, err := s.op.Pair(t.Context(), host.PairRequest{})
		if err == nil || !strings.Contains(err.Error(), "--advertise") || !strings.Contains(err.Error(), "enrol") {
			t.Fatalf("an invite without a way in: %v", err)
		}
	}
}

func TestBrokerAway(t *testing.T) {
	s := newSite(t)
	b := newBroker(t, s.ca)
	s.enroll(b)
	b.stop()
	s.start()
	inv := s.pair(host.PairRequest{})
	if len(inv.Notes) != 1 || !strings.Contains(inv.Notes[0], b.line.URL.HostPort()) {
		t.Errorf("notes = %q, want one about the broker", inv.Notes)
	}
	if p := parse(t, inv.Text); len(p.Endpoints) != 1 || p.Endpoints[0].Role != endpoints.RolePluginProxy {
		t.Errorf("candidates = %v, want the direct one", p.Endpoints)
	}
	s.join(inv, "")
}

func TestBadPairRequest(t *testing.T) {
	s := newSite(t)
	s.start()
	for _, req := range []host.PairRequest{{TTL: "soon"}, {Grants: "terminal"}, {TTL: "-1d"}} {
		if inv, err := s.op.Pair(t.Context(), req); err == nil {
			t.Errorf("%+v made the invite %s", req, inv.ID)
		}
	}
}

// TestBootstrapEnds: however a code ends, the broker takes no more for it.
func TestBootstrapEnds(t *testing.T) {
	for name, end := range map[string]func(*site, *host.Invite){
		"used":      func(s *site, inv *host.Invite) { s.join(inv, throughBroker) },
		"used else": func(s *site, inv *host.Invite) { s.join(inv, endpoints.RolePluginProxy) },
		"cancelled": func(s *site, inv *host.Invite) {
			if err := s.op.CancelPair(s.t.Context(), inv.ID); err != nil {
				s.t.Fatal(err)
			}
		},
		"expired": func(s *site, inv *host.Invite) {
			s.host.CodeEnded(session.CodeEnd{PairingID: inv.ID, Why: session.CodeExpired})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t)
			b := newBroker(t, s.ca)
			s.enroll(b)
			s.start()
			inv := s.pair(host.PairRequest{})
			if !b.has(wire.KindBootstrap, inv.ID) {
				t.Fatal("the broker does not know the bootstrap")
			}
			end(s, inv)
			until(t, "the bootstrap's end at the broker", func() bool { return !b.has(wire.KindBootstrap, inv.ID) })
		})
	}
}

// TestHostDecides: a broker that was not told, or lies, gets nobody in.
func TestHostDecides(t *testing.T) {
	s := newSite(t)
	b := newBroker(t, s.ca)
	s.enroll(b)
	s.start()
	used, cancelled := s.pair(host.PairRequest{}), s.pair(host.PairRequest{})
	d := s.join(used, throughBroker)
	if err := s.op.CancelPair(t.Context(), cancelled.ID); err != nil {
		t.Fatal(err)
	}
	for _, inv := range []*host.Invite{used, cancelled} {
		until(t, "the bootstraps' end", func() bool { return !b.has(wire.KindBootstrap, inv.ID) })
	}
	for name, tt := range map[string]struct {
		kind wire.Kind
		id   string
		want wire.Code
	}{
		"a pairing that was used":      {wire.KindBootstrap, used.ID, wire.CodeRefused},
		"a pairing that was cancelled": {wire.KindBootstrap, cancelled.ID, wire.CodeRefused},
		"a pairing that never was":     {wire.KindBootstrap, wire.NewID().String(), wire.CodeRefused},
		"a route of nobody":            {wire.KindRoute, wire.NewID().String(), wire.CodeRevoked},
	} {
		t.Run(name, func(t *testing.T) {
			token := wire.NewToken()
			err := b.store.Publish(store.Credential{
				Host: b.line.HostID, Kind: tt.kind, ID: tt.id, Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Hour),
			})
			if err != nil {
				t.Fatal(err)
			}
			if got := refusal(t, s, b, tt.kind, token); got != tt.want {
				t.Errorf("refused with %q, want %q", got, tt.want)
			}
		})
	}
	if err := d.signIn(throughBroker); err != nil {
		t.Errorf("the paired device: %v", err)
	}
}

// refusal dials through a broker and gives the code it is refused with.
func refusal(t *testing.T, s *site, b *testBroker, kind wire.Kind, token string) wire.Code {
	t.Helper()
	dialer, err := reach.NewDialer(reach.DialerConfig{
		URL: b.line.URL.String(), HostID: b.line.HostID, Kind: kind, Token: token, TLS: s.ca.Client(), Agent: "test/1",
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dialer.Close() }()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := dialer.DialContext(ctx)
	if err == nil {
		_ = c.Close()
		return ""
	}
	r, ok := asRefused(err)
	if !ok {
		t.Fatalf("dial: %v, want a refusal with a code", err)
	}
	return r.Code
}

// TestWaitEnds: whoever waits for a device hears how the invite ended.
func TestWaitEnds(t *testing.T) {
	s := newSite(t)
	s.start()
	wait := func(op *operator.Operator, id string) (<-chan host.PairEnd, <-chan error) {
		ends, errs := make(chan host.PairEnd, 1), make(chan error, 1)
		go func() {
			end, err := op.WaitPair(t.Context(), id)
			if err != nil {
				errs <- err
				return
			}
			ends <- end
		}()
		return ends, errs
	}
	cancelled, joined, open := s.pair(host.PairRequest{}), s.pair(host.PairRequest{}), s.pair(host.PairRequest{})
	ends, _ := wait(s.op, cancelled.ID)
	if err := s.op.CancelPair(t.Context(), cancelled.ID); err != nil {
		t.Fatal(err)
	}
	if end := <-ends; end.State != "cancelled" || end.Device != nil {
		t.Errorf("ended as %+v, want cancelled", end)
	}
	ends, _ = wait(s.op, joined.ID)
	s.join(joined, "")
	if end := <-ends; end.State != "joined" || end.Device == nil || end.Device.Name != "laptop" || end.Path != "plugin_proxy" {
		t.Errorf("ended as %+v, want joined by the laptop", end)
	}
	if end, err := s.op.WaitPair(t.Context(), joined.ID); err != nil || end.State != "joined" {
		t.Errorf("asked later: %+v, %v", end, err)
	}
	if _, err := s.op.WaitPair(t.Context(), "nothing"); err == nil {
		t.Error("an unknown pairing ended")
	}
	_, errs := wait(s.op, open.ID)
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	if err := <-errs; err == nil {
		t.Error("a wait outlived the host")
	}
}

// TestInviteWorksOnce: neither the code nor the bootstrap pairs a second device.
func TestInviteWorksOnce(t *testing.T) {
	s := newSite(t)
	s.enroll(newBroker(t, s.ca))
	s.start()
	inv := s.pair(host.PairRequest{})
	s.join(inv, "")
	for _, role := range []endpoints.Role{endpoints.RolePluginProxy, throughBroker} {
		if _, err := s.tryJoin(inv, role); err == nil {
			t.Errorf("the invite worked again by %s", role)
		}
	}
}

// TestLogsHoldNoSecret greps the debug log of a host's life for all it had to
// keep to itself.
func TestLogsHoldNoSecret(t *testing.T) {
	s := newSite(t)
	b := newBroker(t, s.ca)
	s.enroll(b)
	s.start()
	inv := s.pair(host.PairRequest{})
	p := parse(t, inv.Text)
	d := s.join(inv, throughBroker)
	_ = d.signIn(throughBroker)
	if err := s.stop(); err != nil {
		t.Fatal(err)
	}
	log := s.log.String()
	if !strings.Contains(log, "device paired") || !strings.Contains(log, s.dir) {
		t.Error("the log is not complete, or does not name the state folder")
	}
	secrets := map[string]string{"pairing code": p.Relay.Code, "session": d.profile.Session.Reveal(), "refresh": d.profile.Refresh.Reveal(), "host token": b.line.Token}
	for _, c := range p.Endpoints {
		if c.Broker != nil {
			secrets["bootstrap"] = c.Broker.Token
		}
	}
	for _, r := range d.profile.Routes {
		secrets["route"] = r.Token.Reveal()
	}
	if len(secrets) != 6 {
		t.Fatalf("only %d secrets to look for", len(secrets))
	}
	for name, text := range secrets {
		if text == "" || strings.Contains(log, text) {
			t.Errorf("the log holds the %s", name)
		}
	}
}
