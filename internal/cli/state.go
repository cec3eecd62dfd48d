package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
)

// What a command says of itself, in cobra's annotations.
const (
	onDevice    = "hermes-reach/on-device"
	longRunning = "hermes-reach/long-running"
)

// OnDevice marks a command, and all below it, as one for a device: its state
// lives where the platform keeps a user's configuration instead of beside Hermes.
func OnDevice(cmd *cobra.Command) *cobra.Command { return annotate(cmd, onDevice) }

// LongRunning marks a command, and all below it, as one that stays running: its
// log is worth reading while nothing is wrong.
func LongRunning(cmd *cobra.Command) *cobra.Command { return annotate(cmd, longRunning) }

func annotate(cmd *cobra.Command, what string) *cobra.Command {
	if cmd.Annotations == nil {
		cmd.Annotations = map[string]string{}
	}
	cmd.Annotations[what] = "yes"
	return cmd
}

func annotated(cmd *cobra.Command, what string) bool {
	for c := cmd; c != nil; c = c.Parent() {
		if c.Annotations[what] != "" {
			return true
		}
	}
	return false
}

// StateDir is the folder where the command keeps its state. The folder exists
// when StateDir returns, and only its owner can enter it.
func (a *App) StateDir(cmd *cobra.Command) (string, error) {
	dir, err := a.statePath(cmd)
	if err != nil {
		return "", err
	}
	return dir, a.private(dir)
}

// statePath says where the state is, without touching it:
//
//	$HERMES_REACH_HOME, if set; else
//	on a host: $HERMES_HOME/reach, or ~/.hermes/reach (Windows: %LOCALAPPDATA%\hermes-reach)
//	on a device: hermes-reach in the platform's folder for configuration
func (a *App) statePath(cmd *cobra.Command) (string, error) {
	if dir := a.env("HERMES_REACH_HOME"); dir != "" {
		return a.absolute("HERMES_REACH_HOME", dir)
	}
	device := annotated(cmd, onDevice)
	if dir := a.env("HERMES_HOME"); dir != "" && !device {
		dir, err := a.absolute("HERMES_HOME", dir)
		return filepath.Join(dir, "reach"), err
	}
	if a.GOOS == "windows" {
		local := a.env("LOCALAPPDATA")
		if local == "" {
			return "", errors.New("LOCALAPPDATA is not set: set HERMES_REACH_HOME to the folder for the state")
		}
		return filepath.Join(local, "hermes-reach"), nil
	}
	if dir := a.env("XDG_CONFIG_HOME"); dir != "" && device && a.GOOS != "darwin" {
		dir, err := a.absolute("XDG_CONFIG_HOME", dir)
		return filepath.Join(dir, "hermes-reach"), err
	}
	home, err := a.UserHome()
	switch {
	case err != nil:
		return "", fmt.Errorf("no home folder: set HERMES_REACH_HOME to the folder for the state: %w", err)
	case !device:
		return filepath.Join(home, ".hermes", "reach"), nil
	case a.GOOS == "darwin":
		return filepath.Join(home, "Library", "Application Support", "hermes-reach"), nil
	}
	return filepath.Join(home, ".config", "hermes-reach"), nil
}

// absolute takes a relative folder from where the program was started, once.
func (a *App) absolute(name, dir string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	return dir, nil
}

// private makes the folder if it is not there and takes it from everybody else.
// A folder in which others may write, such as /tmp, is shared on purpose: it is
// refused, not changed. Windows has no modes; there the folder's parent protects.
func (a *App) private(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the state folder: %w", err)
	}
	info, err := os.Stat(dir)
	switch {
	case err != nil:
		return fmt.Errorf("look at the state folder: %w", err)
	case a.GOOS == "windows":
		return nil
	case info.Mode()&(fs.ModeSticky|0o002) != 0:
		return fmt.Errorf("the state folder %s is shared with other users: choose a folder of its own", dir)
	case info.Mode().Perm()&0o077 == 0:
		return nil
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return fmt.Errorf("keep others out of the state folder: %w", err)
	}
	return nil
}

// env reads a variable; an empty one counts as not set.
func (a *App) env(name string) string {
	value, found := a.LookupEnv(name)
	if !found {
		return ""
	}
	return value
}
