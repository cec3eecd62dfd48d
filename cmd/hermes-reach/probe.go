package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

func newProbeCommand(app *cli.App) *cobra.Command {
	var f deviceFlags
	cmd := &cobra.Command{
		Use:     "probe",
		Short:   "Try every way to the host and say which is used, and why",
		Example: "  hermes-reach probe",
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, p, err := f.open(app, cmd)
			if err != nil {
				return notReachable(err)
			}
			defer func() { _ = c.Close() }()
			results := c.Probe(cmd.Context())
			v := struct {
				Profile    string              `json:"profile"`
				Chosen     any                 `json:"chosen"`
				Candidates []reach.ProbeResult `json:"candidates"`
			}{Profile: p.Name, Candidates: results}
			for _, r := range results {
				if r.Chosen {
					v.Chosen = r.Role
				}
			}
			if err := app.Result(v, func(w io.Writer) { showProbe(app, w, results) }); err != nil {
				return err
			}
			if v.Chosen == nil {
				return cli.Exit(cli.NotReachable, nil, "no way leads to the host now")
			}
			return nil
		},
	}
	f.add(cmd)
	return cli.OnDevice(cmd)
}

func showProbe(app *cli.App, w io.Writer, results []reach.ProbeResult) {
	var rows [][]cli.Cell
	for _, r := range results {
		mood, where, rtt := cli.Bad, r.Authority, ""
		if r.State == reach.StateReachable {
			mood, rtt = cli.Good, fmt.Sprintf("%.1f ms", r.RTT)
		}
		if u, err := wire.ParseBrokerURL(r.Broker, true); err == nil {
			where = u.HostPort()
		}
		mark := ""
		if r.Chosen {
			mark = "→"
		}
		rows = append(rows, []cli.Cell{
			{Text: mark}, {Text: fmt.Sprint(r.Priority)}, {Text: string(r.Role)}, {Text: where},
			{Text: r.State, Mood: mood}, {Text: rtt}, {Text: r.Security}, {Text: r.Reason, Mood: cli.Faint},
		})
	}
	app.Table(w, []string{"", "#", "ROLE", "WHERE", "STATE", "TIME", "SECURITY", "WHY"}, rows...)
}
