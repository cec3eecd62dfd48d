// Package endpoints says where a Hermes host can be reached and which of those
// ways to take: the candidates, the signed pairing payload (versions 1 to 3)
// that carries them to a device as a QR code or an invite, the addresses of
// this machine worth offering, and the strict-priority choice between
// candidates.
//
// Everything here is a value or a function on values. Only the QR secret file,
// picture files and the list of network interfaces touch the machine; nothing
// touches the network. What is read comes from strangers: every parser is
// bounded, and a reader of a payload gets either a checked value or an error
// that holds no part of the text, because the text holds an API key, a pairing
// code and broker tokens.
package endpoints

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/hermes-reach/hermes-reach/endpoints/pyjson"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// Role names what kind of way a candidate is. The vocabulary is open: a role
// nobody here knows is kept byte for byte and ordered like any other.
type Role string

// The roles that field clients know. The strings are on the wire.
const (
	RolePluginProxy    Role = "plugin_proxy"    // Secure Link, dialled directly
	RoleOutboundBroker Role = "outbound_broker" // Reach: Secure Link through a broker
	RoleLAN            Role = "lan"
	RoleTailscale      Role = "tailscale"
	RolePublic         Role = "public"
)

// IsBroker reports whether the role means Reach. Besides today's spelling it
// knows the two legacy ones, which are read but never written.
func (r Role) IsBroker() bool {
	return strings.EqualFold(string(r), string(RoleOutboundBroker)) ||
		strings.EqualFold(string(r), "broker") || strings.EqualFold(string(r), "relay_broker")
}

// MarshalJSON keeps what encoding/json would replace: a role read with a lone
// surrogate escape is written with the same escape.
func (r Role) MarshalJSON() ([]byte, error) { return pyjson.AppendString(nil, string(r)), nil }

// Surface is one of the three services behind a host. Each is proved on its
// own: a healthy one never vouches for another.
type Surface string

// The surfaces, as they stand in a proxy's "surfaces" list.
const (
	SurfaceRelay     Surface = "relay"
	SurfaceAPI       Surface = "api"
	SurfaceDashboard Surface = "dashboard"
)

// Values of Candidate.Security, and what SecurityOf answers.
const (
	SecurityPinned    = "pinned_tls"      // pinned TLS straight to the host
	SecurityE2E       = "e2ee_pinned_tls" // the same inside a broker stream
	SecurityTLS       = "tls"             // TLS that ends at somebody's proxy, checked by system trust
	SecurityPlaintext = "plaintext"       // readable by everyone on the way; needs consent
)

// Values of Broker.CredentialKind.
const (
	KindBootstrap = "bootstrap" // single use, expires with the pairing code
	KindRoute     = "route"     // durable, belongs to one paired device
)

// TransportHint values in use: "ws", "wss", "http", "https", "unknown". They
// are hints: the URL decides.

// A Candidate is one way to the host. Which members are set depends on the
// role: Secure Link has Proxy, Reach has Proxy and Broker, the others have API,
// Relay and Dashboard. A broker's token is a secret, so a Candidate prints and
// logs without it; its JSON form carries it.
type Candidate struct {
	Role         Role       `json:"role"`
	Priority     int        `json:"priority"` // 0 is best
	Recommended  bool       `json:"recommended,omitempty"`
	Experimental bool       `json:"experimental,omitempty"`
	Security     string     `json:"security,omitempty"` // the producer's claim; SecurityOf is the fact
	DisplayName  string     `json:"display_name,omitempty"`
	Description  string     `json:"description,omitempty"`
	Capabilities []string   `json:"capabilities,omitempty"`
	API          *API       `json:"api,omitempty"`
	Relay        *Relay     `json:"relay,omitempty"`
	Dashboard    *Dashboard `json:"dashboard,omitempty"`
	Broker       *Broker    `json:"broker,omitempty"`
	Proxy        *Proxy     `json:"proxy,omitempty"`
}

// API is where the Hermes API server answers without Secure Link.
type API struct {
	Host string `json:"host"` // never bracketed, also for IPv6
	Port int    `json:"port"`
	TLS  bool   `json:"tls"`
}

// Relay is where the Relay answers without Secure Link.
type Relay struct {
	URL           string `json:"url"` // ws:// or wss://
	TransportHint string `json:"transport_hint,omitempty"`
}

// Dashboard is where the Dashboard answers without Secure Link.
type Dashboard struct {
	URL string `json:"url"`
}

