package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/admin"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/internal/cli"
)

type brokerFlags struct {
	listen      string
	cert, key   string
	state       string
	insecureDev bool
	limits      broker.Limits
}

func newBrokerCommand(app *cli.App) *cobra.Command {
	var f brokerFlags
	cmd := &cobra.Command{
		Use:   "broker",
		Short: "Run a rendezvous: it joins hosts and devices and cannot read along",
		Long: `Runs a broker on one port. Hosts and devices connect out to it; it joins their
streams, which are TLS between host and device. It keeps digests of credentials,
never the credentials, and never sees what passes.`,
		Example: "  hermes-reach broker --listen :443 --tls-cert fullchain.pem --tls-key privkey.pem",
		RunE: func(cmd *cobra.Command, _ []string) error {
			state, err := f.statePath(app, cmd)
			if err != nil {
				return err
			}
			return f.run(cmd.Context(), app, state)
		},
	}
	cmd.PersistentFlags().StringVar(&f.state, "state", "", "`FILE` with hosts and credentials; empty for broker.db in the state folder")
	fs := cmd.Flags()
	fs.StringVar(&f.listen, "listen", ":443", "serve hosts and devices on `ADDRESS`")
	fs.StringVar(&f.cert, "tls-cert", "", "certificate chain of the broker's name: PEM `FILE`")
	fs.StringVar(&f.key, "tls-key", "", "private key of that certificate: PEM `FILE`")
	fs.BoolVar(&f.insecureDev, "insecure-dev", false, "serve without TLS, on loopback only, for development")
	defaults := broker.DefaultLimits()
	fs.IntVar(&f.limits.Hosts, "max-hosts", defaults.Hosts, "hosts that may be registered at a time: `N`")
	fs.IntVar(&f.limits.HostStreams, "max-host-streams", defaults.HostStreams, "streams of one host at a time: `N`")
	fs.IntVar(&f.limits.CredentialStreams, "max-device-streams", defaults.CredentialStreams, "streams of one device at a time: `N`")
	fs.IntVar(&f.limits.Sessions, "max-sessions", defaults.Sessions, "sessions in all: `N`")
	fs.DurationVar(&f.limits.Idle, "stream-idle", defaults.Idle, "end a stream on which nothing passed for this `DURATION`")
	fs.DurationVar(&f.limits.Drain, "drain", defaults.Drain, "let streams go on for this `DURATION` when told to stop")
	cmd.AddCommand(newBrokerHostCommand(app, &f))
	return cli.LongRunning(cmd)
}

func (f *brokerFlags) statePath(app *cli.App, cmd *cobra.Command) (string, error) {
	if f.state != "" {
		return f.state, nil
	}
	dir, err := app.StateDir(cmd)
	return filepath.Join(dir, "broker.db"), err
}

// certificate loads the broker's certificate, or says what to give.
func (f *brokerFlags) certificate() (*tls.Config, error) {
	switch {
	case f.insecureDev && f.cert+f.key == "":
		return nil, nil
	case f.insecureDev:
		return nil, cli.Usagef("--insecure-dev and a certificate exclude each other")
	case f.cert == "" || f.key == "":
		return nil, cli.Usagef("a broker needs its certificate: --tls-cert FILE and --tls-key FILE")
	}
	cert, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return nil, fmt.Errorf("load the broker's certificate: %w", err)
	}
	return &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}, nil
}

func (f *brokerFlags) run(ctx context.Context, app *cli.App, state string) error {
	cert, err := f.certificate()
	if err != nil {
		return err
	}
	st, err := store.Open(state, nil)
	if err != nil {
		return err
	}
	defer func() { _ = st.Close() }()
	b, err := broker.New(broker.Config{Store: st, TLS: cert, PlainLoopback: f.insecureDev, Limits: f.limits, Log: app.Log})
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", f.listen)
	if err != nil {
		return fmt.Errorf("listen for hosts and devices: %w", err)
	}
	hosts, err := st.Hosts()
	if err != nil {
		return errors.Join(err, ln.Close())
	}
	err = app.Result(map[string]any{"listening": ln.Addr().String(), "hosts": len(hosts)}, func(w io.Writer) {
		fmt.Fprintf(w, "Broker on %s, %d hosts may register.\n", ln.Addr(), len(hosts))
		if len(hosts) == 0 {
			fmt.Fprintln(w, "Add one: hermes-reach broker host add NAME --url wss://THIS-BROKER")
		}
	})
	if err != nil {
		return errors.Join(err, ln.Close())
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wait sync.WaitGroup
	wait.Go(func() {
		if err := admin.Serve(ctx, state, b, st); err != nil {
			cancel(err)
		}
	})
	err = b.Serve(ctx, ln)
	cancel(nil)
	wait.Wait()
	if cause := context.Cause(ctx); err == nil && !errors.Is(cause, context.Canceled) {
		return cause
	}
	return err
}
