package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/internal/host/operator"
	"github.com/hermes-reach/hermes-reach/pins"
)

func newStatusCommand(app *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "status",
		Short:   "Show what runs here: listeners, brokers, services",
		Example: "  hermes-reach status",
		RunE: withOperator(app, func(cmd *cobra.Command, op *operator.Operator, _ []string) error {
			st, err := op.Status(cmd.Context())
			if err != nil {
				return err
			}
			return app.Result(st, func(w io.Writer) { showHost(app, w, st) })
		}),
	}
}

func newIdentityCommand(app *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "identity", Short: "Show the key that devices pin"}
	cmd.AddCommand(&cobra.Command{
		Use:     "show",
		Short:   "Show the pin, the names and the expiry of this host's identity",
		Example: "  hermes-reach identity show",
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir, err := app.StateDir(cmd)
			if err != nil {
				return err
			}
			id, err := pins.Load(host.IdentityDir(dir))
			if err != nil {
				return err
			}
			v := map[string]any{"pin": id.Pin(), "authorities": id.Authorities(), "not_after": id.NotAfter()}
			return app.Result(v, func(w io.Writer) {
				rows := [][]cli.Cell{cli.Cells("pin", id.Pin().String()), cli.Cells("expires", id.NotAfter().Format("2006-01-02"))}
				for _, a := range id.Authorities() {
					rows = append(rows, cli.Cells("name", a))
				}
				app.Table(w, nil, rows...)
				fmt.Fprintln(w, "\nDevices accept this key and no other; docs/pinning.md says how.")
			})
		},
	})
	return cmd
}
