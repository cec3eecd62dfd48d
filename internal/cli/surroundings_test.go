package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

func TestStatePath(t *testing.T) {
	host := &cobra.Command{Use: "host"}
	device := OnDevice(&cobra.Command{Use: "device"})
	below := &cobra.Command{Use: "below"}
	device.AddCommand(below)
	for name, tt := range map[string]struct {
		cmd  *cobra.Command
		goos string
		env  map[string]string
		want string
	}{
		"host":               {host, "linux", nil, "/home/u/.hermes/reach"},
		"host, Hermes moved": {host, "linux", map[string]string{"HERMES_HOME": "/srv/hermes"}, "/srv/hermes/reach"},
		"host, our own":      {host, "linux", map[string]string{"HERMES_HOME": "/srv/hermes", "HERMES_REACH_HOME": "/srv/reach"}, "/srv/reach"},
		"device":             {device, "linux", map[string]string{"HERMES_HOME": "/srv/hermes"}, "/home/u/.config/hermes-reach"},
		"below a device":     {below, "linux", nil, "/home/u/.config/hermes-reach"},
		"device, XDG":        {device, "linux", map[string]string{"XDG_CONFIG_HOME": "/xdg"}, "/xdg/hermes-reach"},
		"host, XDG":          {host, "linux", map[string]string{"XDG_CONFIG_HOME": "/xdg"}, "/home/u/.hermes/reach"},
		"device, our own":    {device, "linux", map[string]string{"HERMES_REACH_HOME": "/srv/reach"}, "/srv/reach"},
		"Mac device":         {device, "darwin", nil, "/home/u/Library/Application Support/hermes-reach"},
		"Mac host":           {host, "darwin", nil, "/home/u/.hermes/reach"},
		"Windows host":       {host, "windows", map[string]string{"LOCALAPPDATA": "/local"}, "/local/hermes-reach"},
		"Windows device":     {device, "windows", map[string]string{"LOCALAPPDATA": "/local"}, "/local/hermes-reach"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.env, b.GOOS, b.home = tt.env, tt.goos, "/home/u"
			if got, err := b.statePath(tt.cmd); err != nil || filepath.ToSlash(got) != tt.want {
				t.Errorf("got %q, %v; want %q", got, err, tt.want)
			}
		})
	}
	b := newBench(t)
	b.UserHome = func() (string, error) { return "", fs.ErrNotExist }
	if _, err := b.statePath(host); err == nil || !strings.Contains(err.Error(), "HERMES_REACH_HOME") {
		t.Errorf("no home: %v", err)
	}
}

