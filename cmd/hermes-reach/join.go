package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/reach"
)

func newJoinCommand(app *cli.App) *cobra.Command {
	var name, as string
	cmd := &cobra.Command{
		Use:   "join INVITE",
		Short: "Pair this device with a host",
		Long: `Checks an invite, finds a way to its host, proves the host's key, and only then
uses the pairing code. INVITE is the line that "hermes-reach pair" printed, the
name of a picture of its QR code (.png), "@FILE", or "-" for standard input.`,
		Example: "  hermes-reach join - < invite",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			invite, err := readInvite(app, args[0])
			if err != nil {
				return err
			}
			store, err := openProfiles(app, cmd)
			if err != nil {
				return err
			}
			defer func() { _ = store.Close() }()
			cfg, err := clientConfig(app)
			if err != nil {
				return err
			}
			app.Progress("Looking for a way to the host…")
			j, err := reach.Join(cmd.Context(), store, invite, reach.JoinOptions{Profile: as, Device: thisDevice(name), Client: cfg})
			if errors.Is(err, endpoints.ErrInvite) {
				return cli.Exit(cli.WrongUsage, err, "this is no invite: give the whole line that `hermes-reach pair` printed, "+
					"a picture of its QR code (.png), @FILE, or - to paste it")
			}
			if err != nil {
				return notReachable(err)
			}
			v := map[string]any{"host": j.Host, "profile": j.Profile.Name, "path": j.Path.Role, "notes": append([]string{}, j.Notes...)}
			return app.Result(v, func(w io.Writer) { showJoined(w, j) })
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "what the host calls this device: `NAME`; empty for its host name")
	cmd.Flags().StringVar(&as, "as", "", "store the host under this profile `NAME`")
	return cli.OnDevice(cmd)
}

// readInvite takes the invite in any of its forms.
func readInvite(app *cli.App, arg string) (string, error) {
	if strings.HasSuffix(strings.ToLower(arg), ".png") {
		f, err := os.Open(arg)
		if err != nil {
			return "", err
		}
		defer func() { _ = f.Close() }()
		return endpoints.ReadPNG(f)
	}
	return app.Secret(arg)
}

func showJoined(w io.Writer, j *reach.Joined) {
	fmt.Fprintf(w, "Paired with %s over %s. It is profile %q here.\n", cli.Clean(j.Host), j.Path, j.Profile.Name)
	for _, n := range j.Notes {
		fmt.Fprintf(w, "  %s\n", cli.Clean(n))
	}
	fmt.Fprintf(w, "Try: hermes-reach get /relay/health\n")
}
