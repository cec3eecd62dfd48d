package securelink

import (
	"net/http"
	"net/netip"
	"net/url"
	"strings"

	"github.com/hermes-reach/hermes-reach/pins"
)

// A refusal is an answer of ours, not of an upstream.
type refusal struct {
	status  int
	code    string
	message string
	headers []string // name, value, name, value
}

func refusing(status int, code, message string, headers ...string) *refusal {
	return &refusal{status, code, message, headers}
}

func (r *refusal) Error() string { return r.code + ": " + r.message }

func badRequest(code, message string) *refusal {
	return refusing(http.StatusBadRequest, code, message)
}

// target is a request target that passed the check, split but not decoded:
// what is forwarded is what came.
type target struct {
	path     string
	query    string
	hasQuery bool // tells "/x?" from "/x"
}

// parseTarget checks a request target. It takes origin form only, and refuses
// every path that two parsers may take for different ones: then what we route
// by is what the upstream routes by.
func parseTarget(raw string) (target, *refusal) {
	if !strings.HasPrefix(raw, "/") {
		return target{}, badRequest("bad_target", "the request target must be a path")
	}
	for i := range len(raw) {
		// '#' never comes in a target; who sends it hopes that somebody cuts there.
		if c := raw[i]; c <= ' ' || c == 0x7f || c == '#' {
			return target{}, badRequest("bad_path", "the request target holds a character that does not belong there")
		}
	}
	var t target
	t.path, t.query, t.hasQuery = strings.Cut(raw, "?")
	if strings.Contains(t.path, `\`) || strings.Contains(t.path, "//") {
		return target{}, badRequest("bad_path", `the path holds a backslash or an empty segment ("//")`)
	}
	for segment := range strings.SplitSeq(t.path, "/") {
		if segment == "." || segment == ".." {
			return target{}, badRequest("bad_path", `the path holds a "." or ".." segment`)
		}
	}
	if !plainEscapes(t.path) {
		return target{}, badRequest("bad_path", "the path holds an encoded separator or dot, or a broken escape")
	}
	return t, nil
}

// escapeLayers is how often an escape may be escaped. Nobody needs so many,
// and each costs a pass.
const escapeLayers = 4

// plainEscapes says that no '/', '\' or '.' comes out of the path however often
// it is decoded.
func plainEscapes(path string) bool {
	for layer := range escapeLayers {
		out := make([]byte, 0, len(path))
		for i := 0; i < len(path); i++ {
			c := path[i]
			if c == '%' {
				if i+2 < len(path) && isHex(path[i+1]) && isHex(path[i+2]) {
					c = unhex(path[i+1])<<4 | unhex(path[i+2])
					if c == '/' || c == '\\' || c == '.' {
						return false
					}
					i += 2
				} else if layer == 0 {
					return false // further down, a percent sign may be just that
				}
			}
			out = append(out, c)
		}
		if len(out) == len(path) {
			return true
		}
		path = string(out)
	}
	return false
}

func isHex(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}

func unhex(c byte) byte {
	switch {
	case c >= 'a':
		return c - 'a' + 10
	case c >= 'A':
		return c - 'A' + 10
	}
	return c - '0'
}

// The namespaces.
const (
	nsRelay     = "relay"
	nsAPI       = "api"
	nsDashboard = "dashboard"
)

// route says which namespace a checked path belongs to and what is left of it.
// Matching is on the bytes as they came: nothing is decoded, so nothing has
// two names.
func route(path string) (ns, rest string, ok bool) {
	for _, ns := range []string{nsRelay, nsAPI, nsDashboard} {
		if rest, ok := strings.CutPrefix(path, "/"+ns); ok && strings.HasPrefix(rest, "/") {
			return ns, rest, true
		}
	}
	return "", "", false
}

// splitHost takes the host part of a Host header or an authority, without its
// port, in the clean spelling of pins.CleanHost. Any port is taken.
func splitHost(authority string) (host, port string, ok bool) {
	host = authority
	if end := strings.LastIndexByte(authority, ']'); strings.HasPrefix(authority, "[") && end > 0 {
		host, port = authority[:end+1], authority[end+1:]
	} else if i := strings.IndexByte(authority, ':'); i >= 0 {
		host, port = authority[:i], authority[i:]
	}
	if port != "" {
		if port[0] != ':' || len(port) > 6 || strings.Trim(port[1:], "0123456789") != "" {
			return "", "", false
		}
		port = port[1:]
	}
	clean, err := pins.CleanHost(host)
	if err != nil {
		return "", "", false
	}
	return clean, port, true
}

// checkHost is the host check: 400 for none, several or nonsense, 421 for a
// host that is not ours. covers decides that.
func checkHost(r *http.Request, covers func(host string) bool) *refusal {
	if extra := r.Header["Host"]; len(extra) > 1 || len(extra) == 1 && extra[0] != r.Host {
		return badRequest("bad_host", "the request names its host twice")
	}
	host, _, ok := splitHost(r.Host)
	if !ok {
		return badRequest("bad_host", "the request has no valid Host")
	}
	if !covers(host) {
		return refusing(http.StatusMisdirectedRequest, "wrong_host",
			"this host does not answer to that name: use the address of the invite, or add the name on the host with --advertise")
	}
	return nil
}

// sameOrigin says whether the Origin header is the one of the request itself:
// https, and the very host and port that the request was sent to.
func sameOrigin(origin, authority string) bool {
	rest, ok := strings.CutPrefix(origin, "https://")
	if !ok {
		return false
	}
	oh, op, ok1 := splitHost(rest)
	rh, rp, ok2 := splitHost(authority)
	return ok1 && ok2 && oh == rh && defaultPort(op) == defaultPort(rp)
}

func defaultPort(p string) string {
	if p == "" {
		return "443"
	}
	return p
}

// isLoopbackHost says whether a name or address means the machine it is used
// on. What cannot be read as either counts as one: parsers disagree about it.
func isLoopbackHost(host string) bool {
	clean, err := pins.CleanHost(host)
	if err != nil {
		return true
	}
	if ip, err := netip.ParseAddr(clean); err == nil {
		return ip.IsLoopback() || ip.IsUnspecified()
	}
	return clean == "localhost" || strings.HasSuffix(clean, ".localhost")
}

// wantsUpgrade says whether the request is a WebSocket handshake, and whether
// it was meant as one but lost a part on the way, which must not become a
// plain GET in silence.
func wantsUpgrade(r *http.Request) (yes bool, broken *refusal) {
	upgrade := hasToken(r.Header["Upgrade"], "websocket")
	_, key := r.Header["Sec-Websocket-Key"]
	if !upgrade && !key {
		return false, nil
	}
	switch {
	case r.ProtoMajor != 1:
		return false, badRequest("bad_upgrade", "WebSockets are opened on HTTP/1.1 here")
	case r.Method != http.MethodGet, !r.ProtoAtLeast(1, 1), len(r.Header["Upgrade"]) != 1,
		!strings.EqualFold(r.Header.Get("Upgrade"), "websocket"),
		!hasToken(r.Header["Connection"], "upgrade"), len(r.Header["Sec-Websocket-Key"]) != 1:
		return false, badRequest("bad_upgrade", "this is no complete WebSocket handshake: something on the way dropped a part of it")
	}
	return true, nil
}

// hasToken looks for a token in comma-separated header values, ignoring case.
func hasToken(values []string, token string) bool {
	for _, v := range values {
		for t := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.Trim(t, " \t"), token) {
				return true
			}
		}
	}
	return false
}

// upstreamURL builds the URL of a forwarded request. The path goes into Opaque,
// because that is the only part of a url.URL that is written as it stands.
func upstreamURL(base *url.URL, rest string, t target) *url.URL {
	return &url.URL{
		Scheme: "http", Host: base.Host, Opaque: strings.TrimSuffix(base.Path, "/") + rest,
		RawQuery: t.query, ForceQuery: t.hasQuery && t.query == "",
	}
}
