package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func sampleID(b byte) (id ID) {
	for i := range id {
		id[i] = b
	}
	return id
}

// sampleTokens are secrets that no error and no print may show.
var (
	sampleToken     = RawToken{1, 2, 3}.Text()
	sampleHostToken = strings.Repeat("host-secret-", 4)
)

// samples2 has every message of protocol 2 with every member set.
func samples2() []Message {
	slot, offer := 3, &RawOffer{Token: RawToken{9}, DeadlineSeconds: 10}
	digest := DigestOf("x")
	return []Message{
		&Register{
			ProtocolVersion: 2, Role: RoleHost, HostID: sampleID(1), ConnectionID: sampleID(2), CredentialKind: KindHost,
			Token: sampleHostToken, Agent: "hermes-reach/1.2.3", InstanceID: sampleID(3), Features: []string{"a", "b"}, Slot: &slot, Epoch: 9,
		},
		&Register{
			ProtocolVersion: 2, Role: RoleClient, HostID: sampleID(1), ConnectionID: sampleID(2), CredentialKind: KindBootstrap,
			Token: sampleToken, Agent: "x", InstanceID: sampleID(3),
		},
		&Registered{
			SessionID: sampleID(4), Limits: Limits{256, 1 << 20, 300}, ObservedAddr: "192.0.2.1:5",
			Features: []string{"a"}, RawPoolKey: RawToken{8},
		},
		&Dial{}, &Matched{StreamID: sampleID(5), Raw: offer},
		&Open{
			StreamID: sampleID(5), HostConnectionID: sampleID(2), Via: "tls", SourceTag: "tag",
			CredentialKind: KindRoute, CredentialID: "c", Raw: offer,
		},
		&Open{StreamID: sampleID(5), HostConnectionID: sampleID(2), CredentialKind: KindBootstrap, PairingID: "p"},
		&Accept{}, &Refuse{CodeRefused},
		&PublishBootstrap{"r", "p", digest, 1780000000, 1}, &PublishRoute{"r", "c", digest, 1780000000, digest},
		&Revoke{"r", KindRoute, "c", ""}, &Revoke{"r", KindBootstrap, "", "p"},
		&Published{"r", KindRoute, "c", ""}, &Revoked{"r", KindBootstrap, "", "p"},
		&Error{CodeRateLimited, "r", 90 * time.Second}, &Error{Code: CodeReplaced}, &Reset{sampleID(5), CodeClosed},
		&BootstrapReused{"p", "v1"}, &Drain{30}, &Ping{-1}, &Pong{1 << 62}, &UseRaw{}, &UseSession{},
	}
}

// samples1 has every message of protocol 1 in a flow that has it.
func samples1() map[Flow][]Message1 {
	digest := DigestOf("x")
	return map[Flow][]Message1{
		FirstFrame: {
			&Register1{RoleHost, sampleID(1), sampleID(2), KindHost, sampleHostToken},
			&Register1{RoleClient, sampleID(1), sampleID(2), KindRoute, sampleToken},
		},
		HostToBroker: {
			&PublishBootstrap1{"p", digest, 1780000000, 1}, &PublishRoute1{"c", digest, 1780000000, digest}, &Revoke1{"c"},
		},
		BrokerToHost: {
			&Registered1{}, &Open1{sampleID(5), sampleID(2)}, &Published1{KindRoute, "c", ""},
			&Published1{KindBootstrap, "", "p"}, &Revoked1{"c"}, &Error1{CodeHostBusy},
		},
		BrokerToClient: {&Matched1{sampleID(5)}, &Error1{CodeHostOffline}},
	}
}

func TestEveryTypeHasASample(t *testing.T) {
	types := map[reflect.Type]bool{}
	for _, m := range samples2() {
		types[reflect.TypeOf(m)] = true
	}
	for name, newOne := range newMessage {
		if m := newOne(); !types[reflect.TypeOf(m)] || m.messageType() != name {
			t.Errorf("%s: sample %v, type %s", name, types[reflect.TypeOf(m)], m.messageType())
		}
	}
	for flow, forms := range newMessage1 {
		have := map[reflect.Type]bool{}
		for _, m := range samples1()[flow] {
			have[reflect.TypeOf(m)] = true
		}
		for name, newOne := range forms {
			if m := newOne(); !have[reflect.TypeOf(m)] || m.message1Type() != name {
				t.Errorf("%d %s: sample %v, type %s", flow, name, have[reflect.TypeOf(m)], m.message1Type())
			}
		}
	}
}

