package bench

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// maxStreams is more than any measurement has at a time.
const maxStreams = 4096

// place is what one part tells the others to be found. The credentials in it
// are made for the run and travel through pipes only.
type place struct {
	Origin  string            `json:"origin,omitempty"` // of the host: its TCP address
	Pin     pins.Pin          `json:"pin,omitzero"`     // of the host
	Outer   string            `json:"outer,omitempty"`  // of the host: the origin in an outer TLS
	OuterCA []byte            `json:"outer_ca,omitempty"`
	Routes  map[string]string `json:"routes,omitempty"` // of the host: tokens by transport
	Splice  string            `json:"splice,omitempty"` // of the splice
	Relay   string            `json:"relay,omitempty"`  // of the relay, in the splice's process
	RelayCA []byte            `json:"relay_ca,omitempty"`
	URL     string            `json:"url,omitempty"`   // of the broker
	CA      []byte            `json:"ca,omitempty"`    // of the broker, PEM
	Hosts   map[string]enrol  `json:"hosts,omitempty"` // of the broker, by transport
}

// enrol is a host's entry at the broker. Each transport has a host of its own,
// so that a stream takes the same transport on both sides of the broker.
type enrol struct {
	ID    wire.ID `json:"id"`
	Token string  `json:"token"`
}

// part is something that runs.
type part struct {
	place place
	stop  func()
}

// roots trusts the broker's authority alone.
func roots(ca []byte) (*tls.Config, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, errors.New("the broker's authority is no certificate")
	}
	return &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13}, nil
}

func listen() (net.Listener, error) {
	return (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
}

// startBroker runs a broker with an authority and a store of its own.
func startBroker() (*part, error) {
	ca, err := lab.NewCA()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "reachbench")
	if err != nil {
		return nil, err
	}
	st, err := store.Open(filepath.Join(dir, "broker.db"), nil)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	p := &part{place: place{CA: ca.PEM(), Hosts: map[string]enrol{}}}
	for _, t := range []string{TLS, WSS} {
		e := enrol{wire.NewID(), wire.NewToken()}
		if err := st.AddHost(t, e.ID, wire.DigestOf(e.Token)); err != nil {
			return nil, errors.Join(err, st.Close(), os.RemoveAll(dir))
		}
		p.place.Hosts[t] = e
	}
	stop, err := serveBroker(ca, st, &p.place)
	if err != nil {
		return nil, errors.Join(err, st.Close(), os.RemoveAll(dir))
	}
	p.stop = func() { stop(); _ = st.Close(); _ = os.RemoveAll(dir) }
	return p, nil
}

func serveBroker(ca *lab.CA, st *store.Store, at *place) (stop func(), err error) {
	cfg, err := ca.Server("localhost")
	if err != nil {
		return nil, err
	}
	b, err := broker.New(broker.Config{Store: st, TLS: cfg, Limits: broker.Limits{
		HostStreams: maxStreams, CredentialStreams: maxStreams, Drain: time.Millisecond,
	}})
	if err != nil {
		return nil, err
	}
	ln, err := listen()
	if err != nil {
		return nil, err
	}
	_, port, _ := net.SplitHostPort(ln.Addr().String())
	at.URL = "wss://localhost:" + port + "/v1/connect"
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() { _ = b.Serve(ctx, ln) })
	return func() { cancel(); done.Wait() }, nil
}

// startHost runs the origin on a TCP port and behind a connector for each
// transport of the broker at.
func startHost(at place) (*part, error) {
	id, err := newOrigin()
	if err != nil {
		return nil, err
	}
	ln, err := listen()
	if err != nil {
		return nil, err
	}
	behind, ca, err := listenHops()
	if err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	p := &part{place: place{
		Origin: ln.Addr().String(), Pin: id.Pin(), Routes: map[string]string{},
		Outer: behind.Addr().String(), OuterCA: ca,
	}}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	p.stop = func() { cancel(); _ = ln.Close(); _ = behind.Close(); running.Wait() }
	running.Go(func() { serveOrigin(ln, id) })
	running.Go(func() { serveOrigin(behind, id) })
	for t, e := range at.Hosts {
		c, err := newConnector(at, t, e)
		if err != nil {
			p.stop()
			return nil, err
		}
		running.Go(func() { _ = c.Run(ctx) })
		running.Go(func() { serveOrigin(c, id) })
		if p.place.Routes[t], err = publish(ctx, c); err != nil {
			p.stop()
			return nil, err
		}
	}
	return p, nil
}

