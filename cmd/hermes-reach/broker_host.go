package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/broker/admin"
	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func newBrokerHostCommand(app *cli.App, f *brokerFlags) *cobra.Command {
	cmd := &cobra.Command{Use: "host", Short: "Say which hosts may use this broker; beside a running one or on a stopped one"}
	cmd.AddCommand(
		newHostAddCommand(app, f), newHostListCommand(app, f), newHostRotateCommand(app, f), newHostRemoveCommand(app, f),
	)
	return cmd
}

// withAdmin opens the broker of --state for one command.
func withAdmin(app *cli.App, f *brokerFlags, run func(context.Context, *admin.Admin, []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		state, err := f.statePath(app, cmd)
		if err != nil {
			return err
		}
		a, err := admin.Open(state)
		if err != nil {
			return err
		}
		defer func() { _ = a.Close() }()
		return run(cmd.Context(), a, args)
	}
}

func newHostAddCommand(app *cli.App, f *brokerFlags) *cobra.Command {
	var address string
	cmd := &cobra.Command{
		Use:   "add NAME",
		Short: "Let a host register, and print the line to paste on it",
		Long: `Prints one line, once: it holds the host's token, of which only a digest is kept.
Paste it on the host: hermes-reach enroll -`,
		Example: "  hermes-reach broker host add home --url wss://reach.example.com",
		Args:    cobra.ExactArgs(1),
		RunE: withAdmin(app, f, func(ctx context.Context, a *admin.Admin, args []string) error {
			u, err := brokerAddress(address)
			if err != nil {
				return err
			}
			line, err := a.Add(ctx, args[0], wire.ID{})
			if err != nil {
				return err
			}
			return showLine(app, line, u)
		}),
	}
	addAddressFlag(cmd, &address)
	return cmd
}

func newHostRotateCommand(app *cli.App, f *brokerFlags) *cobra.Command {
	var address string
	var overlap time.Duration
	cmd := &cobra.Command{
		Use:     "rotate NAME",
		Short:   "Give a host a new token, and print the line to paste on it",
		Example: "  hermes-reach broker host rotate home --url wss://reach.example.com --overlap 24h",
		Args:    cobra.ExactArgs(1),
		RunE: withAdmin(app, f, func(ctx context.Context, a *admin.Admin, args []string) error {
			u, err := brokerAddress(address)
			if err != nil {
				return err
			}
			line, err := a.Rotate(ctx, args[0], overlap)
			if err != nil {
				return err
			}
			return showLine(app, line, u)
		}),
	}
	addAddressFlag(cmd, &address)
	cmd.Flags().DurationVar(&overlap, "overlap", time.Hour, "how long the old token works on: `DURATION`")
	return cmd
}

func addAddressFlag(cmd *cobra.Command, address *string) {
	cmd.Flags().StringVar(address, "url", "", "where hosts and devices find this broker: `wss://HOST[:PORT]`")
}

// brokerAddress reads --url; a name alone is taken for one on the usual port.
func brokerAddress(address string) (wire.BrokerURL, error) {
	if address == "" {
		return wire.BrokerURL{}, cli.Usagef("say where hosts and devices find this broker: --url wss://HOST[:PORT]")
	}
	if !strings.Contains(address, "://") {
		address = "wss://" + address
	}
	u, err := wire.ParseBrokerURL(address, true)
	if err != nil {
		return u, cli.Usagef("--url: %v", err)
	}
	return u, nil
}

func showLine(app *cli.App, line wire.HostLine, u wire.BrokerURL) error {
	line.URL = u
	text, err := wire.FormatHostLine(line)
	if err != nil {
		return err
	}
	v := map[string]any{"name": line.Name, "host_id": line.HostID, "enroll": text}
	return app.Result(v, func(w io.Writer) {
		fmt.Fprintf(w, "%s\n\n", text)
		fmt.Fprintf(w, "On the host: hermes-reach enroll -   (and paste the line above; it is shown only now)\n")
	})
}

func newHostListCommand(app *cli.App, f *brokerFlags) *cobra.Command {
	return &cobra.Command{
		Use:     "list",
		Short:   "List the hosts that may register",
		Example: "  hermes-reach broker host list",
		RunE: withAdmin(app, f, func(ctx context.Context, a *admin.Admin, _ []string) error {
			hosts, err := a.List(ctx)
			if err != nil {
				return err
			}
			if hosts == nil {
				hosts = []admin.Host{}
			}
			return app.Result(map[string]any{"running": a.Running(), "hosts": hosts}, func(w io.Writer) { listHosts(app, w, a, hosts) })
		}),
	}
}

func listHosts(app *cli.App, w io.Writer, a *admin.Admin, hosts []admin.Host) {
	if len(hosts) == 0 {
		fmt.Fprintln(w, "No host may register. `hermes-reach broker host add` lets one.")
		return
	}
	var rows [][]cli.Cell
	for _, h := range hosts {
		state := cli.Cell{Text: "away", Mood: cli.Doubt}
		switch {
		case !a.Running():
			state = cli.Cell{Text: "broker stopped", Mood: cli.Faint}
		case h.Sessions > 0:
			state = cli.Cell{Text: fmt.Sprintf("online, %d sessions", h.Sessions), Mood: cli.Good}
		}
		rows = append(rows, []cli.Cell{
			{Text: h.Name}, {Text: h.ID.String()}, {Text: h.Created.Local().Format(time.DateOnly)}, state,
			{Text: fmt.Sprint(h.Streams)}, {Text: fmt.Sprint(h.Credentials)},
		})
	}
	app.Table(w, []string{"NAME", "HOST ID", "ADDED", "STATE", "STREAMS", "CREDENTIALS"}, rows...)
}

func newHostRemoveCommand(app *cli.App, f *brokerFlags) *cobra.Command {
	return &cobra.Command{
		Use:     "remove NAME",
		Short:   "Shut a host out: what it and its devices have open here ends at once",
		Example: "  hermes-reach broker host remove home",
		Args:    cobra.ExactArgs(1),
		RunE: withAdmin(app, f, func(ctx context.Context, a *admin.Admin, args []string) error {
			return done(app, a.Remove(ctx, args[0]), "Removed %s.", args[0])
		}),
	}
}
