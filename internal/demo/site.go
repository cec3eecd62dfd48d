package demo

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/internal/host/operator"
	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/reach/wire"
	"github.com/hermes-reach/hermes-reach/securelink"
)

// site is the whole system on loopback: a service, a host in front of it, a
// broker, and two captures on the way to the broker. The devices are apart.
type site struct {
	dir     string
	ca      *lab.CA
	service *service
	outside *lab.Capture // the wire in front of the broker
	inside  *lab.Capture // what a broker could read: without its outer TLS
	direct  *lab.Gate
	op      *operator.Operator
	token   string // registers the host
	bearer  string

	stop  context.CancelFunc
	tasks sync.WaitGroup
	errs  chan error
}

// startSite brings everything up, or down again if something fails.
func startSite(ctx context.Context, dir string, log *slog.Logger) (_ *site, err error) {
	s := &site{dir: dir, bearer: rand.Text(), errs: make(chan error, 4)}
	ctx, s.stop = context.WithCancel(ctx)
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.ca, err = lab.NewCA(); err != nil {
		return nil, err
	}
	if s.service, err = startService(s.bearer); err != nil {
		return nil, err
	}
	st, err := store.Open(filepath.Join(dir, "broker.db"), nil)
	if err != nil {
		return nil, err
	}
	if err := s.startBroker(ctx, st, log); err != nil {
		return nil, errors.Join(err, st.Close())
	}
	if err := s.startHost(ctx, st, log); err != nil {
		return nil, err
	}
	return s, s.awaitBroker(ctx)
}

// run keeps a part alive until the site closes; its end is the site's error.
func (s *site) run(name string, f func() error) {
	s.tasks.Go(func() {
		if err := f(); err != nil {
			s.errs <- fmt.Errorf("%s: %w", name, err)
		}
	})
}

// startBroker runs the broker with the captures in front of it.
func (s *site) startBroker(ctx context.Context, st *store.Store, log *slog.Logger) error {
	cert, err := s.ca.Server("localhost")
	if err != nil {
		return err
	}
	b, err := broker.New(broker.Config{Store: st, TLS: cert, Log: log, Limits: broker.Limits{Drain: time.Second}})
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s.run("broker", func() error { return errors.Join(b.Serve(ctx, ln), st.Close()) })
	client := s.ca.Client()
	client.ServerName = "localhost"
	if s.inside, err = lab.NewTLSCapture(ln.Addr().String(), cert, client); err != nil {
		return err
	}
	s.outside, err = lab.NewCapture(s.inside.Addr())
	return err
}

// startHost enrols a host with the broker and runs it.
func (s *site) startHost(ctx context.Context, st *store.Store, log *slog.Logger) error {
	dir := filepath.Join(s.dir, "host")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	u, err := wire.ParseBrokerURL("wss://localhost:"+s.outside.Port()+"/v1/connect", false)
	if err != nil {
		return err
	}
	line := wire.HostLine{URL: u, HostID: wire.NewID(), Token: wire.NewToken(), Name: "demo"}
	s.token = line.Token
	if err := st.AddHost(line.Name, line.HostID, wire.DigestOf(line.Token)); err != nil {
		return err
	}
	enrolled, err := host.OpenEnrolled(dir)
	if err != nil {
		return err
	}
	if _, err := enrolled.Add(line); err != nil {
		return err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s.direct = lab.NewGate(ln)
	h, err := host.New(host.Config{
		Dir: dir, Listen: []string{}, Listeners: []net.Listener{s.direct}, Roots: s.ca.Client().RootCAs, Version: "demo",
		Upstreams: securelink.Upstreams{API: s.service.url(), Dashboard: s.service.url()}, Log: log,
	})
	if err != nil {
		return err
	}
	s.run("host", func() error { return h.Run(ctx) })
	s.op, err = operator.New(ctx, dir)
	return err
}

// awaitBroker waits until the host is registered.
func (s *site) awaitBroker(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		st, err := s.op.Status(ctx)
		if err == nil && len(st.Brokers) == 1 && st.Brokers[0].Sessions > 1 {
			return nil
		}
		select {
		case err := <-s.errs:
			return err
		case <-ctx.Done():
			return errors.Join(errors.New("the host did not register with the broker"), err)
		case <-tick.C:
		}
	}
}

// close ends everything and waits for it.
func (s *site) close() {
	s.stop()
	for _, c := range []*lab.Capture{s.outside, s.inside} {
		if c != nil {
			_ = c.Close()
		}
	}
	s.tasks.Wait()
	if s.direct != nil {
		_ = s.direct.Close()
	}
	if s.service != nil {
		s.service.close()
	}
}
