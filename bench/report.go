package bench

import (
	"fmt"
	"io"
	"runtime"
	"slices"
	"text/tabwriter"
)

// The goals for transport tls on one machine.
const (
	GoalBulk = 0.4 // at least, of the splice
	GoalPing = 4.0 // at most, times the splice's
)

// A Report is the outcome of a run: medians over its rounds.
type Report struct {
	Rounds  int     `json:"rounds"`
	CPUs    int     `json:"cpus"`
	OS      string  `json:"os"`
	Arch    string  `json:"arch"`
	Seconds float64 `json:"seconds"` // that the run took
	// Others is the part of all processors that other programs took in the
	// rounds. The broker's paths need more of them than the splice: on a busy
	// machine their ratios come out too low.
	Others float64            `json:"others_cpu"`
	Paths  map[string]*Path   `json:"paths"`
	Broker map[string]*Broker `json:"broker"` // by transport
	Goals  []Goal             `json:"goals"`
}

// A Path is one path's figures.
type Path struct {
	DownMBps     float64 `json:"down_mb_s"` // 10^6 bytes
	UpMBps       float64 `json:"up_mb_s"`
	CPUsPerGB    float64 `json:"cpu_s_per_gb_down"` // all processes; 0 where the system does not tell
	PingP50us    float64 `json:"ping_p50_us"`
	PingP99us    float64 `json:"ping_p99_us"`
	SetupsPerSec float64 `json:"setups_per_s"`
	// Medians of ratios taken within a round.
	ToSplice Ratios `json:"to_splice"`
	ToRelay  Ratios `json:"to_relay"`
}

// Ratios are figures divided by those of another path.
type Ratios struct {
	Down  float64 `json:"down"`
	Up    float64 `json:"up"`
	CPU   float64 `json:"cpu"`
	P50   float64 `json:"ping_p50"`
	P99   float64 `json:"ping_p99"`
	Setup float64 `json:"setups"`
}

// Broker is what the broker's own process spends on a transport.
type Broker struct {
	AllocsPerMessage float64 `json:"allocs_per_message"` // of 1 KiB, one way
	BytesPerMessage  float64 `json:"bytes_per_message"`
	IdleKB           float64 `json:"idle_stream_kb"` // of a stream that carried a byte
	// IdleAfterBurstKB is of one that carried 256 KiB some seconds ago. It is
	// measured over tls only: the streams are the same.
	IdleAfterBurstKB float64 `json:"idle_stream_after_burst_kb,omitempty"`
}

// A Goal is a bound and what came out.
type Goal struct {
	Name string  `json:"name"`
	Want float64 `json:"want"`
	Got  float64 `json:"got"`
	Met  bool    `json:"met"`
}

func newReport(cfg Config, rounds map[string][]round) *Report {
	r := &Report{
		Rounds: cfg.Rounds, CPUs: runtime.GOMAXPROCS(0), OS: runtime.GOOS, Arch: runtime.GOARCH,
		Paths: make(map[string]*Path), Broker: make(map[string]*Broker),
	}
	for name, rs := range rounds {
		us := func(f func(round) float64) float64 { return median(rs, f) / 1e3 }
		r.Paths[name] = &Path{
			DownMBps: median(rs, down) / 1e6, UpMBps: median(rs, up) / 1e6, CPUsPerGB: median(rs, cpuDown) * 1e9,
			PingP50us: us(p50), PingP99us: us(p99), SetupsPerSec: median(rs, perSecond),
			ToSplice: ratios(rs, rounds[Splice]), ToRelay: ratios(rs, rounds[Relay]),
		}
	}
	tls := r.Paths[TLS].ToSplice
	r.Goals = []Goal{
		{"bulk down over tls, of the splice, at least", GoalBulk, tls.Down, tls.Down >= GoalBulk},
		{"bulk up over tls, of the splice, at least", GoalBulk, tls.Up, tls.Up >= GoalBulk},
		{"ping p50 over tls, times the splice's, at most", GoalPing, tls.P50, tls.P50 <= GoalPing},
	}
	return r
}

