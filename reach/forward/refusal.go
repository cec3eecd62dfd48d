package forward

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach"
)

// A refusal is an answer of our own: the same JSON shape that the host uses.
type refusal struct {
	status  int
	Code    string `json:"code"`
	Message string `json:"message"`
}

func refuse(status int, code, message string) *refusal { return &refusal{status, code, message} }

func (r *refusal) write(w http.ResponseWriter) {
	body, err := json.Marshal(map[string]*refusal{"error": r})
	if err != nil { // two strings always marshal
		panic(err)
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if r.status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "X-Reach-Key") // 401 must name a scheme; browsers know none of that name and show no dialog
	}
	w.WriteHeader(r.status)
	_, _ = w.Write(body) // a client that is gone needs no answer
}

// failed answers for the host when no answer came. It runs only while nothing
// of the response has been written; a response that breaks later is cut.
func (f *Forwarder) failed(w http.ResponseWriter, r *http.Request, err error) {
	no := explain(err)
	if r.Context().Err() == nil { // a client that went away is no failure
		f.log.WarnContext(r.Context(), "forwarding failed", "method", r.Method, "code", no.Code, "err", err)
	}
	no.write(w)
}

// explain chooses status, code and sentence for an error of the transport. The
// errors of reach hold no secret and name each candidate with its reason.
func explain(err error) *refusal {
	unreachable, _ := errors.AsType[*reach.UnreachableError](err)
	var timed interface{ Timeout() bool }
	switch {
	case pins.IsTrust(err):
		return refuse(http.StatusBadGateway, "trust_refused", err.Error())
	case errors.Is(err, reach.ErrNotResent):
		return refuse(http.StatusBadGateway, "path_lost", err.Error())
	case unreachable != nil && !unreachable.Timeout(): // whatever else is in its tree
		return refuse(http.StatusBadGateway, "host_unreachable", err.Error())
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timed) && timed.Timeout():
		return refuse(http.StatusGatewayTimeout, "host_timeout", err.Error())
	default:
		return refuse(http.StatusBadGateway, "forward_failed", err.Error())
	}
}
