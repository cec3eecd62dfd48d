// Package profile is what a device remembers of the hosts it is paired with.
//
// A Profile holds three kinds of secret: the session with the host, the API
// key that an invite may have carried, and one durable credential for each
// broker. They are of type Secret, which no print, log or JSON shows: only
// Store writes them down, in files that nobody but the owner can read.
package profile

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/pins"
)

// MaxName is the longest profile name, in bytes.
const MaxName = 32

// Errors a caller acts on.
var (
	ErrName     = errors.New("profile: unusable name")
	ErrNotFound = errors.New("profile: not found")
	ErrExists   = errors.New("profile: exists")
)

// A Secret prints as a placeholder in every form but Reveal.
type Secret string

const placeholder = "[secret]"

// Reveal gives the secret itself, for the one place that sends or stores it.
func (s Secret) Reveal() string { return string(s) }

// String hides the secret and tells only whether there is one.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return placeholder
}

// Format hides the secret from every verb, %x and %#v too.
func (s Secret) Format(f fmt.State, _ rune) { fmt.Fprint(f, s.String()) }

// LogValue hides the secret from every log.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText hides the secret from every encoder. Store has its own form.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// A Profile is one paired host as this device knows it. It is plain data: copy
// it with Clone before changing what another goroutine may read.
type Profile struct {
	Name string   `json:"name"`
	Pin  pins.Pin `json:"pin"` // the host's key: the same on every candidate

	// Candidates are the ways to the host as paired. Their broker tokens are
	// empty: what opens a broker is in Routes.
	Candidates []endpoints.Candidate `json:"candidates"`
	Routes     []Route               `json:"routes,omitempty"`

	DeviceID   string `json:"device_id"` // 22 characters of base64url; the same for all hosts
	DeviceName string `json:"device_name"`

	Session Secret               `json:"session,omitempty"` // the Relay session token
	Refresh Secret               `json:"refresh,omitempty"` // trades once for a new session
	Expires time.Time            `json:"expires,omitzero"`  // of the session; zero = never
	Grants  map[string]time.Time `json:"grants,omitempty"`  // channel to end; zero = as long as the session
	APIKey  Secret               `json:"api_key,omitempty"` // for /api only

	ServerVersion string    `json:"server_version,omitempty"`
	Paired        time.Time `json:"paired,omitzero"`
}

// A Route is what opens one broker for this device: a credential of kind
// endpoints.KindRoute, or for the moment of pairing endpoints.KindBootstrap.
type Route struct {
	BrokerURL    string    `json:"broker_url"` // byte for byte that of the candidate
	HostID       string    `json:"host_id"`    // 22 characters
	Kind         string    `json:"kind"`
	CredentialID string    `json:"credential_id,omitempty"`
	Token        Secret    `json:"token"`
	Expires      time.Time `json:"expires,omitzero"` // zero = not said; the broker judges
}

// String names the profile without its secrets.
func (p *Profile) String() string {
	return fmt.Sprintf("profile %s (host %v, %d candidates)", p.Name, p.Pin, len(p.Candidates))
}

// LogValue names the profile without its secrets.
func (p *Profile) LogValue() slog.Value {
	return slog.GroupValue(slog.String("name", p.Name), slog.Any("pin", p.Pin), slog.Int("candidates", len(p.Candidates)))
}

// Clone copies the profile so far that no change to the copy shows in p.
func (p *Profile) Clone() *Profile {
	out := *p
	out.Candidates = slices.Clone(p.Candidates)
	out.Routes = slices.Clone(p.Routes)
	if p.Grants != nil {
		out.Grants = make(map[string]time.Time, len(p.Grants))
		maps.Copy(out.Grants, p.Grants)
	}
	return &out
}

// Route finds what opens the broker of a candidate.
func (p *Profile) Route(b *endpoints.Broker) (Route, bool) {
	i := slices.IndexFunc(p.Routes, func(r Route) bool { return r.BrokerURL == b.URL && r.HostID == b.HostID })
	if i < 0 {
		return Route{}, false
	}
	return p.Routes[i], true
}

// SetRoute adds a credential, or replaces the one of the same broker and host.
func (p *Profile) SetRoute(r Route) {
	i := slices.IndexFunc(p.Routes, func(o Route) bool { return o.BrokerURL == r.BrokerURL && o.HostID == r.HostID })
	if i < 0 {
		p.Routes = append(p.Routes, r)
		return
	}
	p.Routes[i] = r
}

// reserved are file names that Windows gives to devices, whatever follows the
// dot: a profile of that name could be made on one machine and not on another.
var reserved = []string{"con", "prn", "aux", "nul"}

// CheckName refuses what is not 1 to 32 lower-case letters, digits and inner
// hyphens: such a name is a file name everywhere and a label of a host name.
func CheckName(name string) error {
	bad := name == "" || len(name) > MaxName || name[0] == '-' || name[len(name)-1] == '-' || slices.Contains(reserved, name)
	for i := range len(name) {
		c := name[i]
		bad = bad || (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-'
	}
	if len(name) == 4 && (name[:3] == "com" || name[:3] == "lpt") && name[3] <= '9' {
		bad = true
	}
	if bad {
		return fmt.Errorf("%w %.40q: use 1 to %d lower-case letters, digits and inner hyphens", ErrName, name, MaxName)
	}
	return nil
}