// Proxy is a Secure Link: one pinned TLS authority with up to three surfaces.
type Proxy struct {
	URL           string             `json:"url"` // https://HOST[:PORT], kept as read
	TransportHint string             `json:"transport_hint,omitempty"`
	PinSHA256     string             `json:"pin_sha256"` // "sha256/" and the base64 of SHA-256(SPKI)
	CertDER       string             `json:"cert_der,omitempty"`
	Surfaces      []Surface          `json:"surfaces,omitempty"`
	Services      map[string]Service `json:"services,omitempty"`
}

// Service describes one surface to clients that like to be told.
type Service struct {
	Supported      bool   `json:"supported"`
	BasePath       string `json:"base_path,omitempty"`
	HealthPath     string `json:"health_path,omitempty"`
	WebSocketPath  string `json:"websocket_path,omitempty"`
	Authentication string `json:"authentication,omitempty"`
}

// Broker is how to ask a rendezvous broker for a stream to the host.
type Broker struct {
	ProtocolVersion int         `json:"protocol_version"`
	URL             string      `json:"url"`     // wss://BROKER/v1/connect, kept as read
	HostID          string      `json:"host_id"` // 22 characters, see wire.ParseID
	CredentialKind  string      `json:"credential_kind"`
	Token           string      `json:"token"`                // secret
	ExpiresAt       wire.Expiry `json:"expires_at,omitempty"` // Unix seconds; 0 = not said
}

// String names the candidate without its secrets.
func (c Candidate) String() string {
	return fmt.Sprintf("candidate %q priority %d", bounded(string(c.Role)), c.Priority)
}

// LogValue keeps a broker's token out of every log.
func (c Candidate) LogValue() slog.Value {
	return slog.GroupValue(slog.String("role", bounded(string(c.Role))), slog.Int("priority", c.Priority))
}

// String names the broker without the token.
func (b Broker) String() string { return "broker " + bounded(b.URL) }

// LogValue keeps the token out of every log.
func (b Broker) LogValue() slog.Value { return slog.StringValue(b.String()) }

// GoString keeps the token out of %#v.
func (b Broker) GoString() string { return b.String() }

// bounded cuts a string that a stranger chose before it is shown.
func bounded(s string) string {
	const most = 64
	if len(s) > most {
		return s[:most] + "…"
	}
	return s
}

// IsExperimental puts a candidate in the class that is tried after all others.
// Every spelling of the broker role counts, whether or not the flag is set.
func (c Candidate) IsExperimental() bool { return c.Experimental || c.Role.IsBroker() }

// ProxyValid says why the candidate's Secure Link cannot be used, or nil.
func (c Candidate) ProxyValid() error {
	if c.Proxy == nil {
		return errors.New("no proxy member")
	}
	return c.Proxy.Valid()
}

// BrokerValid says why the candidate cannot be reached through its broker at
// that time, or nil. It includes ProxyValid: there is no Reach without a pin.
func (c Candidate) BrokerValid(now time.Time) error {
	if !c.Role.IsBroker() {
		return errors.New("role is not a broker role")
	}
	if c.Broker == nil {
		return errors.New("no broker member")
	}
	if err := c.Broker.Valid(now); err != nil {
		return err
	}
	return c.ProxyValid()
}

// Valid says why this Secure Link cannot be used, or nil: https, a host, nothing
// else in the URL, and a pin. There is no Secure Link without a pin.
func (p *Proxy) Valid() error {
	if _, err := p.parse(); err != nil {
		return err
	}
	return checkPin(p.PinSHA256)
}

// Authority is the paired HOST:PORT, with port 443 when the URL names none and
// IPv6 in brackets. It is what a device dials and shares pins by.
func (p *Proxy) Authority() (string, error) {
	u, err := p.parse()
	if err != nil {
		return "", err
	}
	port := u.Port()
	if port == "" {
		port = "443"
	}
	return net.JoinHostPort(u.Hostname(), port), nil
}

// Base is the URL below which a surface lives ("https://H:P/relay"), or an
// error if this Secure Link is not valid or does not offer the surface.
func (p *Proxy) Base(s Surface) (string, error) {
	if err := p.Valid(); err != nil {
		return "", err
	}
	if !p.Has(s) {
		return "", fmt.Errorf("surface %q is not offered", bounded(string(s)))
	}
	u, err := p.parse()
	if err != nil {
		return "", err
	}
	return "https://" + trimDefaultPort(u) + "/" + string(s), nil
}

