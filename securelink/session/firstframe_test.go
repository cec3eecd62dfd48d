package session

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"
)

func TestFirstFrameRefusals(t *testing.T) {
	for name, tt := range map[string]struct{ frame, reason string }{
		"no JSON":        {`hello`, ReasonFormat},
		"array":          {`[1,2]`, ReasonFormat},
		"null":           {`null`, ReasonFormat},
		"string":         {`"system"`, ReasonFormat},
		"bad UTF-8":      {"{\"channel\":\"\xff\"}", ReasonFormat},
		"two values":     {`{} {}`, ReasonFormat},
		"deep":           {strings.Repeat(`{"a":`, 10001) + "1" + strings.Repeat("}", 10001), ReasonFormat},
		"empty object":   {`{}`, ReasonFirst},
		"another type":   {`{"channel":"system","type":"ping"}`, ReasonFirst},
		"another case":   {`{"Channel":"system","Type":"auth","Payload":{}}`, ReasonFirst},
		"type number":    {`{"channel":"system","type":7}`, ReasonFirst},
		"no payload":     {`{"channel":"system","type":"auth"}`, ReasonInvalid},
		"payload array":  {`{"channel":"system","type":"auth","payload":[]}`, ReasonInvalid},
		"nothing shown":  {`{"channel":"system","type":"auth","payload":{}}`, ReasonInvalid},
		"code number":    {`{"channel":"system","type":"auth","payload":{"pairing_code":123456}}`, ReasonInvalid},
		"code array":     {`{"channel":"system","type":"auth","payload":{"pairing_code":["A"]}}`, ReasonInvalid},
		"token object":   {`{"channel":"system","type":"auth","payload":{"session_token":{}}}`, ReasonInvalid},
		"wrong code":     {`{"channel":"system","type":"auth","payload":{"pairing_code":"AAAAAA"}}`, ReasonInvalid},
		"wrong token":    {`{"channel":"system","type":"auth","payload":{"session_token":"x"}}`, ReasonInvalid},
		"wrong refresh":  {`{"channel":"system","type":"auth","payload":{"refresh_token":"x"}}`, ReasonInvalid},
		"long device id": {`{"channel":"system","type":"auth","payload":{"session_token":"x","device_id":"` + strings.Repeat("d", 129) + `"}}`, ReasonInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Options{}, func(t *testing.T, b bench) {
				c := b.srv.mustDial()
				_ = c.Write(b.Context(), websocket.MessageBinary, []byte("ignored"))
				frame := tt.frame
				m := b.ask(c, frame)
				want := map[string]any{"channel": "system", "type": "auth.fail", "payload": map[string]any{"reason": tt.reason}, "id": m["id"]}
				if diff := cmp.Diff(want, m); diff != "" || m["id"] == "" {
					t.Error(diff)
				}
				if code, reason := b.closed(c); code != websocket.StatusNormalClosure || reason != "" {
					t.Errorf("closed with %v %q, want 1000", code, reason)
				}
			})
		})
	}
}

func TestFirstFrameTimeout(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, b bench) {
		c, start := b.srv.mustDial(), time.Now()
		m := b.next(c)
		if after := time.Since(start); after != 30*time.Second || m["payload"].(map[string]any)["reason"] != ReasonTimeout {
			t.Errorf("after %v: %v", after, m)
		}
		if code, _ := b.closed(c); code != websocket.StatusNormalClosure {
			t.Errorf("closed with %v", code)
		}
	})
}

func TestFirstFrameTooLarge(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, b bench) {
		c := b.srv.mustDial()
		go func() { _ = c.Write(b.Context(), websocket.MessageText, make([]byte, 64<<10+1)) }()
		if code, _ := b.closed(c); code != websocket.StatusMessageTooBig {
			t.Errorf("closed with %v, want 1009", code)
		}
	})
}

