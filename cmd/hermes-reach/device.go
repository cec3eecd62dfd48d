package main

import (
	"context"
	"crypto/tls"
	"errors"
	"os"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/profile"
)

// deviceFlags choose the host that a command on a device talks to.
type deviceFlags struct {
	profile string
	path    string
}

func (f *deviceFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.profile, "profile", "", "the paired host to use, by `NAME`; empty for the current one")
	cmd.Flags().StringVar(&f.path, "path", "", "use candidates of this `ROLE` only, such as outbound_broker")
}

// open gives a client of the chosen host, and the store of profiles.
func (f *deviceFlags) open(app *cli.App, cmd *cobra.Command) (*reach.Client, *profile.Profile, error) {
	store, err := openProfiles(app, cmd)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = store.Close() }()
	p, err := store.Get(f.profile)
	if err != nil {
		if errors.Is(err, profile.ErrNotFound) {
			return nil, nil, cli.Exit(cli.Failed, err, "this device is not paired with such a host: `hermes-reach join` pairs it")
		}
		return nil, nil, err
	}
	cfg, err := clientConfig(app)
	if err != nil {
		return nil, nil, err
	}
	cfg.Profile, cfg.Only = p, endpoints.Role(f.path)
	c, err := reach.New(cfg)
	return c, p, err
}

func openProfiles(app *cli.App, cmd *cobra.Command) (*profile.Store, error) {
	dir, err := app.StateDir(cmd)
	if err != nil {
		return nil, err
	}
	return profile.Open(dir)
}

func clientConfig(app *cli.App) (reach.Config, error) {
	roots, err := app.Roots()
	if err != nil {
		return reach.Config{}, err
	}
	return reach.Config{
		Outer: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		Agent: "hermes-reach/" + cli.Version(), Log: app.Log,
	}, nil
}

// thisDevice is what a host's operator sees of this device.
func thisDevice(name string) reach.Device {
	host, _ := os.Hostname()
	if name == "" {
		name = host
	}
	return reach.Device{Name: name, Hostname: host, Platform: runtime.GOOS, FormFactor: "desktop", Surface: "desktop"}
}

// notReachable gives errors that mean "no way there" their exit code.
func notReachable(err error) error {
	if err == nil || !errors.Is(err, reach.ErrUnreachable) || errors.Is(err, context.Canceled) {
		return err
	}
	return cli.Exit(classifyOr(err, cli.NotReachable), err, "%v", err)
}

func classifyOr(err error, code int) int {
	if c := classify(err); c != 0 {
		return c
	}
	return code
}
