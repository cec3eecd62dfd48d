package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"github.com/hermes-reach/hermes-reach/internal/localsock"
	"github.com/hermes-reach/hermes-reach/securelink/session"
)

// maxControlBody bounds one request on the control socket.
const maxControlBody = 64 << 10

// ControlPath is where the socket of the host with state in dir is.
func ControlPath(dir string) string { return filepath.Join(dir, "control.sock") }

func (h *Host) listenControl() (net.Listener, error) {
	ln, err := localsock.Listen(ControlPath(h.cfg.Dir))
	if errors.Is(err, localsock.ErrServed) {
		return nil, fmt.Errorf("a host with this state folder runs already (%s): stop it first", h.cfg.Dir)
	}
	return ln, err
}

// serveControl answers the operator until ctx ends. It owns ln.
func (h *Host) serveControl(ctx context.Context, ln net.Listener) error {
	srv := &http.Server{
		Handler: http.MaxBytesHandler(localOnly(h.controlRoutes()), maxControlBody), ReadHeaderTimeout: 10 * time.Second,
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	defer context.AfterFunc(ctx, func() { _ = srv.Close() })()
	if err := srv.Serve(ln); ctx.Err() == nil {
		return fmt.Errorf("serve the control socket: %w", err)
	}
	return nil
}

// localOnly refuses what a browser or a proxy would send: nothing of the kind
// has business on a socket of this machine's owner.
func localOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, name := range []string{"Origin", "Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "Sec-Fetch-Site"} {
			if r.Header.Get(name) != "" {
				http.Error(w, "forwarded requests are not served here", http.StatusForbidden)
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

func (h *Host) controlRoutes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /status", func(w http.ResponseWriter, r *http.Request) { reply(w, h.Status(r.Context()), nil) })
	mux.HandleFunc("POST /reload", func(w http.ResponseWriter, _ *http.Request) { reply(w, struct{}{}, h.Reload()) })
	mux.HandleFunc("POST /pair", func(w http.ResponseWriter, r *http.Request) {
		var req PairRequest
		if err := decode(r, &req); err != nil {
			reply(w, nil, err)
			return
		}
		inv, err := h.Pair(r.Context(), req)
		reply(w, inv, err)
	})
	mux.HandleFunc("GET /pair/{id}", h.waitPair)
	mux.HandleFunc("DELETE /pair/{id}", func(w http.ResponseWriter, r *http.Request) {
		reply(w, map[string]bool{"cancelled": h.CancelPair(r.PathValue("id"))}, nil)
	})
	mux.HandleFunc("GET /devices", func(w http.ResponseWriter, _ *http.Request) {
		devices := h.sessions.Devices()
		if devices == nil {
			devices = []session.Device{}
		}
		reply(w, map[string]any{"devices": devices}, nil)
	})
	mux.HandleFunc("GET /devices/{id}", func(w http.ResponseWriter, r *http.Request) {
		d, err := h.sessions.Device(r.PathValue("id"))
		reply(w, d, err)
	})
	mux.HandleFunc("POST /devices/{id}/revoke", func(w http.ResponseWriter, r *http.Request) {
		d, err := h.sessions.Revoke(r.PathValue("id"))
		reply(w, d, err)
	})
	mux.HandleFunc("POST /devices/{id}/shorten", h.shorten)
	return mux
}

// waitPair answers when a pairing has ended, however long that takes.
func (h *Host) waitPair(w http.ResponseWriter, r *http.Request) {
	e := h.pairings.get(r.PathValue("id"))
	if e == nil {
		reply(w, nil, errors.New("no such pairing"))
		return
	}
	select {
	case <-e.ended:
		reply(w, e.end, nil)
	case <-r.Context().Done():
	}
}

func (h *Host) shorten(w http.ResponseWriter, r *http.Request) {
	var req PairRequest
	if err := decode(r, &req); err != nil {
		reply(w, nil, err)
		return
	}
	mint, err := parseMint(req)
	if err != nil {
		reply(w, nil, err)
		return
	}
	d, err := h.sessions.Shorten(r.PathValue("id"), session.Reduction{TTL: mint.TTL, Grants: mint.Grants})
	reply(w, d, err)
}

func decode(r *http.Request, v any) error {
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("read the request: %w", err)
	}
	return nil
}

// reply writes v, or the error as a sentence.
func reply(w http.ResponseWriter, v any, err error) {
	w.Header().Set("Content-Type", "application/json")
	if err != nil {
		w.WriteHeader(http.StatusUnprocessableEntity)
		v = map[string]string{"error": err.Error()}
	}
	_ = json.NewEncoder(w).Encode(v)
}
