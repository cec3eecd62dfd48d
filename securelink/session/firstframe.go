package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/coder/websocket"
)

// Bounds of what a frame may hold.
const (
	maxText      = 128 // descriptions
	maxToken     = 512
	maxID        = 128
	maxAnswer    = 256 << 10 // auth.ok, as a device reads it
	maxUnrelated = 16        // other messages a device reads past before its answer
)

// AuthRequest is the payload of the first frame: one way or several to prove a
// device, and what it says about itself. It is a secret and prints as none.
type AuthRequest struct {
	SessionToken string
	RefreshToken string
	PairingCode  string

	DeviceID         string
	DeviceName       string
	DeviceHostname   string // in place of an empty name
	DeviceModel      string
	DevicePlatform   string
	ClientSurface    string // android, desktop, quest, …
	DeviceFormFactor string // phone, desktop, xr, …
}

func (AuthRequest) String() string { return "auth request" }

// LogValue keeps the credentials out of logs.
func (r AuthRequest) LogValue() slog.Value { return slog.StringValue(r.String()) }

// AuthOK is the answer to a device that proved itself. It is a secret.
type AuthOK struct {
	SessionToken     string
	ServerVersion    string
	ExpiresAt        time.Time            // [Forever] for a session without end
	Grants           map[string]time.Time // name to end
	TransportHint    string
	ClientSurface    string
	DeviceFormFactor string
	RefreshToken     string // only when it is new: it replaces the one before
	// Routes are the ways to come back through a broker, the best first. The
	// first travels as route_credential, which is all that peers in the field
	// read; all of them as route_credentials.
	Routes []RouteCredential
}

func (AuthOK) String() string { return "auth answer" }

// LogValue keeps the tokens out of logs.
func (a AuthOK) LogValue() slog.Value { return slog.StringValue(a.String()) }

// envelope is every message on the socket.
type envelope struct {
	Channel string `json:"channel"`
	Type    string `json:"type"`
	ID      string `json:"id"`
	Payload any    `json:"payload"`
}

func encode(channel, typ, id string, payload any) ([]byte, error) {
	if id == "" {
		id = newSessionToken() // a UUID like any other
	}
	return json.Marshal(envelope{channel, typ, id, payload})
}

// members reads one JSON object. Unlike decoding into a struct it does not
// take "Session_Token" for session_token.
func members(b []byte) (map[string]json.RawMessage, error) {
	if !utf8.Valid(b) {
		return nil, errors.New("not UTF-8")
	}
	var m map[string]json.RawMessage
	if err := json.Unmarshal(b, &m); err != nil {
		return nil, errors.New("not a JSON object")
	}
	if m == nil {
		return nil, errors.New("null is no object")
	}
	return m, nil
}

// text reads a string member; absent and null are "". Anything else than a
// string, or one longer than limit, is an error.
func text(m map[string]json.RawMessage, name string, limit int) (s string, err error) {
	raw, ok := m[name]
	if !ok || string(raw) == "null" {
		return "", nil
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return "", fmt.Errorf("%s is not a string", name)
	}
	if len(s) > limit {
		return "", fmt.Errorf("%s is longer than %d bytes", name, limit)
	}
	return s, nil
}

// message is an envelope that came in.
type message struct {
	channel, typ, id string
	payload          json.RawMessage
}

// parseMessage reads an envelope. Members of the wrong type read as empty: no
// channel and no type is called "".
func parseMessage(b []byte) (message, error) {
	m, err := members(b)
	if err != nil {
		return message{}, err
	}
	var msg message
	msg.channel, _ = text(m, "channel", maxID)
	msg.typ, _ = text(m, "type", maxID)
	msg.id, _ = text(m, "id", maxID)
	msg.payload = m["payload"]
	return msg, nil
}

// parseFirst reads the first frame of a socket. A refusal is an [AuthError];
// the id is given for its answer whenever there is one.
func parseFirst(b []byte) (req AuthRequest, id string, err error) {
	msg, err := parseMessage(b)
	if err != nil {
		return req, "", &AuthError{ReasonFormat}
	}
	if msg.channel != "system" || msg.typ != "auth" {
		return req, msg.id, &AuthError{ReasonFirst}
	}
	m, err := members(msg.payload)
	if err != nil {
		return req, msg.id, &AuthError{ReasonInvalid}
	}
	for _, f := range req.fields() {
		if *f.to, err = text(m, f.name, f.limit); err != nil {
			return AuthRequest{}, msg.id, &AuthError{ReasonInvalid}
		}
	}
	return req, msg.id, nil
}

type field struct {
	name  string
	to    *string
	limit int
}

