package forward

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"slices"
	"strings"
	"sync"
)

// What belongs to the forwarder and never reaches the host.
const (
	ownPrefix = "/.reach/"
	openPath  = ownPrefix + "open"
	keyHeader = "X-Reach-Key"
)

// How many one-use links and signed-in browsers are remembered. The oldest
// goes: whoever can make more of them holds the key anyway.
const (
	maxLinks    = 16
	maxBrowsers = 64
)

// A gate knows who may use the origin. Only digests are kept of what browsers
// hold; comparing digests leaks nothing useful through its timing.
type gate struct {
	cookie string // its name, with the port in it
	key    string // for scripts

	mu       sync.Mutex
	links    [][sha256.Size]byte // unused, oldest first
	browsers [][sha256.Size]byte // signed in, oldest first
}

func newGate(cookie string) *gate { return &gate{cookie: cookie, key: rand.Text()} }

// mint makes a one-use link key of at least 128 bits.
func (g *gate) mint() string {
	k := rand.Text()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.links = remember(g.links, k, maxLinks)
	return k
}

// spend trades a link key for the value of a new cookie, once.
func (g *gate) spend(k string) (value string, ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	i := find(g.links, k)
	if i < 0 {
		return "", false
	}
	g.links = slices.Delete(g.links, i, i+1)
	value = rand.Text() + rand.Text()
	g.browsers = remember(g.browsers, value, maxBrowsers)
	return value, true
}

// admits reports whether the request carries the key or a live cookie.
func (g *gate) admits(r *http.Request) bool {
	if k := r.Header.Values(keyHeader); len(k) == 1 {
		a, b := sha256.Sum256([]byte(k[0])), sha256.Sum256([]byte(g.key))
		if subtle.ConstantTimeCompare(a[:], b[:]) == 1 {
			return true
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	// Another local port can set a cookie of our name beside ours, so each is tried.
	for _, c := range r.CookiesNamed(g.cookie) {
		if find(g.browsers, c.Value) >= 0 {
			return true
		}
	}
	return false
}

func remember(list [][sha256.Size]byte, secret string, most int) [][sha256.Size]byte {
	list = append(list, sha256.Sum256([]byte(secret)))
	if len(list) > most {
		list = slices.Delete(list, 0, len(list)-most)
	}
	return list
}

func find(list [][sha256.Size]byte, secret string) int {
	d := sha256.Sum256([]byte(secret))
	return slices.IndexFunc(list, func(have [sha256.Size]byte) bool {
		return subtle.ConstantTimeCompare(have[:], d[:]) == 1
	})
}

// check refuses what no page of ours and no script would send, before anyone
// is asked for a key. nil means go on.
func (f *Forwarder) check(r *http.Request) *refusal {
	switch {
	case r.Method == http.MethodConnect || r.Method == http.MethodTrace:
		return refuse(http.StatusMethodNotAllowed, "method", "CONNECT and TRACE are not forwarded")
	case !strings.HasPrefix(r.RequestURI, "/"):
		return refuse(http.StatusBadRequest, "target", "the request target must be a path")
	case !slices.Contains(f.hosts, r.Host):
		// A name that somebody else's DNS points at this machine ends here.
		return refuse(http.StatusMisdirectedRequest, "host", "Host must be exactly "+f.hosts[0]+" or one of its two aliases")
	case !f.originOK(r):
		return refuse(http.StatusForbidden, "origin", "requests from pages of another origin are not forwarded")
	case !fetchSiteOK(r):
		return refuse(http.StatusForbidden, "cross_site", "requests that another site caused are not forwarded")
	}
	return nil
}

// originOK accepts no Origin, or exactly one that is ours.
func (f *Forwarder) originOK(r *http.Request) bool {
	switch o := r.Header.Values("Origin"); len(o) {
	case 0:
		return true
	case 1:
		host, ok := strings.CutPrefix(o[0], "http://")
		return ok && slices.Contains(f.hosts, host)
	default:
		return false
	}
}

// fetchSiteOK judges what the browser says about who caused the request. All
// ports of a host are one site, so same-site is another program's page: it may
// link to ours and nothing more. The opening link may be clicked anywhere: it
// carries its own proof and shows nothing to the page that held it.
func fetchSiteOK(r *http.Request) bool {
	navigation := r.Method == http.MethodGet && r.Header.Get("Sec-Fetch-Mode") == "navigate" &&
		r.Header.Get("Sec-Fetch-Dest") == "document"
	for _, site := range r.Header.Values("Sec-Fetch-Site") {
		switch site {
		case "same-origin", "none":
		case "same-site":
			if !navigation {
				return false
			}
		default:
			if r.URL.Path != openPath || !navigation {
				return false
			}
		}
	}
	return true
}

// open signs a browser in. Only GET spends the key, so that a HEAD by a
// preview does not.
func (f *Forwarder) open(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("Referrer-Policy", "no-referrer")
	if r.Method != http.MethodGet {
		h.Set("Allow", http.MethodGet)
		refuse(http.StatusMethodNotAllowed, "method", "open the link in a browser").write(w)
		return
	}
	value, ok := f.gate.spend(r.URL.Query().Get("k"))
	if !ok {
		refuse(http.StatusUnauthorized, "local_auth", "this link was used already or is not ours: "+
			"start `hermes-reach forward` again for a new one").write(w)
		return
	}
	http.SetCookie(w, &http.Cookie{
		Name: f.gate.cookie, Value: value, Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode,
	})
	h.Set("Location", f.home())
	w.WriteHeader(http.StatusSeeOther)
}

// home is where an opened browser lands: the namespace at the root, or our own
// page where the root is nothing.
func (f *Forwarder) home() string {
	if f.cfg.Namespace != "" {
		return "/"
	}
	return ownPrefix
}
