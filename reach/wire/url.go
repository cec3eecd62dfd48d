package wire

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of the texts that people paste, in bytes.
const (
	MaxBrokerURL = 512
	MaxHostLine  = 16 << 10 // twice what the longest members can need
	maxHostName  = 64       // characters in HostLine.Name
)

const (
	v1Path     = "/v1/connect"
	v2Path     = "/v2/connect"
	healthPath = "/health"
)

// A BrokerURL is where a broker is. It is comparable, holds no secret and may
// be logged. Make one with [ParseBrokerURL]; the zero BrokerURL is none.
type BrokerURL struct {
	text      string // as given: devices compare it byte for byte
	hostPort  string // lower case, port always there
	authority string // as given, for the URLs we build
	base      string // "" or "/a/b", no slash at its end
}

// ParseBrokerURL reads wss://HOST[:PORT] with the path "", "/" or
// "/v1/connect"; with allowPath, also a base path before "/v1/connect" (phones
// and desktops in the field refuse one, so it is for hosts and our own clients).
// User info, query and fragment are refused, even empty ones. The error does
// not repeat s, which may hold a password by mistake.
func ParseBrokerURL(s string, allowPath bool) (BrokerURL, error) {
	bad := func(why string) (BrokerURL, error) {
		return BrokerURL{}, fmt.Errorf("%w: broker URL %s; it is like wss://reach.example.com", ErrMalformed, why)
	}
	if len(s) > MaxBrokerURL || !visible(s, MaxBrokerURL, false) {
		return bad("is too long or has characters that no URL has")
	}
	rest, found := cutPrefixFold(s, "wss://")
	if !found {
		return bad("does not begin with wss://")
	}
	if strings.ContainsAny(rest, "?#@") {
		return bad("has user info, a query or a fragment")
	}
	authority, path := rest, ""
	if i := strings.IndexByte(rest, '/'); i >= 0 {
		authority, path = rest[:i], rest[i:]
	}
	hostPort, ok := splitAuthority(authority)
	if !ok {
		return bad("has no good host name, address or port")
	}
	base, ok := basePath(path)
	if !ok {
		return bad("has a path that does not end in " + v1Path)
	}
	if base != "" && !allowPath {
		return bad("has a base path, which devices in the field do not take")
	}
	return BrokerURL{text: s, hostPort: hostPort, authority: authority, base: base}, nil
}

// String returns the URL exactly as it was given.
func (u BrokerURL) String() string { return u.text }

// IsZero says whether u is none.
func (u BrokerURL) IsZero() bool { return u.text == "" }

// V1 returns the URL of protocol 1's endpoint.
func (u BrokerURL) V1() string { return u.at("wss://", v1Path) }

// V2 returns the URL of protocol 2's endpoint.
func (u BrokerURL) V2() string { return u.at("wss://", v2Path) }

// Health returns the https URL of the broker's health page.
func (u BrokerURL) Health() string { return u.at("https://", healthPath) }

func (u BrokerURL) at(scheme, path string) string {
	if u.IsZero() {
		return ""
	}
	return scheme + u.authority + u.base + path
}

// HostPort returns host:port to dial, in lower case, an IPv6 address in
// brackets, 443 where the URL has no port.
func (u BrokerURL) HostPort() string { return u.hostPort }

// Host returns the name or address alone, in lower case, without brackets: what
// the outer certificate must be for.
func (u BrokerURL) Host() string {
	host, _, _ := net.SplitHostPort(u.hostPort)
	return host
}

// HasPath says whether a base path stands before the endpoints.
func (u BrokerURL) HasPath() bool { return u.base != "" }

// MarshalText implements [encoding.TextMarshaler]; it never fails.
func (u BrokerURL) MarshalText() ([]byte, error) { return []byte(u.text), nil }

// UnmarshalText implements [encoding.TextUnmarshaler], base paths allowed; the
// empty text is none.
func (u *BrokerURL) UnmarshalText(b []byte) error {
	if len(b) == 0 {
		*u = BrokerURL{}
		return nil
	}
	got, err := ParseBrokerURL(string(b), true)
	if err == nil {
		*u = got
	}
	return err
}

func cutPrefixFold(s, prefix string) (string, bool) {
	if len(s) < len(prefix) || !strings.EqualFold(s[:len(prefix)], prefix) {
		return s, false
	}
	return s[len(prefix):], true
}

// splitAuthority returns host:port in its comparable form.
func splitAuthority(a string) (hostPort string, ok bool) {
	host, port := a, "443"
	bracketed := strings.HasPrefix(a, "[")
	if i := strings.LastIndexByte(a, ':'); i > strings.LastIndexByte(a, ']') {
		host, port = a[:i], a[i+1:]
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || strconv.FormatUint(n, 10) != port { // no sign, no leading zero
		return "", false
	}
	if bracketed {
		if !strings.HasSuffix(host, "]") {
			return "", false
		}
		addr, err := netip.ParseAddr(host[1 : len(host)-1])
		if err != nil || !addr.Is6() || addr.Zone() != "" {
			return "", false
		}
		return netip.AddrPortFrom(addr, uint16(n)).String(), true
	}
	host = strings.ToLower(host)
	if addr, err := netip.ParseAddr(host); err == nil {
		return net.JoinHostPort(host, port), addr.Is4()
	}
	return net.JoinHostPort(host, port), dnsName(host)
}

// dnsName accepts letter-digit-hyphen names (and the underscore, which exists
// in private zones). A name whose last label is a number is an address in a
// spelling that programs read differently (127.1, 0x7f.1), so it is none.
func dnsName(host string) bool {
	if host == "" || len(host) > 253 {
		return false
	}
	labels := strings.Split(host, ".")
	for _, l := range labels {
		if l == "" || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' {
			return false
		}
		if strings.Trim(l, "abcdefghijklmnopqrstuvwxyz0123456789-_") != "" {
			return false
		}
	}
	last := labels[len(labels)-1]
	return strings.Trim(last, "0123456789") != "" && !strings.HasPrefix(last, "0x")
}

