package admin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// local does what is asked in the process that holds the file.
type local struct {
	store  *store.Store
	broker *broker.Broker // nil when none runs
}

var errNoToken = errors.New("the request has no token_sha256")

func (l *local) add(_ context.Context, r addRequest) (Host, error) {
	if r.Token == (wire.Digest{}) {
		return Host{}, errNoToken
	}
	if err := l.store.AddHost(r.Name, r.HostID, r.Token); err != nil {
		return Host{}, err
	}
	h, _, err := l.store.Host(r.HostID)
	return shown(h), err
}

func (l *local) list(context.Context) ([]Host, error) {
	hosts, err := l.store.Hosts()
	if err != nil {
		return nil, err
	}
	list := make([]Host, len(hosts))
	for i, h := range hosts {
		list[i] = shown(h)
		if list[i].Credentials, err = l.credentials(h); err != nil {
			return nil, err
		}
		if l.broker != nil {
			here := l.broker.Host(h.ID)
			list[i].Sessions, list[i].Streams = here.Sessions, here.Streams
		}
	}
	return list, nil
}

func (l *local) credentials(h store.Host) (int, error) {
	creds, err := l.store.Credentials(h.ID)
	n := 0
	for _, c := range creds {
		if !c.Used && c.Expires.After(time.Now()) {
			n++
		}
	}
	return n, err
}

func (l *local) rotate(_ context.Context, r rotateRequest) (Host, error) {
	if r.Overlap < 0 || r.Overlap > MaxOverlap {
		return Host{}, fmt.Errorf("rotate the token of %q: an overlap is 0 to %d days", r.Name, MaxOverlap/(24*time.Hour))
	}
	if r.Token == (wire.Digest{}) {
		return Host{}, errNoToken
	}
	h, err := l.store.RotateHost(r.Name, r.Token, r.Overlap)
	if err == nil && l.broker != nil {
		l.broker.HostRotated(h.ID)
	}
	return shown(h), err
}

func (l *local) remove(_ context.Context, r removeRequest) (Host, error) {
	h, err := l.store.RemoveHost(r.Name)
	if err == nil && l.broker != nil {
		l.broker.HostRemoved(h.ID)
	}
	return shown(h), err
}

// shown is a host without its digests.
func shown(h store.Host) Host {
	s := Host{ID: h.ID, Name: h.Name, Created: h.Created}
	for _, t := range h.Tokens {
		if t.Until.After(time.Now()) && t.Until.After(s.OldTokenUntil) {
			s.OldTokenUntil = t.Until
		}
	}
	return s
}
