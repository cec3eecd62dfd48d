package securelink

import (
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// gateCookie is ours alone: no upstream sees it or sets it.
const gateCookie = "__Host-hermes-gate"

// A rule of the header table. Names are lower-case; a final '*' stands for any
// rest. Names with underscores are matched as if they had hyphens, because
// CGI-like servers cannot tell the two apart.
type rule struct {
	name string
	why  string
	in   []string // namespaces in which the header is dropped
}

var everywhere = []string{nsRelay, nsAPI, nsDashboard}

// requestRules say which request headers do not cross. Everything else does,
// except towards the Relay, which gets no client header at all.
var requestRules = []rule{
	{"connection", "hop by hop", everywhere},
	{"proxy-connection", "hop by hop", everywhere},
	{"keep-alive", "hop by hop", everywhere},
	{"proxy-authenticate", "hop by hop", everywhere},
	{"proxy-authorization", "hop by hop", everywhere},
	{"te", "hop by hop", everywhere},
	{"trailer", "hop by hop", everywhere},
	{"transfer-encoding", "hop by hop", everywhere},
	{"upgrade", "hop by hop", everywhere},
	{"host", "the upstream sees its own", everywhere},
	{"forwarded", "only we say where a request came from", everywhere},
	{"x-forwarded-*", "only we say where a request came from", everywhere},
	{"x-real-ip", "only we say where a request came from", everywhere},
	{"tailscale-*", "an identity that only tailscaled may claim", everywhere},
	{"x-hermes-relay-session", "a credential of ours", everywhere},
	{"x-hermes-proxy-*", "the proof that we are the proxy", everywhere},
	{"cookie", "an API is called with a bearer", []string{nsRelay, nsAPI}},
	{"*", "the Relay knows clients by their first frame only", []string{nsRelay}},
}

// responseRules say the same of answers.
var responseRules = []rule{
	{"set-cookie", "an API has no cookies", []string{nsRelay, nsAPI}},
	{"alt-svc", "another port of the upstream is not ours", everywhere},
	{"x-hermes-proxy-*", "never leaves the host", everywhere},
}

func dropped(rules []rule, ns, name string) bool {
	name = strings.ReplaceAll(strings.ToLower(name), "_", "-")
	for _, r := range rules {
		match := name == r.name
		if stem, ok := strings.CutSuffix(r.name, "*"); ok {
			match = strings.HasPrefix(name, stem)
		}
		if !match {
			continue
		}
		if slices.Contains(r.in, ns) {
			return true
		}
	}
	return false
}

// forwardHeaders gives what crosses of a client's request headers. Headers
// that Connection nominates go first, so that nothing of ours can be
// nominated away.
func forwardHeaders(ns string, in http.Header) http.Header {
	out := make(http.Header, len(in))
	for name, values := range in {
		if dropped(requestRules, ns, name) || hasToken(in["Connection"], name) {
			continue
		}
		if name == "Cookie" {
			if line := forwardCookies(values); line != "" {
				out[name] = []string{line}
			}
			continue
		}
		out[name] = append([]string(nil), values...)
	}
	if ns != nsRelay && hasToken(in["Te"], "trailers") {
		out["Te"] = []string{"trailers"} // ours too: we do pass trailers on
	}
	return out
}

// returnHeaders strips an answer's headers in place.
func returnHeaders(ns string, h http.Header) {
	for name := range h {
		if dropped(responseRules, ns, name) {
			delete(h, name)
		}
	}
	if set := h["Set-Cookie"]; ns == nsDashboard && set != nil {
		h.Del("Set-Cookie")
		for _, line := range set {
			if mapped, ok := mapSetCookie(line); ok {
				h.Add("Set-Cookie", mapped)
			}
		}
	}
}

// A cookie with the prefix __Host- must have the path "/", and would then reach
// all namespaces. Under /dashboard it travels as __Secure-hd-.
const (
	hostPrefix   = "__Host-"
	hiddenPrefix = "__Secure-hd-"
)

func cutFold(s, prefix string) (rest string, ok bool) {
	if len(s) < len(prefix) || !strings.EqualFold(s[:len(prefix)], prefix) {
		return s, false
	}
	return s[len(prefix):], true
}

// forwardCookies maps the Cookie lines of a client back to what the Dashboard
// set, in one line.
func forwardCookies(lines []string) string {
	var out []string
	for _, line := range lines {
		for pair := range strings.SplitSeq(line, ";") {
			pair = strings.Trim(pair, " \t")
			name, value, ok := strings.Cut(pair, "=")
			name = strings.Trim(name, " \t")
			if !ok || name == "" {
				continue // nameless: browsers and servers split it differently
			}
			if _, host := cutFold(name, hostPrefix); host {
				continue // none of these was set through us
			}
			if rest, hidden := cutFold(name, hiddenPrefix); hidden {
				name = hostPrefix + rest
			}
			out = append(out, name+"="+value)
		}
	}
	return strings.Join(out, "; ")
}

// mapSetCookie maps one Set-Cookie line of the Dashboard; false drops it.
func mapSetCookie(line string) (string, bool) {
	parts := strings.Split(line, ";")
	name, value, ok := strings.Cut(parts[0], "=")
	name = strings.Trim(name, " \t")
	if !ok || name == "" || strings.EqualFold(name, gateCookie) {
		return "", false
	}
	if _, taken := cutFold(name, hiddenPrefix); taken {
		return "", false // it would come back under another name
	}
	if rest, host := cutFold(name, hostPrefix); host {
		name = hiddenPrefix + rest
	}
	out := []string{name + "=" + strings.Trim(value, " \t")}
	secure := false
	for _, attr := range parts[1:] {
		attr = strings.Trim(attr, " \t")
		key, value, _ := strings.Cut(attr, "=")
		switch strings.ToLower(strings.Trim(key, " \t")) {
		case "domain", "":
			continue
		case "path":
			path := strings.Trim(value, " \t")
			if !strings.HasPrefix(path, "/") {
				continue // means the default path, which is already under ours
			}
			attr = "Path=" + underDashboard(path)
		case "secure":
			secure = true
		}
		out = append(out, attr)
	}
	if !secure {
		out = append(out, "Secure")
	}
	return strings.Join(out, "; "), true
}

// underDashboard joins an upstream path to our prefix. An upstream that minds
// X-Forwarded-Prefix has done it already.
func underDashboard(path string) string {
	const prefix = "/" + nsDashboard
	if path == prefix || strings.HasPrefix(path, prefix+"/") || strings.HasPrefix(path, prefix+"?") {
		return path
	}
	if path == "/" {
		return prefix
	}
	return prefix + path
}

// mapLocation maps a redirect of the Dashboard so that it works from outside:
// its own URLs come under /dashboard, https elsewhere (an identity provider) is
// passed, anything else is an error: the client must never be sent to an
// address of this machine. base is the upstream, at the path that was asked for
// there.
func mapLocation(location string, base *url.URL, at string) (string, error) {
	for i := range len(location) {
		if c := location[i]; c <= ' ' || c == '\\' || c >= 0x7f {
			return "", errors.New("it holds a character that browsers read in different ways")
		}
	}
	u, err := url.Parse(location)
	if err != nil || u.User != nil {
		return "", errors.New("it is no plain URL")
	}
	switch {
	case u.Scheme == "" && (u.Host != "" || strings.HasPrefix(location, "//")):
		return "", errors.New("it names a host without a scheme")
	case u.Scheme == "":
		return mapPath(location, at)
	case u.Opaque != "" || u.Host == "":
		return "", errors.New("it is no http or https URL")
	case sameUpstream(u, base):
		_, rest, _ := strings.Cut(location, "//")
		path := "/"
		if i := strings.IndexAny(rest, "/?#"); i >= 0 {
			path += strings.TrimPrefix(rest[i:], "/")
		}
		return mapPath(path, at)
	case u.Scheme == "https" && !isLoopbackHost(u.Hostname()):
		return location, nil
	}
	return "", errors.New("it leads to an address that cannot be reached from outside")
}

// mapPath maps a reference without scheme and host, seen from the path at.
func mapPath(ref, at string) (string, error) {
	path, tail := ref, ""
	if i := strings.IndexAny(ref, "?#"); i >= 0 {
		path, tail = ref[:i], ref[i:]
	}
	if path == "" {
		return ref, nil // the same page
	}
	if path[0] != '/' {
		path = at[:strings.LastIndexByte(at, '/')+1] + path
	}
	path = squash(path)
	if _, bad := parseTarget(path); bad != nil {
		return "", errors.New("its path can be read in different ways")
	}
	if path == "/" {
		return "/" + nsDashboard + "/" + tail, nil // the bare prefix is not routed
	}
	return underDashboard(path) + tail, nil
}

// squash resolves "." and ".." segments as browsers do, without decoding.
func squash(path string) string {
	var out []string
	segments := strings.Split(path[1:], "/")
	for i, s := range segments {
		last := i == len(segments)-1
		switch s {
		case "..":
			out = out[:max(len(out)-1, 0)]
			if last {
				out = append(out, "")
			}
		case ".":
			if last {
				out = append(out, "")
			}
		default:
			out = append(out, s)
		}
	}
	return "/" + strings.Join(out, "/")
}

// sameUpstream says whether u is the upstream itself, under any name of this
// machine.
func sameUpstream(u, base *url.URL) bool {
	if u.Scheme != "http" || base == nil {
		return false
	}
	port := func(u *url.URL) string {
		if p := u.Port(); p != "" {
			return p
		}
		return "80"
	}
	return u.Host == base.Host || isLoopbackHost(u.Hostname()) && port(u) == port(base)
}