func TestStateDirIsPrivate(t *testing.T) {
	b := newBench(t)
	for name, before := range map[string]fs.FileMode{"new": 0, "open": 0o755, "private": 0o700, "shared": 0o777, "sticky": 0o755 | fs.ModeSticky} {
		dir := filepath.Join(b.home, name, "below")
		if before != 0 {
			if err := os.MkdirAll(dir, 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(dir, before); err != nil { // which no umask narrows
				t.Fatal(err)
			}
		}
		b.env["HERMES_REACH_HOME"] = dir
		got, err := b.StateDir(&cobra.Command{})
		if name == "shared" || name == "sticky" {
			if info, _ := os.Stat(dir); err == nil || !strings.Contains(err.Error(), "folder of its own") || info.Mode()&^fs.ModeDir != before {
				t.Errorf("%s: %v, %v", name, err, info.Mode())
			}
			continue
		}
		if info, _ := os.Stat(dir); err != nil || got != dir || info.Mode().Perm() != 0o700 {
			t.Errorf("%s: %q, %v, %v", name, got, err, info.Mode())
		}
	}
}

func TestLogging(t *testing.T) {
	for name, tt := range map[string]struct {
		args []string
		want []string // messages seen
	}{
		"a command that ends": {[]string{"fetch", "/"}, []string{"w"}},
		"one that stays":      {[]string{"serve"}, []string{"i", "w"}},
		"and what is below":   {[]string{"serve", "user", "add", "--name=x"}, []string{"i", "w"}},
		"as told":             {[]string{"serve", "--log-level=error"}, nil},
		"debug wins":          {[]string{"fetch", "/", "--debug", "--log-level=error"}, []string{"d", "i", "w"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.do = func(context.Context) error {
				b.Log.Debug("d")
				b.Log.Info("i")
				b.Log.Warn("w")
				return nil
			}
			if code := b.run(t, append(tt.args, "--log-format=json")...); code != Done {
				t.Fatal(b.err.String())
			}
			var got []string
			for line := range strings.Lines(b.err.String()) {
				var entry struct{ Msg string }
				if err := json.Unmarshal([]byte(line), &entry); err != nil {
					t.Fatal(err)
				}
				got = append(got, entry.Msg)
			}
			if strings.Join(got, "") != strings.Join(tt.want, "") || b.out.Len() != 0 {
				t.Errorf("logged %q, want %q", got, tt.want)
			}
		})
	}
}

func TestLogFile(t *testing.T) {
	name := filepath.Join(t.TempDir(), "log")
	for range 2 {
		b := newBench(t)
		b.do = func(context.Context) error { b.Log.Warn("here"); return nil }
		if code := b.run(t, "serve", "--log-file", name); code != Done || b.err.Len() != 0 {
			t.Fatalf("code %d, %q", code, b.err.String())
		}
	}
	text, err := os.ReadFile(name)
	if info, _ := os.Stat(name); err != nil || bytes.Count(text, []byte("msg=here")) != 2 || (runtime.GOOS != "windows" && info.Mode().Perm() != 0o600) {
		t.Errorf("%q, %v, %v", text, err, info.Mode())
	}
	b := newBench(t)
	if code := b.run(t, "serve", "--log-file", t.TempDir()); code != Failed || !strings.Contains(b.err.String(), "open the log") {
		t.Errorf("a folder as log: %d, %q", code, b.err.String())
	}
}

func TestResult(t *testing.T) {
	v := map[string]any{"invite": "hermes-relay://pair?a=1&b=<2>"}
	people := func(w io.Writer) { fmt.Fprintln(w, "hello") }
	for args, want := range map[string]string{"": "hello\nmore\n", "--json": `{"invite":"hermes-relay://pair?a=1&b=<2>"}` + "\n"} {
		b := newBench(t)
		b.do = func(context.Context) error {
			defer b.Say("more")
			return b.Result(v, people)
		}
		if code := b.run(t, strings.Fields("serve "+args)...); code != Done || b.out.String() != want {
			t.Errorf("%q: %d, %q", args, code, b.out.String())
		}
	}
}

func TestTable(t *testing.T) {
	rows := [][]Cell{{{Text: "direct"}, {Text: "ok", Mood: Good}}, {{Text: "brokér"}, {Text: "evil\x1b]0;\r\nx\u202e", Mood: Bad}}}
	const plain = "PATH    STATE\ndirect  ok\nbrokér  evil\ufffd]0;; x\ufffd\n"
	for name, tt := range map[string]struct {
		terminal bool
		env      map[string]string
		colours  bool
	}{
		"a file":       {false, nil, false},
		"a person":     {true, nil, true},
		"NO_COLOR":     {true, map[string]string{"NO_COLOR": "1"}, false},
		"empty":        {true, map[string]string{"NO_COLOR": ""}, true},
		"a typewriter": {true, map[string]string{"TERM": "dumb"}, false},
	} {
		b := newBench(t)
		b.env, b.Terminal = tt.env, func(io.Writer) bool { return tt.terminal }
		b.Table(b.Stdout, []string{"PATH", "STATE"}, rows...)
		b.Progress("working")
		got := b.out.String()
		if (got == plain) == tt.colours || strings.Contains(got, "\x1b[32mok\x1b[0m") != tt.colours || strings.Contains(got, "\x1b]") {
			t.Errorf("%s: %q", name, got)
		}
		if (b.err.String() == "working\n") != tt.colours {
			t.Errorf("%s: progress %q", name, b.err.String())
		}
	}
}
