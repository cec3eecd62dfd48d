package cli

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

func write(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestSecret(t *testing.T) {
	long := strings.Repeat("s", MaxSecret)
	for name, tt := range map[string]struct {
		arg, stdin, want, fails string
	}{
		"as it stands":     {arg: "s3cret", want: "s3cret"},
		"standard input":   {arg: "-", stdin: "s3cret\n", want: "s3cret"},
		"of Windows":       {arg: "-", stdin: "s3cret\r\n", want: "s3cret"},
		"inner newlines":   {arg: "-", stdin: "s3c\nret\n\n", want: "s3c\nret\n"},
		"a file":           {arg: "@" + write(t, "s3cret\n"), want: "s3cret"},
		"as long as can":   {arg: "-", stdin: long, want: long},
		"longer":           {arg: "-", stdin: long + "s", fails: "too long: more than 65536 bytes"},
		"a longer file":    {arg: "@" + write(t, long+"s"), fails: "too long"},
		"a longer word":    {arg: long + "s", fails: "longer than 65536 bytes"},
		"nothing":          {arg: "", fails: "the argument is empty"},
		"nothing to read":  {arg: "-", stdin: "\n", fails: "standard input is empty"},
		"nothing in there": {arg: "@" + write(t, ""), fails: "file is empty"},
		"no file":          {arg: "@/nowhere", fails: "/nowhere"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.Stdin = strings.NewReader(tt.stdin)
			got, err := b.Secret(tt.arg)
			if got != tt.want || (err == nil) != (tt.fails == "") {
				t.Fatalf("got %d bytes, %v", len(got), err)
			}
			if err != nil && (!strings.Contains(err.Error(), tt.fails) || strings.Contains(err.Error(), "sss")) {
				t.Errorf("%v, want %q", err, tt.fails)
			}
		})
	}
	b := newBench(t)
	b.Stdin = strings.NewReader("one")
	if _, err := b.Secret("-"); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Secret("-"); err == nil || !strings.Contains(err.Error(), "one argument only") {
		t.Errorf("standard input twice: %v", err)
	}
}

func authority(t *testing.T) (*x509.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func TestRoots(t *testing.T) {
	b := newBench(t)
	if pool, err := b.Roots(); pool != nil || err != nil {
		t.Errorf("without --ca: %v, %v", pool, err)
	}
	one, text := authority(t)
	two, more := authority(t)
	key := string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: []byte("x")}))
	b.opts.ca = write(t, "words\n"+text+key+more)
	pool, err := b.Roots()
	if err != nil {
		t.Fatal(err)
	}
	for _, cert := range []*x509.Certificate{one, two} {
		if _, err := cert.Verify(x509.VerifyOptions{Roots: pool}); err != nil {
			t.Error(err)
		}
	}
	for text, want := range map[string]string{
		"":            "no certificate in PEM form in it",
		"\x30\x82":    "it looks like DER",
		key:           "no certificate",
		text + broken: "certificate 2",
	} {
		b.opts.ca = write(t, text)
		if _, err := b.Roots(); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "--ca") {
			t.Errorf("%.20q: %v, want %q", text, err, want)
		}
	}
	b.opts.ca = "/nowhere"
	if _, err := b.Roots(); err == nil || !strings.Contains(err.Error(), "/nowhere") {
		t.Errorf("no file: %v", err)
	}
}

const broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"

// TestLine reads what terminals send in raw mode.
func TestLine(t *testing.T) {
	long := strings.Repeat("x", 20000) // longer than any terminal's own line
	for name, tt := range map[string]struct {
		in, want string
		fails    bool
	}{
		"Enter":          {"abc\rrest", "abc", false},
		"line feed":      {"abc\nrest", "abc", false},
		"empty first":    {"\r\n\rabc\r", "abc", false},
		"Ctrl-D":         {"abc\x04", "abc", false},
		"end":            {"abc", "abc", false},
		"nothing":        {"\x04", "", false},
		"Backspace":      {"\x7fabd\x7fc\x08c\r", "abc", false},
		"control bytes":  {"a\x1b\x00bc\r", "abc", false},
		"long":           {long + "\r", long, false},
		"Ctrl-C":         {"abc\x03\r", "", true},
		"without an end": {strings.Repeat("y", MaxSecret+1), "", true},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := line(iotest.HalfReader(strings.NewReader(tt.in)), MaxSecret)
			if got != tt.want || (err != nil) != tt.fails {
				t.Errorf("line = %d bytes, %v; want %d", len(got), err, len(tt.want))
			}
			if e, ok := errors.AsType[*ExitError](err); name == "Ctrl-C" && (!ok || e.Code != Interrupted) {
				t.Errorf("Ctrl-C = %v, want the code %d", err, Interrupted)
			}
		})
	}
}
