// Package operator asks a running host on its control socket: what a command
// of the host's owner does is here one call each. Whoever may open the socket
// is the owner.
package operator

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/internal/localsock"
	"github.com/hermes-reach/hermes-reach/securelink/session"
)

// maxReply bounds what is read of an answer on the control socket.
const maxReply = 16 << 20

// startWait is how long an Operator waits for a host that is starting.
const startWait = 10 * time.Second

// ErrNotRunning says that no host with this state folder runs.
var ErrNotRunning = errors.New("no host runs with this state folder: start it with `hermes-reach up`")

// Operator asks one host. Its methods may be called by any number of goroutines.
type Operator struct {
	client *http.Client
}

// New makes an Operator of the host with state in dir, and waits up to
// 10 s for one that is starting.
func New(ctx context.Context, dir string) (*Operator, error) {
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	if err := localsock.Wait(ctx, host.ControlPath(dir)); err != nil {
		return nil, fmt.Errorf("%w (%w)", ErrNotRunning, err)
	}
	return &Operator{client: localsock.Client(host.ControlPath(dir))}, nil
}

// Running says whether a host with state in dir answers now.
func Running(ctx context.Context, dir string) bool {
	ctx, cancel := context.WithTimeout(ctx, time.Millisecond*200)
	defer cancel()
	return localsock.Wait(ctx, host.ControlPath(dir)) == nil
}

func ask[T any](ctx context.Context, o *Operator, method, path string, body any) (T, error) {
	var v T
	var in io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return v, err
		}
		in = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://host"+path, in)
	if err != nil {
		return v, err
	}
	res, err := o.client.Do(req)
	if err != nil {
		return v, fmt.Errorf("ask the host: %w", err)
	}
	defer func() { _ = res.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(res.Body, maxReply))
	if err != nil {
		return v, fmt.Errorf("ask the host: %w", err)
	}
	if res.StatusCode != http.StatusOK {
		var e struct {
			Error string `json:"error"`
		}
		if json.Unmarshal(data, &e) != nil || e.Error == "" {
			e.Error = res.Status
		}
		return v, errors.New(e.Error)
	}
	if err := json.Unmarshal(data, &v); err != nil {
		return v, fmt.Errorf("ask the host: %w", err)
	}
	return v, nil
}

// Status tells what runs.
func (o *Operator) Status(ctx context.Context) (host.Status, error) {
	return ask[host.Status](ctx, o, http.MethodGet, "/status", nil)
}

// Reload makes the host read its list of brokers again.
func (o *Operator) Reload(ctx context.Context) error {
	_, err := ask[struct{}](ctx, o, http.MethodPost, "/reload", struct{}{})
	return err
}

// Pair mints an invite.
func (o *Operator) Pair(ctx context.Context, req host.PairRequest) (*host.Invite, error) {
	return ask[*host.Invite](ctx, o, http.MethodPost, "/pair", req)
}

// WaitPair waits until somebody joined with an invite or it ended otherwise.
func (o *Operator) WaitPair(ctx context.Context, id string) (host.PairEnd, error) {
	return ask[host.PairEnd](ctx, o, http.MethodGet, "/pair/"+url.PathEscape(id), nil)
}

// CancelPair makes an invite useless.
func (o *Operator) CancelPair(ctx context.Context, id string) error {
	_, err := ask[map[string]bool](ctx, o, http.MethodDelete, "/pair/"+url.PathEscape(id), nil)
	return err
}

// Devices lists the paired devices.
func (o *Operator) Devices(ctx context.Context) ([]session.Device, error) {
	v, err := ask[struct{ Devices []session.Device }](ctx, o, http.MethodGet, "/devices", nil)
	return v.Devices, err
}

// Device shows one device, by its id or the first four or more of its characters.
func (o *Operator) Device(ctx context.Context, id string) (session.Device, error) {
	return ask[session.Device](ctx, o, http.MethodGet, "/devices/"+url.PathEscape(id), nil)
}

// Revoke ends a device at once.
func (o *Operator) Revoke(ctx context.Context, id string) (session.Device, error) {
	return ask[session.Device](ctx, o, http.MethodPost, "/devices/"+url.PathEscape(id)+"/revoke", struct{}{})
}

// Shorten takes time or grants away from a device.
func (o *Operator) Shorten(ctx context.Context, id string, req host.PairRequest) (session.Device, error) {
	return ask[session.Device](ctx, o, http.MethodPost, "/devices/"+url.PathEscape(id)+"/shorten", req)
}
