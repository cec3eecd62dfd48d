package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/internal/host/operator"
	"github.com/hermes-reach/hermes-reach/securelink/session"
)

func newDevicesCommand(app *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "devices", Short: "Show and end paired devices"}
	var shorter host.PairRequest
	shorten := &cobra.Command{
		Use: "shorten ID", Short: "Take time or grants away from a device", Args: cobra.ExactArgs(1),
		Example: "  hermes-reach devices shorten 3f2a --ttl 1d",
		RunE: withOperator(app, func(cmd *cobra.Command, op *operator.Operator, args []string) error {
			if err := checkAuthority(shorter); err != nil {
				return err
			}
			d, err := op.Shorten(cmd.Context(), args[0], shorter)
			return showDevice(app, d, err)
		}),
	}
	shorten.Flags().StringVar(&shorter.TTL, "ttl", "", "how much longer it stays paired: `DURATION` such as 1d")
	shorten.Flags().StringVar(&shorter.Grants, "grants", "", "how much longer it keeps single grants: `LIST` such as terminal=1h")
	cmd.AddCommand(&cobra.Command{
		Use: "list", Short: "List the paired devices", Example: "  hermes-reach devices list",
		RunE: withOperator(app, func(cmd *cobra.Command, op *operator.Operator, _ []string) error {
			devices, err := op.Devices(cmd.Context())
			if err != nil {
				return err
			}
			return app.Result(map[string]any{"devices": devices}, func(w io.Writer) { listDevices(app, w, devices) })
		}),
	}, &cobra.Command{
		Use: "show ID", Short: "Show one device", Args: cobra.ExactArgs(1), Example: "  hermes-reach devices show 3f2a",
		RunE: withOperator(app, func(cmd *cobra.Command, op *operator.Operator, args []string) error {
			d, err := op.Device(cmd.Context(), args[0])
			return showDevice(app, d, err)
		}),
	}, &cobra.Command{
		Use: "revoke ID", Short: "End a device at once: everything it has open is closed", Args: cobra.ExactArgs(1),
		Example: "  hermes-reach devices revoke 3f2a",
		RunE: withOperator(app, func(cmd *cobra.Command, op *operator.Operator, args []string) error {
			d, err := op.Revoke(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return app.Result(map[string]any{"revoked": d.ID, "name": d.Name}, func(w io.Writer) {
				fmt.Fprintf(w, "Revoked %s (%s). It has to pair again to come back.\n", cli.Clean(d.Name), d.ID)
			})
		}),
	}, shorten)
	return cmd
}

// withOperator is RunE of a command that asks the running host.
func withOperator(app *cli.App, run func(*cobra.Command, *operator.Operator, []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		op, err := askHost(app, cmd)
		if err != nil {
			return err
		}
		return run(cmd, op, args)
	}
}

// askHost finds the running host, and waits for one that is starting.
func askHost(app *cli.App, cmd *cobra.Command) (*operator.Operator, error) {
	dir, err := app.StateDir(cmd)
	if err != nil {
		return nil, err
	}
	if !operator.Running(cmd.Context(), dir) {
		app.Progress("No host answers in %s. Waiting up to 10 s for one that starts…", dir)
	}
	op, err := operator.New(cmd.Context(), dir)
	if err != nil {
		return nil, cli.Exit(cli.NotReachable, err, "%v (looked in %s)", operator.ErrNotRunning, dir)
	}
	return op, nil
}

// checkAuthority refuses lifetimes and grants that cannot be read, before a
// host is asked.
func checkAuthority(req host.PairRequest) error {
	var err error
	if req.TTL != "" {
		_, err = session.ParseTTL(req.TTL)
	}
	if err == nil && req.Grants != "" {
		_, err = session.ParseGrants(req.Grants)
	}
	if err != nil {
		return cli.Exit(cli.WrongUsage, err, "%v", err)
	}
	return nil
}

func listDevices(app *cli.App, w io.Writer, devices []session.Device) {
	if len(devices) == 0 {
		fmt.Fprintln(w, "No device is paired. `hermes-reach pair` makes an invite.")
		return
	}
	var rows [][]cli.Cell
	for _, d := range devices {
		rows = append(rows, cli.Cells(d.ID, d.Name, d.Platform, d.Path, ago(d.LastSeen), until(d.Expires)))
	}
	app.Table(w, []string{"ID", "NAME", "PLATFORM", "LAST PATH", "LAST SEEN", "ENDS"}, rows...)
}

func showDevice(app *cli.App, d session.Device, err error) error {
	if err != nil {
		return err
	}
	return app.Result(d, func(w io.Writer) {
		rows := [][]cli.Cell{
			cli.Cells("id", d.ID), cli.Cells("name", d.Name), cli.Cells("platform", d.Platform+" "+d.FormFactor),
			cli.Cells("paired", d.Created.Local().Format(time.DateTime)), cli.Cells("ends", until(d.Expires)),
			cli.Cells("last seen", ago(d.LastSeen)), cli.Cells("last path", d.Path), cli.Cells("open now", fmt.Sprint(d.Live)),
		}
		for name, end := range d.Grants {
			rows = append(rows, cli.Cells("grant "+name, until(end)))
		}
		app.Table(w, nil, rows...)
	})
}

func ago(t time.Time) string {
	if t.IsZero() {
		return "never"
	}
	d := time.Since(t)
	if d < time.Minute {
		return "just now"
	}
	return session.FormatTTL(d.Round(coarse(d))) + " ago"
}

func until(t time.Time) string {
	d := time.Until(t)
	switch {
	case !t.Before(session.Forever):
		return "never"
	case d <= 0:
		return "over"
	}
	return "in " + session.FormatTTL(d.Round(coarse(d)))
}

// coarse is the unit a person would give a duration in.
func coarse(d time.Duration) time.Duration {
	switch {
	case d > 48*time.Hour:
		return 24 * time.Hour
	case d > 2*time.Hour:
		return time.Hour
	}
	return time.Second
}