func newConnector(at place, transport string, e enrol) (*connector.Connector, error) {
	url, err := wire.ParseBrokerURL(at.URL, true)
	if err != nil {
		return nil, err
	}
	ca, err := roots(at.CA)
	if err != nil {
		return nil, err
	}
	return connector.New(connector.Config{
		URL: url, HostID: e.ID, Token: e.Token, TLS: ca, Instance: wire.NewID(), Epoch: 1, Agent: "bench/1",
		Transports: []carrier.Transport{carrier.Transport(transport)}, Sessions: 1,
	})
}

// publish gives the broker a route credential, as soon as there is a session.
func publish(ctx context.Context, c *connector.Connector) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	token := wire.NewToken()
	pub := connector.Publication{Kind: wire.KindRoute, ID: "bench", Digest: wire.DigestOf(token), Expires: time.Now().Add(time.Hour)}
	err := c.Publish(ctx, pub)
	for errors.Is(err, connector.ErrOffline) && ctx.Err() == nil {
		err = c.Publish(ctx, pub)
	}
	return token, err
}

// startSplice runs the bare splice and the relay in front of the origin.
func startSplice(at place) (*part, error) {
	ln, err := listen()
	if err != nil {
		return nil, err
	}
	relay, ca, err := listenHops()
	if err != nil {
		return nil, errors.Join(err, ln.Close())
	}
	var running sync.WaitGroup
	serve := func(ln net.Listener, one func(net.Conn)) {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			running.Go(func() { one(c) })
		}
	}
	running.Go(func() { serve(ln, func(c net.Conn) { spliceTo(c.(*net.TCPConn), at.Origin) }) })
	running.Go(func() { serve(relay, func(c net.Conn) { relayTo(c.(hop), at) }) })
	return &part{
		place: place{Splice: ln.Addr().String(), Relay: relay.Addr().String(), RelayCA: ca},
		stop:  func() { _ = ln.Close(); _ = relay.Close(); running.Wait() },
	}, nil
}

func spliceTo(a *net.TCPConn, target string) {
	defer a.Close()
	c, err := (&net.Dialer{}).DialContext(context.Background(), "tcp", target)
	if err != nil {
		return
	}
	b := c.(*net.TCPConn)
	defer b.Close()
	var both sync.WaitGroup
	one := func(dst, src *net.TCPConn) {
		_, _ = io.Copy(dst, src) // splice(2) where the kernel has it
		_ = dst.CloseWrite()
	}
	both.Go(func() { one(a, b) })
	both.Go(func() { one(b, a) })
	both.Wait()
}

// startDevice gives a dialer for each path of the place that all parts make.
func startDevice(at place) (map[string]Dialer, func(), error) {
	tcp := func(addr string) Dialer {
		return func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "tcp", addr) }
	}
	dialers := map[string]Dialer{
		Direct: tcp(at.Origin), Splice: tcp(at.Splice),
		Relay: func(ctx context.Context) (net.Conn, error) { return dialHop(ctx, at.Relay, at.RelayCA) },
	}
	ca, err := roots(at.CA)
	if err != nil {
		return nil, nil, err
	}
	stop := func() {}
	for t, token := range at.Routes {
		d, err := reach.NewDialer(reach.DialerConfig{
			URL: at.URL, HostID: at.Hosts[t].ID, Kind: wire.KindRoute, Token: token, TLS: ca, Agent: "bench/1",
			Transports: []carrier.Transport{carrier.Transport(t)},
		})
		if err != nil {
			stop()
			return nil, nil, fmt.Errorf("path %s: %w", t, err)
		}
		before := stop
		stop = func() { before(); _ = d.Close() }
		dialers[t] = d.DialContext
	}
	return dialers, stop, nil
}