// fields are the members of the payload; what a description has too much is
// cut later, a credential or an id that is too long is none.
func (r *AuthRequest) fields() []field {
	const long = 4096
	return []field{
		{"session_token", &r.SessionToken, maxToken},
		{"refresh_token", &r.RefreshToken, maxToken},
		{"pairing_code", &r.PairingCode, maxToken},
		{"device_id", &r.DeviceID, maxDeviceID},
		{"device_name", &r.DeviceName, long},
		{"device_hostname", &r.DeviceHostname, long},
		{"device_model", &r.DeviceModel, long},
		{"device_platform", &r.DevicePlatform, long},
		{"client_surface", &r.ClientSurface, long},
		{"device_form_factor", &r.DeviceFormFactor, long},
	}
}

// epoch is an end in a message: whole seconds, or null for none.
type epoch time.Time

// MarshalJSON writes seconds or null.
func (e epoch) MarshalJSON() ([]byte, error) {
	if time.Time(e).Equal(Forever) {
		return []byte("null"), nil
	}
	return json.Marshal(time.Time(e).Unix())
}

// UnmarshalJSON reads seconds, with or without a fraction.
func (e *epoch) UnmarshalJSON(b []byte) error {
	if string(b) == "null" {
		*e = epoch(Forever)
		return nil
	}
	var f float64
	if err := json.Unmarshal(b, &f); err != nil || f <= 0 || f > float64(Forever.Unix()) {
		return errors.New("not a time")
	}
	whole, frac := math.Modf(f)
	*e = epoch(time.Unix(int64(whole), int64(frac*1e9)).UTC())
	return nil
}

type routeWire struct {
	Kind         string `json:"kind"`
	BrokerURL    string `json:"broker_url"`
	HostID       string `json:"host_id"`
	CredentialID string `json:"credential_id"`
	Token        string `json:"token"`
	ExpiresAt    epoch  `json:"expires_at"`
}

type okWire struct {
	SessionToken     string            `json:"session_token"`
	ServerVersion    string            `json:"server_version"`
	Profiles         []json.RawMessage `json:"profiles"`
	ExpiresAt        *epoch            `json:"expires_at"`
	Grants           map[string]*epoch `json:"grants"`
	TransportHint    string            `json:"transport_hint"`
	ClientSurface    string            `json:"client_surface"`
	DeviceFormFactor string            `json:"device_form_factor"`
	RefreshToken     string            `json:"refresh_token,omitempty"`
	Route            *routeWire        `json:"route_credential,omitempty"`
	Routes           []routeWire       `json:"route_credentials,omitempty"`
}

const routeKind = "broker_route"

// MarshalJSON writes the payload of auth.ok.
func (a AuthOK) MarshalJSON() ([]byte, error) {
	end := epoch(a.ExpiresAt)
	w := okWire{SessionToken: a.SessionToken, ServerVersion: a.ServerVersion, Profiles: []json.RawMessage{},
		ExpiresAt: &end, Grants: make(map[string]*epoch), TransportHint: a.TransportHint,
		ClientSurface: a.ClientSurface, DeviceFormFactor: a.DeviceFormFactor, RefreshToken: a.RefreshToken}
	for n, t := range a.Grants {
		g := epoch(t)
		w.Grants[n] = &g
	}
	for _, r := range a.Routes {
		w.Routes = append(w.Routes, routeWire{routeKind, r.BrokerURL, r.HostID, r.CredentialID, r.Token, epoch(r.Expires)})
	}
	if len(w.Routes) > 0 {
		w.Route = &w.Routes[0]
	}
	return json.Marshal(w)
}

// UnmarshalJSON reads it on a device. Routes of a kind it does not know are
// left out.
func (a *AuthOK) UnmarshalJSON(b []byte) error {
	var w okWire
	if err := json.Unmarshal(b, &w); err != nil {
		return errors.New("auth.ok does not have the form of relay-auth")
	}
	if w.SessionToken == "" || len(w.SessionToken) > maxToken || len(w.RefreshToken) > maxToken || len(w.Grants) > 4*maxGrants {
		return errors.New("auth.ok is out of bounds")
	}
	*a = AuthOK{SessionToken: w.SessionToken, ServerVersion: w.ServerVersion, ExpiresAt: orForever(w.ExpiresAt),
		Grants: make(map[string]time.Time), TransportHint: w.TransportHint, ClientSurface: w.ClientSurface,
		DeviceFormFactor: w.DeviceFormFactor, RefreshToken: w.RefreshToken}
	for n, g := range w.Grants {
		a.Grants[n] = orForever(g)
	}
	if len(w.Routes) == 0 && w.Route != nil {
		w.Routes = []routeWire{*w.Route}
	}
	for _, r := range w.Routes {
		if r.Kind == routeKind {
			a.Routes = append(a.Routes, RouteCredential{r.BrokerURL, r.HostID, r.CredentialID, r.Token, time.Time(r.ExpiresAt)})
		}
	}
	return nil
}