// The answer has the members that devices in the field read.
func TestAuthOKForm(t *testing.T) {
	inBubble(t, Options{Version: "1.2.3", Routes: new(fakeRoutes)}, func(t *testing.T, b bench) {
		c := b.srv.mustDial()
		defer c.CloseNow()
		code := mint(t, b.s, Mint{TTL: Never, Grants: map[string]time.Duration{"terminal": time.Hour}})
		now := float64(time.Now().Unix())
		m := b.ask(c, `{"channel":"system","type":"auth","id":"req-1","payload":{"pairing_code":"`+code+`","device_id":"d",
			"device_name":"Phone","client_surface":"android","device_form_factor":"phone","ttl_seconds":999,"grants":{"bridge":0},"supports":{"typed_stream_events":true}}}`)
		p := m["payload"].(map[string]any)
		token := p["session_token"].(string)
		hash := digestOf(token)
		route := map[string]any{"kind": "broker_route", "broker_url": "wss://broker.test/v1/connect", "host_id": "AAECAwQFBgcICQoLDA0ODw",
			"credential_id": credentialID(hash), "token": "route-token-secret", "expires_at": now + 30*86400}
		want := map[string]any{"channel": "system", "type": "auth.ok", "id": "req-1", "payload": map[string]any{
			"session_token": token, "server_version": "1.2.3", "profiles": []any{}, "expires_at": nil, "transport_hint": "wss",
			"client_surface": "android", "device_form_factor": "phone", "refresh_token": p["refresh_token"],
			"grants": map[string]any{"relay": nil, "api": nil, "dashboard": nil, "chat": nil, "voice:config": nil, "voice:stt": nil, "voice:tts": nil,
				"voice:realtime": nil, "terminal": now + 3600, "bridge": now + 7*86400, "tui": now + 30*86400},
			"route_credential": route, "route_credentials": []any{route}}}
		if diff := cmp.Diff(want, m); diff != "" {
			t.Error(diff)
		}
		req := b.s.opts.Routes.(*fakeRoutes).issued[0]
		if req.CredentialID != credentialID(hash) || req.DeviceIDHash != "GKw-c0PwFokMUQ6T-TUmEWnZ4_Vlu2Qpgw-vCTTeoyw" && len(req.DeviceIDHash) != 43 {
			t.Errorf("route asked for: %+v", req)
		}
	})
}

// A broker that is down costs the route and nothing else.
func TestNoRouteStillPairs(t *testing.T) {
	log, buf := debugLog()
	r := &fakeRoutes{down: errors.New("no broker")}
	inBubble(t, Options{Routes: r, Log: log}, func(t *testing.T, b bench) {
		c, ok := b.join("d", Mint{})
		defer c.CloseNow()
		if len(ok.Routes) != 0 || ok.SessionToken == "" {
			t.Errorf("%d routes", len(ok.Routes))
		}
		if !strings.Contains(buf.String(), "no broker route") {
			t.Error("nothing in the log")
		}
	})
}

func TestOnJoin(t *testing.T) {
	var joined chan Joined // of the bubble
	var ends chan CodeEnd
	inBubble(t, Options{OnJoin: func(j Joined) { joined <- j }, OnCode: func(e CodeEnd) { ends <- e }}, func(t *testing.T, b bench) {
		joined, ends = make(chan Joined, 1), make(chan CodeEnd, 1)
		c, _ := b.join("d", Mint{PairingID: "p9"})
		defer c.CloseNow()
		j := <-joined
		if j.Device.DeviceID != "d" || j.Path != phone.Path || j.PairingID != "p9" || <-ends != (CodeEnd{"p9", CodeUsed}) {
			t.Errorf("%+v", j)
		}
	})
}

