package cli

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/spf13/cobra"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// A bench is an App in surroundings of its own, with a few commands:
//
//	fake serve --listen --host… --map --count   (long running)
//	fake serve user add --name
//	fake fetch --listen                         (on a device)
type bench struct {
	*App
	env      map[string]string
	out, err bytes.Buffer
	home     string

	do      func(ctx context.Context) error // what every command does
	listen  string                          // of serve
	fetched string                          // --listen of fetch
	hosts   []string
	pairs   map[string]string
	count   int
	name    string
}

func newBench(t *testing.T) *bench {
	b := &bench{App: New(), env: map[string]string{}, home: t.TempDir()}
	b.Stdin, b.Stdout, b.Stderr = strings.NewReader(""), &b.out, &b.err
	b.LookupEnv = func(name string) (string, bool) { v, ok := b.env[name]; return v, ok }
	b.UserHome = func() (string, error) { return b.home, nil }
	b.GOOS = "linux"
	b.do = func(context.Context) error { return nil }
	return b
}

func (b *bench) root() *cobra.Command {
	run := func(cmd *cobra.Command, _ []string) error { return b.do(cmd.Context()) }
	serve := LongRunning(&cobra.Command{Use: "serve", Short: "Serve", RunE: run})
	serve.Flags().StringVar(&b.listen, "listen", ":9443", "listen on `ADDRESS`")
	serve.Flags().StringArrayVar(&b.hosts, "host-name", nil, "a name")
	serve.Flags().StringToStringVar(&b.pairs, "map", nil, "a mapping")
	serve.Flags().IntVar(&b.count, "count", 3, "a number")
	serve.MarkFlagsMutuallyExclusive("count", "map")
	user := &cobra.Command{Use: "user", Short: "Users"}
	add := &cobra.Command{Use: "add", Short: "Add one", RunE: run}
	add.Flags().StringVar(&b.name, "name", "", "its name")
	if err := add.MarkFlagRequired("name"); err != nil {
		panic(err)
	}
	user.AddCommand(add)
	serve.AddCommand(user)
	fetch := OnDevice(&cobra.Command{Use: "fetch PATH", Short: "Fetch", Args: cobra.ExactArgs(1), RunE: run})
	fetch.Flags().StringVar(&b.fetched, "listen", "127.0.0.1:1", "listen on `ADDRESS`")
	root := b.Root(&cobra.Command{Use: "fake", Short: "A program"})
	root.AddCommand(serve, fetch)
	return root
}

func (b *bench) run(t *testing.T, args ...string) int {
	t.Helper()
	return b.Run(t.Context(), b.root(), args)
}

