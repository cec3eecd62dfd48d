package forward

import (
	"html/template"
	"net/http"
)

// own serves what lies below /.reach/ and is not the opening link. Nothing
// there is ever asked of the host.
func (f *Forwarder) own(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != ownPrefix {
		refuse(http.StatusNotFound, "not_found", "there is nothing here: "+ownPrefix+" is the forwarder's own page").write(w)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		refuse(http.StatusMethodNotAllowed, "method", "this page is only read").write(w)
		return
	}
	data := struct {
		Profile     string
		Namespaces  []string
		NoLocalAuth bool
	}{f.cfg.Profile, nil, f.cfg.NoLocalAuth}
	if f.cfg.Namespace == "" {
		data.Namespaces = namespaces
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if err := page.Execute(w, data); err != nil {
		f.log.DebugContext(r.Context(), "own page not written", "err", err)
	}
}

var page = template.Must(template.New("page").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Hermes Reach: {{.Profile}}</title>
<h1>{{.Profile}}</h1>
<p>This origin forwards to the Hermes host of the profile {{.Profile}} over a pinned connection.</p>
{{if .NoLocalAuth}}<p><strong>Local authentication is off: every program on this machine may use it.</strong></p>{{end}}
<ul>{{range .Namespaces}}<li><a href="/{{.}}/">/{{.}}</a></li>{{else}}<li><a href="/">the forwarded service</a></li>{{end}}</ul>
`))
