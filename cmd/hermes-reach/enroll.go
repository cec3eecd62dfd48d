package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/internal/host/operator"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func newEnrollCommand(app *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:   "enroll LINE",
		Short: "Let this host be reached through a broker",
		Long: `Takes the line that "hermes-reach broker host add" printed on the broker and
stores the broker with its token. LINE is a secret: give "-" to paste it on
standard input, or "@FILE". A host that runs takes the broker up at once.`,
		Example: "  hermes-reach enroll -",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			text, err := app.Secret(args[0])
			if err != nil {
				return err
			}
			line, err := wire.ParseHostLine(text)
			if err != nil {
				return cli.Exit(cli.WrongUsage, err, "this is not a line from `hermes-reach broker host add`")
			}
			dir, err := app.StateDir(cmd)
			if err != nil {
				return err
			}
			enrolled, err := host.OpenEnrolled(dir)
			if err != nil {
				return err
			}
			b, err := enrolled.Add(line)
			if err != nil {
				return err
			}
			running, err := reloadIfRunning(cmd.Context(), dir)
			if err != nil {
				return err
			}
			return app.Result(map[string]any{"broker": b.URL, "host_id": b.HostID, "running": running}, func(w io.Writer) {
				fmt.Fprintf(w, "Enrolled with broker %s.\n", b.URL.HostPort())
				if !running {
					fmt.Fprintln(w, "Start the host with `hermes-reach up`.")
				}
			})
		},
	}
}

func newUnenrollCommand(app *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "unenroll BROKER",
		Short:   "Leave a broker",
		Long:    `Forgets a broker, named by its URL or host name, and the token for it. A host that runs leaves it at once.`,
		Example: "  hermes-reach unenroll reach.example.com",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := app.StateDir(cmd)
			if err != nil {
				return err
			}
			enrolled, err := host.OpenEnrolled(dir)
			if err != nil {
				return err
			}
			if err := enrolled.Remove(args[0]); err != nil {
				return err
			}
			running, err := reloadIfRunning(cmd.Context(), dir)
			if err != nil {
				return err
			}
			return app.Result(map[string]any{"broker": args[0], "running": running}, func(w io.Writer) {
				fmt.Fprintf(w, "Left broker %s.\n", args[0])
			})
		},
	}
}

func reloadIfRunning(ctx context.Context, dir string) (bool, error) {
	if !operator.Running(ctx, dir) {
		return false, nil
	}
	op, err := operator.New(ctx, dir)
	if err != nil {
		return false, err
	}
	return true, op.Reload(ctx)
}
