package endpoints

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"strings"

	"github.com/hermes-reach/hermes-reach/endpoints/pyjson"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// Bounds of a payload, for producers and consumers alike.
const (
	MaxPayload    = 64 << 10 // bytes of JSON text
	MaxCandidates = 64
)

// Ports that a payload means when it names none.
const (
	DefaultAPIPort   = 8642
	DefaultRelayPort = 8767
)

// ErrPayload is wrapped by every error about a payload that cannot be used. The
// errors name members and never quote values: key, code and tokens are secrets.
var ErrPayload = errors.New("endpoints: unusable pairing payload")

// A Payload is what a host hands to a device that may pair. It holds secrets
// (Key, Relay.Code, broker tokens), so it prints and logs without them; its
// JSON form is the payload itself.
type Payload struct {
	Hermes       int           `json:"hermes"` // 1, 2 or 3; Encode computes it
	Host         string        `json:"host"`   // of the API
	Port         int           `json:"port"`   // of the API
	Key          string        `json:"key"`    // API bearer, "" = open API; never a pairing code
	TLS          bool          `json:"tls"`    // of the API
	Relay        *PayloadRelay `json:"relay,omitempty"`
	Endpoints    []Candidate   `json:"endpoints,omitempty"`
	DashboardURL string        `json:"dashboard_url,omitempty"`
	Sig          string        `json:"sig,omitempty"`

	// Raw is the JSON text this was read from, nil for one made here. A
	// signature covers members that this type does not have, so only Raw can be
	// verified: Verify(secret, p.Raw).
	Raw []byte `json:"-"`
	// Skipped says which candidates of Raw are not in Endpoints, and why.
	Skipped []Skip `json:"-"`
}

// PayloadRelay is the top-level "relay" member: how to pair. Code is a secret.
type PayloadRelay struct {
	URL           string           `json:"url"`
	Code          string           `json:"code"`
	TTLSeconds    *int64           `json:"ttl_seconds,omitempty"` // session lifetime; 0 = never ends, nil = not said
	Grants        map[string]int64 `json:"grants,omitempty"`      // channel → seconds from now; 0 = as long as the session
	TransportHint string           `json:"transport_hint,omitempty"`
}

// A Skip is a candidate that was left out of a payload.
type Skip struct {
	Index  int    // in the payload's endpoints array
	Reason string // safe to show
}

// String names the payload without its secrets.
func (p Payload) String() string {
	return fmt.Sprintf("pairing payload v%d for %q with %d candidates", p.Hermes, bounded(p.Host), len(p.Endpoints))
}

// GoString keeps the secrets out of %#v.
func (p Payload) GoString() string { return p.String() }

// LogValue keeps the secrets out of every log.
func (p Payload) LogValue() slog.Value { return slog.StringValue(p.String()) }

// String names the Relay without the pairing code.
func (r PayloadRelay) String() string { return "relay " + bounded(r.URL) }

// GoString keeps the pairing code out of %#v.
func (r PayloadRelay) GoString() string { return r.String() }

// LogValue keeps the pairing code out of every log.
func (r PayloadRelay) LogValue() slog.Value { return slog.StringValue(r.String()) }

// Candidates are the ways to the host: the endpoints of a version 3 payload, or
// the one candidate that the top level of an older payload means.
func (p *Payload) Candidates() []Candidate {
	if len(p.Endpoints) > 0 || len(p.Skipped) > 0 {
		return p.Endpoints
	}
	c := Candidate{Role: RoleLAN, API: &API{Host: p.Host, Port: p.Port, TLS: p.TLS}}
	if tailnetHost(p.Host) {
		c.Role = RoleTailscale
	}
	if p.Relay != nil {
		c.Relay = &Relay{URL: p.Relay.URL, TransportHint: p.Relay.TransportHint}
	}
	if p.DashboardURL != "" {
		c.Dashboard = &Dashboard{URL: p.DashboardURL}
	}
	return []Candidate{c}
}

func tailnetHost(host string) bool {
	ip, err := netip.ParseAddr(host)
	return strings.HasSuffix(strings.ToLower(host), ".ts.net") || err == nil && cgnat.Contains(ip.Unmap())
}

func validPort(n int64) bool { return n >= 1 && n <= 65535 }

func visible(s string) bool {
	for i := range len(s) {
		if s[i] < 0x21 || s[i] > 0x7e {
			return false
		}
	}
	return true
}

