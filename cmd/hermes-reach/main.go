// Command hermes-reach is the host, the broker and the device of Hermes Reach:
// the secure way to a Hermes host behind somebody's home router.
//
// Each command is one file with a function newXxxCommand(*cli.App), listed in
// root.go. What the commands share is in internal/cli; what they do is in the
// packages that they wire together.
package main

import (
	"os"

	"github.com/hermes-reach/hermes-reach/internal/cli"
)

func main() {
	app := cli.New()
	os.Exit(app.Main(newRootCommand(app)))
}