// Every member survives, the same bytes come out again, and each of them is
// needed: a message cut anywhere is an error.
func TestRoundTripAndCutV2(t *testing.T) {
	for _, m := range samples2() {
		var buf bytes.Buffer
		if err := WriteMessage(&buf, m); err != nil {
			t.Fatal(err)
		}
		wire := buf.Bytes()
		got, err := ReadMessage(bytes.NewReader(wire))
		if err != nil || !cmp.Equal(got, m) {
			t.Fatalf("ReadMessage(%s) = %v\n%s", wire, err, cmp.Diff(m, got))
		}
		again, err := AppendMessage(nil, got)
		if err != nil || !bytes.Equal(again, wire[2:]) {
			t.Errorf("one meaning, two spellings: %s and %s (%v)", wire[2:], again, err)
		}
		for n := range wire {
			if _, err := ReadMessage(bytes.NewReader(wire[:n])); kindOf(err) != map[bool]string{true: "eof", false: "cut"}[n == 0] {
				t.Errorf("%s cut to %d bytes: %v", wire, n, err)
			}
		}
		for n := range again {
			if _, err := ParseMessage(again[:n]); kindOf(err) != "malformed" {
				t.Errorf("%s cut to %d bytes: %v", again, n, err)
			}
		}
	}
}

func TestRoundTripAndCutV1(t *testing.T) {
	for flow, list := range samples1() {
		for _, m := range list {
			b, err := AppendV1(nil, m)
			if err != nil {
				t.Fatal(err)
			}
			got, err := ParseV1(flow, b)
			if err != nil || !cmp.Equal(got, m) {
				t.Fatalf("ParseV1(%s) = %v\n%s", b, err, cmp.Diff(m, got))
			}
			for n := range b {
				if _, err := ParseV1(flow, b[:n]); kindOf(err) != "malformed" {
					t.Errorf("%s cut to %d bytes: %v", b, n, err)
				}
			}
			for other, forms := range newMessage1 { // what a flow does not have
				_, has := forms[m.message1Type()]
				if _, err := ParseV1(other, b); (err == nil) != has {
					t.Errorf("%s in flow %d: %v", b, other, err)
				}
			}
		}
	}
}

// A writer refuses what the reader at the other end would refuse.
func TestWritersCheck(t *testing.T) {
	slot := 8
	register := func(change func(*Register)) *Register {
		m := samples2()[0].(*Register)
		change(m)
		return m
	}
	for name, m := range map[string]Message{
		"wrong version":     register(func(m *Register) { m.ProtocolVersion = 1 }),
		"no role":           register(func(m *Register) { m.Role = "" }),
		"no slot":           register(func(m *Register) { m.Slot = nil }),
		"slot 8":            register(func(m *Register) { m.Slot = &slot }),
		"negative epoch":    register(func(m *Register) { m.Epoch = -1 }),
		"client with slot":  register(func(m *Register) { m.Role, m.CredentialKind, m.Token = RoleClient, KindRoute, sampleToken }),
		"short token":       register(func(m *Register) { m.Token = "short" }),
		"too many features": register(func(m *Register) { m.Features = make([]string, 17) }),
		"long agent":        register(func(m *Register) { m.Agent = strings.Repeat("x", 129) }),
		"no code":           &Refuse{},
		"no request id":     &Revoke{"", KindRoute, "c", ""},
		"two ids":           &Revoke{"r", KindRoute, "c", "p"},
		"two ids again":     &Revoke{"r", KindBootstrap, "c", "p"},
		"too long in all": register(func(m *Register) {
			m.Token, m.Features = strings.Repeat("\U0010ffff", 512), slices.Repeat([]string{strings.Repeat(`"`, 64)}, 16)
			m.Agent = strings.Repeat(`"`, 128)
		}),
		"no kind":           &Revoke{"r", "", "c", ""},
		"no expiry":         &PublishBootstrap{"r", "p", Digest{}, 0, 1},
		"late expiry":       &PublishBootstrap{"r", "p", Digest{}, MaxExpiry + 1, 1},
		"two uses":          &PublishBootstrap{"r", "p", Digest{}, 1, 2},
		"negative retry":    &Error{CodeDraining, "", -time.Second},
		"broken UTF-8":      &BootstrapReused{"\xff", ""},
		"negative deadline": &Drain{-1},
		"no raw deadline":   &Matched{Raw: &RawOffer{}},
	} {
		var w counter
		if err := WriteMessage(&w, m); err == nil || w.calls != 0 {
			t.Errorf("%s: WriteMessage = %v after %d writes", name, err, w.calls)
		}
	}
	huge := &Register1{RoleHost, ID{}, ID{}, KindHost, strings.Repeat("\U0010ffff", 512)}
	if b, err := AppendV1([]byte("kept"), huge); err != nil || len(b) > MaxMessage {
		t.Errorf("the longest host token does not fit: %d bytes, %v", len(b), err)
	}
	if b, err := AppendV1([]byte("kept"), &Error1{}); err == nil || string(b) != "kept" {
		t.Errorf("AppendV1 = %q, %v", b, err)
	}
	if b, err := AppendMessage([]byte("kept"), &Refuse{}); err == nil || string(b) != "kept" {
		t.Errorf("AppendMessage = %q, %v", b, err)
	}
}