// The whole debug log of a flow with every kind of secret holds none of them.
func TestLogHoldsNoSecrets(t *testing.T) {
	log, buf := debugLog()
	r := new(fakeRoutes)
	var secrets []string
	inBubble(t, Options{Routes: r, Log: log}, func(t *testing.T, b bench) {
		code, used := mint(t, b.s, Mint{}), mint(t, b.s, Mint{PairingID: "pp"})
		secrets = append(secrets, code, used, strings.ToLower(code), "wrong-session-token", "wrong-refresh-token", "WRONG1", "route-token-secret")
		c := b.srv.mustDial()
		ok, err := Authenticate(t.Context(), c, AuthRequest{PairingCode: used, DeviceID: "d"})
		if err != nil {
			t.Fatal(err)
		}
		log.Info("given away by mistake", "answer", ok, "request", AuthRequest{PairingCode: code}, "route", ok.Routes[0])
		_ = c.Close(websocket.StatusNormalClosure, "")
		bad := b.srv.mustDial()
		_, err = Authenticate(t.Context(), bad, AuthRequest{SessionToken: "wrong-session-token", RefreshToken: "wrong-refresh-token", PairingCode: "WRONG1"})
		refused(t, err)
		_ = bad.CloseNow()
		again := b.srv.mustDial()
		ok2, err := Authenticate(t.Context(), again, AuthRequest{RefreshToken: ok.RefreshToken, DeviceID: "d"})
		if err != nil {
			t.Fatal(err)
		}
		secrets = append(secrets, ok.SessionToken, ok.RefreshToken, ok2.SessionToken, ok2.RefreshToken)
		b.s.CancelCode(code)
		if _, err := b.s.Revoke("d"); err != nil {
			t.Fatal(err)
		}
		b.closed(again)
	})
	for _, want := range []string{"device paired", "device refused", "device revoked", "pairing code minted", "device disconnected"} {
		if !strings.Contains(buf.String(), want) {
			t.Errorf("%q is not in the log: this test looks at the wrong one", want)
		}
	}
	for _, s := range secrets {
		if s == "" || strings.Contains(buf.String(), s) {
			t.Errorf("%q is in the log", s)
		}
	}
}

func TestClientErrors(t *testing.T) {
	inBubble(t, Options{}, func(t *testing.T, b bench) {
		c := b.srv.mustDial()
		_, err := Authenticate(t.Context(), c, AuthRequest{PairingCode: "AAAAAA"})
		refused(t, err)
		_ = c.CloseNow()
		if _, err := OwnSession(t.Context(), c); err == nil {
			t.Error("no error on a closed socket")
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		c = b.srv.mustDial()
		if _, err := Authenticate(ctx, c, AuthRequest{}); err == nil {
			t.Error("no error after the context ended")
		}
	})
}

func FuzzParseFirst(f *testing.F) {
	for _, s := range []string{`{"channel":"system","type":"auth","id":"x","payload":{"pairing_code":"ABC123","device_id":"d"}}`,
		`[]`, `null`, `{"channel":"system","type":"auth","payload":null}`, `{"channel":"system","type":"auth","payload":{"session_token":1}}`, "{\"\xff\":1}"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		req, id, err := parseFirst(in)
		if err != nil {
			if e, ok := errors.AsType[*AuthError](err); !ok || e.Reason != ReasonFormat && e.Reason != ReasonFirst && e.Reason != ReasonInvalid {
				t.Errorf("error %v is no reason", err)
			}
			return
		}
		if len(id) > maxID || len(req.DeviceID) > maxDeviceID || len(req.SessionToken) > maxToken {
			t.Error("out of bounds")
		}
		payload := make(map[string]string)
		for _, m := range req.fields() {
			payload[m.name] = *m.to
		}
		b, err := encode("system", "auth", id, payload)
		if err != nil {
			t.Fatal(err)
		}
		again, _, err := parseFirst(b)
		if err != nil || again != req {
			t.Errorf("%+v\nbecame %+v, %v", req, again, err)
		}
	})
}

func FuzzAuthOK(f *testing.F) {
	f.Add([]byte(`{"session_token":"s","expires_at":1780000000.5,"grants":{"chat":null,"x":1},"profiles":[{}],"route_credential":{"kind":"broker_route","expires_at":1}}`))
	f.Add([]byte(`{"session_token":"s","expires_at":null,"route_credentials":[{"kind":"other"}]}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		var ok AuthOK
		if json.Unmarshal(in, &ok) != nil {
			return
		}
		if out, err := json.Marshal(ok); err != nil || !json.Valid(out) {
			t.Errorf("%+v: %v", ok, err)
		}
	})
}

func FuzzRelayMessage(f *testing.F) {
	for _, s := range []string{`{"channel":"system","type":"ping","id":"1","payload":{"ts":1}}`, `{"channel":"chat"}`, `[]`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		msg, err := parseMessage(in)
		if err != nil {
			return
		}
		m, _ := members(msg.payload)
		if r, err := parseReduction(m); err == nil && r.TTL != 0 && checkTTL(r.TTL) != nil {
			t.Errorf("lifetime %v", r.TTL)
		}
	})
}