func ratios(rs, base []round) Ratios {
	ratio := func(f func(round) float64) float64 { return medianRatio(rs, base, f) }
	return Ratios{
		Down: ratio(down), Up: ratio(up), CPU: ratio(cpuDown), P50: ratio(p50), P99: ratio(p99), Setup: ratio(perSecond),
	}
}

func down(r round) float64      { return r.down }
func up(r round) float64        { return r.up }
func cpuDown(r round) float64   { return r.cpuDown }
func p50(r round) float64       { return float64(r.p50) }
func p99(r round) float64       { return float64(r.p99) }
func perSecond(r round) float64 { return r.perSecond }

func median(rs []round, f func(round) float64) float64 {
	var vs []float64
	for _, r := range rs {
		vs = append(vs, f(r))
	}
	return middle(vs)
}

// medianRatio takes the ratio in each round, then the median: what slowed a
// whole round down does not count.
func medianRatio(rs, base []round, f func(round) float64) float64 {
	var vs []float64
	for i := range rs {
		if b := f(base[i]); b > 0 {
			vs = append(vs, f(rs[i])/b)
		}
	}
	return middle(vs)
}

// middle is the median, the mean of two in the middle; 0 of nothing.
func middle(vs []float64) float64 {
	slices.Sort(vs)
	n := len(vs)
	if n == 0 {
		return 0
	}
	return (vs[(n-1)/2] + vs[n/2]) / 2
}

// Met says whether every goal was met.
func (r *Report) Met() bool {
	return !slices.ContainsFunc(r.Goals, func(g Goal) bool { return !g.Met })
}

func (r *Report) writeRatios(w io.Writer, base string, paths []string, of func(*Path) Ratios) {
	fmt.Fprintf(w, "to %s\t\t\t\t\t\t\t\n", base)
	for _, name := range paths {
		p := of(r.Paths[name])
		fmt.Fprintf(w, "%s\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t%.2f\t\n", name, p.Down, p.Up, p.CPU, p.P50, p.P99, p.Setup)
	}
}

// WriteTable writes the report for people.
func (r *Report) WriteTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "path\tdown MB/s\tup MB/s\tCPU s/GB\tping p50 µs\tp99 µs\tconnections/s\t")
	for _, name := range Paths {
		p := r.Paths[name]
		fmt.Fprintf(t, "%s\t%.0f\t%.0f\t%.2f\t%.0f\t%.0f\t%.0f\t\n",
			name, p.DownMBps, p.UpMBps, p.CPUsPerGB, p.PingP50us, p.PingP99us, p.SetupsPerSec)
	}
	r.writeRatios(t, Splice, Paths, func(p *Path) Ratios { return p.ToSplice })
	r.writeRatios(t, Relay, []string{TLS, WSS}, func(p *Path) Ratios { return p.ToRelay })
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(t, "\nin the broker\tallocations a message\tbytes a message\tKB an idle stream\tKB after a burst of 256 KiB\t")
	for _, name := range []string{TLS, WSS} {
		b := r.Broker[name]
		after := ""
		if b.IdleAfterBurstKB != 0 {
			after = fmt.Sprintf("%.1f", b.IdleAfterBurstKB)
		}
		fmt.Fprintf(t, "%s\t%.1f\t%.0f\t%.1f\t%s\t\n", name, b.AllocsPerMessage, b.BytesPerMessage, b.IdleKB, after)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for _, g := range r.Goals {
		fmt.Fprintf(w, "%-48s %.2f: %.2f %s\n", g.Name, g.Want, g.Got, map[bool]string{true: "met", false: "MISSED"}[g.Met])
	}
	_, err := fmt.Fprintf(w, "%d rounds in %.0f s on %s/%s with %d processors, of which other programs took %.0f %%\n",
		r.Rounds, r.Seconds, r.OS, r.Arch, r.CPUs, 100*r.Others)
	return err
}
