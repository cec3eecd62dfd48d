package main

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/internal/demo"
	"github.com/hermes-reach/hermes-reach/internal/host"
)

// onTerminal is an App whose standard output is a window of this size.
func onTerminal(columns, rows int) (*cli.App, *bytes.Buffer) {
	var out bytes.Buffer
	app := cli.New()
	app.Stdout = &out
	app.LookupEnv = func(string) (string, bool) { return "", false }
	app.Terminal = func(w io.Writer) bool { return w == &out }
	app.Window = func(io.Writer) (int, int) { return columns, rows }
	return app, &out
}

// TestQRFitsTheWindow or is not drawn: one that wraps or scrolls scans as nothing.
func TestQRFitsTheWindow(t *testing.T) {
	inv := &host.Invite{Text: "hermes-relay://pair?payload=x", QR: strings.Repeat("x", 1000), Expires: time.Now(), Candidates: []string{"plugin_proxy 192.0.2.1:9443"}, Notes: []string{"a note"}}
	columns, rows, err := endpoints.TerminalSize(inv.QR)
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		columns, rows int
		flags         pairFlags
		drawn         bool
		says          string
	}{
		"large":      {columns, rows + 3, pairFlags{}, true, "192.0.2.1:9443"},
		"narrow":     {columns - 1, rows + 3, pairFlags{}, false, "--png"},
		"low":        {columns, rows + 2, pairFlags{}, false, "--png"},
		"80 x 24":    {80, 24, pairFlags{}, false, "this one has 80 x 24"},
		"as text":    {columns, rows + 3, pairFlags{text: true}, false, inv.Text},
		"as picture": {columns, rows + 3, pairFlags{png: filepath.Join(t.TempDir(), "invite.png")}, false, "invite.png"},
	} {
		t.Run(name, func(t *testing.T) {
			app, out := onTerminal(tt.columns, tt.rows)
			if err := tt.flags.show(app, inv); err != nil {
				t.Fatal(err)
			}
			if drawn := strings.Contains(out.String(), "▄"); drawn != tt.drawn || !strings.Contains(out.String(), tt.says) {
				t.Errorf("drawn %v, want %v and %q in %q", drawn, tt.drawn, tt.says, out.String())
			}
			_, after, _ := strings.Cut(out.String(), "a note")
			if n := strings.Count(after, "\n"); tt.drawn && n > tt.rows {
				t.Errorf("%d lines from the code on, in a window of %d", n, tt.rows)
			}
			if strings.Contains(out.String(), "join '") {
				t.Error("people are told to put a secret into an argument")
			}
		})
	}
}

func TestDemoTableFits(t *testing.T) {
	check := demo.Check{Name: "a check", OK: true, Detail: strings.Repeat("word ", 30)}
	for _, columns := range []int{0, 80, 200} {
		app, out := onTerminal(columns, 24)
		app.LookupEnv = func(name string) (string, bool) { return "1", name == "NO_COLOR" }
		showCheck(app, check)
		for line := range strings.Lines(out.String()) {
			if n := len(line) - 1; columns > 0 && n > columns {
				t.Errorf("a line of %d characters in a window of %d", n, columns)
			}
		}
		if n := strings.Count(out.String(), "word"); n != 30 {
			t.Errorf("%d of 30 words are left at %d columns", n, columns)
		}
	}
	if got := wrap("a verylongword b c", 3); !slices.Equal(got, []string{"a", "verylongword", "b c"}) {
		t.Errorf("wrap = %q", got)
	}
}

// TestForwardOnLoopbackOnly: nothing else is opened, not even for a moment.
func TestForwardOnLoopbackOnly(t *testing.T) {
	for listen, want := range map[string]int{
		"0.0.0.0:8788": cli.WrongUsage, ":8788": cli.WrongUsage, "192.0.2.1:1": cli.WrongUsage, "example.com:1": cli.WrongUsage,
		"127.0.0.1": cli.WrongUsage, "127.0.0.1:no-such-port": cli.WrongUsage,
	} {
		ln, err := forwardListener(listen, "")
		e, ok := errors.AsType[*cli.ExitError](err)
		if ln != nil || !ok || e.Code != want {
			t.Errorf("%s: %v, want code %d", listen, err, want)
		}
	}
	for _, listen := range []string{"127.0.0.1:0", "localhost:0"} {
		ln, err := forwardListener(listen, "")
		if err != nil {
			t.Errorf("%s: %v", listen, err)
			continue
		}
		if !ln.Addr().(*net.TCPAddr).IP.IsLoopback() {
			t.Errorf("%s listens on %s", listen, ln.Addr())
		}
		if _, err := forwardListener(ln.Addr().String(), ""); err == nil || !strings.Contains(err.Error(), "--listen") {
			t.Errorf("a taken address: %v", err)
		}
		_ = ln.Close()
	}
}

// TestUsageBeforeTheHost: what cannot be meant is refused at once, with the code
// for it, and not after ten seconds of waiting for a host.
func TestUsageBeforeTheHost(t *testing.T) {
	for _, args := range [][]string{
		{"pair", "--ttl", "soon"}, {"pair", "--grants", "terminal"}, {"up", "--advertise", "https://x"},
		{"up", "--listen", "127.0.0.1"}, {"up", "--listen", "127.0.0.1:0", "--api", "http://192.0.2.1"}, {"join", "nonsense"}, {"enroll", "nonsense"},
	} {
		if code, _, stderr := run(t, args...); code != cli.WrongUsage || stderr == "" {
			t.Errorf("%q: code %d, %q; want %d", args, code, stderr, cli.WrongUsage)
		}
	}
}

// TestGetTellsReadingFromWriting: a full disk is not an answer that was cut.
func TestGetTellsReadingFromWriting(t *testing.T) {
	answer := func(r io.Reader) *http.Response { return &http.Response{Body: io.NopCloser(r)} }
	f := new(getFlags)
	full := errors.New("no space left")
	pr, pw := io.Pipe()
	_ = pr.CloseWithError(full)
	if err := f.write(pw, answer(strings.NewReader("body"))); !errors.Is(err, full) || strings.Contains(err.Error(), "cut") {
		t.Errorf("a full disk: %v", err)
	}
	if err := f.write(io.Discard, answer(iotest.ErrReader(io.ErrUnexpectedEOF))); err == nil || !strings.Contains(err.Error(), "cut") {
		t.Errorf("a cut answer: %v", err)
	}
	var out bytes.Buffer
	if err := f.write(&out, answer(strings.NewReader("body"))); err != nil || out.String() != "body" {
		t.Errorf("%q, %v", out.String(), err)
	}
}
