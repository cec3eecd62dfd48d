package wire

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

func TestParseBrokerURL(t *testing.T) {
	for in, want := range map[string]struct{ hostPort, v1, v2, health string }{
		"wss://reach.example": {
			"reach.example:443", "wss://reach.example/v1/connect", "wss://reach.example/v2/connect", "https://reach.example/health",
		},
		"wss://Reach.Example/": {
			"reach.example:443", "wss://Reach.Example/v1/connect", "wss://Reach.Example/v2/connect", "https://Reach.Example/health",
		},
		"WSS://localhost:9444/v1/connect": {
			"localhost:9444", "wss://localhost:9444/v1/connect", "wss://localhost:9444/v2/connect", "https://localhost:9444/health",
		},
		"wss://[2001:DB8::0:1]:8443": {
			"[2001:db8::1]:8443", "wss://[2001:DB8::0:1]:8443/v1/connect", "wss://[2001:DB8::0:1]:8443/v2/connect", "https://[2001:DB8::0:1]:8443/health",
		},
		"wss://[::1]":            {"[::1]:443", "wss://[::1]/v1/connect", "wss://[::1]/v2/connect", "https://[::1]/health"},
		"wss://192.0.2.1:1":      {"192.0.2.1:1", "wss://192.0.2.1:1/v1/connect", "wss://192.0.2.1:1/v2/connect", "https://192.0.2.1:1/health"},
		"wss://my_box.lan:65535": {"my_box.lan:65535", "wss://my_box.lan:65535/v1/connect", "wss://my_box.lan:65535/v2/connect", "https://my_box.lan:65535/health"},
	} {
		u, err := ParseBrokerURL(in, false)
		if err != nil {
			t.Errorf("%s: %v", in, err)
			continue
		}
		if u.String() != in || u.HostPort() != want.hostPort || u.V1() != want.v1 || u.V2() != want.v2 || u.Health() != want.health || u.HasPath() {
			t.Errorf("%s: %s %s %s %s %s", in, u, u.HostPort(), u.V1(), u.V2(), u.Health())
		}
	}
	const based = "wss://h.example/a/B.1~_-/v1/connect"
	if _, err := ParseBrokerURL(based, false); !errors.Is(err, ErrMalformed) {
		t.Errorf("base path for a field device: %v", err)
	}
	u, err := ParseBrokerURL(based, true)
	if err != nil || u.V2() != "wss://h.example/a/B.1~_-/v2/connect" || u.Health() != "https://h.example/a/B.1~_-/health" || !u.HasPath() || u.Host() != "h.example" {
		t.Errorf("base path: %v, %s, %s", err, u.V2(), u.Health())
	}
}

func TestParseBrokerURLRefuses(t *testing.T) {
	for _, in := range []string{
		"", "wss://", "wss:///", "ws://h.example", "https://h.example", "h.example", "wss:h.example", "//h.example", " wss://h.example", "wss://h.example ",
		"wss://user@h.example", "wss://user:secret@h.example", "wss://@h.example", "wss://h.example?", "wss://h.example/?x=1", "wss://h.example#", "wss://h.example/v1/connect#x",
		"wss://h.example:", "wss://h.example:0", "wss://h.example:65536", "wss://h.example:080", "wss://h.example:+1", "wss://h.example:8a", "wss://:443",
		"wss://h..example", "wss://.h.example", "wss://h.example.", "wss://-h.example", "wss://h-.example", "wss://h%2eexample", "wss://h\\example", "wss://h_é.example",
		"wss://" + strings.Repeat("a", 64) + ".example", "wss://" + strings.Repeat("a.", 127) + "ab",
		"wss://127.1", "wss://0x7f.1", "wss://2130706433", "wss://0x7f000001", "wss://1.2.3.256", "wss://192.0.2.1.5", "wss://01.2.3.4",
		"wss://::1", "wss://[::1", "wss://::1]", "wss://[::1]x", "wss://[::1]:", "wss://[fe80::1%eth0]", "wss://[fe80::1%25eth0]", "wss://[192.0.2.1]", "wss://[]", "wss://2001:db8::1",
		"wss://h.example/v1/tunnel", "wss://h.example/v1/connect/", "wss://h.example/v2/connect", "wss://h.example/reach", "wss://h.example/reach/",
		"wss://h.example//v1/connect", "wss://h.example/a//v1/connect", "wss://h.example/../v1/connect", "wss://h.example/a/./v1/connect", "wss://h.example/%61/v1/connect",
		"wss://h.example/a b/v1/connect", "wss://h.example/a;b/v1/connect", "wss://h.example/V1/connect", "wss://h.example\n", "wss://h\x00.example",
		"wss://h.example/" + strings.Repeat("a", MaxBrokerURL) + "/v1/connect",
	} {
		u, err := ParseBrokerURL(in, true)
		if !errors.Is(err, ErrMalformed) || u != (BrokerURL{}) {
			t.Errorf("ParseBrokerURL(%q) = %v, %v", in, u.HostPort(), err)
		}
		if strings.Contains(in, "@") && err != nil && !strings.Contains(err.Error(), "user info") {
			t.Errorf("%s: %v, which does not say what is wrong", in, err)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("the error repeats a password: %v", err)
		}
	}
}

