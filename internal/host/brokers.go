package host

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/internal/localsock"
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
		return nil, fmt.Errorf("%s is damaged or of another version, and was left as it is: "+
			"restore it from a backup, or remove it and enrol again", e.path)
	}
	for i, b := range file.Brokers {
		if b.URL.IsZero() || b.HostID.IsZero() || wire.CheckHostToken(b.Token) != nil {
			return nil, fmt.Errorf("%s is damaged: its entry %d has no good url, host_id or token; "+
				"restore it from a backup, or remove it and enrol again", e.path, i+1)
		}
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
	unlock, err := e.lock()
	if err != nil {
		return EnrolledBroker{}, err
	}
	defer unlock()
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
	kept := slices.DeleteFunc(brokers, func(old EnrolledBroker) bool { return old.same(b.URL) })
	return b, e.save(append(kept, b))
}

// same says whether two URLs lead to one broker, whatever their spelling.
func (b EnrolledBroker) same(u wire.BrokerURL) bool {
	return b.URL.HostPort() == u.HostPort() && b.path() == EnrolledBroker{URL: u}.path()
}

// path is what stands behind the host and port.
func (b EnrolledBroker) path() string {
	_, path, _ := strings.Cut(strings.TrimPrefix(b.URL.V1(), "wss://"), "/")
	return path
}

// Remove forgets a broker, named by its URL, its host:port, or its host where
// that is clear.
func (e *Enrolled) Remove(name string) error {
	unlock, err := e.lock()
	if err != nil {
		return err
	}
	defer unlock()
	brokers, err := e.List()
	if err != nil {
		return err
	}
	u, err := wire.ParseBrokerURL(name, true)
	isURL := err == nil
	var kept, gone []EnrolledBroker
	for _, b := range brokers {
		if isURL && b.same(u) || strings.EqualFold(name, b.URL.HostPort()) || strings.EqualFold(name, b.URL.Host()) {
			gone = append(gone, b)
		} else {
			kept = append(kept, b)
		}
	}
	switch {
	case len(gone) > 1:
		return fmt.Errorf("this host is enrolled with %d brokers %q: give the whole URL, %s or %s",
			len(gone), name, gone[0].URL, gone[1].URL)
	case len(gone) == 1:
		return e.save(kept)
	case len(kept) == 0:
		return fmt.Errorf("this host is not enrolled with a broker %q, nor with any other", name)
	}
	var known []string
	for _, b := range kept {
		known = append(known, b.URL.HostPort())
	}
	return fmt.Errorf("this host is not enrolled with a broker %q: it is with %s", name, strings.Join(known, ", "))
}

// lock keeps a second change of the list out until this one is written: of two
// at once, each would write what it had read and one be lost.
func (e *Enrolled) lock() (unlock func(), err error) {
	l, err := localsock.Lock(e.path + ".lock")
	if errors.Is(err, localsock.ErrLocked) {
		return nil, fmt.Errorf("another command is changing the list of brokers, try again: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("change the list of brokers: %w", err)
	}
	return func() { _ = l.Close() }, nil
}

func (e *Enrolled) save(brokers []EnrolledBroker) error {
	if brokers == nil {
		brokers = []EnrolledBroker{}
	}
	data, err := json.MarshalIndent(map[string]any{"version": 1, "brokers": brokers}, "", "  ")
	if err != nil {
		return err
	}
	return writeFile(e.path, append(data, '\n'))
}

// running is a broker that is being served.
type running struct {
	broker EnrolledBroker
	conn   *connector.Connector
	stop   context.CancelFunc
	done   chan struct{}
}

// Reload reads the list of brokers and starts and stops sessions to match. One
// that cannot be started keeps no other back.
func (h *Host) Reload() error {
	h.reload.Lock()
	defer h.reload.Unlock()
	want, err := h.enrolled.List()
	if err != nil {
		return err
	}
	for _, r := range h.brokers() {
		if i := slices.Index(want, r.broker); i >= 0 {
			want = slices.Delete(want, i, i+1)
			continue
		}
		h.log.Info("broker left", "broker", r.broker.URL.HostPort())
		h.forget(r)
	}
	var errs []error
	for _, b := range want {
		if err := h.startBroker(b); err != nil {
			errs = append(errs, fmt.Errorf("broker %s: %w", b.URL.HostPort(), err))
		}
	}
	h.mu.Lock()
	h.loaded = true
	h.mu.Unlock()
	h.sessions.RetryWithdrawals() // some of them may have been left to tell
	return errors.Join(errs...)
}

// serving says whether the connectors are those of the list.
func (h *Host) serving() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.loaded && !h.stopped
}