func TestExitCodes(t *testing.T) {
	secret := errors.New("inner cause")
	for name, tt := range map[string]struct {
		args []string
		err  error
		code int
		say  string
	}{
		"done":            {[]string{"serve"}, nil, Done, ""},
		"failed":          {[]string{"serve"}, errors.New("it broke"), Failed, "fake: it broke\n"},
		"its own code":    {[]string{"serve"}, fmt.Errorf("dial: %w", Exit(NotReachable, secret, "host %s is off", "h")), NotReachable, "fake: dial: host h is off\n"},
		"in one line":     {[]string{"serve"}, errors.New("one\ntwo\x1b[31m"), Failed, "fake: one; two\ufffd[31m\n"},
		"refused dial":    {[]string{"serve"}, &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}, NotReachable, "refused"},
		"no listener":     {[]string{"serve"}, &net.OpError{Op: "listen", Err: syscall.EADDRINUSE}, Failed, "in use"},
		"no such name":    {[]string{"serve"}, &net.DNSError{Name: "h", Err: "no such host"}, NotReachable, "no such host"},
		"outer trust":     {[]string{"serve"}, fmt.Errorf("x: %w", x509.UnknownAuthorityError{}), TrustRefused, "unknown authority"},
		"asked of others": {[]string{"serve"}, fs.ErrClosed, TrustRefused, "closed"},
		"unknown flag":    {[]string{"serve", "--nope"}, nil, WrongUsage, "fake: unknown flag: --nope (see fake serve --help)\n"},
		"wrong value":     {[]string{"serve", "--count", "x"}, nil, WrongUsage, "--count"},
		"unknown command": {[]string{"serv"}, nil, WrongUsage, `there is no command "serv": did you mean serve? (see fake --help)`},
		"unknown below":   {[]string{"serve", "user", "nope"}, nil, WrongUsage, `there is no command "nope" (see fake serve user --help)`},
		"too much":        {[]string{"serve", "user", "add", "--name=a", "hermes-relay://secret"}, nil, WrongUsage, `unexpected argument "hermes-relay://s…"`},
		"too little":      {[]string{"fetch"}, nil, WrongUsage, "accepts 1 arg(s), received 0"},
		"required flag":   {[]string{"serve", "user", "add"}, nil, WrongUsage, `"name" not set (see fake serve user add --help)`},
		"either, or":      {[]string{"serve", "--count=1", "--map=a=b"}, nil, WrongUsage, "[count map]"},
		"no such help":    {[]string{"help", "nope"}, nil, WrongUsage, "there is no command"},
		"log level":       {[]string{"serve", "--log-level=loud"}, nil, WrongUsage, "debug, info, warn, error"},
		"log format":      {[]string{"serve", "--log-format=xml"}, nil, WrongUsage, "text or json"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.do = func(context.Context) error { return tt.err }
			b.Classify = func(err error) int {
				if errors.Is(err, fs.ErrClosed) {
					return TrustRefused
				}
				return 0
			}
			if code := b.run(t, tt.args...); code != tt.code || !strings.Contains(b.err.String(), tt.say) || (tt.say == "") != (b.err.Len() == 0) {
				t.Errorf("%q: code %d, %q; want %d, %q", tt.args, code, b.err.String(), tt.code, tt.say)
			}
			if strings.Contains(b.err.String(), "inner cause") || b.out.Len() != 0 {
				t.Errorf("unasked: %q %q", b.err.String(), b.out.String())
			}
			if strings.Count(b.err.String(), "\n") > 1 {
				t.Errorf("more than one line: %q", b.err.String())
			}
		})
	}
}

func TestDebugExplains(t *testing.T) {
	b := newBench(t)
	b.do = func(context.Context) error {
		return Exit(NotReachable, errors.Join(errors.New("first"), fmt.Errorf("second: %w", os.ErrNotExist)), "no way there")
	}
	if code := b.run(t, "serve", "--debug"); code != NotReachable {
		t.Errorf("code %d", code)
	}
	for _, want := range []string{"fake: no way there\n", "*cli.ExitError: no way there\n", ": first\n", ": second: file does not exist\n", "*errors.errorString: file does not exist\n"} {
		if !strings.Contains(b.err.String(), want) {
			t.Errorf("no %q in %q", want, b.err.String())
		}
	}
}

func TestInterrupted(t *testing.T) {
	for name, tt := range map[string]struct {
		do   func(ctx context.Context) error
		code int
	}{
		"a server that drains":   {func(ctx context.Context) error { <-ctx.Done(); return nil }, Done},
		"a command that gave up": {func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, Interrupted},
		"by another name":        {func(ctx context.Context) error { <-ctx.Done(); return errors.New("read: closed") }, Interrupted},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			ctx, stop := context.WithCancel(t.Context())
			b.do = func(ctx context.Context) error { stop(); return tt.do(ctx) }
			if code := b.Run(ctx, b.root(), []string{"serve"}); code != tt.code {
				t.Errorf("code %d, want %d (%s)", code, tt.code, b.err.String())
			}
		})
	}
}

// TestHelpNeedsNothing: it works where the configuration file is broken.
func TestHelpNeedsNothing(t *testing.T) {
	for _, args := range [][]string{{"help"}, {"help", "serve"}, {"serve", "--help"}, {"completion", "bash"}, {"--version"}} {
		b := newBench(t)
		b.env["HERMES_REACH_HOME"] = b.home
		if err := os.WriteFile(b.home+"/config.yaml", []byte("broken: ["), 0o600); err != nil {
			t.Fatal(err)
		}
		if code := b.run(t, args...); code != Done || b.out.Len() == 0 {
			t.Errorf("%q: code %d, %q", args, code, b.err.String())
		}
	}
}
