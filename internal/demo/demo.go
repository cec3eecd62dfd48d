// Package demo is the whole system on this machine, once through: a broker, a
// host and two devices, each as its own command would run it, talking over real
// sockets. It proves the main claims while somebody looks, and says so in a
// table: what a device reaches, what a stranger reads, what happens when the
// direct path goes and when a device is revoked.
package demo

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/hermes-reach/hermes-reach/internal/host"
)

// limit bounds a run; the checks take a few seconds.
const limit = 60 * time.Second

// Check is one line of the outcome.
type Check struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
}

// Report is the outcome. OK is true when every check is.
type Report struct {
	OK     bool    `json:"ok"`
	Checks []Check `json:"checks"`
}

// Options adjust a run.
type Options struct {
	Log *slog.Logger
	// Each hears of a check as soon as it is done; nil is nobody.
	Each func(Check)
	// Keep, when set, is called with a fresh invite after the checks; the
	// system stays up until it returns.
	Keep func(ctx context.Context, invite *host.Invite, ca []byte) error
}

// Run brings the system up in a folder of its own, goes through the checks and
// takes it down. The error says that it could not be brought up or that ctx
// ended; what the checks found is in the Report.
func Run(ctx context.Context, o Options) (Report, error) {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	dir, err := os.MkdirTemp("", "hermes-reach-demo-")
	if err != nil {
		return Report{}, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	s, err := startSite(ctx, dir, o.Log)
	if err != nil {
		return Report{}, fmt.Errorf("bring the demo up: %w", err)
	}
	defer s.close()
	r := &run{site: s, log: o.Log, each: o.Each}
	checks, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	r.all(checks)
	rep := r.report()
	if ctx.Err() != nil {
		return rep, context.Cause(ctx)
	}
	if o.Keep == nil {
		return rep, nil
	}
	inv, err := s.op.Pair(ctx, host.PairRequest{})
	if err != nil {
		return rep, err
	}
	return rep, o.Keep(ctx, inv, s.ca.PEM())
}

// run collects the outcome of one run.
type run struct {
	site    *site
	log     *slog.Logger
	each    func(Check)
	checks  []Check
	secrets map[string]string // what must not be read on the way: name to text
	laptop  *device
	headset *device
}

// check runs one step. A step that fails does not stop the others, but those
// that need what it makes will say so.
func (r *run) check(name string, step func() (string, error)) {
	c := Check{Name: name, OK: true}
	var err error
	if c.Detail, err = step(); err != nil {
		c.OK, c.Detail = false, err.Error()
	}
	r.checks = append(r.checks, c)
	if r.each != nil {
		r.each(c)
	}
}

func (r *run) report() Report {
	rep := Report{OK: len(r.checks) > 0, Checks: r.checks}
	for _, c := range r.checks {
		rep.OK = rep.OK && c.OK
	}
	return rep
}
