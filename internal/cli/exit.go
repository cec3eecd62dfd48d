package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/spf13/cobra"
)

// Exit codes. Scripts depend on them: never renumber.
const (
	Done         = 0
	Failed       = 1
	WrongUsage   = 2
	NotReachable = 3
	TrustRefused = 4 // pin, name or expiry
	Interrupted  = 130
)

// An ExitError ends the program with a code of its own. Say, if not empty, is
// the one sentence that the user reads in place of Err: what happened, to what,
// and what to do. Err stays visible with --debug and to errors.Is.
type ExitError struct {
	Code int
	Say  string
	Err  error // may be nil if Say is not empty
}

func (e *ExitError) Error() string {
	switch {
	case e.Say != "":
		return e.Say
	case e.Err != nil:
		return e.Err.Error()
	}
	return fmt.Sprintf("failed with code %d", e.Code)
}

func (e *ExitError) Unwrap() error { return e.Err }

// Exit makes an [ExitError]. err may be nil.
func Exit(code int, err error, format string, args ...any) error {
	return &ExitError{Code: code, Say: fmt.Sprintf(format, args...), Err: err}
}

// Usagef is for a command line that cannot be meant.
func Usagef(format string, args ...any) error {
	return Exit(WrongUsage, nil, format, args...)
}

// usage says where to read more, unless the error already has a code.
func usage(cmd *cobra.Command, err error) error {
	if e, ok := errors.AsType[*ExitError](err); ok {
		return e
	}
	return Exit(WrongUsage, err, "%v (see %s --help)", err, cmd.CommandPath())
}

// strict makes every command refuse arguments that it does not ask for, and
// makes a wrong argument wrong usage. Cobra by itself takes any argument where
// none is declared, and prints help with code 0 for an unknown sub-command.
func strict(cmd *cobra.Command) {
	check := cmd.Args
	if check == nil {
		check = none
	}
	if !cmd.Runnable() {
		cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	}
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usage(cmd, err)
		}
		return nil
	}
	for _, sub := range cmd.Commands() {
		strict(sub)
	}
}

// help is cobra's command of that name, except that it fails for a command that
// does not exist.
func help() *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Explain a command",
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			about, rest, err := cmd.Root().Find(args)
			if err == nil {
				err = none(about, rest)
			}
			if err != nil {
				return usage(cmd, err)
			}
			about.InitDefaultHelpFlag() // or its help would not list it
			return about.Help()
		},
	}
}

// none refuses any argument and, where a sub-command may have been meant, names
// those that are alike. It repeats only the start of the argument, which may be an
// invite or another secret that was put at the wrong place.
func none(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	said := Clean(args[0])
	if short := []rune(said); len(short) > 16 {
		said = string(short[:16]) + "…"
	}
	if !cmd.HasAvailableSubCommands() {
		return fmt.Errorf("unexpected argument %q", said)
	}
	hint := ""
	if cmd.SuggestionsMinimumDistance <= 0 {
		cmd.SuggestionsMinimumDistance = 2
	}
	if alike := cmd.SuggestionsFor(args[0]); len(alike) > 0 {
		hint = ": did you mean " + strings.Join(alike, " or ") + "?"
	}
	return fmt.Errorf("there is no command %q%s", said, hint)
}

// exit tells the user about err and chooses the code.
func (a *App) exit(ctx context.Context, name string, err error) int {
	if err == nil {
		return Done
	}
	code := a.code(err)
	if ctx.Err() != nil { // whatever failed, failed because of it
		code = Interrupted
		fmt.Fprintf(a.Stderr, "%s: interrupted\n", name)
	} else {
		fmt.Fprintf(a.Stderr, "%s: %s\n", name, Clean(err.Error()))
	}
	if a.opts.debug {
		explain(a.Stderr, err, "  ")
	}
	return code
}

func (a *App) code(err error) int {
	if e, ok := errors.AsType[*ExitError](err); ok {
		return e.Code
	}
	if a.Classify != nil {
		if code := a.Classify(err); code != 0 {
			return code
		}
	}
	switch {
	case is[*tls.CertificateVerificationError](err), is[x509.UnknownAuthorityError](err),
		is[x509.HostnameError](err), is[x509.CertificateInvalidError](err):
		return TrustRefused
	case is[*net.DNSError](err):
		return NotReachable
	}
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		return NotReachable
	}
	return Failed
}

func is[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

// explain prints err and what it wraps, each with its type.
func explain(w io.Writer, err error, indent string) {
	fmt.Fprintf(w, "%s%T: %s\n", indent, err, Clean(err.Error()))
	switch wrapped := err.(type) { //nolint:errorlint // it walks the chain itself
	case interface{ Unwrap() error }:
		if inner := wrapped.Unwrap(); inner != nil {
			explain(w, inner, indent+"  ")
		}
	case interface{ Unwrap() []error }:
		for _, inner := range wrapped.Unwrap() {
			explain(w, inner, indent+"  ")
		}
	}
}