// basePath returns what stands before /v1/connect. Segments are plain: an
// escape, a dot segment or an empty one would be read differently by the
// proxies between.
func basePath(path string) (base string, ok bool) {
	if path == "" || path == "/" {
		return "", true
	}
	base, found := strings.CutSuffix(path, v1Path)
	if !found {
		return "", false
	}
	if base == "" {
		return "", true
	}
	for seg := range strings.SplitSeq(base[1:], "/") {
		if seg == "" || seg == "." || seg == ".." {
			return "", false
		}
		if strings.Trim(seg, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~") != "" {
			return "", false
		}
	}
	return base, true
}

// hostLinePrefix begins the enrolment line; v1 is the version of the line.
const hostLinePrefix = "reach-host://v1?"

// A HostLine is what `broker host add` prints once and `enroll` takes: all a
// host needs to register with a broker. It holds the host's token, so it prints
// hidden and never belongs into a log or an argument list.
type HostLine struct {
	URL    BrokerURL
	HostID ID
	Token  string // secret, 32 to 512 characters
	Name   string // for people, at most 64 printable characters; may be ""
	Pin    string // "sha256/…" of the broker's own key; "": its certificate is checked against the roots
}

// FormatHostLine returns the one line. It is a secret.
func FormatHostLine(h HostLine) (string, error) {
	if err := h.check(); err != nil {
		return "", err
	}
	s := hostLinePrefix + "url=" + url.QueryEscape(h.URL.String()) + "&host_id=" + h.HostID.String() +
		"&token=" + url.QueryEscape(h.Token)
	if h.Name != "" {
		s += "&name=" + url.QueryEscape(h.Name)
	}
	if h.Pin != "" {
		s += "&pin=" + url.QueryEscape(h.Pin)
	}
	return s, nil
}

// ParseHostLine reads the line, space around it allowed. A member that it does
// not know is refused, because it may be one that must be obeyed: the line then
// comes from a newer broker. The error repeats nothing of the line.
func ParseHostLine(s string) (HostLine, error) {
	bad := func(why string) (HostLine, error) {
		return HostLine{}, fmt.Errorf("%w: enrolment line %s", ErrMalformed, why)
	}
	s = strings.TrimSpace(s)
	if len(s) > MaxHostLine {
		return bad("is too long")
	}
	query, found := cutPrefixFold(s, hostLinePrefix)
	if !found {
		return bad("does not begin with " + hostLinePrefix + ": copy the whole line that `broker host add` printed")
	}
	q, err := url.ParseQuery(query)
	if err != nil { // its text repeats what it could not read
		return bad("is damaged: copy it again")
	}
	var h HostLine
	for name, values := range q {
		if len(values) != 1 {
			return bad("has a member twice")
		}
		v := values[0]
		switch name {
		case "url":
			h.URL, err = ParseBrokerURL(v, true)
		case "host_id":
			h.HostID, err = ParseID(v)
		case "token":
			h.Token = v
		case "name":
			h.Name = v
		case "pin":
			h.Pin = v
		default:
			return bad("has a member this version does not know: update the host")
		}
		if err != nil {
			return HostLine{}, fmt.Errorf("enrolment line: %w", err)
		}
	}
	if !q.Has("host_id") {
		return bad("has no host_id")
	}
	if err := h.check(); err != nil {
		return HostLine{}, err
	}
	return h, nil
}

func (h HostLine) check() error {
	if h.URL.IsZero() {
		return fmt.Errorf("%w: enrolment line has no url", ErrMalformed)
	}
	if err := CheckHostToken(h.Token); err != nil {
		return fmt.Errorf("enrolment line: %w", err)
	}
	if utf8.RuneCountInString(h.Name) > maxHostName || !utf8.ValidString(h.Name) ||
		strings.ContainsFunc(h.Name, func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }) {
		return fmt.Errorf("%w: enrolment line has a name that is not at most %d printable characters", ErrMalformed, maxHostName)
	}
	if h.Pin != "" && !pinForm(h.Pin) {
		return fmt.Errorf("%w: enrolment line has a pin that is not sha256/ and 44 characters", ErrMalformed)
	}
	return nil
}

// pinForm checks the form only; what a pin means is not this package's business.
func pinForm(s string) bool {
	text, found := strings.CutPrefix(s, "sha256/")
	b, err := base64.StdEncoding.DecodeString(text)
	return found && err == nil && len(b) == 32 && base64.StdEncoding.EncodeToString(b) == text
}

// String returns the line's public part.
func (h HostLine) String() string {
	return fmt.Sprintf("enrolment{broker %s, host_id %s, name %q, token hidden}", h.URL, h.HostID, h.Name)
}

// Format implements [fmt.Formatter]: every verb prints String, %#v too.
func (h HostLine) Format(s fmt.State, _ rune) { fmt.Fprint(s, h.String()) }

// LogValue implements [slog.LogValuer] without the token.
func (h HostLine) LogValue() slog.Value { return slog.StringValue(h.String()) }

// MarshalJSON hides the token as well; [FormatHostLine] shows it.
func (h HostLine) MarshalJSON() ([]byte, error) { return json.Marshal(h.String()) }
