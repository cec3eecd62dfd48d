package main

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/internal/host"
)

func newUpCommand(app *cli.App) *cobra.Command {
	cfg := host.Config{Version: cli.Version()}
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Serve this host's Hermes to its paired devices",
		Long: `Opens the Secure Link, one pinned TLS origin with /relay, /api and /dashboard in
front of services that listen on loopback only, and keeps a session to every
broker this host is enrolled with. It needs neither a broker (devices then come
directly) nor a Hermes service (its path then answers 503 and says why).`,
		Example: "  hermes-reach up --api http://127.0.0.1:8642 --dashboard http://127.0.0.1:9119",
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if cfg.Dir, err = app.StateDir(cmd); err != nil {
				return err
			}
			if cfg.Roots, err = app.Roots(); err != nil {
				return err
			}
			cfg.Log = app.Log
			cfg.Ready = func(st host.Status) { _ = app.Result(st, func(w io.Writer) { showHost(app, w, st) }) }
			hup := make(chan os.Signal, 1) // before the start: one that comes early must not kill us
			signal.Notify(hup, syscall.SIGHUP)
			defer signal.Stop(hup)
			h, err := host.New(cfg)
			if err != nil {
				return err
			}
			done := make(chan struct{})
			var reloads sync.WaitGroup
			reloads.Go(func() { reloadOn(app, hup, h, done) })
			defer reloads.Wait()
			defer close(done)
			return h.Run(cmd.Context())
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&cfg.Listen, "listen", []string{":" + host.DefaultPort}, "serve devices on `ADDRESS`; repeatable, empty for brokers only")
	f.StringSliceVar(&cfg.Advertise, "advertise", nil, "`HOST[:PORT]` that devices should use, such as a name of dynamic DNS; repeatable")
	f.StringVar(&cfg.Upstreams.API, "api", "http://127.0.0.1:8642", "`URL` of the Hermes API on this machine, empty for none")
	f.StringVar(&cfg.Upstreams.Dashboard, "dashboard", "http://127.0.0.1:9119", "`URL` of the Hermes Dashboard on this machine, empty for none")
	f.StringVar(&cfg.Upstreams.Relay, "relay", "", "`URL` of a Hermes Relay on this machine; empty for the built-in one")
	f.StringVar(&cfg.QRSecret, "qr-secret", "", "`FILE` of the secret that signs invites; empty for one of our own")
	return cli.LongRunning(cmd)
}

// reloadOn reads the list of brokers again at each SIGHUP.
func reloadOn(app *cli.App, hup <-chan os.Signal, h *host.Host, done <-chan struct{}) {
	for {
		select {
		case <-hup:
			if err := h.Reload(); err != nil {
				app.Log.Error("not reloaded", "err", err)
			}
		case <-done:
			return
		}
	}
}

// showHost tells a person what is open, what is closed and why.
func showHost(app *cli.App, w io.Writer, st host.Status) {
	fmt.Fprintf(w, "Secure Link %s\n\n", st.Pin)
	var rows [][]cli.Cell
	for _, l := range st.Listeners {
		rows = append(rows, []cli.Cell{{Text: "listening"}, {Text: l}, {Text: "open", Mood: cli.Good}, {}})
	}
	for _, b := range st.Brokers {
		mood := cli.Doubt
		if b.State == "connected" {
			mood = cli.Good
		}
		rows = append(rows, []cli.Cell{{Text: "broker"}, {Text: b.URL}, {Text: b.State, Mood: mood}, {Text: b.Error, Mood: cli.Faint}})
	}
	for _, name := range []string{"relay", "api", "dashboard"} {
		n := st.Namespaces[name]
		row := []cli.Cell{{Text: "service"}, {Text: "/" + name}, {Text: "open", Mood: cli.Good}, {}}
		if !n.Open {
			row[2], row[3] = cli.Cell{Text: "closed", Mood: cli.Doubt}, cli.Cell{Text: n.Message, Mood: cli.Faint}
		}
		rows = append(rows, row)
	}
	app.Table(w, nil, rows...)
	fmt.Fprintln(w)
	if len(st.Addresses) > 0 {
		fmt.Fprintf(w, "Devices are told: %s\n", strings.Join(st.Addresses, ", "))
	}
	if len(st.Brokers) == 0 {
		fmt.Fprintln(w, "No broker: devices reach this host directly only. `hermes-reach enroll` adds one.")
	}
	if st.Devices == 0 {
		fmt.Fprintln(w, "No device is paired yet: `hermes-reach pair` makes an invite.")
	}
}
