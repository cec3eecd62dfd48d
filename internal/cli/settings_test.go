package cli

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func (b *bench) config(t *testing.T, text string) string {
	t.Helper()
	name := filepath.Join(b.home, "settings.yaml")
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// TestPrecedence: flag beats environment beats file beats default.
func TestPrecedence(t *testing.T) {
	const file = "serve:\n  listen: file:1\nfetch:\n  listen: file:2\n"
	for name, tt := range map[string]struct {
		args []string
		env  string
		file string
		want string
	}{
		"default":             {[]string{"serve"}, "", "", ":9443"},
		"file":                {[]string{"serve"}, "", file, "file:1"},
		"its own section":     {[]string{"fetch", "/"}, "", file, "file:2"},
		"environment":         {[]string{"serve"}, "env:1", file, "env:1"},
		"flag":                {[]string{"serve", "--listen=flag:1"}, "env:1", file, "flag:1"},
		"flag, though empty":  {[]string{"serve", "--listen="}, "env:1", file, ""},
		"flag like default":   {[]string{"serve", "--listen=:9443"}, "env:1", file, ":9443"},
		"a section of others": {[]string{"fetch", "/"}, "", "serve:\n  listen: file:1\n", "127.0.0.1:1"},
		"no value":            {[]string{"serve"}, "", "serve:\n  listen:\n", ":9443"},
		"only comments":       {[]string{"serve"}, "", "# nothing\nserve:\n  #listen: x\n", ":9443"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.env[EnvName("listen")] = tt.env
			args := append(tt.args, "--config", b.config(t, tt.file))
			code, got := b.run(t, args...), b.listen
			if args[0] == "fetch" {
				got = b.fetched
			}
			if code != Done || got != tt.want {
				t.Errorf("code %d, listen = %q, want %q: %s", code, got, tt.want, b.err.String())
			}
		})
	}
}

func TestFileValues(t *testing.T) {
	b := newBench(t)
	name := b.config(t, "debug: true\nserve:\n  host-name: [a, 'b,c']\n  map: {api: device, relay: open}\n")
	if code := b.run(t, "serve", "--config", name); code != Done {
		t.Fatal(b.err.String())
	}
	if !slices.Equal(b.hosts, []string{"a", "b,c"}) || b.pairs["api"] != "device" || b.pairs["relay"] != "open" || !b.Debug() {
		t.Errorf("got %q, %v, %v", b.hosts, b.pairs, b.Debug())
	}
	b = newBench(t)
	if code := b.run(t, "serve", "--config", name, "--host-name=x"); code != Done || !slices.Equal(b.hosts, []string{"x"}) {
		t.Errorf("a flag adds to the file's list instead of replacing it: %q", b.hosts)
	}
	b = newBench(t)
	if code := b.run(t, "serve", "--config", b.config(t, "serve: {count: 7}")); code != Done || b.count != 7 {
		t.Errorf("a number: code %d, %d, %s", code, b.count, b.err.String())
	}
	b = newBench(t)
	b.env["HERMES_REACH_NAME"] = "env"
	if code := b.run(t, "serve", "user", "add"); code != Done || b.name != "env" {
		t.Errorf("a required flag from the environment: code %d, %q, %s", code, b.name, b.err.String())
	}
	b = newBench(t)
	if code := b.run(t, "serve", "user", "add", "--config", b.config(t, "serve: {user: {add: {name: file}}}")); code != Done || b.name != "file" {
		t.Errorf("a nested section: code %d, %q, %s", code, b.name, b.err.String())
	}
}

