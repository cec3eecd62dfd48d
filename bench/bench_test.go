package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "-role" { // one of the other processes of a run
		if err := ServeRole(os.Args[2], os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

// TestRun measures everything for a moment: every figure is there, on every path.
func TestRun(t *testing.T) {
	r, err := Run(t.Context(), Config{Rounds: 2, Time: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range Paths {
		p := r.Paths[name]
		if p == nil {
			t.Fatalf("path %s is missing", name)
		}
		for what, v := range map[string]float64{
			"down": p.DownMBps, "up": p.UpMBps, "p50": p.PingP50us, "p99": p.PingP99us, "setups": p.SetupsPerSec,
			"ratio down": p.ToSplice.Down, "ratio up": p.ToSplice.Up, "ratio p50": p.ToSplice.P50, "ratio setups": p.ToSplice.Setup,
		} {
			if v <= 0 {
				t.Errorf("path %s: %s = %v", name, what, v)
			}
		}
	}
	for _, name := range []string{TLS, WSS} {
		if b := r.Broker[name]; b == nil || b.AllocsPerMessage <= 0 {
			t.Errorf("broker, %s: %+v", name, b)
		}
	}
	var table bytes.Buffer
	if err := r.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	for _, want := range append(Paths, "to splice", "to relay", "in the broker", "other programs") {
		if !strings.Contains(table.String(), want) {
			t.Errorf("the table has no %q:\n%s", want, table.String())
		}
	}
	if _, err := json.Marshal(r); err != nil {
		t.Error(err)
	}
}

// TestRatiosAreTakenWithinARound: a round in which the machine was twice as slow
// changes no ratio.
func TestRatiosAreTakenWithinARound(t *testing.T) {
	rs := func(down ...float64) (rs []round) {
		for _, d := range down {
			rs = append(rs, round{down: d, p50: time.Duration(1e9 / d)})
		}
		return rs
	}
	r := newReport(Config{Rounds: 3}, map[string][]round{
		Splice: rs(1000, 500, 1000), TLS: rs(410, 205, 390), Direct: rs(1, 1, 1), Relay: rs(1, 1, 1), WSS: rs(1, 1, 1),
	})
	tls := r.Paths[TLS].ToSplice
	if got := fmt.Sprintf("%.2f %.2f", tls.Down, r.Paths[TLS].DownMBps*1e6); got != "0.41 390.00" {
		t.Errorf("ratio and median = %s, want 0.41 390.00", got)
	}
	if !r.Goals[0].Met || r.Goals[1].Met || !r.Goals[2].Met || r.Met() {
		t.Errorf("goals = %+v; want down and ping met, up (never measured) missed", r.Goals)
	}
	if got := middle([]float64{4, 1, 3, 2}); got != 2.5 {
		t.Errorf("middle of 1 to 4 = %v, want 2.5", got)
	}
}

func TestRoleNeedsAPlace(t *testing.T) {
	for name, in := range map[string]string{"nothing": "", "not a place": "x\n", "unknown role": "{}\n"} {
		if err := ServeRole("cook", strings.NewReader(in), io.Discard); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// each runs a benchmark on every path, all parts being processes of their own.
func each(b *testing.B, run func(b *testing.B, d *device)) {
	ps, err := startProcesses(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	defer ps.stop()
	for _, name := range Paths {
		b.Run(name, func(b *testing.B) { run(b, &device{ps.paths[name], innerClient(ps.place.Pin)}) })
	}
}

func BenchmarkDown(b *testing.B) {
	each(b, func(b *testing.B, d *device) {
		c, err := d.connect(b.Context(), cmdDown)
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		buf := make([]byte, chunk)
		b.SetBytes(chunk)
		for b.Loop() {
			if _, err := io.ReadFull(c, buf); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkUp(b *testing.B) {
	each(b, func(b *testing.B, d *device) {
		c, err := d.connect(b.Context(), cmdUp)
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		buf := make([]byte, chunk)
		b.SetBytes(chunk)
		for b.Loop() {
			if _, err := c.Write(buf); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkPing(b *testing.B) {
	each(b, func(b *testing.B, d *device) {
		c, err := d.connect(b.Context(), cmdEcho)
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		for b.Loop() {
			if _, err := pings(c, 0); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkConnect(b *testing.B) {
	each(b, func(b *testing.B, d *device) {
		for b.Loop() {
			c, err := d.hello(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			_ = c.Close()
		}
	})
}
