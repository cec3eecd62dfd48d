// Command reachbench measures the ways to a host against each other and prints
// one table; see package bench for what is measured.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"time"

	"github.com/hermes-reach/hermes-reach/bench"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "reachbench:", err)
		os.Exit(1)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	short := flag.Bool("short", false, "the short form, in less than 15 s")
	asJSON := flag.Bool("json", false, "print one JSON object instead of the table")
	check := flag.Bool("check", false, "fail when a goal is missed")
	rounds := flag.Int("rounds", 0, "rounds, instead of the form's")
	length := flag.Duration("time", 0, "length of one measurement, instead of the form's")
	idle := flag.Int("idle", -1, "idle streams, instead of the form's; 0 leaves them out")
	role := flag.String("role", "", "used by the command itself for its other processes")
	flag.Parse()
	if *role != "" {
		return bench.ServeRole(*role, os.Stdin, os.Stdout)
	}
	cfg := bench.Full()
	if *short {
		cfg = bench.Short()
	}
	if *rounds > 0 {
		cfg.Rounds = *rounds
	}
	if *length > 0 {
		cfg.Time = *length
	}
	if *idle >= 0 {
		cfg.Idle = *idle
	}
	began := time.Now()
	cfg.Progress = func(what string) {
		fmt.Fprintf(os.Stderr, "%4.0f s  %s\n", time.Since(began).Seconds(), what)
	}
	r, err := bench.Run(ctx, cfg)
	if err != nil {
		return err
	}
	if *asJSON {
		err = json.NewEncoder(os.Stdout).Encode(r)
	} else {
		err = r.WriteTable(os.Stdout)
	}
	if err == nil && *check && !r.Met() {
		err = fmt.Errorf("a goal was missed")
	}
	return err
}
