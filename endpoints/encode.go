package endpoints

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hermes-reach/hermes-reach/endpoints/pyjson"
)

// A Form is how much a payload says.
type Form int

const (
	// FormField is what fits a QR code that phones scan: without certificates,
	// service tables and prose, none of which phones read.
	FormField Form = iota
	// FormInvite is what desktops demand: certificates, and recommended:true on
	// a valid Secure Link.
	FormInvite
)

// Encode writes the payload as compact ASCII JSON with integers only, which is
// what every client in the field accepts. It computes the version, writes
// today's role spelling for Reach, and refuses what clients would refuse.
// Sig is written as it stands; EncodeSigned makes it.
func Encode(p *Payload, form Form) ([]byte, error) {
	out := *p
	out.Endpoints = make([]Candidate, len(p.Endpoints))
	for i, c := range p.Endpoints {
		out.Endpoints[i] = shape(c, form)
	}
	out.DashboardURL = strings.TrimRight(p.DashboardURL, "/")
	out.Hermes = version(&out)
	if err := out.check(); err != nil {
		return nil, fmt.Errorf("endpoints: encode payload: %w", err)
	}
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(&out); err != nil {
		return nil, fmt.Errorf("endpoints: encode payload: %w", err)
	}
	text := ascii(bytes.TrimSuffix(buf.Bytes(), []byte("\n")))
	if len(text) > MaxPayload {
		return nil, fmt.Errorf("endpoints: encode payload: %d bytes, at most %d", len(text), MaxPayload)
	}
	return text, nil
}

// EncodeSigned is Encode with "sig" made by the QR secret.
func EncodeSigned(p *Payload, form Form, secret []byte) ([]byte, error) {
	out := *p
	out.Sig = ""
	text, err := Encode(&out, form)
	if err != nil {
		return nil, err
	}
	if out.Sig, err = Sign(secret, text); err != nil {
		return nil, err
	}
	return Encode(&out, form)
}

func version(p *Payload) int {
	switch r := p.Relay; {
	case len(p.Endpoints) > 0:
		return 3
	case r != nil && (r.TTLSeconds != nil || len(r.Grants) > 0 || r.TransportHint != ""):
		return 2
	default:
		return 1
	}
}

// shape copies a candidate into a form. The caller's own is left alone.
func shape(c Candidate, form Form) Candidate {
	if c.Role.IsBroker() {
		c.Role = RoleOutboundBroker
	}
	if c.Broker != nil {
		b := *c.Broker
		if b.ProtocolVersion == 0 {
			b.ProtocolVersion = 1
		}
		c.Broker = &b
	}
	if c.Proxy == nil {
		return c
	}
	p := *c.Proxy
	p.Surfaces = normalSurfaces(p.Surfaces)
	if form == FormInvite {
		if c.Role == RolePluginProxy && p.Valid() == nil {
			c.Recommended = true
		}
	} else {
		c.Description, c.Capabilities = "", nil
		p.CertDER, p.Services = "", nil
	}
	c.Proxy = &p
	return c
}

// ascii escapes what lies outside ASCII in a JSON text, which can only be
// inside strings. DEL is ASCII and stays: JSON allows it.
func ascii(text []byte) []byte {
	out := make([]byte, 0, len(text))
	for _, r := range string(text) {
		if r < 0x80 {
			out = append(out, byte(r))
			continue
		}
		quoted := pyjson.AppendString(nil, string(r))
		out = append(out, quoted[1:len(quoted)-1]...)
	}
	return out
}

// check refuses what a client in the field would refuse.
func (p *Payload) check() error {
	switch {
	case strings.TrimSpace(p.Host) == "":
		return errors.New("host is blank")
	case !validPort(int64(p.Port)):
		return errors.New("port is not between 1 and 65535")
	case !visible(p.Key):
		return errors.New("key has characters that phones refuse: it must be visible ASCII")
	case len(p.Endpoints) > MaxCandidates:
		return fmt.Errorf("more than %d candidates", MaxCandidates)
	}
	if err := p.Relay.check(); err != nil {
		return err
	}
	for i, c := range p.Endpoints {
		if err := c.check(); err != nil {
			return fmt.Errorf("candidate %d: %w", i, err)
		}
	}
	return nil
}

func (r *PayloadRelay) check() error {
	if r == nil {
		return nil
	}
	if r.TTLSeconds != nil && *r.TTLSeconds < 0 {
		return errors.New("relay.ttl_seconds is negative")
	}
	for _, seconds := range r.Grants {
		if seconds < 0 {
			return errors.New("relay.grants has a negative number of seconds")
		}
	}
	return nil
}

func (c Candidate) check() error {
	switch {
	case c.Role == "":
		return errors.New("no role")
	case c.API != nil && (c.API.Host == "" || !validPort(int64(c.API.Port))):
		return errors.New("api needs a host and a port between 1 and 65535")
	case c.Relay != nil && c.Relay.URL == "":
		return errors.New("relay has no url")
	case c.Dashboard != nil && c.Dashboard.URL == "":
		return errors.New("dashboard has no url")
	case c.Role.IsBroker() || c.Broker != nil:
		return c.BrokerValid(time.Time{}) // expiry is for readers to judge
	case c.Proxy != nil:
		return c.ProxyValid()
	}
	return nil
}