type counter struct {
	calls int
	err   error
}

func (w *counter) Write(p []byte) (int, error) {
	w.calls++
	return len(p), w.err
}

// A peer told to come back in 1.5 s must not come after 1 s.
func TestRetryAfterIsRoundedUp(t *testing.T) {
	for d, want := range map[time.Duration]string{
		time.Nanosecond: `"retry_after":1}`, time.Second: `"retry_after":1}`, 1500 * time.Millisecond: `"retry_after":2}`,
	} {
		if b, err := AppendMessage(nil, &Error{Code: CodeDraining, RetryAfter: d}); err != nil || !strings.HasSuffix(string(b), want) {
			t.Errorf("%v is written as %s, %v", d, b, err)
		}
	}
}

func TestWriteMessageIsOneWrite(t *testing.T) {
	for _, m := range samples2() {
		var w counter
		if err := WriteMessage(&w, m); err != nil || w.calls != 1 {
			t.Errorf("%s: %d writes, %v", m.messageType(), w.calls, err)
		}
	}
	broken := errors.New("broken")
	if err := WriteMessage(&counter{err: broken}, &Dial{}); !errors.Is(err, broken) {
		t.Errorf("WriteMessage = %v, want it to wrap the writer's error", err)
	}
}

// limited fails the test when more than its bytes are asked for: the stream
// goes on with payload that is not ours.
type limited struct {
	t    *testing.T
	left []byte
}

func (r *limited) Read(p []byte) (int, error) {
	if len(p) > len(r.left) {
		r.t.Errorf("a read of %d bytes where the message has %d left", len(p), len(r.left))
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	return n, nil
}

func TestReadMessageTakesNoMore(t *testing.T) {
	for _, m := range samples2() {
		var buf bytes.Buffer
		if err := WriteMessage(&buf, m); err != nil {
			t.Fatal(err)
		}
		r := &limited{t: t, left: buf.Bytes()}
		if _, err := ReadMessage(r); err != nil || len(r.left) != 0 {
			t.Errorf("%s: %v, %d bytes left", m.messageType(), err, len(r.left))
		}
		slow := iotest.OneByteReader(bytes.NewReader(buf.Bytes()))
		if got, err := ReadMessage(slow); err != nil || !cmp.Equal(got, m) {
			t.Errorf("%s byte by byte: %v", m.messageType(), err)
		}
	}
	down := errors.New("line is down")
	if _, err := ReadMessage(iotest.ErrReader(down)); !errors.Is(err, down) {
		t.Errorf("ReadMessage = %v, want it to wrap the reader's error", err)
	}
}

// The biggest message is read, one byte more is refused from its length alone.
func TestMessageBound(t *testing.T) {
	pad := func(n int) []byte {
		body := []byte(`{"type":"dial","x":""}`)
		body = append(body[:len(body)-2], strings.Repeat("x", n-len(body))+`"}`...)
		return append(binary.BigEndian.AppendUint16(nil, uint16(n)), body...)
	}
	if _, err := ReadMessage(bytes.NewReader(pad(MaxMessage))); err != nil {
		t.Errorf("4096 bytes: %v", err)
	}
	if _, err := ParseMessage(pad(MaxMessage + 1)[2:]); !errors.Is(err, ErrMalformed) {
		t.Errorf("4097 bytes: %v", err)
	}
	r := bytes.NewReader(pad(MaxMessage + 1))
	if _, err := ReadMessage(r); !errors.Is(err, ErrMalformed) || r.Len() != MaxMessage+1 {
		t.Errorf("4097 bytes: %v, %d bytes were left", err, r.Len())
	}
	if _, err := ParseV1(FirstFrame, bytes.Repeat([]byte(" "), MaxMessage+1)); !errors.Is(err, ErrMalformed) {
		t.Errorf("4097 bytes in protocol 1: %v", err)
	}
	const most = MaxMessage + 256 // the body, the two bytes before it, the error
	length := []byte{0x10, 0x00}  // 4096, of which nothing comes
	const rounds = 1000
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range rounds {
		if _, err := ReadMessage(bytes.NewReader(length)); err == nil {
			t.Fatal("read a message that is not there")
		}
	}
	runtime.ReadMemStats(&after)
	got := (after.TotalAlloc - before.TotalAlloc) / rounds
	if got > most {
		t.Errorf("a length without a message costs %d bytes, at most %d are allowed", got, most)
	}
}
