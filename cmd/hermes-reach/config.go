package main

import (
	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/internal/cli"
)

func newConfigCommand(app *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Show what can be configured",
	}
	cmd.AddCommand(&cobra.Command{
		Use:     "example",
		Short:   "Print a configuration file with every setting and its default",
		Example: "  hermes-reach config example > ~/.hermes/reach/config.yaml",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return cli.WriteExample(app.Stdout, cmd.Root())
		},
	})
	return cmd
}
