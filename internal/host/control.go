package host

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"github.com/hermes-reach/hermes-reach/securelink/session"
)

const (
	maxControlBody = 64 << 10    // bytes of one request on the control socket
	controlGrace   = time.Second // for the last answers on it
)

// ControlPath is where the socket of the host with state in dir is.
func ControlPath(dir string) string { return filepath.Join(dir, "control.sock") }

// serveControl answers the operator until over ends; from the end of ctx on,
// only about the state. It owns ln.
func (h *Host) serveControl(ctx, over context.Context, ln net.Listener) error {
	srv := &http.Server{
		Handler:           http.MaxBytesHandler(localOnly(notTooLate(ctx, h.controlRoutes())), maxControlBody),
		ReadHeaderTimeout: 10 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: maxControlBody,
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    slog.NewLogLogger(h.log.Handler(), slog.LevelDebug),
	}
	done := make(chan struct{})
	stop := context.AfterFunc(over, func() {
		defer close(done)
		last, cancel := context.WithTimeout(context.Background(), controlGrace)
		defer cancel()
		if srv.Shutdown(last) != nil {
			_ = srv.Close()
		}
	})
	err := srv.Serve(ln)
	if stop() {
		return fmt.Errorf("serve the control socket: %w", err)
	}
	<-done
	return nil
}

// localOnly refuses what a browser or a proxy would send: nothing of the kind
// has business on a socket of this machine's owner.
func localOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for name := range r.Header {
			if strings.HasPrefix(name, "X-Forwarded-") || strings.HasPrefix(name, "Sec-Fetch-") || name == "Origin" || name == "Forwarded" {
				http.Error(w, "forwarded requests are not served here", http.StatusForbidden)
				return
			}
		}
		next.ServeHTTP(w, r)
	})
}

// notTooLate refuses what a host that stops cannot see through.
func notTooLate(ctx context.Context, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if ctx.Err() != nil && r.URL.Path != "/status" {
			reply(w, nil, errStopping)
			return
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
		if err != nil && d.ID != "" {
			err = fmt.Errorf("%s is out, but that is not saved, and a restart of this host would bring it back; "+
				"saving is tried again every half a minute: %w", d.ID, err)
		}
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
	case <-r.Context().Done(): // who asked is gone, or the host stops
		reply(w, nil, errStopping)
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
	err := d.Decode(v)
	if err == nil {
		if _, err = d.Token(); errors.Is(err, io.EOF) {
			return nil
		}
		err = errors.Join(errors.New("something follows the end of it"), err)
	}
	return fmt.Errorf("read the request: %w", err)
}

// reply writes v, or the error as a sentence.
func reply(w http.ResponseWriter, v any, err error) {
	w.Header().Set("Content-Type", "application/json")
	if err != nil {
		w.WriteHeader(http.StatusUnprocessableEntity)
		v = map[string]string{"error": strings.TrimPrefix(err.Error(), "session: ")} // a person reads it
	}
	_ = json.NewEncoder(w).Encode(v)
}
