package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/internal/demo"
	"github.com/hermes-reach/hermes-reach/internal/host"
)

func newDemoCommand(app *cli.App) *cobra.Command {
	var keep bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "See the whole system work, on this machine alone",
		Long: `Runs a broker, a host and two devices on loopback, with a certificate authority
made for the run, goes through what matters and ends with a table. Nothing leaves
this machine and nothing stays behind. The exit code is 0 only if all is well.`,
		Example: "  hermes-reach demo",
		RunE: func(cmd *cobra.Command, _ []string) error {
			began := time.Now()
			app.Progress("A broker, a host and two devices on loopback…")
			o := demo.Options{}
			if app.Debug() { // what breaks in a demo breaks on purpose
				o.Log = app.Log
			}
			if !app.JSON() {
				o.Each = func(c demo.Check) { showCheck(app, c) }
			}
			if keep {
				o.Keep = func(ctx context.Context, inv *host.Invite, ca []byte) error { return keepUp(ctx, app, inv, ca) }
			}
			rep, err := demo.Run(cmd.Context(), o)
			if err != nil {
				return err
			}
			if err := app.Result(rep, func(w io.Writer) { summary(w, rep, time.Since(began)) }); err != nil {
				return err
			}
			if !rep.OK {
				return cli.Exit(cli.Failed, nil, "not every check passed: see the table, or run with --debug")
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&keep, "keep", false, "stay up after the checks and show an invite as a QR code")
	return cmd
}

// showCheck prints one line of the table as soon as it is known.
func showCheck(app *cli.App, c demo.Check) {
	mark := cli.Cell{Text: "ok  ", Mood: cli.Good}
	if !c.OK {
		mark = cli.Cell{Text: "FAIL", Mood: cli.Bad}
	}
	const indent, name = 6, 56
	columns, _ := app.Window(app.Stdout)
	if columns == 0 || indent+name+2+len(c.Detail) <= columns {
		app.Table(app.Stdout, nil, []cli.Cell{mark, {Text: fmt.Sprintf("%-*s", name, c.Name)}, {Text: c.Detail, Mood: cli.Faint}})
		return
	}
	app.Table(app.Stdout, nil, []cli.Cell{mark, {Text: c.Name}})
	for _, line := range wrap(c.Detail, columns-indent) {
		app.Table(app.Stdout, nil, []cli.Cell{{Text: strings.Repeat(" ", indent-2)}, {Text: line, Mood: cli.Faint}})
	}
}

// wrap breaks text between words into lines of at most width bytes, where its
// words allow that.
func wrap(text string, width int) (lines []string) {
	for word := range strings.FieldsSeq(text) {
		if n := len(lines); n > 0 && len(lines[n-1])+1+len(word) <= width {
			lines[n-1] += " " + word
		} else {
			lines = append(lines, word)
		}
	}
	return lines
}

func summary(w io.Writer, rep demo.Report, took time.Duration) {
	good := 0
	for _, c := range rep.Checks {
		if c.OK {
			good++
		}
	}
	fmt.Fprintf(w, "\n%d of %d checks passed in %.1f s.\n", good, len(rep.Checks), took.Seconds())
}

// keepUp shows the invite and waits for the interrupt.
func keepUp(ctx context.Context, app *cli.App, inv *host.Invite, ca []byte) error {
	dir, err := os.MkdirTemp("", "hermes-reach-ca-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(file, ca, 0o600); err != nil {
		return err
	}
	err = app.Result(map[string]any{"invite": inv.Text, "ca": file, "expires_at": inv.Expires}, func(w io.Writer) {
		fmt.Fprintf(w, "\nIn another terminal run `hermes-reach join - --ca %s` and paste this line:\n\n%s\n\n"+
			"then `hermes-reach probe --ca %s`. Ctrl-C here ends it.\n", file, inv.Text, file)
		drawQR(app, w, inv.QR)
	})
	if err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}
