package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/reach/profile"
)

func newProfileCommand(app *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "profile", Short: "Show and choose the hosts this device is paired with"}
	cmd.AddCommand(&cobra.Command{
		Use: "list", Short: "List the paired hosts", Example: "  hermes-reach profile list",
		RunE: withProfiles(app, func(store *profile.Store, _ []string) error { return listProfiles(app, store) }),
	}, &cobra.Command{
		Use: "use NAME", Short: "Make a paired host the current one", Args: cobra.ExactArgs(1), Example: "  hermes-reach profile use home",
		RunE: withProfiles(app, func(store *profile.Store, args []string) error {
			return done(app, store.Use(args[0]), "Current host: %s.", args[0])
		}),
	}, &cobra.Command{
		Use: "rename NAME NEW", Short: "Give a paired host another name", Args: cobra.ExactArgs(2), Example: "  hermes-reach profile rename home attic",
		RunE: withProfiles(app, func(store *profile.Store, args []string) error {
			return done(app, store.Rename(args[0], args[1]), "%s is %s now.", args[0], args[1])
		}),
	}, &cobra.Command{
		Use: "remove NAME", Short: "Forget a paired host and the secrets for it", Args: cobra.ExactArgs(1), Example: "  hermes-reach profile remove home",
		RunE: withProfiles(app, func(store *profile.Store, args []string) error {
			return done(app, store.Remove(args[0]), "Forgot %s. Its operator can revoke this device with `hermes-reach devices revoke`.", args[0])
		}),
	})
	return cli.OnDevice(cmd)
}

func withProfiles(app *cli.App, run func(*profile.Store, []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		store, err := openProfiles(app, cmd)
		if err != nil {
			return err
		}
		defer func() { _ = store.Close() }()
		return run(store, args)
	}
}

// done says what was done, to people and to scripts.
func done(app *cli.App, err error, format string, args ...any) error {
	if err != nil {
		return err
	}
	return app.Result(map[string]any{"done": true}, func(w io.Writer) { fmt.Fprintf(w, format+"\n", args...) })
}

func listProfiles(app *cli.App, store *profile.Store) error {
	names, err := store.Names()
	if err != nil {
		return err
	}
	current, err := store.Current()
	if err != nil && len(names) > 0 {
		app.Log.Debug("no current profile", "err", err)
	}
	type entry struct {
		Name    string    `json:"name"`
		Current bool      `json:"current"`
		Pin     string    `json:"pin"`
		Paired  time.Time `json:"paired"`
		Ways    []string  `json:"ways"`
	}
	list := []entry{}
	for _, n := range names {
		p, err := store.Get(n)
		if err != nil {
			return err
		}
		e := entry{Name: n, Current: n == current, Pin: p.Pin.String(), Paired: p.Paired, Ways: []string{}}
		for _, c := range p.Candidates {
			e.Ways = append(e.Ways, string(c.Role))
		}
		list = append(list, e)
	}
	return app.Result(map[string]any{"profiles": list}, func(w io.Writer) {
		if len(list) == 0 {
			fmt.Fprintln(w, "This device is paired with no host. `hermes-reach join` pairs it.")
			return
		}
		var rows [][]cli.Cell
		for _, e := range list {
			mark := map[bool]string{true: "→"}[e.Current]
			rows = append(rows, cli.Cells(mark, e.Name, e.Paired.Local().Format(time.DateOnly), fmt.Sprint(len(e.Ways)), e.Pin))
		}
		app.Table(w, []string{"", "NAME", "PAIRED", "WAYS", "PIN"}, rows...)
	})
}
