package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/internal/host/operator"
)

type pairFlags struct {
	req      host.PairRequest
	png, svg string
	text     bool
	noWait   bool
}

func newPairCommand(app *cli.App) *cobra.Command {
	var f pairFlags
	cmd := &cobra.Command{
		Use:   "pair",
		Short: "Make an invite for one device and wait until it has joined",
		Long: `Mints a signed invite: shown as a QR code for the phone app, and as a line of
text for "hermes-reach join". It pairs one device and is good for ten minutes.
Whoever has it can join, so show it to nobody else.`,
		Example: "  hermes-reach pair --ttl 90d",
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir, err := app.StateDir(cmd)
			if err != nil {
				return err
			}
			op, err := operator.New(cmd.Context(), dir)
			if err != nil {
				return cli.Exit(cli.NotReachable, err, "%v", operator.ErrNotRunning)
			}
			inv, err := op.Pair(cmd.Context(), f.req)
			if err != nil {
				return err
			}
			if err := f.show(app, inv); err != nil || f.noWait {
				return err
			}
			return waitForDevice(cmd.Context(), app, op, inv)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.req.TTL, "ttl", "30d", "how long the device stays paired: `DURATION` such as 1d, 7d, 30d, 90d, 1y, never")
	fs.StringVar(&f.req.Grants, "grants", "", "what it may do, such as terminal=1d,dashboard: `LIST`; empty for the usual")
	fs.StringVar(&f.png, "png", "", "write the QR code as a picture to `FILE` (owner-only) instead of showing it")
	fs.StringVar(&f.svg, "svg", "", "write the QR code as SVG to `FILE` (owner-only) instead of showing it")
	fs.BoolVar(&f.text, "text", false, "print the invite line only, without a QR code")
	fs.BoolVar(&f.noWait, "no-wait", false, "do not wait until a device has joined")
	return cmd
}

// show prints the invite. With --json it is one object, and waiting prints
// another.
func (f pairFlags) show(app *cli.App, inv *host.Invite) error {
	for path, write := range map[string]func(string, string) error{f.png: endpoints.WritePNGFile, f.svg: endpoints.WriteSVGFile} {
		if path == "" {
			continue
		}
		if err := write(path, inv.QR); err != nil {
			return err
		}
	}
	return app.Result(inv, func(w io.Writer) {
		if f.png == "" && f.svg == "" && !f.text {
			f.draw(app, w, inv)
		}
		if f.text {
			fmt.Fprintln(w, inv.Text)
			return
		}
		fmt.Fprintf(w, "\nOn a laptop or headset: hermes-reach join '%s'\n\n", inv.Text)
		fmt.Fprintf(w, "It offers, the best first:\n")
		for _, c := range inv.Candidates {
			fmt.Fprintf(w, "  %s\n", cli.Clean(c))
		}
		for _, n := range inv.Notes {
			fmt.Fprintf(w, "  %s\n", cli.Clean(n))
		}
		fmt.Fprintf(w, "Good for one device until %s.\n", inv.Expires.Local().Format(time.TimeOnly))
	})
}

func (f pairFlags) draw(app *cli.App, w io.Writer, inv *host.Invite) {
	if !app.Terminal(app.Stdout) {
		return
	}
	if err := endpoints.TerminalQR(w, inv.QR); err != nil {
		fmt.Fprintf(w, "The QR code cannot be drawn: %v\n", err)
	}
}

func waitForDevice(ctx context.Context, app *cli.App, op *operator.Operator, inv *host.Invite) error {
	app.Progress("Waiting for a device to join (Ctrl-C takes the invite back)…")
	end, err := op.WaitPair(ctx, inv.ID)
	if err != nil {
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer cancel()
		_ = op.CancelPair(late, inv.ID)
		return err
	}
	if end.State != "joined" {
		return cli.Exit(cli.Failed, nil, "nobody joined: the invite is %s; make another with `hermes-reach pair`", end.State)
	}
	return app.Result(end, func(w io.Writer) {
		fmt.Fprintf(w, "Joined: %s (%s) by %s.\n", cli.Clean(end.Device.Name), cli.Clean(end.Device.Platform), cli.Clean(end.Path))
		fmt.Fprintf(w, "If that was not you: hermes-reach devices revoke %s\n", end.Device.ID)
	})
}
