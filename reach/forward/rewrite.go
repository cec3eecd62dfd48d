package forward

import (
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"

	"github.com/hermes-reach/hermes-reach/reach"
)

// renamed marks cookies whose own name (__Host-X, __Secure-X) browsers accept
// only with Secure, which a plain loopback origin cannot promise.
const renamed = "reach-"

func (f *Forwarder) newProxy() *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite:        f.rewrite,
		ModifyResponse: f.mapBack,
		ErrorHandler:   f.failed,
		Transport:      f.cfg.Transport,
		FlushInterval:  -1, // tokens are read as they are written
		BufferPool:     new(buffers),
		ErrorLog:       slog.NewLogLogger(f.log.Handler(), slog.LevelDebug),
	}
}

// rewrite turns a request to our origin into one to the host's. Path and query
// go on byte for byte.
func (f *Forwarder) rewrite(pr *httputil.ProxyRequest) {
	in, out := pr.In, pr.Out
	out.Host = ""
	out.URL.Scheme, out.URL.Host = "https", reach.OriginHost
	out.URL.RawQuery = in.URL.RawQuery // ReverseProxy had cleaned it
	if ns := f.cfg.Namespace; ns != "" {
		out.URL.Path = "/" + ns + in.URL.Path
		if in.URL.RawPath != "" {
			out.URL.RawPath = "/" + ns + in.URL.RawPath
		}
	}
	h := out.Header
	h.Del(keyHeader)
	h.Del("X-Hermes-Relay-Session") // ours to add, where the host asks for it
	if h.Get("Origin") != "" {
		h.Set("Origin", reach.Origin)
	}
	f.rewriteReferer(h)
	rewriteCookies(h)
}

// rewriteReferer keeps a page of ours recognisable to the host and tells it
// nothing about pages that are not.
func (f *Forwarder) rewriteReferer(h http.Header) {
	ref, ok := strings.CutPrefix(h.Get("Referer"), "http://")
	h.Del("Referer")
	if !ok {
		return
	}
	host, rest, _ := strings.Cut(ref, "/")
	for _, ours := range f.hosts {
		if host != ours || strings.HasPrefix("/"+rest, ownPrefix) {
			continue
		}
		path := "/" + rest
		if f.cfg.Namespace != "" {
			path = "/" + f.cfg.Namespace + path
		}
		h.Set("Referer", reach.Origin+path)
		return
	}
}

// rewriteCookies takes our own cookies out (those of other forwarders too:
// browsers share cookies between ports) and gives renamed ones their name back.
func rewriteCookies(h http.Header) {
	var kept []string
	for _, line := range h.Values("Cookie") {
		for pair := range strings.SplitSeq(line, ";") {
			pair = strings.Trim(pair, " \t")
			name, _, _ := strings.Cut(pair, "=")
			switch {
			case pair == "" || isOwnCookie(name) || needsSecure(name):
				// A prefixed name cannot come from us, who rename them.
			default:
				if real, ok := strings.CutPrefix(pair, renamed); ok && needsSecure(real) {
					pair = real
				}
				kept = append(kept, pair)
			}
		}
	}
	h.Del("Cookie")
	if len(kept) > 0 {
		h.Set("Cookie", strings.Join(kept, "; "))
	}
}

// isOwnCookie knows the gate cookies of all forwarders: reach_PORT, reach_unix.
func isOwnCookie(name string) bool {
	suffix, ok := strings.CutPrefix(strings.TrimSpace(name), "reach_")
	return ok && (suffix == "unix" || suffix != "" && strings.Trim(suffix, "0123456789") == "")
}

// needsSecure reports whether browsers demand Secure for a cookie of that name.
func needsSecure(name string) bool {
	for _, p := range []string{"__Host-", "__Secure-", "__Http-"} {
		if len(name) >= len(p) && strings.EqualFold(name[:len(p)], p) {
			return true
		}
	}
	return false
}

// mapBack makes what the host says about its own origin true for ours.
func (f *Forwarder) mapBack(res *http.Response) error {
	h := res.Header
	for _, name := range []string{"Location", "Content-Location"} {
		if v := h.Get(name); v != "" {
			h.Set(name, f.mapLocation(v, res.Request))
		}
	}
	if cookies := h.Values("Set-Cookie"); len(cookies) > 0 {
		h.Del("Set-Cookie")
		for _, c := range cookies {
			if c, ok := f.mapCookie(c); ok {
				h.Add("Set-Cookie", c)
			}
		}
	}
	// Both speak of a TLS origin; this one is none, and "localhost" is shared.
	h.Del("Strict-Transport-Security")
	h.Del("Alt-Svc")
	return nil
}

// mapLocation turns an absolute URL of the host into a path here, and takes
// the namespace off where it is our root. Other sites' URLs pass as they are.
func (f *Forwarder) mapLocation(v string, req *http.Request) string {
	u, err := url.Parse(v)
	if err != nil {
		return v
	}
	if u.Host != "" {
		if u.Scheme != "" && u.Scheme != "https" || !isHost(u, req) {
			return v
		}
		_, v, _ = strings.Cut(v, "//")
		if i := strings.IndexAny(v, "/?#"); i >= 0 {
			v = v[i:]
		} else {
			v = ""
		}
		if !strings.HasPrefix(v, "/") {
			v = "/" + v
		}
	}
	return f.stripNamespace(v)
}

// isHost reports whether u names the authority that the request went to.
func isHost(u *url.URL, req *http.Request) bool {
	if u.Host == reach.OriginHost {
		return true
	}
	if req == nil || req.URL == nil {
		return false
	}
	port := func(u *url.URL) string {
		if p := u.Port(); p != "" {
			return p
		}
		return "443"
	}
	return strings.EqualFold(u.Hostname(), req.URL.Hostname()) && port(u) == port(req.URL)
}

func (f *Forwarder) stripNamespace(path string) string {
	if f.cfg.Namespace == "" {
		return path
	}
	rest, ok := strings.CutPrefix(path, "/"+f.cfg.Namespace)
	switch {
	case !ok:
		return path
	case rest == "":
		return "/"
	case rest[0] == '/':
		return rest
	case rest[0] == '?' || rest[0] == '#':
		return "/" + rest
	default:
		return path // "/apixyz" is not below "/api"
	}
}

// mapCookie rewrites one Set-Cookie value: no Secure and no Domain on a plain
// loopback origin, and what goes only with Secure is renamed or weakened so
// that browsers keep it. Attributes nobody here knows pass as they are.
func (f *Forwarder) mapCookie(line string) (string, bool) {
	pair, attrs, _ := strings.Cut(line, ";")
	name, _, _ := strings.Cut(pair, "=")
	name = strings.TrimSpace(name)
	if isOwnCookie(name) {
		return "", false
	}
	if needsSecure(name) {
		pair = renamed + strings.TrimLeft(pair, " \t")
	}
	out := []string{pair}
	for attr := range strings.SplitSeq(attrs, ";") {
		key, value, _ := strings.Cut(attr, "=")
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		switch strings.ToLower(key) {
		case "", "secure", "domain", "partitioned":
		case "path":
			out = append(out, " Path="+f.stripNamespace(value))
		case "samesite":
			if strings.EqualFold(value, "none") { // refused without Secure
				value = "Lax"
			}
			out = append(out, " SameSite="+value)
		default:
			out = append(out, " "+strings.TrimSpace(attr))
		}
	}
	return strings.Join(out, ";"), true
}

// buffers lends the 32 KiB copy buffers of the proxy.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, 32<<10)
}

func (b *buffers) Put(p []byte) { b.pool.Put(&p) }
