package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/internal/cli"
)

func newVersionCommand(app *cli.App) *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version of this program",
		Example: "  hermes-reach version --json",
		RunE: func(*cobra.Command, []string) error {
			b := cli.ThisBuild()
			return app.Result(b, func(w io.Writer) {
				fmt.Fprintf(w, "hermes-reach %s (%s, %s/%s)\n", b.Version, b.Go, b.OS, b.Arch)
			})
		},
	}
}