func TestBrokerURLAsText(t *testing.T) {
	type config struct{ URL, None BrokerURL }
	u, err := ParseBrokerURL("wss://h.example/base/v1/connect", true)
	if err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(config{URL: u})
	if err != nil || string(b) != `{"URL":"wss://h.example/base/v1/connect","None":""}` {
		t.Errorf("Marshal = %s, %v", b, err)
	}
	var back config
	if err := json.Unmarshal(b, &back); err != nil || back.URL != u || !back.None.IsZero() {
		t.Errorf("Unmarshal = %v", err)
	}
	if err := back.URL.UnmarshalText([]byte("https://h")); err == nil || back.URL != u {
		t.Errorf("UnmarshalText = %v", err)
	}
	if (BrokerURL{}).V1() != "" || (BrokerURL{}).Health() != "" {
		t.Error("the zero URL leads somewhere")
	}
}

const samplePin = "sha256/AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="

func sampleHostLine(tb testing.TB) HostLine {
	tb.Helper()
	u, err := ParseBrokerURL("wss://h.example:9444/b/v1/connect", true)
	if err != nil {
		tb.Fatal(err)
	}
	return HostLine{URL: u, HostID: sampleID(1), Token: "+/&=%# " + sampleHostToken, Name: "Zuhause & büro", Pin: samplePin}
}

func TestHostLine(t *testing.T) {
	full := sampleHostLine(t)
	short := HostLine{URL: full.URL, HostID: full.HostID, Token: sampleHostToken}
	for _, h := range []HostLine{full, short} {
		line, err := FormatHostLine(h)
		if err != nil || strings.ContainsAny(line, " \n\"'`$;<>|\\") {
			t.Fatalf("FormatHostLine: %v, or a character that shells read", err)
		}
		for _, pasted := range []string{line, "\n  " + line + "\r\n", "REACH-HOST" + strings.TrimPrefix(line, "reach-host")} {
			if got, err := ParseHostLine(pasted); err != nil || got != h {
				t.Errorf("ParseHostLine = %v, %v", got, err)
			}
		}
		for n := range len(line) {
			if got, err := ParseHostLine(line[:n]); err == nil && got.Token == h.Token && got.Pin == h.Pin && got.Name == h.Name {
				t.Errorf("cut to %d of %d bytes it is the same line", n, len(line))
			}
		}
	}
}

func TestHostLineRefuses(t *testing.T) {
	line, err := FormatHostLine(sampleHostLine(t))
	if err != nil {
		t.Fatal(err)
	}
	swap := func(old, with string) string {
		if !strings.Contains(line, old) {
			t.Fatalf("the sample has no %q", old)
		}
		return strings.Replace(line, old, with, 1)
	}
	for name, in := range map[string]string{
		"empty": "", "other scheme": swap("reach-host", "https"), "version 2": swap("//v1", "//v2"), "no members": hostLinePrefix,
		"no url": swap("url=", "url2="), "no id": swap("host_id=", "x="), "no token": swap("&token=", "&t="), "token twice": line + "&token=secret-secret",
		"unknown member": line + "&ca=x", "bad escape": line + "%zz-secret", "semicolon": line + ";x=1", "bad url": swap("wss", "ws"), "empty id": swap("host_id="+sampleID(1).String(), "host_id="),
		"id left out": swap("&host_id="+sampleID(1).String(), ""), "pin of 31 bytes": swap("Hh8%3D", "Hg%3D%3D"), "pin with stray bits": swap("Hh8%3D", "Hh9%3D"),
		"short token": swap(sampleHostToken, "secret"), "bad pin": swap("sha256", "sha1"), "long": line + strings.Repeat(" ", 8) + strings.Repeat("x", MaxHostLine),
		"long name": swap("name=", "name="+strings.Repeat("n", 65)), "name with a line break": swap("name=", "name=%0a"), "name not UTF-8": swap("name=", "name=%ff"),
	} {
		got, err := ParseHostLine(in)
		if !errors.Is(err, ErrMalformed) || got != (HostLine{}) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: the error repeats a secret: %v", name, err)
		}
	}
	if _, err := ParseHostLine(strings.Repeat("x", MaxHostLine+1)); err == nil || !strings.Contains(err.Error(), "too long") {
		t.Errorf("a long line: %v", err)
	}
	for name, h := range map[string]HostLine{
		"nothing": {}, "no token": {URL: sampleHostLine(t).URL}, "pin": {URL: sampleHostLine(t).URL, Token: sampleHostToken, Pin: "sha256/x"},
	} {
		if line, err := FormatHostLine(h); err == nil || line != "" {
			t.Errorf("FormatHostLine(%s) = %d bytes, %v", name, len(line), err)
		}
	}
}

// The longest members that are allowed make a line that is allowed.
func TestLongestHostLine(t *testing.T) {
	u, err := ParseBrokerURL("wss://h.example/"+strings.Repeat("~", MaxBrokerURL-len("wss://h.example//v1/connect"))+"/v1/connect", true)
	if err != nil {
		t.Fatal(err)
	}
	h := HostLine{URL: u, Token: strings.Repeat("\U0010ffff", MaxHostToken), Name: strings.Repeat("\U0001f680", maxHostName), Pin: samplePin}
	line, err := FormatHostLine(h)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ParseHostLine(line); err != nil || got != h {
		t.Errorf("%d bytes: %v", len(line), err)
	}
}