// ParsePayload reads a payload of any version. Numbers may be written as
// floats, unknown members are ignored, missing ones have the defaults of field
// clients, and a candidate that makes no sense is left out and listed in
// Skipped. What is read need not be usable: see Candidate.ProxyValid,
// Candidate.BrokerValid and Choose.
func ParsePayload(text []byte) (*Payload, error) {
	if len(text) > MaxPayload {
		return nil, fmt.Errorf("%w: longer than %d bytes", ErrPayload, MaxPayload)
	}
	n, err := pyjson.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPayload, err)
	}
	if n.Kind != pyjson.Object {
		return nil, fmt.Errorf("%w: not a JSON object", ErrPayload)
	}
	p := &Payload{
		Hermes: 1, Port: DefaultAPIPort, Raw: bytes.Clone(text),
		Host: strings.TrimSpace(n.Str("host")), Key: strings.Trim(n.Str("key"), " \t"),
		TLS: n.Bool("tls"), Sig: n.Str("sig"), Relay: readPayloadRelay(n),
		DashboardURL: firstOf(n.Str("dashboard_url"), n.Str("dashboardUrl")),
	}
	if err := p.readNumbers(n); err != nil {
		return nil, err
	}
	switch {
	case p.Host == "":
		return nil, fmt.Errorf("%w: no host", ErrPayload)
	case !visible(p.Key):
		return nil, fmt.Errorf("%w: key is not visible ASCII", ErrPayload)
	}
	list, _ := n.Get("endpoints")
	if list.Kind != pyjson.Array {
		return p, nil
	}
	if len(list.Members) > MaxCandidates {
		return nil, fmt.Errorf("%w: more than %d candidates", ErrPayload, MaxCandidates)
	}
	for i, m := range list.Members {
		c, err := readCandidate(m.Value)
		if err != nil {
			p.Skipped = append(p.Skipped, Skip{i, err.Error()})
			continue
		}
		p.Endpoints = append(p.Endpoints, c)
	}
	return p, nil
}

func (p *Payload) readNumbers(n pyjson.Value) error {
	if v, ok := wholeMember(n, "hermes"); ok {
		if v < 1 || v > math.MaxInt32 {
			return fmt.Errorf("%w: no version %d", ErrPayload, v)
		}
		p.Hermes = int(v)
	}
	if v, ok := wholeMember(n, "port"); ok {
		if !validPort(v) {
			return fmt.Errorf("%w: port is not between 1 and 65535", ErrPayload)
		}
		p.Port = int(v)
	}
	return nil
}

// UnmarshalJSON is ParsePayload.
func (p *Payload) UnmarshalJSON(text []byte) error {
	got, err := ParsePayload(text)
	if err != nil {
		return err
	}
	*p = *got
	return nil
}

func readPayloadRelay(top pyjson.Value) *PayloadRelay {
	n, _ := top.Get("relay")
	if v, _ := n.Get("url"); v.Kind != pyjson.String {
		return nil
	}
	r := &PayloadRelay{URL: n.Str("url"), Code: n.Str("code"), TransportHint: n.Str("transport_hint")}
	if v, ok := wholeMember(n, "ttl_seconds"); ok && v >= 0 {
		r.TTLSeconds = &v
	}
	grants, _ := n.Get("grants")
	for _, m := range grants.Members {
		if v, ok := m.Value.Whole(); ok && v >= 0 && grants.Kind == pyjson.Object {
			if r.Grants == nil {
				r.Grants = map[string]int64{}
			}
			r.Grants[m.Key] = v
		}
	}
	return r
}