// WebSocketURL is the Relay socket: wss://H[:P]/relay/ws, without port 443.
func (p *Proxy) WebSocketURL() (string, error) {
	base, err := p.Base(SurfaceRelay)
	if err != nil {
		return "", err
	}
	return "wss" + strings.TrimPrefix(base, "https") + "/ws", nil
}

// Has reports whether the surface is offered. The Relay always is.
func (p *Proxy) Has(s Surface) bool {
	return s == SurfaceRelay || slices.Contains(normalSurfaces(p.Surfaces), s)
}

func (p *Proxy) parse() (*url.URL, error) {
	u, err := bareURL(p.URL)
	if err != nil {
		return nil, fmt.Errorf("proxy url %w", err)
	}
	if u.Path != "" && u.Path != "/" {
		return nil, errors.New("proxy url has a path")
	}
	return u, nil
}

func trimDefaultPort(u *url.URL) string {
	if u.Port() == "443" {
		return strings.TrimSuffix(u.Host, ":443")
	}
	return u.Host
}

// bareURL parses https://HOST[:PORT][/PATH] and nothing more: no user
// information, no query and no fragment, not even empty ones. Its errors go on
// "… url" and quote nothing, because a query may hold a secret.
func bareURL(s string) (*url.URL, error) {
	if len(s) > 2048 {
		return nil, errors.New("is longer than 2048 bytes")
	}
	u, err := url.Parse(s)
	if err != nil {
		return nil, errors.New("does not parse")
	}
	switch {
	case u.Scheme != "https":
		return nil, errors.New("is not https://")
	case u.Hostname() == "" || u.Opaque != "":
		return nil, errors.New("has no host")
	case u.User != nil:
		return nil, errors.New("has user information")
	case strings.ContainsAny(s, "?#"):
		return nil, errors.New("has a query or a fragment")
	}
	if strings.HasSuffix(u.Host, ":") {
		return nil, errors.New("has an empty port")
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			return nil, errors.New("has no port between 1 and 65535")
		}
	}
	return u, nil
}

// checkPin demands the prefix, because field clients that pass a pin without it
// fail later, at the connection.
func checkPin(s string) error {
	if _, err := pins.Parse(s); err != nil {
		return errors.New(`proxy pin is not "sha256/" and 44 characters of base64`)
	}
	return nil
}

// Valid says why this broker cannot be asked at that time, or nil.
func (b *Broker) Valid(now time.Time) error {
	if b.ProtocolVersion != 1 {
		return fmt.Errorf("broker protocol version %d is not known", b.ProtocolVersion)
	}
	// A base path is what our own clients take and phones do not; it is the
	// host's business not to offer one to phones.
	if _, err := wire.ParseBrokerURL(b.URL, true); err != nil {
		return err
	}
	if _, err := wire.ParseID(b.HostID); err != nil {
		return fmt.Errorf("broker host_id: %w", err)
	}
	if err := wire.CheckToken(b.Token); err != nil {
		return fmt.Errorf("broker token: %w", err)
	}
	switch b.CredentialKind {
	case KindRoute:
		return nil // its expiry is the broker's to judge: device clocks are wrong
	case KindBootstrap:
		if b.ExpiresAt != 0 && b.ExpiresAt.Past(now) {
			return errors.New("broker credential has expired: ask the host for a new invite")
		}
		return nil
	default:
		return errors.New("broker credential_kind is neither bootstrap nor route")
	}
}

// normalSurfaces is the list as clients read it: lower case, known ones only,
// each once, and the Relay when nothing is left.
func normalSurfaces(in []Surface) []Surface {
	var out []Surface
	for _, s := range in {
		s = Surface(strings.ToLower(string(s)))
		known := s == SurfaceRelay || s == SurfaceAPI || s == SurfaceDashboard
		if known && !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	if out == nil {
		return []Surface{SurfaceRelay}
	}
	return out
}

// UnmarshalJSON reads a candidate as leniently as ParsePayload does.
func (c *Candidate) UnmarshalJSON(text []byte) error {
	n, err := pyjson.Parse(text)
	if err != nil {
		return err
	}
	got, err := readCandidate(n)
	if err != nil {
		return fmt.Errorf("endpoints: candidate: %w", err)
	}
	*c = got
	return nil
}

var (
	_ json.Unmarshaler = (*Candidate)(nil)
	_ json.Marshaler   = Role("")
)
