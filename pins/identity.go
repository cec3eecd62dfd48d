package pins

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// MaxHosts bounds the names one identity may hold, because names are only ever
// added. It keeps the certificate below 8 KiB.
const MaxHosts = 256

// ErrTooManyHosts: the identity holds [MaxHosts] names. Only a new identity
// (and pairing again) makes room.
var ErrTooManyHosts = errors.New("the identity holds too many host names")

// Identity is the key of a host with its certificates. The first leaf is made
// with the key and never changes; it stands in every invite. A further leaf of
// the same key takes over where the first lacks a name. All methods are safe
// for concurrent use.
type Identity struct {
	first   tls.Certificate
	pin     Pin
	tickets *tls.Config // owns the session ticket keys of every ServerConfig

	further atomic.Pointer[tls.Certificate] // nil: the first leaf holds every name

	mu  sync.Mutex // serialises AddHosts
	dir string     // where names.pem is kept; "" = nowhere
}

// New makes an identity that lives in memory only. hosts become the names of
// the first leaf; at least one is needed, because a certificate without names
// is accepted by nobody.
func New(hosts []string, now time.Time) (*Identity, error) {
	clean, err := cleanHosts(hosts)
	if err != nil {
		return nil, fmt.Errorf("new identity: %w", err)
	}
	if len(clean) == 0 {
		return nil, errors.New("new identity: no host name or address given; a certificate without names is accepted by no client")
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("new identity: %w", err)
	}
	leaf, err := makeFirst(key, clean, now)
	if err != nil {
		return nil, fmt.Errorf("new identity: %w", err)
	}
	return newIdentity(tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf})
}

// newIdentity wraps a pair whose key is known to match its leaf.
func newIdentity(first tls.Certificate) (*Identity, error) {
	switch key := first.PrivateKey.(type) {
	case *ecdsa.PrivateKey:
	case *rsa.PrivateKey:
		if bits := key.N.BitLen(); bits < 2048 {
			return nil, fmt.Errorf("an RSA key of %d bits is too short, want 2048 or more", bits)
		}
	default:
		return nil, fmt.Errorf("key type %T is not supported, want ECDSA or RSA", key)
	}
	return &Identity{first: first, pin: Of(first.Leaf), tickets: new(tls.Config)}, nil
}

// Pin is what devices check. It is the same for every leaf.
func (id *Identity) Pin() Pin { return id.pin }

// LeafDER is the first leaf, the one that invites carry.
func (id *Identity) LeafDER() []byte { return slices.Clone(id.first.Leaf.Raw) }

// NotAfter is when the leaf that expires first does so.
func (id *Identity) NotAfter() time.Time {
	end := id.first.Leaf.NotAfter
	if cur := id.current().Leaf.NotAfter; cur.Before(end) {
		return cur
	}
	return end
}

// Authorities lists every host the identity ever answered to, without port:
// names first, then addresses, each in the order in which they came.
func (id *Identity) Authorities() []string { return sans(id.current().Leaf) }

// Covers says whether host (a name or an address in any spelling, no port) is
// one of Authorities.
func (id *Identity) Covers(host string) bool { return covers(id.current().Leaf, host) }

// AddHosts makes the identity answer to more hosts without a new key: when one
// of them is not covered, a further leaf with all old and new names is issued,
// stored beside the identity (when it has a folder) and served from the next
// handshake on. It reports whether there was anything to add.
func (id *Identity) AddHosts(hosts []string, now time.Time) (bool, error) {
	clean, err := cleanHosts(hosts)
	if err != nil {
		return false, fmt.Errorf("add hosts: %w", err)
	}
	id.mu.Lock()
	defer id.mu.Unlock()
	if err := id.readNames(); err != nil { // another process may have added some
		return false, fmt.Errorf("add hosts: %w", err)
	}
	all := id.Authorities()
	missing := slices.DeleteFunc(clean, id.Covers)
	if len(missing) == 0 {
		return false, nil
	}
	if all = append(all, missing...); len(all) > MaxHosts {
		return false, fmt.Errorf("add hosts: %w: %d of at most %d", ErrTooManyHosts, len(all), MaxHosts)
	}
	leaf, err := makeFurther(id.first.Leaf, id.first.PrivateKey.(crypto.Signer), all, now)
	if err != nil {
		return false, fmt.Errorf("add hosts: %w", err)
	}
	if err := id.writeNames(leaf); err != nil {
		return false, fmt.Errorf("add hosts: %w", err)
	}
	id.serve(leaf)
	return true, nil
}

// current is the newest leaf: it holds every name.
func (id *Identity) current() *tls.Certificate {
	if further := id.further.Load(); further != nil {
		return further
	}
	return &id.first
}

// serve makes leaf the newest one. The first leaf goes along as its issuer.
func (id *Identity) serve(leaf *x509.Certificate) {
	chain := append([][]byte{leaf.Raw}, id.first.Certificate...)
	id.further.Store(&tls.Certificate{Certificate: chain, PrivateKey: id.first.PrivateKey, Leaf: leaf})
}

// choose picks the leaf for one handshake. asked is the server name, else the
// local address, else "". Who trusts the first leaf only gets the first leaf
// as long as it holds the name asked for.
func (id *Identity) choose(asked string) *tls.Certificate {
	if asked != "" && covers(id.first.Leaf, asked) {
		return &id.first
	}
	return id.current()
}