// readCandidate keeps whatever has a role and well-formed members. A member
// that says where to connect and is malformed condemns the candidate; one that
// only describes it falls back to its default.
func readCandidate(n pyjson.Value) (Candidate, error) {
	if n.Kind != pyjson.Object {
		return Candidate{}, errors.New("not an object")
	}
	c := Candidate{
		Role: Role(n.Str("role")), Recommended: n.Bool("recommended"), Experimental: n.Bool("experimental"),
		Security: n.Str("security"), DisplayName: n.Str("display_name"), Description: n.Str("description"),
		Capabilities: n.Strs("capabilities"),
	}
	if c.Role == "" {
		return Candidate{}, errors.New("no role")
	}
	if v, found := n.Get("priority"); found && v.Kind != pyjson.Null {
		num, ok := v.Whole()
		if !ok || num < math.MinInt32 || num > math.MaxInt32 {
			return Candidate{}, errors.New("priority is not a whole number")
		}
		c.Priority = int(num)
	}
	for _, part := range []struct {
		name string
		read func(pyjson.Value) error
	}{{"api", c.readAPI}, {"relay", c.readRelay}, {"dashboard", c.readDashboard}, {"proxy", c.readProxy}, {"broker", c.readBroker}} {
		v, found := n.Get(part.name)
		if !found || v.Kind == pyjson.Null {
			continue
		}
		if v.Kind != pyjson.Object {
			return Candidate{}, errors.New(part.name + " is not an object")
		}
		if err := part.read(v); err != nil {
			return Candidate{}, fmt.Errorf("%s: %w", part.name, err)
		}
	}
	return c, nil
}

func (c *Candidate) readAPI(n pyjson.Value) error {
	c.API = &API{Host: n.Str("host"), Port: DefaultAPIPort, TLS: n.Bool("tls")}
	if c.API.Host == "" {
		return errors.New("no host")
	}
	if v, found := n.Get("port"); found && v.Kind != pyjson.Null {
		num, ok := v.Whole()
		if !ok || !validPort(num) {
			return errors.New("port is not between 1 and 65535")
		}
		c.API.Port = int(num)
	}
	return nil
}

func (c *Candidate) readRelay(n pyjson.Value) error {
	c.Relay = &Relay{URL: n.Str("url"), TransportHint: n.Str("transport_hint")}
	return needURL(c.Relay.URL)
}

func (c *Candidate) readDashboard(n pyjson.Value) error {
	c.Dashboard = &Dashboard{URL: n.Str("url")}
	return needURL(c.Dashboard.URL)
}

func needURL(s string) error {
	if s == "" {
		return errors.New("no url")
	}
	return nil
}

func (c *Candidate) readProxy(n pyjson.Value) error {
	p := &Proxy{URL: n.Str("url"), TransportHint: n.Str("transport_hint"), PinSHA256: n.Str("pin_sha256"), CertDER: n.Str("cert_der")}
	for _, s := range n.Strs("surfaces") {
		p.Surfaces = append(p.Surfaces, Surface(s))
	}
	p.Surfaces = normalSurfaces(p.Surfaces)
	services, _ := n.Get("services")
	for _, m := range services.Members {
		if m.Value.Kind != pyjson.Object || services.Kind != pyjson.Object {
			continue
		}
		if p.Services == nil {
			p.Services = map[string]Service{}
		}
		p.Services[m.Key] = Service{
			Supported: m.Value.Bool("supported"), BasePath: m.Value.Str("base_path"), HealthPath: m.Value.Str("health_path"),
			WebSocketPath: m.Value.Str("websocket_path"), Authentication: m.Value.Str("authentication"),
		}
	}
	c.Proxy = p
	return needURL(p.URL)
}

func (c *Candidate) readBroker(n pyjson.Value) error {
	b := &Broker{ProtocolVersion: 1, URL: n.Str("url"), HostID: n.Str("host_id"), CredentialKind: n.Str("credential_kind"), Token: n.Str("token")}
	if v, found := n.Get("protocol_version"); found && v.Kind != pyjson.Null {
		num, ok := v.Whole()
		if !ok || num < 1 || num > math.MaxInt32 {
			return errors.New("protocol_version is not a positive whole number")
		}
		b.ProtocolVersion = int(num)
	}
	exp, _ := n.Get("expires_at")
	var err error
	if b.ExpiresAt, err = readExpiry(exp); err != nil {
		return err
	}
	c.Broker = b
	return needURL(b.URL)
}

// readExpiry takes what older producers wrote, too: floats and RFC 3339.
func readExpiry(n pyjson.Value) (wire.Expiry, error) {
	if n.Kind == pyjson.Null {
		return 0, nil
	}
	e, err := wire.ParseExpiry(pyjson.Append(nil, n))
	if err != nil {
		return 0, fmt.Errorf("expires_at: %w", err)
	}
	return e, nil
}

func wholeMember(n pyjson.Value, key string) (int64, bool) {
	v, _ := n.Get(key)
	return v.Whole()
}

func firstOf(ss ...string) string {
	for _, s := range ss {
		if s != "" {
			return s
		}
	}
	return ""
}
