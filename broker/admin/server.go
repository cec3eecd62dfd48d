package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/internal/localsock"
)

// Bounds of the socket: a request is a name and a digest.
const (
	maxRequest = 4 << 10
	maxAnswer  = 8 << 20 // some 20000 hosts
	ioTimeout  = 10 * time.Second
	stopGrace  = 2 * time.Second
)

// Serve answers Admins beside a running broker until ctx ends; then it lets
// requests that are under way finish, for a short time. The socket is STATE.sock,
// with mode 0600; where that is too long for a socket it is in a private folder
// of this user's under the temporary one. A socket that a dead broker left is
// replaced. Where brokers have no socket Serve only waits for ctx.
func Serve(ctx context.Context, statePath string, b *broker.Broker, s *store.Store) error {
	if !hasSocket {
		<-ctx.Done()
		return nil
	}
	socket, err := socketOf(statePath)
	if err != nil {
		return err
	}
	ln, err := localsock.Listen(socket)
	if err != nil {
		return fmt.Errorf("broker administration: %w", err)
	}
	srv := &http.Server{
		Handler:           handler(&local{store: s, broker: b}),
		ReadHeaderTimeout: ioTimeout, ReadTimeout: ioTimeout, WriteTimeout: ioTimeout, IdleTimeout: ioTimeout,
		MaxHeaderBytes: maxRequest,
	}
	stopped := make(chan struct{})
	unhook := context.AfterFunc(ctx, func() {
		defer close(stopped)
		grace, cancel := context.WithTimeout(context.Background(), stopGrace)
		defer cancel()
		_ = srv.Shutdown(grace)
		_ = srv.Close()
	})
	err = srv.Serve(ln)
	if unhook() {
		return errors.Join(fmt.Errorf("broker administration: %w", err), srv.Close())
	}
	<-stopped
	return nil
}

func handler(l *local) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/add", answer(l.add))
	mux.HandleFunc("POST /v1/rotate", answer(l.rotate))
	mux.HandleFunc("POST /v1/remove", answer(l.remove))
	mux.HandleFunc("POST /v1/list", answer(func(ctx context.Context, _ struct{}) ([]Host, error) { return l.list(ctx) }))
	return mux
}

// answer makes a handler of what is done with one request.
func answer[Req, Res any](do func(context.Context, Req) (Res, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		req, err := decodeRequest[Req](http.MaxBytesReader(w, r.Body, maxRequest))
		if err != nil {
			refuse(w, http.StatusBadRequest, err)
			return
		}
		res, err := do(r.Context(), req)
		if err != nil {
			refuse(w, http.StatusConflict, err)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(res)
	}
}

// decodeRequest takes exactly one object without members it does not know: they
// may be ones that have to be obeyed.
func decodeRequest[Req any](body io.Reader) (Req, error) {
	var req Req
	d := json.NewDecoder(body)
	d.DisallowUnknownFields()
	err := d.Decode(&req)
	if err == nil && d.More() {
		err = errors.New("more than one value")
	}
	if err != nil {
		return req, fmt.Errorf("the request is not one: %w", err)
	}
	return req, nil
}

// refusal is the answer to what did not work.
type refusal struct {
	Code    string `json:"code,omitempty"` // of kinds
	Message string `json:"message"`
}

// kinds are the errors that keep their identity across the socket.
var kinds = map[string]error{
	"no_host": store.ErrNoHost, "host_name": store.ErrHostName, "host_id": store.ErrHostID,
}

func refuse(w http.ResponseWriter, status int, err error) {
	r := refusal{Message: err.Error()}
	for code, kind := range kinds {
		if errors.Is(err, kind) {
			r.Code = code
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(r)
}
