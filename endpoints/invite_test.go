package endpoints

import (
	"bytes"
	"encoding/base64"
	"errors"
	"net/url"
	"strings"
	"testing"
)

const smallJSON = `{"hermes":1,"host":"h","port":8642,"key":"","tls":false}`

func TestInviteURL(t *testing.T) {
	const want = "hermes-relay://pair?payload=eyJoZXJtZXMiOjEsImhvc3QiOiJoIiwicG9ydCI6ODY0Miwia2V5IjoiIiwidGxzIjpmYWxzZX0"
	if got := InviteURL([]byte(smallJSON)); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestParseInvite(t *testing.T) {
	// The text has bytes that differ between the two base64 alphabets.
	raw := `{"hermes":1,"host":"h","port":8642,"key":"","tls":false,"x":"??>>~~~"}`
	std, web := base64.StdEncoding.EncodeToString([]byte(raw)), base64.URLEncoding.EncodeToString([]byte(raw))
	if !strings.ContainsAny(std, "+/") || !strings.HasSuffix(std, "=") {
		t.Fatalf("the sample does not need padding and both alphabets: %s", std)
	}
	link := InviteURL([]byte(raw))
	for name, text := range map[string]string{
		"link":                link,
		"in prose":            "Scan this:\n  <" + link + "> (valid for 10 minutes).",
		"end of a sentence":   "Use " + link + ".",
		"in quotes":           `{"invite":"` + link + `"}`,
		"markdown":            "[pair](" + link + ")",
		"upper-case scheme":   strings.Replace(link, "hermes-relay://pair", "HERMES-Relay://PAIR", 1),
		"slash before query":  strings.Replace(link, "pair?", "pair/?", 1),
		"p":                   "hermes-relay://pair?p=" + web,
		"p beside others":     "hermes-relay://pair?v=1&p=" + web + "&x=2#frag",
		"payload beats p":     "hermes-relay://pair?p=AAAA&payload=" + web,
		"standard base64":     "hermes-relay://pair?payload=" + std,
		"escaped":             "hermes-relay://pair?payload=" + url.QueryEscape(std),
		"JSON in the query":   "hermes-relay://pair?payload=" + url.PathEscape(raw),
		"path segment":        "hermes-relay://pair/" + web,
		"path, standard":      "hermes-relay://pair/" + std + "/",
		"second link":         "see hermes-relay://help and hermes-relay://pair?payload=cut or " + link,
		"after odd letters":   "İİİİ ſ " + link, // lower case of these has another length
		"JSON":                raw,
		"base64":              std,
		"base64, no padding":  strings.TrimRight(std, "="),
		"base64url":           web,
		"base64url, unpadded": strings.TrimRight(web, "="),
		"base64 in lines":     std[:20] + "\r\n  " + std[20:50] + "\n" + std[50:] + "\n",
		"byte order mark":     "\ufeff" + std,
	} {
		p, err := ParseInvite(text)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if string(p.Raw) != raw || p.Host != "h" {
			t.Errorf("%s: read %s", name, p.Raw)
		}
	}
	if p, err := ParseInvite(" \n" + smallJSON + "\n"); err != nil || string(p.Raw) != smallJSON {
		t.Errorf("JSON with space around it: %v", err)
	}
}

func TestParseInviteRefuses(t *testing.T) {
	text, err := Encode(full(), FormInvite)
	if err != nil {
		t.Fatal(err)
	}
	link := InviteURL(text)
	for name, in := range map[string]string{
		"empty": "", "space": " \n\t", "prose": "please pair with me", "other link": "https://pair?payload=eyJ9", "no payload": "hermes-relay://pair", "empty payload": "hermes-relay://pair?payload=",
		"other action": "hermes-relay://pairing?payload=e30", "cut": link[:len(link)/2], "bad escape": "hermes-relay://pair?payload=%zz", "not base64": "hermes-relay://pair?payload=!!!",
		"base64 of text": base64.StdEncoding.EncodeToString([]byte("hello " + testKey)), "too long": strings.Repeat(" ", maxInvite) + link,
		"JSON with a tail": smallJSON + " and more " + testKey, "payload too long": InviteURL([]byte(`{"host":"h","x":"` + strings.Repeat("x", MaxPayload) + `"}`)),
		"too many links": strings.Repeat("hermes-relay://pair ", maxTries) + link,
	} {
		p, err := ParseInvite(in)
		if err == nil {
			t.Errorf("%s: read %v", name, p)
			continue
		}
		if !errors.Is(err, ErrInvite) && !errors.Is(err, ErrPayload) {
			t.Errorf("%s: %v", name, err)
		}
		wantNoSecret(t, name, err.Error())
	}
}

func FuzzParseInvite(f *testing.F) {
	f.Add("hermes-relay://pair?payload=e30", smallJSON)
	f.Add("see hermes-relay://pair/eyJob3N0IjoiaCJ9?p=e30#x.", `{"host":"h","x":"??>>"}`)
	f.Add("aGVybWVz LXJlbGF5", `{}`)
	f.Fuzz(func(t *testing.T, text, payload string) {
		if p, err := ParseInvite(text); err == nil && (p == nil || p.Host == "" || len(p.Raw) > MaxPayload) {
			t.Errorf("read %v", p)
		} else if err != nil && !errors.Is(err, ErrInvite) && !errors.Is(err, ErrPayload) {
			t.Errorf("untyped error %v", err)
		}
		want, err := ParsePayload([]byte(payload))
		if err != nil || !strings.HasPrefix(payload, "{") {
			return
		}
		if p, err := ParseInvite("x " + InviteURL([]byte(payload)) + " y"); err != nil || !bytes.Equal(p.Raw, want.Raw) {
			t.Errorf("%q as an invite: %v", payload, err)
		}
	})
}
