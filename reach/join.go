package reach

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach/profile"
)

// ErrInvite is wrapped by every refusal of an invite before anything was sent.
var ErrInvite = errors.New("this invite cannot be used")

// JoinOptions says how this device pairs. The zero value is right but for
// Device.
type JoinOptions struct {
	// Profile is the name to store the host under; "" = the name it had, or
	// one made from its host name.
	Profile string
	Device  Device
	// Client sets everything but Profile of the Client that pairs.
	Client Config
}

// Joined is what came of a pairing.
type Joined struct {
	Profile *profile.Profile // as stored
	Host    string           // the authority of the host, without port
	Path    Path             // what the pairing went over
	Again   bool             // the host was known: its old profile was replaced
	Notes   []string         // for people: candidates that were left out, and why
}

// Join pairs this device with the host of an invite and stores the profile. The
// invite's pairing code leaves the device only inside a connection whose far
// end has proved the invite's pin; until then nothing is stored.
//
// A host that is known by its pin keeps its name; its session and credentials
// are replaced. Candidates behind a broker for which the host gave no durable
// credential are left out, and Notes says so.
func Join(ctx context.Context, store *profile.Store, invite string, opts JoinOptions) (*Joined, error) {
	payload, err := endpoints.ParseInvite(invite)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvite, err)
	}
	now := time.Now
	if opts.Client.Now != nil {
		now = opts.Client.Now
	}
	p, notes, err := fromPayload(payload, now())
	if err != nil {
		return nil, err
	}
	j := &Joined{Profile: p, Notes: notes}
	if err := j.name(store, opts.Profile); err != nil {
		return nil, err
	}
	if p.DeviceID, err = store.DeviceID(); err != nil {
		return nil, err
	}
	p.DeviceName, p.Paired = opts.Device.Name, now().UTC().Truncate(time.Second)
	if err := j.pair(ctx, opts, payload.Relay.Code); err != nil {
		return nil, err
	}
	j.settle()
	if err := store.Save(p); err != nil {
		return nil, fmt.Errorf("paired, but the profile could not be stored: revoke this device at the host and pair again: %w", err)
	}
	return j, nil
}

// fromPayload makes the profile to pair with: the candidates that end at the
// invite's one pin, and the bootstrap credentials.
func fromPayload(payload *endpoints.Payload, now time.Time) (*profile.Profile, []string, error) {
	if payload.Relay == nil || !goodCode(payload.Relay.Code) {
		return nil, nil, fmt.Errorf("%w: it carries no pairing code", ErrInvite)
	}
	p := &profile.Profile{APIKey: profile.Secret(payload.Key)}
	var notes []string
	for _, s := range payload.Skipped {
		notes = append(notes, fmt.Sprintf("candidate %d was left out: %s", s.Index+1, s.Reason))
	}
	for _, cand := range payload.Candidates() {
		if err := usable(cand, now); err != nil {
			notes = append(notes, fmt.Sprintf("%v was left out: %v", pathOf(cand), err))
			continue
		}
		pin, err := pins.Parse(cand.Proxy.PinSHA256)
		if err != nil {
			return nil, nil, fmt.Errorf("%w: %w", ErrInvite, err)
		}
		if len(p.Candidates) > 0 && !pin.Equal(p.Pin) {
			return nil, nil, fmt.Errorf("%w: its candidates name different host keys: it was put together from several, or tampered with", ErrInvite)
		}
		p.Pin = pin
		if b := cand.Broker; b != nil {
			p.SetRoute(profile.Route{
				BrokerURL: b.URL, HostID: b.HostID, Kind: b.CredentialKind, Token: profile.Secret(b.Token), Expires: expiry(b),
			})
			bare := *b
			bare.Token, bare.CredentialKind, bare.ExpiresAt = "", "", 0
			cand.Broker = &bare
		}
		p.Candidates = append(p.Candidates, cand)
	}
	if len(p.Candidates) == 0 {
		return nil, nil, fmt.Errorf("%w: no candidate in it leads to a pinned host: %s", ErrInvite, strings.Join(notes, "; "))
	}
	return p, notes, nil
}

func expiry(b *endpoints.Broker) time.Time {
	if b.ExpiresAt == 0 {
		return time.Time{}
	}
	return b.ExpiresAt.Time()
}