// forget ends the sessions to one broker.
func (h *Host) forget(r *running) {
	h.mu.Lock()
	h.connectors = slices.DeleteFunc(h.connectors, func(o *running) bool { return o == r })
	h.mu.Unlock()
	r.stop()
	<-r.done
}

// startBroker begins to serve what comes in through a broker.
func (h *Host) startBroker(b EnrolledBroker) error {
	conn, err := connector.New(connector.Config{
		URL: b.URL, HostID: b.HostID, Token: b.Token, TLS: &tls.Config{RootCAs: h.cfg.Roots, MinVersion: tls.VersionTLS12},
		Instance: h.instance, Epoch: h.epoch, Agent: "hermes-reach/" + h.cfg.Version,
		Admit: h.admit, OnReused: h.bootstrapReused, OnUp: h.sessions.RetryWithdrawals, Link: h.cfg.Link, Log: h.log,
	})
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background()) // ends with shutdown, or when the broker is left
	r := &running{broker: b, conn: conn, stop: stop, done: make(chan struct{})}
	h.mu.Lock()
	if h.stopped {
		h.mu.Unlock()
		stop()
		return errStopping
	}
	h.connectors = append(h.connectors, r)
	h.mu.Unlock()
	h.routes.tell(r) // before it runs, so that all of it goes with the first session
	in := newIntake(conn, h.streams.track)
	var parts sync.WaitGroup
	parts.Go(func() {
		if err := h.server.Serve(in); err != nil && ctx.Err() == nil {
			h.log.Error("broker path not served", "broker", b.URL.HostPort(), "err", err)
		}
	})
	parts.Go(in.pump)
	parts.Go(func() { _ = conn.Run(ctx) })
	go func() { defer close(r.done); parts.Wait() }()
	return nil
}

// An intake is what the Secure Link accepts from: the streams of a connector.
// Closing it lets no more of them in and leaves the connector's sessions up, so
// that requests under way through a broker end in order.
type intake struct {
	*connector.Connector
	track  func(net.Conn) net.Conn
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newIntake(c *connector.Connector, track func(net.Conn) net.Conn) *intake {
	return &intake{Connector: c, track: track, conns: make(chan net.Conn), closed: make(chan struct{})}
}

// pump hands streams on until the connector ends.
func (in *intake) pump() {
	defer func() { _ = in.Close() }()
	for {
		c, err := in.Connector.Accept()
		if err != nil {
			return
		}
		c = in.track(c)
		select {
		case in.conns <- c:
		case <-in.closed:
			_ = c.Close()
		}
	}
}

// Accept waits for a device's stream.
func (in *intake) Accept() (net.Conn, error) {
	select {
	case c := <-in.conns:
		return c, nil
	case <-in.closed:
		return nil, net.ErrClosed
	}
}

// Close ends Accept, and nothing else.
func (in *intake) Close() error {
	in.once.Do(func() { close(in.closed) })
	return nil
}

// admit decides on a stream before its device hears of a match: the broker may
// be slow to learn of a revocation, or lie.
func (h *Host) admit(o *wire.Open) wire.Code {
	if h.drain.Load() {
		return wire.CodeDraining
	}
	switch o.CredentialKind {
	case wire.KindBootstrap:
		if !h.pairings.live(o.PairingID) {
			return wire.CodeRefused
		}
	case wire.KindRoute:
		if !h.sessions.Knows(o.CredentialID) {
			return wire.CodeRevoked
		}
	default: // nothing of ours comes by another proof
		return wire.CodeRefused
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
	return slices.Clone(h.connectors)
}
