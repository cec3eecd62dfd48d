package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"

	"github.com/coder/websocket"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/profile"
)

// device is a paired device with a client for each way it may go.
type device struct {
	name    string
	bearer  string
	profile *profile.Profile
	path    reach.Path // it was paired over
	best    *reach.Client
	direct  *reach.Client
	broker  *reach.Client
}

// join mints an invite and pairs a device with it, by any way or by one role.
func (r *run) join(ctx context.Context, name string, only endpoints.Role) (*device, error) {
	inv, err := r.site.op.Pair(ctx, host.PairRequest{})
	if err != nil {
		return nil, err
	}
	payload, err := endpoints.ParseInvite(inv.Text)
	if err != nil {
		return nil, err
	}
	r.secrets["pairing code of "+name] = payload.Relay.Code
	store, err := profile.Open(filepath.Join(r.site.dir, name))
	if err != nil {
		return nil, err
	}
	defer func() { _ = store.Close() }()
	cfg := reach.Config{Outer: r.site.ca.Client(), Agent: "hermes-reach/demo", Log: r.log, Only: only}
	j, err := reach.Join(ctx, store, inv.Text, reach.JoinOptions{
		Device: reach.Device{Name: name, Platform: "demo", FormFactor: "desktop", Surface: "desktop"}, Client: cfg,
	})
	if err != nil {
		return nil, err
	}
	r.secrets["session token of "+name] = j.Profile.Session.Reveal()
	r.secrets["refresh token of "+name] = j.Profile.Refresh.Reveal()
	d := &device{name: name, bearer: r.site.bearer, profile: j.Profile, path: j.Path}
	for role, c := range map[endpoints.Role]**reach.Client{"": &d.best, endpoints.RolePluginProxy: &d.direct, endpoints.RoleOutboundBroker: &d.broker} {
		cfg.Profile, cfg.Only = j.Profile, role
		if *c, err = reach.New(cfg); err != nil {
			return nil, errors.Join(err, d.close())
		}
	}
	return d, nil
}

func (d *device) close() error {
	var errs []error
	for _, c := range []*reach.Client{d.best, d.direct, d.broker} {
		if c != nil {
			errs = append(errs, c.Close())
		}
	}
	return errors.Join(errs...)
}

// answer is a response that was read to its end.
type answer struct {
	status int
	body   []byte
	path   reach.Path
}

func (d *device) ask(ctx context.Context, c *reach.Client, method, path string, body []byte, auth bool) (*answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, reach.Origin+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if auth {
		req.Header.Set("Authorization", "Bearer "+d.bearer)
	}
	res, err := c.HTTPClient().Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	a := &answer{status: res.StatusCode}
	a.path, _ = reach.PathOf(res)
	if a.body, err = io.ReadAll(res.Body); err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	return a, nil
}

// expect asks and wants a status and a text in the body.
func (d *device) expect(ctx context.Context, c *reach.Client, method, path string, body []byte, status int, text string) (*answer, error) {
	a, err := d.ask(ctx, c, method, path, body, status != http.StatusUnauthorized)
	switch {
	case err != nil:
		return nil, err
	case a.status != status:
		return nil, fmt.Errorf("%s answered %d, want %d", path, a.status, status)
	case !bytes.Contains(a.body, []byte(text)):
		return nil, fmt.Errorf("%s did not answer what the service sends", path)
	}
	return a, nil
}

func (d *device) socket(ctx context.Context, c *reach.Client, path string) (*websocket.Conn, error) {
	ws, _, err := websocket.Dial(ctx, reach.Origin+path, &websocket.DialOptions{
		HTTPClient: c.HTTPClient(), HTTPHeader: http.Header{"Authorization": {"Bearer " + d.bearer}},
	})
	return ws, err
}

// relay opens the relay socket and proves the session on it.
func (d *device) relay(ctx context.Context, c *reach.Client) (*websocket.Conn, error) {
	ws, err := d.socket(ctx, c, "/relay/ws")
	if err != nil {
		return nil, err
	}
	auth := map[string]any{"session_token": d.profile.Session.Reveal(), "device_id": d.profile.DeviceID, "device_name": d.name}
	m, err := d.call(ctx, ws, "auth", auth)
	if err == nil && m.Type != "auth.ok" {
		err = fmt.Errorf("the relay answered %s", m.Type)
	}
	if err != nil {
		return nil, errors.Join(err, ws.CloseNow())
	}
	return ws, nil
}

// envelope is a message on the relay socket.
type envelope struct {
	Channel string         `json:"channel"`
	Type    string         `json:"type"`
	ID      string         `json:"id"`
	Payload map[string]any `json:"payload"`
}

func (d *device) call(ctx context.Context, ws *websocket.Conn, typ string, payload map[string]any) (envelope, error) {
	var m envelope
	text, err := json.Marshal(envelope{Channel: "system", Type: typ, ID: "demo", Payload: payload})
	if err != nil {
		return m, err
	}
	if err := ws.Write(ctx, websocket.MessageText, text); err != nil {
		return m, err
	}
	_, got, err := ws.Read(ctx)
	if err != nil {
		return m, err
	}
	return m, json.Unmarshal(got, &m)
}
