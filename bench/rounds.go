package bench

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"time"

	"github.com/hermes-reach/hermes-reach/reach/link"
)

// A round is what one path did in one round.
type round struct {
	down, up  float64 // bytes a second
	cpuDown   float64 // seconds for each byte
	p50, p99  time.Duration
	perSecond float64 // new connections
}

// Run starts every part as a process of its own, measures, and ends them. The
// program must call ServeRole when it is started with -role.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if cfg.Progress == nil {
		cfg.Progress = func(string) {}
	}
	began := time.Now()
	ps, err := startProcesses(ctx)
	if err != nil {
		return nil, err
	}
	defer ps.stop()
	inner := innerClient(ps.place.Pin)
	others := ps.watchOthers()
	rounds, err := runRounds(ctx, cfg, ps, inner)
	if err != nil {
		return nil, err
	}
	r := newReport(cfg, rounds)
	r.Others = others()
	for _, t := range []string{TLS, WSS} {
		cfg.Progress("memory of the broker, " + t)
		d := &device{ps.paths[t], inner}
		if err := r.measureBroker(ctx, t, cfg, ps.all[roleBroker], d); err != nil {
			return nil, fmt.Errorf("path %s: %w", t, err)
		}
	}
	r.Seconds = time.Since(began).Seconds()
	return r, nil
}

// runRounds gives the rounds of each path.
func runRounds(ctx context.Context, cfg Config, ps *processes, inner *tls.Config) (map[string][]round, error) {
	all := make(map[string][]round)
	for i := range cfg.Rounds {
		cfg.Progress(fmt.Sprintf("round %d of %d", i+1, cfg.Rounds))
		these := make([]round, len(Paths))
		for _, measure := range []func(context.Context, *device, time.Duration, *processes, *round) error{
			measureDown, measureUp, measurePings, measureSetup,
		} {
			for k := range Paths {
				k = (k + i) % len(Paths) // another order each round
				d := &device{ps.paths[Paths[k]], inner}
				if err := measure(ctx, d, cfg.Time, ps, &these[k]); err != nil {
					return nil, fmt.Errorf("path %s: %w", Paths[k], err)
				}
			}
		}
		for k, name := range Paths {
			all[name] = append(all[name], these[k])
		}
	}
	return all, nil
}

func measureDown(ctx context.Context, d *device, length time.Duration, ps *processes, r *round) error {
	before := ps.cpu()
	n, took, err := d.down(ctx, length)
	if err != nil {
		return err
	}
	r.down, r.cpuDown = float64(n)/took.Seconds(), (ps.cpu()-before)/float64(n)
	return nil
}

func measureUp(ctx context.Context, d *device, length time.Duration, _ *processes, r *round) error {
	n, took, err := d.up(ctx, length)
	r.up = float64(n) / took.Seconds()
	return err
}

func measurePings(ctx context.Context, d *device, length time.Duration, _ *processes, r *round) error {
	trips, err := d.pings(ctx, length)
	if err != nil {
		return err
	}
	r.p50, r.p99 = trips[len(trips)/2], trips[len(trips)*99/100]
	return nil
}

func measureSetup(ctx context.Context, d *device, length time.Duration, _ *processes, r *round) error {
	n, took, err := d.setup(ctx, length)
	r.perSecond = float64(n) / took.Seconds()
	return err
}

// measureBroker measures what the broker allocates for each message and holds
// for each idle stream.
func (r *Report) measureBroker(ctx context.Context, t string, cfg Config, broker *process, d *device) error {
	b := &Broker{}
	r.Broker[t] = b
	if err := b.measureMessages(ctx, cfg.Time, broker, d); err != nil {
		return err
	}
	if cfg.Idle == 0 {
		return nil
	}
	var err error
	if b.IdleKB, err = held(ctx, cfg.Idle, broker, d, cmdHello, 1, 0); err != nil || t != TLS {
		return err
	}
	// The broker gives a burst's buffers back some seconds after it.
	b.IdleAfterBurstKB, err = held(ctx, cfg.Idle, broker, d, cmdBurst, burst, settled)
	return err
}

func (b *Broker) measureMessages(ctx context.Context, length time.Duration, broker *process, d *device) error {
	c, err := d.connect(ctx, cmdEcho)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := pings(c, 0); err != nil { // the connection is there, whole
		return err
	}
	before, err := broker.memory()
	if err != nil {
		return err
	}
	trips, err := pings(c, length)
	if err != nil {
		return err
	}
	after, err := broker.memory()
	messages := float64(2 * len(trips))
	b.AllocsPerMessage = float64(after.Mallocs-before.Mallocs) / messages
	b.BytesPerMessage = float64(after.Bytes-before.Bytes) / messages
	return err
}

// settled is longer than the interval in which sessions look for idle streams.
const settled = link.DeadAfter/7 + time.Second

// held opens n streams and gives how many KB each of them holds in the broker,
// a while after its last byte.
func held(ctx context.Context, n int, broker *process, d *device, cmd byte, bytes int64, after time.Duration) (float64, error) {
	before, err := broker.memory()
	if err != nil {
		return 0, err
	}
	conns, err := d.idle(ctx, n, cmd, bytes)
	defer endAll(conns)
	if err != nil {
		return 0, err
	}
	select {
	case <-time.After(after):
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	now, err := broker.memory()
	return (float64(now.Held) - float64(before.Held)) / float64(n) / 1024, err
}

// endAll ends connections in good order, so that nothing of them is left.
func endAll(conns []*tls.Conn) {
	for _, c := range conns {
		_ = c.CloseWrite()
	}
	for _, c := range conns {
		_ = c.SetDeadline(time.Now().Add(patience))
		_, _ = io.Copy(io.Discard, c)
		_ = c.Close()
	}
}
