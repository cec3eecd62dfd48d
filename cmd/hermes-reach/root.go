package main

import (
	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/internal/cli"
)

// newRootCommand lists all commands. A new one is one line here, in the group of
// those who use it.
func newRootCommand(app *cli.App) *cobra.Command {
	root := app.Root(&cobra.Command{
		Use:   "hermes-reach",
		Short: "Reach your Hermes host from anywhere, through a broker that cannot read along",
		Long: `Hermes Reach is the secure way from a phone, a headset or a laptop to a Hermes
host that sits behind a home router: directly, over a tailnet, or through a
broker that joins ciphertext and never opens it.

Every flag can also be set in the environment (--log-level is
HERMES_REACH_LOG_LEVEL) and in a configuration file (see "config example"); the
flag beats the environment, the environment beats the file.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 not reachable, 4 trust refused,
130 interrupted.`,
		Example: "  hermes-reach demo",
	})
	group(root, "Try it:",
		newDemoCommand(app),
	)
	group(root, "On the host:",
		newUpCommand(app),
		newEnrollCommand(app),
		newUnenrollCommand(app),
		newPairCommand(app),
		newDevicesCommand(app),
		newStatusCommand(app),
		newIdentityCommand(app),
	)
	group(root, "On the broker:",
		newBrokerCommand(app),
	)
	group(root, "On a device:",
		newJoinCommand(app),
		newForwardCommand(app),
		newGetCommand(app),
		newProbeCommand(app),
		newProfileCommand(app),
	)
	group(root, "Anywhere:",
		newConfigCommand(app),
		newManCommand(app),
		newVersionCommand(app),
	)
	app.Classify = classify
	return root
}

// group adds commands under a heading of the help.
func group(root *cobra.Command, heading string, commands ...*cobra.Command) {
	if len(commands) == 0 {
		return
	}
	root.AddGroup(&cobra.Group{ID: heading, Title: heading})
	for _, c := range commands {
		c.GroupID = heading
	}
	root.AddCommand(commands...)
}
