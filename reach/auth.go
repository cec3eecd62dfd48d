package reach

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/coder/websocket"

	"github.com/hermes-reach/hermes-reach/reach/profile"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// Bounds of the exchange that opens a Relay socket.
const (
	authTimeout = 30 * time.Second
	maxAuthOK   = 256 << 10 // bytes of one frame of the host
	maxOther    = 16        // frames before the answer that are no answer
)

// relayPaths are tried in order: the host's own session store, and the Relay
// for hosts in the field, which answer 404 to the first.
var relayPaths = []string{"/relay/session", "/relay/ws"}

// An AuthError is the host's no to a pairing code or a session token.
type AuthError struct {
	Reason string // the host's words, bounded
}

func (e *AuthError) Error() string { return fmt.Sprintf("the host refused: %.200q", e.Reason) }

// ErrRateLimited says that the host answers no more sign-ins from here for some
// minutes.
var ErrRateLimited = errors.New("the host refuses further attempts for a while: wait five minutes")

// errAfterCode says that the answer to a sent code or token was lost.
var errAfterCode = errors.New("the connection was lost after the credential was sent: it may have been used")

// A Device describes this device to the host, which shows it to its operator.
type Device struct {
	Name       string // "Ann's laptop"
	Hostname   string
	Model      string
	Platform   string // "linux", "darwin", "windows"
	FormFactor string // "desktop", "xr", "phone"
	Surface    string // "desktop", "quest", "android"
}

// envelope frames every message on a Relay socket.
type envelope struct {
	Channel string          `json:"channel"`
	Type    string          `json:"type"`
	ID      string          `json:"id"`
	Payload json.RawMessage `json:"payload"`
}

// authRequest is the first frame's payload. Exactly one of the three proofs is
// set: a host counts each failure.
type authRequest struct {
	SessionToken string `json:"session_token,omitempty"`
	RefreshToken string `json:"refresh_token,omitempty"`
	PairingCode  string `json:"pairing_code,omitempty"`

	DeviceID   string   `json:"device_id"`
	DeviceName string   `json:"device_name,omitempty"`
	Hostname   string   `json:"device_hostname,omitempty"`
	Model      string   `json:"device_model,omitempty"`
	Platform   string   `json:"device_platform,omitempty"`
	FormFactor string   `json:"device_form_factor,omitempty"`
	Surface    string   `json:"client_surface,omitempty"`
	Supports   supports `json:"supports"`
}

type supports struct {
	TypedStreamEvents  bool `json:"typed_stream_events"`
	EventSchemaVersion int  `json:"event_schema_version"`
}

func newAuthRequest(deviceID string, d Device) authRequest {
	return authRequest{
		DeviceID: deviceID, DeviceName: d.Name, Hostname: d.Hostname, Model: d.Model, Platform: d.Platform,
		FormFactor: d.FormFactor, Surface: d.Surface, Supports: supports{true, 1},
	}
}

// authOK is the payload of the host's yes.
type authOK struct {
	SessionToken  string              `json:"session_token"`
	RefreshToken  string              `json:"refresh_token"`
	ServerVersion string              `json:"server_version"`
	Expires       unixTime            `json:"expires_at"`
	Grants        map[string]unixTime `json:"grants"`
	Credential    *routeCredential    `json:"route_credential"`
	Credentials   []routeCredential   `json:"route_credentials"`
}

type routeCredential struct {
	Kind         string   `json:"kind"`
	BrokerURL    string   `json:"broker_url"`
	HostID       string   `json:"host_id"`
	CredentialID string   `json:"credential_id"`
	Token        string   `json:"token"`
	Expires      unixTime `json:"expires_at"`
}

// unixTime reads Unix seconds, with a fraction or not; null and what lies
// beyond the year 9999 mean never, the zero time.
type unixTime struct{ time.Time }

func (t *unixTime) UnmarshalJSON(text []byte) error {
	t.Time = time.Time{}
	if string(text) == "null" {
		return nil
	}
	var s float64
	if err := json.Unmarshal(text, &s); err != nil {
		return errors.New("not a number of seconds")
	}
	if s >= 0 && s <= float64(wire.MaxExpiry) {
		t.Time = time.Unix(int64(s), 0).UTC()
	}
	return nil
}

// apply writes what the host granted into a profile. An answer without a new
// refresh token leaves the old one good.
func (a *authOK) apply(p *profile.Profile) {
	p.Session, p.Expires, p.ServerVersion = profile.Secret(a.SessionToken), a.Expires.Time, a.ServerVersion
	if a.RefreshToken != "" {
		p.Refresh = profile.Secret(a.RefreshToken)
	}
	p.Grants = make(map[string]time.Time, len(a.Grants))
	for channel, end := range a.Grants {
		p.Grants[channel] = end.Time
	}
	for _, c := range a.credentials() {
		for _, cand := range p.Candidates {
			// The credential is sent to the candidate's broker, never to one
			// that only the credential names.
			if cand.Broker != nil && sameBroker(cand.Broker.URL, c.BrokerURL) && cand.Broker.HostID == c.HostID {
				p.SetRoute(profile.Route{
					BrokerURL: cand.Broker.URL, HostID: c.HostID, Kind: string(wire.KindRoute),
					CredentialID: c.CredentialID, Token: profile.Secret(c.Token), Expires: c.Expires.Time,
				})
			}
		}
	}
}

// credentials lists the well-formed ones.
func (a *authOK) credentials() []routeCredential {
	all := a.Credentials
	if a.Credential != nil {
		all = append([]routeCredential{*a.Credential}, all...)
	}
	var good []routeCredential
	for _, c := range all {
		if _, err := wire.ParseID(c.HostID); c.Kind == "broker_route" && err == nil && wire.CheckToken(c.Token) == nil {
			good = append(good, c)
		}
	}
	return good
}