// orForever is a null that encoding/json turned into a nil pointer.
func orForever(e *epoch) time.Time {
	if e == nil {
		return Forever
	}
	return time.Time(*e)
}

// Authenticate is the device's side: it sends the first frame on a fresh
// socket and reads the answer. The socket must have gone through the pinned
// connection: the frame holds credentials. A refusal is an [*AuthError]; any
// other error leaves it open whether a code was used up. If ctx ends, the
// socket is closed. Its read limit is set to 256 KiB and left so.
func Authenticate(ctx context.Context, c *websocket.Conn, req AuthRequest) (AuthOK, error) {
	payload := map[string]any{"supports": map[string]any{"typed_stream_events": true, "event_schema_version": 1}}
	for _, f := range req.fields() {
		if *f.to != "" {
			payload[f.name] = *f.to
		}
	}
	c.SetReadLimit(maxAnswer)
	msg, err := exchange(ctx, c, "auth", payload, "auth.ok", "auth.fail")
	if err != nil {
		return AuthOK{}, fmt.Errorf("authenticate: %w", err)
	}
	if msg.typ == "auth.fail" {
		m, _ := members(msg.payload)
		reason, _ := text(m, "reason", 4096)
		if reason = clip(cleanText(reason), maxText); reason == "" {
			reason = "no reason given"
		}
		return AuthOK{}, &AuthError{Reason: reason}
	}
	var ok AuthOK
	if err := json.Unmarshal(msg.payload, &ok); err != nil {
		return AuthOK{}, fmt.Errorf("authenticate: %w", err)
	}
	return ok, nil
}

// exchange sends one system message and reads until an answer of one of the
// types comes. What else arrives meanwhile is read past, within bounds.
func exchange(ctx context.Context, c *websocket.Conn, typ string, payload any, answers ...string) (message, error) {
	id := newSessionToken()
	b, err := encode("system", typ, id, payload)
	if err != nil {
		return message{}, err
	}
	if err := c.Write(ctx, websocket.MessageText, b); err != nil {
		return message{}, err
	}
	for range maxUnrelated {
		kind, b, err := c.Read(ctx)
		if err != nil {
			return message{}, err
		}
		msg, err := parseMessage(b)
		if kind != websocket.MessageText || err != nil || msg.channel != "system" {
			continue
		}
		if slices.Contains(answers, msg.typ) {
			return msg, nil
		}
		if msg.typ == "error" && msg.id == id {
			m, _ := members(msg.payload)
			text, _ := text(m, "message", 4096)
			return message{}, fmt.Errorf("the host answered: %s", clip(cleanText(text), maxText))
		}
	}
	return message{}, errors.New("the host sent other messages and no answer")
}

// OwnSession asks the host what this device may do. Like its siblings it is
// for a socket that has authenticated, while nobody else reads it.
func OwnSession(ctx context.Context, c *websocket.Conn) (Device, error) {
	return askSession(ctx, c, map[string]any{"action": "list"})
}

// ShortenSession gives up time that this device has left. A grant that is over
// at once is written as one more second.
func ShortenSession(ctx context.Context, c *websocket.Conn, r Reduction) (Device, error) {
	ask := map[string]any{"action": "shorten"}
	if r.TTL != 0 {
		ask["ttl_seconds"] = wholeSeconds(r.TTL)
	}
	grants := make(map[string]int64)
	for n, d := range r.Grants {
		grants[n] = wholeSeconds(d)
	}
	if len(grants) > 0 {
		ask["grants"] = grants
	}
	return askSession(ctx, c, ask)
}

// RevokeSession takes this device off the host's list. The host closes the
// socket when it has answered.
func RevokeSession(ctx context.Context, c *websocket.Conn) error {
	_, err := askSession(ctx, c, map[string]any{"action": "revoke"})
	return err
}

// wholeSeconds never says 0 for a short time: 0 is no end.
func wholeSeconds(d time.Duration) int64 {
	if d == Never {
		return 0
	}
	return max(1, TTLSeconds(d))
}

func askSession(ctx context.Context, c *websocket.Conn, ask map[string]any) (Device, error) {
	msg, err := exchange(ctx, c, "session", ask, "session")
	if err != nil {
		return Device{}, fmt.Errorf("own session: %w", err)
	}
	var a sessionAnswer
	if err := json.Unmarshal(msg.payload, &a); err != nil {
		return Device{}, errors.New("own session: the host's answer has another form")
	}
	w := a.Session
	d := Device{ID: clip(cleanText(w.ID), maxText), Name: clip(cleanText(w.Name), maxText), Path: clip(cleanText(w.Path), maxText),
		Created: orForever(w.Created), LastSeen: orForever(w.LastSeen), Expires: orForever(w.ExpiresAt), Grants: make(map[string]time.Time)}
	for n, g := range w.Grants {
		d.Grants[n] = orForever(g)
	}
	return d, nil
}
