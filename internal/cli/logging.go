package cli

import (
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
)

// openLog makes a.Log as the settings say: to standard error, or appended to a
// file that only its owner can read.
func (a *App) openLog(cmd *cobra.Command) error {
	level := slog.LevelWarn
	if annotated(cmd, longRunning) {
		level = slog.LevelInfo
	}
	if text := a.opts.logLevel; text != "" {
		if err := level.UnmarshalText([]byte(text)); err != nil {
			return Usagef("--log-level %q: it is one of debug, info, warn, error", Clean(text))
		}
	}
	if a.opts.debug {
		level = slog.LevelDebug
	}

	var out io.Writer = a.Stderr
	if name := a.opts.logFile; name != "" {
		file, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
		if err != nil {
			return fmt.Errorf("open the log: %w", err)
		}
		out, a.logFile = file, file
	}

	to := &slog.HandlerOptions{Level: level}
	switch a.opts.logFormat {
	case "text":
		a.Log = slog.New(slog.NewTextHandler(out, to))
	case "json":
		a.Log = slog.New(slog.NewJSONHandler(out, to))
	default:
		return Usagef("--log-format %q: it is text or json", Clean(a.opts.logFormat))
	}
	if a.isProcess { // libraries that log by the standard library's package
		slog.SetDefault(a.Log)
	}
	return nil
}

// Debug reports whether --debug was given.
func (a *App) Debug() bool { return a.opts.debug }
