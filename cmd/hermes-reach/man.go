package main

import (
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/hermes-reach/hermes-reach/internal/cli"
)

func newManCommand(app *cli.App) *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:   "man",
		Short: "Print the manual page, or write one for each command",
		Example: `  hermes-reach man | man -l -
  hermes-reach man --dir /usr/local/share/man/man1`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			root := cmd.Root()
			root.DisableAutoGenTag = true // with SOURCE_DATE_EPOCH set, the pages depend on nothing else
			header := &doc.GenManHeader{Title: "HERMES-REACH", Section: "1", Source: "Hermes Reach " + cli.Version(), Manual: "Hermes Reach"}
			if dir == "" {
				return doc.GenMan(root, header, app.Stdout)
			}
			if err := doc.GenManTree(root, header, dir); err != nil {
				return fmt.Errorf("write the manual pages: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "write a page for each command into the folder `DIR`")
	return cmd
}
