package wire

import (
	"bytes"
	"encoding/hex"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What parses prints to a text that parses to the same value, and that text
// prints to itself: no message has two canonical spellings.
func FuzzParseV1(f *testing.F) {
	for _, tt := range loadVectors(f, "v1.json", 1).Texts {
		f.Add(int(flowNames[tt.Flow]), []byte(tt.Text))
	}
	f.Fuzz(func(t *testing.T, flow int, in []byte) {
		m, err := ParseV1(Flow(flow), in)
		if err != nil {
			if m != nil || len(kindOf(err)) > len("malformed") {
				t.Fatalf("an error of no kind, or a value with it: %v", err)
			}
			return
		}
		out, err := AppendV1(nil, m)
		if err != nil {
			t.Fatalf("%s was read and cannot be written: %v", in, err)
		}
		again, err := ParseV1(Flow(flow), out)
		if err != nil || !cmp.Equal(again, m) {
			t.Fatalf("%s became %s: %v", in, out, err)
		}
		if twice, err := AppendV1(nil, again); err != nil || !bytes.Equal(twice, out) {
			t.Fatalf("%s became %s", out, twice)
		}
	})
}

// ParseMessage behind its length; the stream goes on after it.
func FuzzReadMessage(f *testing.F) {
	v := loadVectors(f, "v2.json", 1)
	for _, tt := range v.Texts {
		f.Add(append([]byte{byte(len(tt.Text) >> 8), byte(len(tt.Text))}, tt.Text...))
	}
	for _, tt := range v.Streams {
		f.Add(unhex(f, tt.Hex))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		r := bytes.NewReader(in)
		m, err := ReadMessage(r)
		if taken := len(in) - r.Len(); taken > MaxMessage+2 {
			t.Fatalf("%d bytes were read", taken)
		}
		if err != nil {
			if m != nil || len(kindOf(err)) > len("malformed") {
				t.Fatalf("an error of no kind, or a value with it: %v", err)
			}
			return
		}
		if want := 2 + int(in[0])<<8 + int(in[1]); len(in)-r.Len() != want {
			t.Fatalf("%d bytes were read, the message has %d", len(in)-r.Len(), want)
		}
		var out bytes.Buffer
		if err := WriteMessage(&out, m); err != nil {
			t.Fatalf("%s was read and cannot be written: %v", in, err)
		}
		first := bytes.Clone(out.Bytes())
		again, err := ReadMessage(&out)
		if err != nil || !cmp.Equal(again, m) {
			t.Fatalf("%s became %s: %v\n%s", in, first, err, cmp.Diff(m, again))
		}
		if twice, err := AppendMessage(nil, again); err != nil || !bytes.Equal(twice, first[2:]) {
			t.Fatalf("%s became %s", first, twice)
		}
	})
}

func FuzzParseFrame(f *testing.F) {
	for _, tt := range loadVectors(f, "v1.json", 1).Frames {
		f.Add(unhex(f, tt.Hex))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		id, flags, payload, err := ParseFrame(in)
		if err != nil {
			return
		}
		if out := AppendFrame(nil, id, flags, payload); !bytes.Equal(out, in) {
			t.Fatalf("one meaning, two spellings: %x and %x", in, out)
		}
	})
}

func FuzzParseBrokerURL(f *testing.F) {
	for _, s := range []string{
		"wss://reach.example", "wss://H.example:8443/", "wss://[2001:db8::1]:1/v1/connect", "WSS://192.0.2.1/base/v1/connect", "wss://u:p@h/?q#f", "wss://127.1",
	} {
		f.Add(s, true)
		f.Add(s, false)
	}
	f.Fuzz(func(t *testing.T, in string, allowPath bool) {
		u, err := ParseBrokerURL(in, allowPath)
		if err != nil {
			return
		}
		if u.String() != in || u.HasPath() && !allowPath {
			t.Fatalf("%q became %q", in, u)
		}
		v1, err := ParseBrokerURL(u.V1(), allowPath)
		if err != nil || v1.HostPort() != u.HostPort() || v1.V2() != u.V2() || v1.V1() != u.V1() || v1.Health() != u.Health() {
			t.Fatalf("%q leads to %q, which leads elsewhere: %v", in, u.V1(), err)
		}
		if back, err := ParseBrokerURL("wss://"+u.HostPort(), false); err != nil || back.HostPort() != u.HostPort() || back.Host() != u.Host() {
			t.Fatalf("%q dials %q, which is not canonical: %v", in, u.HostPort(), err)
		}
	})
}

func FuzzParseHostLine(f *testing.F) {
	line, err := FormatHostLine(sampleHostLine(f))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(line)
	f.Add(" reach-host://v1?url=wss%3A%2F%2Fh&host_id=AAAAAAAAAAAAAAAAAAAAAA&token=xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n")
	f.Add("reach-host://v1?url=&url=&token=%zz;")
	f.Fuzz(func(t *testing.T, in string) {
		h, err := ParseHostLine(in)
		if err != nil {
			if h != (HostLine{}) {
				t.Fatal("a value with an error")
			}
			return
		}
		out, err := FormatHostLine(h)
		if err != nil {
			t.Fatalf("%q cannot be written: %v", in, err)
		}
		if again, err := ParseHostLine(out); err != nil || again != h {
			t.Fatalf("%q became %q: %v", in, out, err)
		}
	})
}

// Both ends of the fast path: what the broker peeks at.
func FuzzRaw(f *testing.F) {
	f.Add(AppendPreamble(nil, Preamble{RawPool, RawToken{1}}))
	f.Add([]byte(RawServerName(RawToken{0xff})))
	f.Add(unhex(f, hex.EncodeToString([]byte("HRR2\x00\x00\x00\x02"))))
	f.Fuzz(func(t *testing.T, in []byte) {
		if p, err := ParsePreamble(in); err == nil {
			if out := AppendPreamble(nil, p); !bytes.Equal(out, in) || !IsPreamble(in[:1]) {
				t.Fatalf("%x became %x", in, out)
			}
		}
		if token, ok := ParseRawServerName(string(in)); ok {
			if out := RawServerName(token); out != string(bytes.ToLower(in)) {
				t.Fatalf("%q became %q", in, out)
			}
		}
		if token, err := ParseRawToken(string(in)); err == nil && token.Text() != string(in) {
			t.Fatalf("%q became another text", in)
		}
	})
}
