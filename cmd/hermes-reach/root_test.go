package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.uber.org/goleak"
	"go.yaml.in/yaml/v3"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/internal/cli"
	"github.com/hermes-reach/hermes-reach/internal/host"
	"github.com/hermes-reach/hermes-reach/pins"
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(asProgram) != "":
		main()
		return
	case os.Getenv(asStandIn) != "":
		serveStandIn()
	}
	goleak.VerifyTestMain(m)
}

// run carries out one command line with a home of its own and an environment
// that holds nothing else.
func run(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	home := t.TempDir()
	app := cli.New()
	app.Stdin, app.Stdout, app.Stderr = strings.NewReader(""), &out, &errs
	app.LookupEnv = func(name string) (string, bool) { return home, name == "HERMES_REACH_HOME" }
	code = app.Run(t.Context(), newRootCommand(app), args)
	return code, out.String(), errs.String()
}

// TestHouseRules holds every command to what people may expect of all of them.
func TestHouseRules(t *testing.T) {
	root := newRootCommand(cli.New())
	var visit func(cmd *cobra.Command)
	visit = func(cmd *cobra.Command) {
		path := cmd.CommandPath()
		if cmd.Runnable() && cmd.Name() != "help" && !strings.Contains(cmd.Example, root.Name()) {
			t.Errorf("%s: its help has no example", path)
		}
		if cmd.Short == "" || strings.HasSuffix(cmd.Short, ".") {
			t.Errorf("%s: its one line of help is missing or ends with a stop", path)
		}
		if cmd != root && (cmd.PersistentPreRun != nil || cmd.PersistentPreRunE != nil) {
			t.Errorf("%s: its PersistentPreRun switches off how flags get their values", path)
		}
		if cmd.Run != nil {
			t.Errorf("%s: Run cannot fail, use RunE", path)
		}
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if f.Usage == "" {
				t.Errorf("%s --%s: no help", path, f.Name)
			}
			if name := cli.EnvName(f.Name); name == "HERMES_REACH_HOME" {
				t.Errorf("%s --%s: %s is taken", path, f.Name, name)
			}
			for _, sub := range cmd.Commands() {
				if sub.Name() == f.Name && sub.Name() != "config" { // which has no key
					t.Errorf("%s: %s is both a flag and a command, so its key in the file would have two meanings", path, f.Name)
				}
			}
		})
		for _, sub := range cmd.Commands() {
			visit(sub)
		}
	}
	visit(root)
}

// TestHelp shows each command's help, which must not need anything.
func TestHelp(t *testing.T) {
	for _, cmd := range append(newRootCommand(cli.New()).Commands(), &cobra.Command{Use: "completion"}) {
		if code, stdout, stderr := run(t, cmd.Name(), "--help"); code != cli.Done || !strings.Contains(stdout, "Usage:") || stderr != "" {
			t.Errorf("%s --help: %d, %q, %q", cmd.Name(), code, stdout, stderr)
		}
	}
}

// TestConfigExample parses what `config example` prints, as it stands and with
// every setting taken in.
func TestConfigExample(t *testing.T) {
	code, example, stderr := run(t, "config", "example")
	if code != cli.Done || stderr != "" {
		t.Fatalf("config example: %d, %s", code, stderr)
	}
	all := regexp.MustCompile(`(?m)^( *)#([a-z])`).ReplaceAllString(example, "$1$2")
	if strings.Count(all, "\n") != strings.Count(example, "\n") || all == example {
		t.Fatal("nothing was commented out")
	}
	settings := regexp.MustCompile(`(?m)^( *)[a-z0-9-]+: *\S`).FindAllString(all, -1)
	if want := countSettings(newRootCommand(cli.New())); len(settings) != want {
		t.Errorf("%d settings in the example, want %d", len(settings), want)
	}
	for name, text := range map[string]string{"as it stands": example, "all settings": all} {
		var parsed map[string]any
		if err := yaml.Unmarshal([]byte(text), &parsed); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		root := newRootCommand(cli.New())
		if err := cli.CheckConfig(name, []byte(text), root); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func countSettings(cmd *cobra.Command) (n int) {
	switch cmd.Name() {
	case "help", "completion", "man", "config", "version":
		return 0
	}
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" && f.Name != "version" && f.Name != "config" {
			n++
		}
	})
	for _, sub := range cmd.Commands() {
		n += countSettings(sub)
	}
	return n
}

func TestVersion(t *testing.T) {
	if code, stdout, _ := run(t, "version"); code != cli.Done || !strings.HasPrefix(stdout, "hermes-reach ") {
		t.Errorf("version: %d, %q", code, stdout)
	}
	if code, stdout, _ := run(t, "version", "--json"); code != cli.Done || !strings.HasPrefix(stdout, `{"version":"`) {
		t.Errorf("version --json: %d, %q", code, stdout)
	}
}

func TestClassify(t *testing.T) {
	for err, want := range map[error]int{
		fmt.Errorf("dial: %w", &pins.TrustError{Err: pins.ErrPin}): cli.TrustRefused,
		fmt.Errorf("start: %w", &host.ConfigError{Err: io.EOF}):    cli.WrongUsage,
		fmt.Errorf("join: %w", endpoints.ErrInvite):                cli.WrongUsage,
		io.ErrUnexpectedEOF: 0,
	} {
		if got := classify(err); got != want {
			t.Errorf("classify(%v) = %d, want %d", err, got, want)
		}
	}
}