func TestConfigErrors(t *testing.T) {
	for name, tt := range map[string]struct{ file, want string }{
		"unknown key":       {"# x\nlog-lvl: info\n", "settings.yaml, line 2: log-lvl: there is no such setting (see fake config example)"},
		"unknown in there":  {"serve:\n  listn: x\n", "line 2: serve.listn: there is no such setting"},
		"of others":         {"fetch:\n  count: 1\n", "line 2: fetch.count: there is no such setting"},
		"unknown section":   {"srv: {}\n", "line 1: srv: there is no such setting"},
		"itself":            {"config: x\n", "config: there is no such setting"},
		"a flag of help":    {"help: true\n", "help: there is no such setting"},
		"twice":             {"serve:\n  listen: a\n  listen: b\n", "line 3"},
		"not a mapping":     {"- a\n", "line 1: the file: it must be a mapping"},
		"section is a word": {"serve: yes\n", "line 1: serve: it must be a mapping"},
		"wrong value":       {"serve:\n  count: many\n", "line 2: serve.count: invalid argument"},
		"wrong form":        {"serve:\n  count: [1]\n", "line 2: serve.count: the value has the wrong form for a int"},
		"nested list":       {"serve:\n  host-name: [[a]]\n", "every element must be a plain value"},
		"alias":             {"serve: &a {listen: x}\nfetch: *a\n", "fetch: it must be a mapping"},
		"two documents":     {"debug: true\n---\ndebug: false\n", "more than one YAML document"},
		"no YAML":           {"serve: [\n", "settings.yaml: yaml:"},
		"too long":          {strings.Repeat("#", maxConfig+1), "too long"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			code := b.run(t, "serve", "--config", b.config(t, tt.file))
			if code != WrongUsage || !strings.Contains(b.err.String(), tt.want) {
				t.Errorf("code %d, %q; want %q", code, b.err.String(), tt.want)
			}
		})
	}
	b := newBench(t)
	if code := b.run(t, "serve", "--config", b.home+"/nowhere"); code != WrongUsage || !strings.Contains(b.err.String(), "nowhere") {
		t.Errorf("a file that is not there: code %d, %q", code, b.err.String())
	}
	b = newBench(t)
	b.env["HERMES_REACH_COUNT"] = "many"
	if code := b.run(t, "serve"); code != WrongUsage || !strings.Contains(b.err.String(), "HERMES_REACH_COUNT: ") {
		t.Errorf("a wrong variable: code %d, %q", code, b.err.String())
	}
}

func TestDefaultConfig(t *testing.T) {
	b := newBench(t)
	b.env["HERMES_REACH_HOME"] = b.home
	if err := os.WriteFile(b.home+"/config.yaml", []byte("serve: {listen: found}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code := b.run(t, "serve"); code != Done || b.listen != "found" {
		t.Errorf("code %d, %q: %s", code, b.listen, b.err.String())
	}
	if code := b.run(t, "serve", "--config="); code != Done || b.listen != ":9443" {
		t.Errorf("--config= : code %d, %q: %s", code, b.listen, b.err.String())
	}
}

// TestExample: what is printed is a configuration file, and holds every flag.
func TestExample(t *testing.T) {
	b := newBench(t)
	var out bytes.Buffer
	if err := WriteExample(&out, b.root()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"\n#log-format: text\n", "\nserve:\n", "\n  # listen on ADDRESS\n  #listen: :9443\n", "\n  #host-name: []\n", "\n  #map: {}\n", "\n  #count: 3\n", "\n  user:\n", "\n    add:\n", "\n      #name: \"\"\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	if err := CheckConfig("example", out.Bytes(), b.root()); err != nil {
		t.Error(err)
	}
	if err := CheckConfig("bad", []byte("serve: {count: x}"), b.root()); err == nil {
		t.Error("CheckConfig takes a value that the flag refuses")
	}
}

// FuzzConfig: whatever stands in the file, it is taken or refused, and what is
// taken names flags that exist.
func FuzzConfig(f *testing.F) {
	for _, text := range []string{"", "debug: true\nserve:\n  count: 3\n", "serve: {user: {add: {name: x}}}", "a: &a [*a]", "---\n...\n---\n", "? [a]\n: b\n", "<<: {debug: true}", "serve: !!binary aGk=", "\xff\xfe"} {
		f.Add([]byte(text))
	}
	root := (&bench{App: New(), do: func(context.Context) error { return nil }}).root()
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := parseConfig("fuzzed", text, root)
		if err != nil {
			return
		}
		for key := range c.values {
			cmd, path := root, strings.Split(key, ".")
			for ; cmd != nil && len(path) > 1; path = path[1:] {
				cmd = child(cmd, path[0])
			}
			if cmd == nil || own(cmd)[path[0]] == nil {
				t.Errorf("%q was taken", key)
			}
		}
	})
}