// goodCode has the form that hosts make: A to Z and digits, read in any case.
func goodCode(code string) bool {
	code = strings.ToUpper(strings.TrimSpace(code))
	return len(code) == 6 && strings.Trim(code, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") == ""
}

// usable refuses candidates without a pin: nothing else may see the code.
func usable(cand endpoints.Candidate, now time.Time) error {
	switch {
	case cand.Proxy == nil:
		return errors.New("it has no pinned Secure Link, and a pairing code is sent to nothing else")
	case cand.Role.IsBroker() || cand.Broker != nil:
		if err := cand.BrokerValid(now); err != nil {
			return err
		}
	default:
		if err := cand.ProxyValid(); err != nil {
			return err
		}
	}
	return checkCertificate(cand.Proxy)
}

// checkCertificate refuses a candidate whose certificate is not of its pin: one
// of the two has been changed on the way.
func checkCertificate(p *endpoints.Proxy) error {
	if p.CertDER == "" {
		return nil
	}
	der, err := base64.StdEncoding.DecodeString(p.CertDER)
	if err != nil {
		return errors.New("its certificate is not base64")
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return errors.New("its certificate does not parse")
	}
	if pins.Of(cert).String() != p.PinSHA256 {
		return errors.New("its certificate and its pin are of different keys")
	}
	return nil
}

// name chooses what the profile is called.
func (j *Joined) name(store *profile.Store, wish string) error {
	p := j.Profile
	j.Host, _, _ = net.SplitHostPort(pathOf(p.Candidates[0]).Authority) // made by JoinHostPort
	old, err := store.ByPin(p.Pin)
	switch {
	case err == nil:
		j.Again, p.Name = true, old.Name
		if wish != "" && wish != old.Name {
			return fmt.Errorf("this host is paired already, as profile %q: join without a name, or rename it first", old.Name)
		}
	case !errors.Is(err, profile.ErrNotFound):
		return err
	case wish != "":
		if err := profile.CheckName(wish); err != nil {
			return err
		}
		names, err := store.Names()
		if err != nil {
			return err
		}
		if slices.Contains(names, wish) {
			return fmt.Errorf("%w: profile %q belongs to another host: choose another name or remove it first", profile.ErrExists, wish)
		}
		p.Name = wish
	default:
		p.Name = store.FreeName(nameOf(j.Host))
	}
	return nil
}

// nameOf is the first label of a host name; an address says nothing to people.
func nameOf(host string) string {
	if net.ParseIP(host) != nil || host == "localhost" {
		return ""
	}
	first, _, _ := strings.Cut(host, ".")
	return first
}

// pair spends the code.
func (j *Joined) pair(ctx context.Context, opts JoinOptions, code string) error {
	cfg := opts.Client
	cfg.Profile = j.Profile
	c, err := New(cfg)
	if err != nil {
		return fmt.Errorf("pair: %w", err)
	}
	req := newAuthRequest(j.Profile.DeviceID, opts.Device)
	req.PairingCode = strings.ToUpper(strings.TrimSpace(code))
	ok, path, err := c.signIn(ctx, req)
	err = errors.Join(err, c.Close())
	if _, refused := errors.AsType[*AuthError](err); refused || errors.Is(err, errAfterCode) {
		return fmt.Errorf("pair: %w: the code works once and for ten minutes: make a new invite with `hermes-reach pair`", err)
	}
	if err != nil {
		return fmt.Errorf("pair: %w", err)
	}
	j.Path = path
	ok.apply(j.Profile)
	return nil
}

// settle leaves out what worked for the pairing only.
func (j *Joined) settle() {
	p := j.Profile
	p.Routes = slices.DeleteFunc(p.Routes, func(r profile.Route) bool { return r.Kind != endpoints.KindRoute })
	p.Candidates = slices.DeleteFunc(p.Candidates, func(c endpoints.Candidate) bool {
		if c.Broker == nil {
			return false
		}
		if _, ok := p.Route(c.Broker); ok {
			return false
		}
		j.Notes = append(j.Notes, fmt.Sprintf("%v was left out: the host gave no lasting credential for this broker; pair again when it is connected there",
			pathOf(c)))
		return true
	})
	if len(p.Candidates) == 0 {
		j.Notes = append(j.Notes, "no way to the host is left: pair again when the host is connected to its broker")
	}
}

// SignIn proves this device's session to the host again and returns the profile
// with what the host renewed: expiry, grants and the brokers' credentials. An
// expired session is traded for a new one with the refresh token, once. The
// caller stores the result; c goes on with what it had.
func SignIn(ctx context.Context, c *Client, p *profile.Profile, d Device) (*profile.Profile, Path, error) {
	out := p.Clone()
	req := newAuthRequest(p.DeviceID, d)
	req.SessionToken = p.Session.Reveal()
	ok, path, err := c.signIn(ctx, req)
	if _, refused := errors.AsType[*AuthError](err); refused && p.Refresh != "" {
		req.SessionToken, req.RefreshToken = "", p.Refresh.Reveal()
		ok, path, err = c.signIn(ctx, req)
	}
	if err != nil {
		return nil, path, err
	}
	ok.apply(out)
	return out, path, nil
}
