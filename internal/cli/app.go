// Package cli is what all commands share and a person or a script relies on:
// where settings come from, where state lives, how logs and results are written,
// how secrets come in, and what an exit code means. Commands themselves, one file
// each, stand in cmd/ and hold nothing but what they wire together.
//
// A command is made by a function that takes the App:
//
//	func newGetCommand(app *cli.App) *cobra.Command {
//		var output string
//		cmd := &cobra.Command{
//			Use:     "get PATH",
//			Short:   "Fetch one path over the best way there",
//			Example: "  hermes-reach get /api/v1/models",
//			Args:    cobra.ExactArgs(1),
//			RunE: func(cmd *cobra.Command, args []string) error {
//				dir, err := app.StateDir(cmd)
//				if err != nil {
//					return err
//				}
//				…
//				return app.Result(answer, func(w io.Writer) { … })
//			},
//		}
//		cmd.Flags().StringVar(&output, "output", "", "write the body to `FILE`")
//		return cli.OnDevice(cmd)
//	}
//
// When RunE is called every flag has its final value, whether it came from the
// command line, the environment or the configuration file, and app.Log is ready.
// Without Args a command takes no argument.
// Only the root has a PersistentPreRunE; a command that sets its own would switch
// all of that off.
package cli

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
)

// An App is one run of the program: its streams, its surroundings and what the
// global flags say. The exported fields are set by [New]; tests set their own
// before Run. It serves one Run and is not for concurrent use, except for Log.
type App struct {
	Stdin     io.Reader
	Stdout    io.Writer
	Stderr    io.Writer
	LookupEnv func(name string) (value string, found bool)
	UserHome  func() (string, error)
	GOOS      string

	// Terminal reports whether a person looks at w.
	Terminal func(w io.Writer) bool

	// Window is the size of the terminal behind w, in characters; 0 if there is
	// none.
	Window func(w io.Writer) (columns, rows int)

	// Classify gives the exit code of an error that this package cannot know,
	// such as a refused pin; 0 leaves it to the general rules. It may be nil.
	Classify func(error) int

	// Log is never nil. It discards until the settings are known.
	Log *slog.Logger

	opts       options
	logFile    io.Closer
	stdinTaken bool
	isProcess  bool // the log package's default output is ours to set
}

// options are the global flags.
type options struct {
	config    string
	debug     bool
	logLevel  string
	logFormat string
	logFile   string
	ca        string
	json      bool
}

// New returns the App of this process.
func New() *App {
	return &App{
		Stdin:     os.Stdin,
		Stdout:    os.Stdout,
		Stderr:    os.Stderr,
		LookupEnv: os.LookupEnv,
		UserHome:  os.UserHomeDir,
		GOOS:      runtime.GOOS,
		Terminal:  isTerminal,
		Window:    window,
		Log:       slog.New(slog.DiscardHandler),
	}
}

// Root gives root the global flags and the one hook that settles all flags
// before any command runs. Sub-commands are added by the caller.
func (a *App) Root(root *cobra.Command) *cobra.Command {
	f := root.PersistentFlags()
	f.StringVar(&a.opts.config, "config", "", "read settings from `FILE` (default config.yaml in the state folder, if it exists)")
	f.BoolVar(&a.opts.debug, "debug", false, "log everything, and explain an error down to its cause")
	f.StringVar(&a.opts.logLevel, "log-level", "", "log what is at least of `LEVEL`: debug, info, warn or error (default info for commands that stay running, else warn)")
	f.StringVar(&a.opts.logFormat, "log-format", "text", "write the log in `FORM`: text or json")
	f.StringVar(&a.opts.logFile, "log-file", "", "append the log to `FILE` instead of standard error")
	f.StringVar(&a.opts.ca, "ca", "", "trust the certificates in `FILE` as well, for the outer connection; a host's pin is not affected")
	f.BoolVar(&a.opts.json, "json", false, "write the result as JSON, for scripts")

	root.Version = Version()
	root.SetVersionTemplate("{{.Version}}\n")
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetHelpCommand(help())
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error { return usage(cmd, err) })
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := a.settle(cmd); err != nil {
			return err
		}
		if err := errors.Join(cmd.ValidateRequiredFlags(), cmd.ValidateFlagGroups()); err != nil {
			return usage(cmd, err) // cobra would call it a failure
		}
		return a.openLog(cmd)
	}
	return root
}

// Main runs the process's command line until it is done or interrupted, and
// returns the exit code. The first interrupt (or SIGTERM) ends the command's
// context; the second ends the process at once.
func (a *App) Main(root *cobra.Command) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	a.isProcess = true
	return a.Run(ctx, root, os.Args[1:])
}

// Run carries out one command line and returns its exit code. An error is
// explained on Stderr in one sentence. If ctx ended before the command failed,
// the code is [Interrupted]; a command that ends well when its context does, as
// a server shall, is [Done].
func (a *App) Run(ctx context.Context, root *cobra.Command, args []string) int {
	root.SetIn(a.Stdin)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	root.InitDefaultCompletionCmd(args...)
	root.InitDefaultHelpCmd() // the one that Root set
	strict(root)
	root.SetArgs(append([]string{}, args...))
	err := root.ExecuteContext(ctx)
	if a.logFile != nil {
		err = errors.Join(err, a.logFile.Close())
	}
	return a.exit(ctx, root.Name(), err)
}

// version is set by the Makefile.
var version = "dev"

// A Build says which program this is.
type Build struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
}

// ThisBuild describes the running binary.
func ThisBuild() Build {
	return Build{Version(), runtime.Version(), runtime.GOOS, runtime.GOARCH}
}

// Version is the version of the running binary: what the Makefile said, or else
// what `go install …@version` recorded, or "dev".
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok && version == "dev" && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return version
}
