package pins

import (
	"crypto"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"fmt"
	"net"
	"time"
)

const (
	leafYears  = 10
	commonName = "Hermes Reach"
)

// notBeforeFloor is older than any device that will see one of our leaves and
// younger than a clock that lost its battery. A host that believes it is 1970
// while it makes its key would otherwise be expired for everybody else.
var notBeforeFloor = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// makeFirst makes the self-signed leaf. It is a CA because desktops in the
// field take it as their only one, and it needs to issue further leaves.
func makeFirst(key crypto.Signer, hosts []string, now time.Time) (*x509.Certificate, error) {
	template := leafTemplate(hosts, now)
	template.Subject = pkix.Name{CommonName: commonName}
	template.IsCA = true
	template.MaxPathLenZero = true // further leaves, and nothing below them
	template.KeyUsage |= x509.KeyUsageCertSign
	return issue(template, template, key)
}

// makeFurther makes a leaf of the same key with more names, issued by the
// first. Its subject must differ: with equal names path builders would take it
// for self-signed and not look for the first.
func makeFurther(first *x509.Certificate, key crypto.Signer, hosts []string, now time.Time) (*x509.Certificate, error) {
	var tag [4]byte
	_, _ = rand.Read(tag[:]) // never fails
	template := leafTemplate(hosts, now)
	template.Subject = pkix.Name{CommonName: commonName + " names " + hex.EncodeToString(tag[:])}
	return issue(template, first, key)
}

func leafTemplate(hosts []string, now time.Time) *x509.Certificate {
	if now.Before(notBeforeFloor) {
		now = notBeforeFloor
	}
	start := now.UTC().Truncate(time.Second).Add(-24 * time.Hour) // field clients check dates: be kind to slow clocks
	t := &x509.Certificate{                                       // a nil SerialNumber: CreateCertificate draws one of 159 random bits
		NotBefore:             start,
		NotAfter:              start.AddDate(leafYears, 0, 0),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, h)
		}
	}
	return t
}

func issue(template, parent *x509.Certificate, key crypto.Signer) (*x509.Certificate, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make certificate: %w", err)
	}
	return x509.ParseCertificate(der)
}

// sans lists the names and addresses of a leaf in their clean spelling.
func sans(leaf *x509.Certificate) []string {
	out := make([]string, 0, len(leaf.DNSNames)+len(leaf.IPAddresses))
	for _, name := range leaf.DNSNames {
		if clean, err := CleanHost(name); err == nil {
			name = clean
		}
		out = append(out, name) // a wildcard is no host, but stays listed
	}
	for _, ip := range leaf.IPAddresses {
		out = append(out, ip.String())
	}
	return out
}

// covers is the one name check of this package, for both ends: exact names,
// addresses compared as addresses, no common name.
func covers(leaf *x509.Certificate, host string) bool {
	clean, err := CleanHost(host)
	return err == nil && leaf.VerifyHostname(clean) == nil
}

// checkFurther says why leaf may not be served for the identity of first, or nil.
func checkFurther(first, leaf *x509.Certificate) error {
	if err := first.CheckSignature(leaf.SignatureAlgorithm, leaf.RawTBSCertificate, leaf.Signature); err != nil {
		return fmt.Errorf("not issued by this identity: %w", err)
	}
	for _, host := range sans(first) {
		if clean, err := CleanHost(host); err == nil && !covers(leaf, clean) {
			return fmt.Errorf("it lacks the host %s of the first certificate", clean)
		}
	}
	return nil
}
