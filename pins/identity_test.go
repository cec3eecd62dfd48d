package pins

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
)

func TestFirstLeaf(t *testing.T) {
	id := newID(t, "Home.Example.", "192.168.1.10", "[2001:DB8:0::7]", "home.example")
	leaf, err := x509.ParseCertificate(id.LeafDER())
	if err != nil {
		t.Fatal(err)
	}
	key, ok := leaf.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		t.Errorf("key = %T, want ECDSA P-256", leaf.PublicKey)
	}
	if err := leaf.CheckSignatureFrom(leaf); err != nil {
		t.Errorf("not self-signed: %v", err)
	}
	if want := x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign; leaf.KeyUsage != want || !leaf.IsCA {
		t.Errorf("key usage = %b, CA = %v", leaf.KeyUsage, leaf.IsCA)
	}
	if !slices.Equal(leaf.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}) {
		t.Errorf("extended key usage = %v", leaf.ExtKeyUsage)
	}
	if got := leaf.NotBefore.AddDate(10, 0, 0); !got.Equal(leaf.NotAfter) || leaf.NotBefore.After(now) {
		t.Errorf("valid %v to %v", leaf.NotBefore, leaf.NotAfter)
	}
	if want := []string{"home.example", "192.168.1.10", "2001:db8::7"}; !slices.Equal(id.Authorities(), want) {
		t.Errorf("Authorities = %v, want %v", id.Authorities(), want)
	}
	if id.Pin() != Of(leaf) {
		t.Error("Pin is not the leaf's")
	}
	if n := len(id.LeafDER()); n > 500 { // it travels in QR codes
		t.Errorf("the leaf has %d bytes", n)
	}
}

func TestCoversIsExact(t *testing.T) {
	id := newID(t, "home.example", "192.168.1.10", "2001:db8::7")
	for host, want := range map[string]bool{
		"home.example": true, "HOME.EXAMPLE.": true, "192.168.1.10": true, "::ffff:192.168.1.10": true,
		"2001:0DB8:0:0:0:0:0:7": true, "[2001:db8::7]": true,
		"192.168.1.1": false, "92.168.1.10": false, "ome.example": false, "a.home.example": false,
		"home.example.evil": false, "2001:db8::70": false, "": false, "*": false, "Hermes Reach": false,
	} {
		if got := id.Covers(host); got != want {
			t.Errorf("Covers(%q) = %v, want %v", host, got, want)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for _, hosts := range [][]string{nil, {}, {"bad host"}, {"ok.example", ""}} {
		if _, err := New(hosts, now); err == nil {
			t.Errorf("New(%q) made an identity", hosts)
		}
	}
}

// A host whose clock lost its battery must not make a leaf that everybody else
// takes for expired.
func TestLeafMadeIn1970(t *testing.T) {
	id, err := New([]string{"localhost"}, time.Unix(0, 0))
	if err != nil {
		t.Fatal(err)
	}
	if got := id.NotAfter(); got.Before(notBeforeFloor.AddDate(9, 0, 0)) {
		t.Errorf("a leaf made in 1970 ends %v", got)
	}
}

func TestFurtherLeaf(t *testing.T) {
	id := newID(t, "home.example", "192.168.1.10")
	firstDER := id.LeafDER()
	if added, err := id.AddHosts([]string{"HOME.example"}, now); added || err != nil {
		t.Fatalf("adding a known host = %v, %v", added, err)
	}
	if added, err := id.AddHosts([]string{"10.0.0.5", "box.tail.ts.net"}, now); !added || err != nil {
		t.Fatalf("adding hosts = %v, %v", added, err)
	}
	if !bytes.Equal(id.LeafDER(), firstDER) {
		t.Error("the first leaf changed: field desktops hold it as their only CA")
	}
	further := id.current().Leaf
	if Of(further) != id.Pin() {
		t.Error("the further leaf has another key")
	}
	if bytes.Equal(further.RawSubject, id.first.Leaf.RawSubject) || !bytes.Equal(further.RawIssuer, id.first.Leaf.RawSubject) {
		t.Errorf("subject %v, issuer %v: want another subject, the first as issuer", further.Subject, further.Issuer)
	}
	roots := x509.NewCertPool()
	roots.AddCert(id.first.Leaf)
	for _, host := range []string{"home.example", "192.168.1.10", "10.0.0.5", "box.tail.ts.net"} {
		if !id.Covers(host) {
			t.Errorf("%s is not covered", host)
		}
		if _, err := further.Verify(x509.VerifyOptions{DNSName: host, Roots: roots, CurrentTime: now}); err != nil {
			t.Errorf("holding the first leaf only, %s: %v", host, err)
		}
	}
}

func TestAddHostsIsBounded(t *testing.T) {
	id := newID(t, "home.example")
	var hosts []string
	for i := range MaxHosts {
		hosts = append(hosts, fmt.Sprintf("10.0.%d.%d", i/256, i%256))
	}
	if _, err := id.AddHosts(hosts, now); !errors.Is(err, ErrTooManyHosts) {
		t.Errorf("one host too many: %v", err)
	}
	if added, err := id.AddHosts(hosts[1:], now); !added || err != nil {
		t.Errorf("as many as may be: %v, %v", added, err)
	}
	if _, err := id.AddHosts([]string{"not a host"}, now); !errors.Is(err, ErrHost) {
		t.Errorf("a bad host: %v", err)
	}
}

func TestChoose(t *testing.T) {
	id := newID(t, "old.example", "192.168.1.10")
	if _, err := id.AddHosts([]string{"new.example"}, now); err != nil {
		t.Fatal(err)
	}
	first, further := &id.first, id.current()
	for asked, want := range map[string]any{
		"old.example": first, "OLD.example": first, "192.168.1.10": first,
		"new.example": further, "other.example": further, "10.9.9.9": further, "": further,
	} {
		if got := id.choose(asked); got != want {
			t.Errorf("asked for %q: served %v", asked, got.Leaf.Subject)
		}
	}
}
