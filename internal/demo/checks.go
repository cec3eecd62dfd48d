package demo

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/coder/websocket"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/reach"
)

const (
	events = 200

	// heldBack is more than any load of this machine explains.
	heldBack = 100 * time.Millisecond
)

// way is a path by the name a person would give it.
type way struct {
	name   string
	client func(*device) *reach.Client
}

var ways = []way{
	{"directly", func(d *device) *reach.Client { return d.direct }},
	{"through the broker", func(d *device) *reach.Client { return d.broker }},
}

// all goes through the checks in the order in which a person would.
func (r *run) all(ctx context.Context) {
	r.secrets = map[string]string{
		"API bearer": r.site.bearer, "API answer": reply, "Dashboard page": page, "request body": secret,
		"API path": "/v1/models", "Dashboard path": "/dashboard/login", "relay path": "/relay/ws",
	}
	r.check("a laptop joins with an invite", func() (string, error) {
		var err error
		if r.laptop, err = r.join(ctx, "laptop", ""); err != nil {
			return "", err
		}
		return "over " + r.laptop.path.String(), nil
	})
	r.check("a headset joins through the broker alone", func() (string, error) {
		var err error
		if r.headset, err = r.join(ctx, "headset", endpoints.RoleOutboundBroker); err != nil {
			return "", err
		}
		return "over " + r.headset.path.String(), nil
	})
	if r.laptop == nil || r.headset == nil {
		return
	}
	defer func() { _, _ = r.laptop.close(), r.headset.close() }()
	for _, w := range ways {
		r.throughEachDoor(ctx, w)
	}
	r.check("200 events, each as it is sent", func() (string, error) { return r.stream(ctx) })
	r.check("the direct path goes: the next request takes the broker", func() (string, error) { return r.failover(ctx) })
	r.check("a revoked device is out", func() (string, error) { return r.revoke(ctx) })
	r.check("nobody on the way can read it", r.captured)
	r.check("the search finds what is sent in clear", func() (string, error) { return r.control(ctx) })
}

// throughEachDoor uses all three namespaces one way.
func (r *run) throughEachDoor(ctx context.Context, w way) {
	c, d := w.client(r.laptop), r.laptop
	r.check("/api "+w.name, func() (string, error) {
		if _, err := d.expect(ctx, c, http.MethodGet, "/api/v1/models", nil, http.StatusUnauthorized, ""); err != nil {
			return "", fmt.Errorf("without a bearer: %w", err)
		}
		if _, err := d.expect(ctx, c, http.MethodPost, "/api/v1/echo", []byte(`"`+secret+`"`), http.StatusOK, secret); err != nil {
			return "", err
		}
		a, err := d.expect(ctx, c, http.MethodGet, "/api/v1/models", nil, http.StatusOK, reply)
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("JSON with the bearer, 401 without, by %s", a.path.Role), nil
	})
	r.check("/dashboard "+w.name, func() (string, error) {
		a, err := d.expect(ctx, c, http.MethodGet, "/dashboard/login", nil, http.StatusOK, page)
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("%d bytes of HTML", len(a.body)), nil
	})
	r.check("/relay/ws "+w.name, func() (string, error) {
		ws, err := d.relay(ctx, c)
		if err != nil {
			return "", err
		}
		defer func() { _ = ws.CloseNow() }()
		began := time.Now()
		m, err := d.call(ctx, ws, "ping", map[string]any{"ts": 1})
		if err != nil || m.Type != "pong" {
			return "", fmt.Errorf("ping was answered with %q: %w", m.Type, errors.Join(err))
		}
		return fmt.Sprintf("signed in, ping %s", ms(time.Since(began))), nil
	})
	r.check("a WebSocket of the API "+w.name, func() (string, error) {
		ws, err := d.socket(ctx, c, "/api/v1/socket")
		if err != nil {
			return "", err
		}
		defer func() { _ = ws.CloseNow() }()
		if err := ws.Write(ctx, websocket.MessageText, []byte(secret)); err != nil {
			return "", err
		}
		_, got, err := ws.Read(ctx)
		if err != nil || string(got) != secret {
			return "", fmt.Errorf("the echo is not what was sent: %w", errors.Join(err))
		}
		return "echoed", nil
	})
}

// stream reads events through the broker and beside it, and compares.
func (r *run) stream(ctx context.Context) (string, error) {
	plain, err := r.readEvents(ctx, http.DefaultTransport, r.site.service.url()+"/v1/events")
	if err != nil {
		return "", fmt.Errorf("without Reach: %w", err)
	}
	reached, err := r.readEvents(ctx, r.laptop.broker, reach.Origin+"/api/v1/events")
	if err != nil {
		return "", err
	}
	added := make([]time.Duration, events)
	for i := range added {
		added[i] = max(0, reached[i]-median(plain))
	}
	slices.Sort(added)
	p99 := added[len(added)*99/100]
	if median(added) > heldBack {
		return "", fmt.Errorf("events are held back on the way: %s at the median", ms(median(added)))
	}
	return fmt.Sprintf("the broker adds %s at the median, %s at p99", ms(median(added)), ms(p99)), nil
}

