package host

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// EnrolledBroker is a broker that this host registers with.
type EnrolledBroker struct {
	URL    wire.BrokerURL `json:"url"`
	HostID wire.ID        `json:"host_id"`
	Token  string         `json:"token"` // secret
	Name   string         `json:"name,omitempty"`
}

// Enrolled is the list of brokers in a state folder: one owner-only file, read
// anew whenever it is asked for. It may be used beside a running host.
type Enrolled struct{ path string }

// OpenEnrolled checks that the list in dir can be read.
func OpenEnrolled(dir string) (*Enrolled, error) {
	e := &Enrolled{path: filepath.Join(dir, "brokers.json")}
	_, err := e.List()
	return e, err
}

// List gives the brokers in the order in which they were enrolled.
func (e *Enrolled) List() ([]EnrolledBroker, error) {
	data, err := os.ReadFile(e.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the list of brokers: %w", err)
	}
	var file struct {
		Version int              `json:"version"`
		Brokers []EnrolledBroker `json:"brokers"`
	}
	if err := json.Unmarshal(data, &file); err != nil || file.Version != 1 {
		return nil, fmt.Errorf("%s is damaged or of another version: enrol again after removing it", e.path)
	}
	return file.Brokers, nil
}

// Add enrols with the broker of a line that `broker host add` printed. A line
// for a broker that is enrolled already replaces its token.
func (e *Enrolled) Add(line wire.HostLine) (EnrolledBroker, error) {
	if line.Pin != "" {
		return EnrolledBroker{}, errors.New("this broker has a certificate of its own making, which this version " +
			"cannot check: start it with --tls-cert and --tls-key and add the host again")
	}
	brokers, err := e.List()
	if err != nil {
		return EnrolledBroker{}, err
	}
	// Devices in the field know only this spelling, and the one in a route
	// credential must be the one in the invite.
	u, err := wire.ParseBrokerURL(line.URL.V1(), true)
	if err != nil {
		return EnrolledBroker{}, err
	}
	b := EnrolledBroker{URL: u, HostID: line.HostID, Token: line.Token, Name: line.Name}
	kept := []EnrolledBroker{}
	for _, old := range brokers {
		if old.URL != b.URL {
			kept = append(kept, old)
		}
	}
	return b, e.save(append(kept, b))
}

// Remove forgets a broker, named by its URL or host:port.
func (e *Enrolled) Remove(name string) error {
	brokers, err := e.List()
	if err != nil {
		return err
	}
	kept := []EnrolledBroker{}
	for _, b := range brokers {
		if b.URL.String() != name && b.URL.HostPort() != name && b.URL.Host() != name {
			kept = append(kept, b)
		}
	}
	if len(kept) == len(brokers) {
		return fmt.Errorf("this host is not enrolled with a broker %q", name)
	}
	return e.save(kept)
}

func (e *Enrolled) save(brokers []EnrolledBroker) error {
	data, err := json.MarshalIndent(map[string]any{"version": 1, "brokers": brokers}, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(e.path, append(data, '\n'))
}

// Reload reads the list of brokers and starts and stops sessions to match.
func (h *Host) Reload() error {
	want, err := h.enrolled.List()
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	var kept, gone []*running
	for _, r := range h.connectors {
		if i := indexOf(want, r.broker); i >= 0 {
			want = append(want[:i], want[i+1:]...)
			kept = append(kept, r)
		} else {
			gone = append(gone, r)
		}
	}
	h.connectors = kept
	for _, b := range want {
		r, err := h.startBroker(b)
		if err != nil {
			return fmt.Errorf("broker %s: %w", b.URL.HostPort(), err)
		}
		h.connectors = append(h.connectors, r)
	}
	for _, r := range gone {
		h.log.Info("broker left", "broker", r.broker.URL.HostPort())
		r.stop()
	}
	return nil
}

func indexOf(list []EnrolledBroker, b EnrolledBroker) int {
	for i := range list {
		if list[i] == b {
			return i
		}
	}
	return -1
}

// startBroker begins to serve what comes in through a broker. The lock is held.
func (h *Host) startBroker(b EnrolledBroker) (*running, error) {
	conn, err := connector.New(connector.Config{
		URL: b.URL, HostID: b.HostID, Token: b.Token, TLS: &tls.Config{RootCAs: h.cfg.Roots, MinVersion: tls.VersionTLS12},
		Instance: h.instance, Epoch: h.epoch, Agent: "hermes-reach/" + h.cfg.Version,
		Admit: h.admit, OnReused: h.bootstrapReused, Link: h.cfg.Link, Log: h.log,
	})
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	r := &running{broker: b, conn: conn, stop: stop, done: make(chan struct{})}
	served := make(chan struct{})
	go func() {
		defer close(served)
		if err := h.server.Serve(conn); err != nil && ctx.Err() == nil {
			h.log.Error("broker path not served", "broker", b.URL.HostPort(), "err", err)
		}
	}()
	go func() { // both end with Run's shutdown, or when the broker is left
		defer close(r.done)
		_ = conn.Run(ctx)
		<-served
	}()
	return r, nil
}

// admit decides on a stream before its device hears of a match: the broker may
// be slow to learn of a revocation, or lie.
func (h *Host) admit(o *wire.Open) wire.Code {
	switch o.CredentialKind {
	case wire.KindBootstrap:
		if !h.pairings.live(o.PairingID) {
			return wire.CodeRefused
		}
	case wire.KindRoute:
		if !h.sessions.Knows(o.CredentialID) {
			return wire.CodeRevoked
		}
	}
	return ""
}

// bootstrapReused tells the operator that an invite was tried a second time.
func (h *Host) bootstrapReused(pairing, via string) {
	h.log.Warn("an invite was used a second time: if that was not you, mint a new one", "pairing", pairing, "via", via)
}

// brokers gives the connectors of now.
func (h *Host) brokers() []*running {
	h.mu.Lock()
	defer h.mu.Unlock()
	return append([]*running(nil), h.connectors...)
}
