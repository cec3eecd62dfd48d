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
			if err := checkAuthority(f.req); err != nil {
				return err
			}
			op, err := askHost(app, cmd)
			if err != nil {
				return err
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
	for _, picture := range []struct {
		file  string
		write func(file, text string) error
	}{{f.png, endpoints.WritePNGFile}, {f.svg, endpoints.WriteSVGFile}} {
		if picture.file == "" {
			continue
		}
		if err := picture.write(picture.file, inv.QR); err != nil {
			return err
		}
	}
	return app.Result(inv, func(w io.Writer) {
		if f.text {
			fmt.Fprintln(w, inv.Text)
			return
		}
		f.describe(w, inv)
		if f.png == "" && f.svg == "" { // last, where it can be seen as a whole
			drawQR(app, w, inv.QR)
		}
		fmt.Fprintf(w, "The invite is good for one device until %s.\n", inv.Expires.Local().Format(time.TimeOnly))
	})
}

func (f pairFlags) describe(w io.Writer, inv *host.Invite) {
	fmt.Fprintf(w, "On a laptop or headset run `hermes-reach join -` and paste this line:\n\n%s\n\n", inv.Text)
	fmt.Fprintf(w, "It offers, the best first:\n")
	for _, c := range inv.Candidates {
		fmt.Fprintf(w, "  %s\n", cli.Clean(c))
	}
	for _, n := range inv.Notes {
		fmt.Fprintf(w, "  %s\n", cli.Clean(n))
	}
	fmt.Fprintln(w)
	for _, file := range []string{f.png, f.svg} {
		if file != "" {
			fmt.Fprintf(w, "The QR code for the phone app is in %s, which only you can read: remove it after use.\n", file)
		}
	}
}

// drawQR draws a QR code for the phone app where it can be seen as a whole: one
// that wraps or scrolls away scans as nothing.
func drawQR(app *cli.App, w io.Writer, text string) {
	if !app.Terminal(app.Stdout) {
		return
	}
	const below = 3 // lines that follow it
	columns, rows, err := endpoints.TerminalSize(text)
	if err != nil {
		fmt.Fprintf(w, "The QR code cannot be drawn: %v\n", err)
		return
	}
	if c, r := app.Window(app.Stdout); c < columns || r < rows+below {
		fmt.Fprintf(w, "The QR code for the phone app needs a window of %d x %d characters, and this one has %d x %d.\n"+
			"Make it larger, or its font smaller, and run this again; or write a picture with --png FILE.\n", columns, rows+below, c, r)
		return
	}
	if err := endpoints.TerminalQR(w, text); err != nil {
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