// readEvents gives the delay of each event from its sending.
func (r *run) readEvents(ctx context.Context, t http.RoundTripper, url string) ([]time.Duration, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("%s?n=%d", url, events), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+r.site.bearer)
	res, err := (&http.Client{Transport: t}).Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = res.Body.Close() }()
	var delays []time.Duration
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		if !ok {
			continue
		}
		now := time.Since(start)
		var e struct {
			Token string        `json:"token"`
			Sent  time.Duration `json:"sent"`
		}
		if err := json.Unmarshal(data, &e); err != nil || e.Token != fmt.Sprintf("word%d", len(delays)) {
			return nil, errors.New("the events are not those that were sent")
		}
		delays = append(delays, now-e.Sent)
	}
	if err := lines.Err(); err != nil || len(delays) != events {
		return nil, fmt.Errorf("%d of %d events came: %w", len(delays), events, errors.Join(err))
	}
	return delays, nil
}

// failover cuts the direct path under a device that uses it.
func (r *run) failover(ctx context.Context) (string, error) {
	ask := func() (*answer, error) {
		return r.laptop.expect(ctx, r.laptop.best, http.MethodGet, "/api/v1/models", nil, http.StatusOK, reply)
	}
	before, err := ask()
	if err != nil {
		return "", err
	}
	if before.path.Role != endpoints.RolePluginProxy {
		return "", fmt.Errorf("the best path was %s before the cut, want the direct one", before.path)
	}
	r.site.direct.Shut()
	began := time.Now()
	after, err := ask()
	if err != nil {
		return "", err
	}
	if after.path.Role != endpoints.RoleOutboundBroker {
		return "", fmt.Errorf("the next request took %s, want the broker", after.path)
	}
	return fmt.Sprintf("no error, answered in %s", ms(time.Since(began))), nil
}

// revoke ends the headset while it has a socket open.
func (r *run) revoke(ctx context.Context) (string, error) {
	ws, err := r.headset.relay(ctx, r.headset.broker)
	if err != nil {
		return "", err
	}
	defer func() { _ = ws.CloseNow() }()
	devices, err := r.site.op.Devices(ctx)
	if err != nil {
		return "", err
	}
	id := ""
	for _, d := range devices {
		if d.Name == r.headset.name {
			id = d.ID
		}
	}
	began := time.Now()
	if _, err := r.site.op.Revoke(ctx, id); err != nil {
		return "", err
	}
	if _, _, err := ws.Read(ctx); err == nil {
		return "", errors.New("its socket was still served")
	}
	took := time.Since(began)
	_, err = r.headset.ask(ctx, r.headset.broker, http.MethodGet, "/relay/health", nil, false)
	if err == nil {
		return "", errors.New("its next request was answered")
	}
	return fmt.Sprintf("its open socket ended in %s, its next request is refused", ms(took)), nil
}

// captured searches what passed for everything that was secret. In front of the
// broker lies the outer TLS; inside it is what a broker could read, where only
// its own credentials may be found.
func (r *run) captured() (string, error) {
	if r.site.outside.Size() == 0 || r.site.inside.Size() == 0 {
		return "", errors.New("the captures are empty")
	}
	for name, text := range r.secrets {
		if text == "" {
			return "", fmt.Errorf("the %s is empty: nothing to search for", name)
		}
		for where, c := range map[string]*lab.Capture{"on the wire": r.site.outside, "at the broker": r.site.inside} {
			if c.Contains(text) {
				return "", fmt.Errorf("the %s can be read %s", name, where)
			}
		}
	}
	if r.site.outside.Contains(r.site.token) {
		return "", errors.New("the host's token can be read on the wire")
	}
	return fmt.Sprintf("%d secrets, paths and bodies are not in %s on the wire, nor in what the broker sees",
		len(r.secrets), size(r.site.outside.Size())), nil
}

// control sends a secret in clear past the same capture: the search must find it.
func (r *run) control(ctx context.Context) (string, error) {
	sink, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer func() { _ = sink.Close() }()
	c, err := lab.NewCapture(sink.Addr().String())
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	done := make(chan error, 1)
	go func() {
		conn, err := sink.Accept()
		if err == nil {
			_, err = io.Copy(io.Discard, conn)
			err = errors.Join(err, conn.Close())
		}
		done <- err
	}()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", c.Addr())
	if err != nil {
		return "", err
	}
	_, err = io.WriteString(conn, "GET /v1/models HTTP/1.1\r\nAuthorization: Bearer "+r.site.bearer+"\r\n\r\n")
	if err := errors.Join(err, conn.Close(), <-done); err != nil {
		return "", err
	}
	if !c.Contains(r.site.bearer) {
		return "", errors.New("a secret sent in clear was not found: the search is worth nothing")
	}
	if !r.site.inside.Contains(r.site.token) {
		return "", errors.New("the broker's own credential was not found in what the broker sees: the search is worth nothing")
	}
	return "a bearer in clear, and the host's own token at the broker", nil
}

func median(d []time.Duration) time.Duration {
	s := slices.Clone(d)
	slices.Sort(s)
	return s[len(s)/2]
}

func ms(d time.Duration) string {
	return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(d)/float64(time.Millisecond)), ".0") + " ms"
}

func size(n int) string { return fmt.Sprintf("%.1f MB", float64(n)/1e6) }
