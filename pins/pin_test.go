package pins

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	good := Pin{1, 2, 3, 255}.String()
	body := strings.TrimPrefix(good, pinPrefix)
	for name, tt := range map[string]struct {
		in string
		ok bool
	}{
		"good":             {good, true},
		"no prefix":        {body, false},
		"other hash":       {"sha512/" + body, false},
		"upper prefix":     {"SHA256/" + body, false},
		"no padding":       {strings.TrimRight(good, "="), false},
		"url alphabet":     {pinPrefix + strings.Repeat("-", 43) + "=", false},
		"blank before":     {" " + good, false},
		"line break after": {good + "\n", false},
		"line break in":    {good[:20] + "\n" + good[20:], false},
		"spare bits set":   {good[:len(good)-2] + "B=", false},
		"empty":            {"", false},
		"prefix only":      {pinPrefix, false},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := Parse(tt.in)
			if (err == nil) != tt.ok || (err != nil && !errors.Is(err, ErrSyntax)) {
				t.Errorf("Parse(%q) = %v, %v", tt.in, p, err)
			}
		})
	}
	for n := range good {
		if _, err := Parse(good[:n]); err == nil {
			t.Errorf("Parse accepts the first %d characters", n)
		}
	}
}

func TestPinText(t *testing.T) {
	in := map[string]Pin{"pin": {7, 8}}
	text, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	var out map[string]Pin
	if err := json.Unmarshal(text, &out); err != nil || !out["pin"].Equal(in["pin"]) {
		t.Errorf("%s came back as %v, %v", text, out, err)
	}
	if err := json.Unmarshal([]byte(`{"pin":"sha256/x"}`), &out); !errors.Is(err, ErrSyntax) {
		t.Errorf("a bad pin in JSON: %v", err)
	}
}

func TestZeroPinEqualsNothing(t *testing.T) {
	var zero Pin
	one := Pin{1}
	if zero.Equal(zero) || zero.Equal(one) || one.Equal(zero) || !one.Equal(one) || one.Equal(Pin{2}) {
		t.Error("Equal is wrong about the zero pin or about equality")
	}
}

func FuzzParse(f *testing.F) {
	f.Add(Pin{1}.String())
	f.Add(pinPrefix + "AAAA")
	f.Fuzz(func(t *testing.T, in string) {
		if p, err := Parse(in); err == nil && p.String() != in {
			t.Errorf("one pin, two spellings: %q and %q", in, p)
		}
	})
}

func TestCleanHost(t *testing.T) {
	for in, want := range map[string]string{
		"Host.Example":              "host.example",
		"host.example.":             "host.example",
		"localhost":                 "localhost",
		"my_box.lan":                "my_box.lan",
		"192.168.1.10":              "192.168.1.10",
		"2001:DB8:0:0::7":           "2001:db8::7",
		"[2001:db8::7]":             "2001:db8::7",
		"::ffff:192.168.1.10":       "192.168.1.10",
		"fe80::1%eth0":              "fe80::1",
		"xn--bcher-kva.example":     "xn--bcher-kva.example",
		"":                          "",
		".":                         "",
		"a..b":                      "",
		"host..":                    "",
		"-a.example":                "",
		"a-.example":                "",
		"bücher.example":            "",
		"127.1":                     "",
		"0x7f000001":                "",
		"2130706433":                "",
		"192.168.1.010":             "",
		"[localhost]":               "",
		"[192.168.1.10]":            "",
		"host.example:9443":         "",
		"[::1]:9443":                "",
		"*.example":                 "",
		"a b":                       "",
		"a\x00b":                    "",
		"user@host":                 "",
		"host/path":                 "",
		strings.Repeat("a", 64):     "",
		strings.Repeat("a.", 128):   "",
		strings.Repeat("a.bc", 200): "",
	} {
		got, err := CleanHost(in)
		if got != want || (err == nil) != (want != "") || (err != nil && !errors.Is(err, ErrHost)) {
			t.Errorf("CleanHost(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
}

func FuzzCleanHost(f *testing.F) {
	f.Add("Host.Example.")
	f.Add("[fe80::1%eth0]")
	f.Add("::ffff:1.2.3.4")
	f.Fuzz(func(t *testing.T, in string) {
		once, err := CleanHost(in)
		if err != nil {
			return
		}
		if twice, err := CleanHost(once); err != nil || twice != once {
			t.Errorf("CleanHost(%q) = %q, cleaned again %q, %v", in, once, twice, err)
		}
	})
}
