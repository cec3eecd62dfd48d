package wire

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

// carriers are all values of this package that hold a secret, each with it.
func carriers(tb testing.TB) map[string]any {
	slot := 1
	raw := RawToken{}
	copy(raw[:], sampleRaw)
	register := Register{Role: RoleHost, CredentialKind: KindHost, Token: sampleHostToken, Slot: &slot}
	register1 := Register1{Role: RoleClient, CredentialKind: KindRoute, Token: sampleToken}
	return map[string]any{
		"Register": register, "*Register": &register, "Register1": register1, "*Register1": &register1,
		"HostLine": sampleHostLine(tb), "RawToken": raw, "RawOffer": RawOffer{Token: raw}, "Preamble": Preamble{Token: raw},
		"Registered": Registered{RawPoolKey: raw}, "Matched": Matched{Raw: &RawOffer{Token: raw}}, "*Open": &Open{Raw: &RawOffer{Token: raw}},
	}
}

const sampleRaw = "raw-secret-raw-secret-raw-secret"

// secretsIn are the spellings in which a secret could come out.
func secretsIn() []string {
	raw := RawToken{}
	copy(raw[:], sampleRaw)
	bytesAsGo := strings.Trim(fmt.Sprint([32]byte(raw)), "[]")
	return []string{
		sampleHostToken, sampleToken, sampleRaw, raw.Text(), strings.SplitN(RawServerName(raw), ".", 2)[0], hex.EncodeToString([]byte(sampleRaw)),
		bytesAsGo, strings.ReplaceAll(bytesAsGo, " ", ","), hex.EncodeToString([]byte(sampleHostToken)),
	}
}

func TestSecretsDoNotPrint(t *testing.T) {
	for name, v := range carriers(t) {
		var out bytes.Buffer
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d", "%t", "%c", "%z"} {
			fmt.Fprintf(&out, verb+"\n", v)
			fmt.Fprintf(&out, verb+"\n", []any{v})
			fmt.Fprintf(&out, verb+"\n", struct{ In any }{v})
		}
		for _, h := range []slog.Handler{slog.NewTextHandler(&out, nil), slog.NewJSONHandler(&out, nil)} {
			log := slog.New(h)
			log.Info("m", "v", v, "in a list", []any{v}, "in a struct", struct{ In any }{v})
			log.With("v", v).Error("m", "err", fmt.Errorf("bad message %v", v))
		}
		if b, err := json.Marshal(v); err != nil {
			t.Errorf("%s: %v", name, err)
		} else {
			out.Write(b)
		}
		for _, secret := range secretsIn() {
			if strings.Contains(strings.ToLower(out.String()), strings.ToLower(secret)) {
				t.Errorf("%s shows its secret: %s", name, out.String())
			}
		}
		if !strings.Contains(out.String(), "hidden") && !strings.Contains(out.String(), "0x") {
			t.Errorf("%s does not say that something is hidden: %s", name, out.String())
		}
	}
}

// The search above must be able to find something.
func TestSecretSearchFinds(t *testing.T) {
	raw := RawToken{}
	copy(raw[:], sampleRaw)
	for _, open := range []string{raw.Text(), RawServerName(raw), fmt.Sprint([32]byte(raw)), string(AppendPreamble(nil, Preamble{Token: raw}))} {
		found := false
		for _, secret := range secretsIn() {
			found = found || strings.Contains(open, secret)
		}
		if !found {
			t.Errorf("not found in %q", open)
		}
	}
	b, err := AppendMessage(nil, samples2()[0])
	if err != nil || !bytes.Contains(b, []byte(sampleHostToken)) {
		t.Errorf("the wire form lost the token: %v", err)
	}
}

// Wherever a register is damaged, the error does not repeat the token, not
// even a piece of it.
func TestErrorsDoNotRepeat(t *testing.T) {
	const token = "secretsecretsecretsecretsecretsecret"
	for _, damage := range []func(string) string{
		func(s string) string { return strings.Replace(s, `"token"`, `"`+token+`"`, 1) },           // as a name
		func(s string) string { return strings.Replace(s, `"host"`, `"`+token+`"`, 1) },            // as a role
		func(s string) string { return strings.Replace(s, `"`+token+`"`, `"`+token[:7]+`\n"`, 1) }, // a bad token
		func(s string) string { return strings.Replace(s, `"`+token+`"`, `["`+token+`"]`, 1) },
		func(s string) string { return strings.Replace(s, `"`+token+`"`, token, 1) }, // not JSON
		func(s string) string { return s + token },
		func(s string) string { return strings.Replace(s, `"host_id":"`, `"host_id":"`+token, 1) },
		func(s string) string { return strings.Replace(s, `"slot":1`, `"slot":"`+token+`"`, 1) },
		func(s string) string { return strings.Replace(s, `"features":[]`, `"features":["`+token+` "]`, 1) },
		func(s string) string { return s[:len(s)-1] + `,"token":"` + token + `"}` },
	} {
		slot := 1
		b, err := AppendMessage(nil, &Register{Role: RoleHost, CredentialKind: KindHost, Token: token, Slot: &slot})
		if err != nil {
			t.Fatal(err)
		}
		b1, err := AppendV1(nil, &Register1{Role: RoleHost, CredentialKind: KindHost, Token: token})
		if err != nil {
			t.Fatal(err)
		}
		in := damage(string(b))
		if _, err := ParseMessage([]byte(in)); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("ParseMessage(%s) = %v", in, err)
		}
		in1 := damage(string(b1))
		if _, err := ParseV1(FirstFrame, []byte(in1)); in1 != string(b1) && (err == nil || strings.Contains(err.Error(), "secret")) {
			t.Errorf("ParseV1(%s) = %v", in1, err)
		}
	}
}