// sameBroker compares byte for byte first, as the contract says, and else by
// where the URLs lead: hosts in the field tidy the URL before they send it.
func sameBroker(a, b string) bool {
	if a == b {
		return true
	}
	x, errX := wire.ParseBrokerURL(a, true)
	y, errY := wire.ParseBrokerURL(b, true)
	return errX == nil && errY == nil && x.HostPort() == y.HostPort() && pathIn(x.V1()) == pathIn(y.V1())
}

func pathIn(wssURL string) string {
	_, path, _ := strings.Cut(strings.TrimPrefix(wssURL, "wss://"), "/")
	return path
}

// signIn opens a Relay socket over the best path, sends the first frame and
// closes the socket after the answer. A path that fails before the credential
// was sent is passed over once.
func (c *Client) signIn(ctx context.Context, req authRequest) (*authOK, Path, error) {
	ctx, cancel := context.WithTimeout(ctx, authTimeout)
	defer cancel()
	var lost *loss
	for {
		cc, r, err := race(ctx, c, c.plan(), (*route).dialSocket, func(cc *http.ClientConn) { cc.Close() })
		if err != nil {
			return nil, Path{}, lost.join(err)
		}
		ok, sent, err := exchange(ctx, cc, r.Authority, req)
		cc.Close() // a 101 took the connection out of it: the socket is closed by then
		if err == nil {
			r.answered(c.now())
			return ok, r.Path, nil
		}
		if sent || lost != nil || ctx.Err() != nil || errors.Is(err, ErrRateLimited) {
			return nil, r.Path, lost.join(fmt.Errorf("sign in over %v: %w", r.Path, err))
		}
		r.lost(c.now(), err)
		lost = &loss{r, err}
	}
}

// dialSocket opens a connection that may serve several upgrades, one after the
// other: behind a broker of version 1 a bootstrap gives no second one.
func (r *route) dialSocket(ctx context.Context) (*http.ClientConn, error) {
	return r.upgrade.NewClientConn(ctx, "https", r.Authority)
}

// exchange reports whether the credential has left, whatever became of it.
func exchange(ctx context.Context, cc *http.ClientConn, authority string, req authRequest) (ok *authOK, sent bool, err error) {
	ws, err := openRelay(ctx, cc, authority)
	if err != nil {
		return nil, false, err
	}
	defer ws.CloseNow()
	ws.SetReadLimit(maxAuthOK)
	payload, err := json.Marshal(req)
	if err != nil {
		return nil, false, fmt.Errorf("encode the first frame: %w", err)
	}
	frame, err := json.Marshal(envelope{Channel: "system", Type: "auth", ID: rand.Text(), Payload: payload})
	if err != nil {
		return nil, false, fmt.Errorf("encode the first frame: %w", err)
	}
	if err := ws.Write(ctx, websocket.MessageText, frame); err != nil {
		return nil, true, errors.Join(errAfterCode, err)
	}
	ok, err = readAuth(ctx, ws)
	if err == nil {
		ws.Close(websocket.StatusNormalClosure, "") // the host's word is given: nothing hangs on it
	}
	return ok, true, err
}

func openRelay(ctx context.Context, rt http.RoundTripper, authority string) (*websocket.Conn, error) {
	opts := &websocket.DialOptions{
		HTTPClient: &http.Client{
			Transport:     rt,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		CompressionMode: websocket.CompressionDisabled,
	}
	for i, path := range relayPaths {
		ws, res, err := websocket.Dial(ctx, "wss://"+strings.TrimSuffix(authority, ":443")+path, opts)
		switch {
		case err == nil:
			return ws, nil
		case res == nil:
			return nil, fmt.Errorf("open %s: %w", path, err)
		case res.StatusCode == http.StatusTooManyRequests:
			return nil, ErrRateLimited
		case res.StatusCode != http.StatusNotFound || i == len(relayPaths)-1:
			return nil, fmt.Errorf("open %s: the host answered %s", path, res.Status)
		}
	}
	panic("unreachable: the last path returns")
}

// readAuth waits for auth.ok or auth.fail.
func readAuth(ctx context.Context, ws *websocket.Conn) (*authOK, error) {
	for range maxOther {
		_, text, err := ws.Read(ctx)
		if err != nil {
			return nil, errors.Join(errAfterCode, err)
		}
		var env envelope
		if json.Unmarshal(text, &env) != nil || env.Channel != "system" {
			continue // whatever else a host sends before its answer is not for us
		}
		switch env.Type {
		case "auth.ok":
			return parseAuthOK(env.Payload)
		case "auth.fail":
			var fail struct {
				Reason string `json:"reason"`
			}
			if json.Unmarshal(env.Payload, &fail) != nil || fail.Reason == "" {
				fail.Reason = "no reason given"
			}
			return nil, &AuthError{fail.Reason}
		}
	}
	return nil, errors.New("the host sent everything but an answer")
}

// parseAuthOK quotes nothing of the payload in its errors.
func parseAuthOK(payload []byte) (*authOK, error) {
	var ok authOK
	if err := json.Unmarshal(payload, &ok); err != nil {
		return nil, errors.New("the host's auth.ok does not parse")
	}
	const longest = 512
	if n := len(ok.SessionToken); n == 0 || n > longest || len(ok.RefreshToken) > longest {
		return nil, errors.New("the host's auth.ok has no usable session token")
	}
	return &ok, nil
}
