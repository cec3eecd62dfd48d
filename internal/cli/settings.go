package cli

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

const maxConfig = 1 << 20

// EnvName is the environment variable that sets a flag, in every command that
// has a flag of that name.
func EnvName(flag string) string {
	return "HERMES_REACH_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// settle gives each flag of cmd its value: what the command line says, else the
// environment, else the configuration file. An empty variable counts as not set.
func (a *App) settle(cmd *cobra.Command) error {
	var errs error
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		value := a.env(EnvName(f.Name))
		if f.Changed || value == "" || !settable(f) {
			return
		}
		if err := cmd.Flags().Set(f.Name, value); err != nil {
			errs = errors.Join(errs, Exit(WrongUsage, err, "%s: %v", EnvName(f.Name), err))
		}
	})
	if errs != nil {
		return errs
	}
	if !usesConfig(cmd) {
		return nil
	}
	file, err := a.loadConfig(cmd)
	if err != nil {
		return err
	}
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		key := keyOf(cmd, f)
		node := file.values[key]
		if f.Changed || node == nil {
			return
		}
		if err := assign(cmd.Flags(), f, node); err != nil {
			errs = errors.Join(errs, file.failed(node, key, err))
		}
	})
	return errs
}

// settable reports whether a flag has a variable. Those that only ask for a text
// have none.
func settable(f *pflag.Flag) bool { return f.Name != "help" && f.Name != "version" }

// configurable reports whether a command has a section in the file.
func configurable(cmd *cobra.Command) bool {
	switch cmd.Name() {
	case "help", "version", "completion", "man", "config":
		return cmd.Parent() != cmd.Root()
	}
	return !cmd.Hidden
}

// usesConfig reports whether cmd reads the configuration file. Those that explain
// the program do not, so that they work when the file is broken.
func usesConfig(cmd *cobra.Command) bool {
	for c := cmd; c.HasParent(); c = c.Parent() {
		if !configurable(c) {
			return false
		}
	}
	return true
}

// own lists the flags that are declared at cmd, by their names in the file.
func own(cmd *cobra.Command) map[string]*pflag.Flag {
	flags := map[string]*pflag.Flag{}
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		if settable(f) && f.Name != "config" && !f.Hidden {
			flags[f.Name] = f
		}
	})
	return flags
}

// keyOf is where a flag of cmd stands in the file: "broker.host.add.url" for one
// of `broker host add`, "log-level" for a global one, "" if nowhere.
func keyOf(cmd *cobra.Command, f *pflag.Flag) string {
	for c := cmd; c != nil; c = c.Parent() {
		if own(c)[f.Name] == f && (c == c.Root() || configurable(c)) {
			path := strings.Fields(c.CommandPath())[1:]
			return strings.Join(append(path, f.Name), ".")
		}
	}
	return ""
}

// A config is a configuration file whose keys are all known.
type config struct {
	name   string
	values map[string]*yaml.Node // by keyOf
	cmds   map[string]*cobra.Command
}

// CheckConfig reports whether text is a configuration file for the commands below
// root, all of whose values their flags accept. It sets those flags.
func CheckConfig(name string, text []byte, root *cobra.Command) error {
	c, err := parseConfig(name, text, root)
	if err != nil {
		return err
	}
	for key, node := range c.values {
		flags := c.cmds[key].LocalFlags()
		if err := assign(flags, flags.Lookup(key[strings.LastIndex(key, ".")+1:]), node); err != nil {
			return c.failed(node, key, err)
		}
	}
	return nil
}

func (c *config) failed(at *yaml.Node, key string, err error) error {
	return Exit(WrongUsage, err, "%s, line %d: %s: %v", c.name, at.Line, key, err)
}

// loadConfig reads the file that --config names, or else the one in the state
// folder if it exists. The flags that name them must be settled.
func (a *App) loadConfig(cmd *cobra.Command) (*config, error) {
	name, given := a.opts.config, true
	if name == "" {
		given = false
		if flag := cmd.Flags().Lookup("config"); flag != nil && flag.Changed {
			return &config{}, nil // --config "" is how to read none
		}
		dir, err := a.statePath(cmd)
		if err != nil {
			return &config{}, nil //nolint:nilerr // a command that keeps state will say so
		}
		name = filepath.Join(dir, "config.yaml")
	}
	text, err := readFile(name, maxConfig)
	if errors.Is(err, fs.ErrNotExist) && !given {
		return &config{}, nil
	}
	if err != nil {
		return nil, Exit(WrongUsage, err, "read the configuration: %v", err)
	}
	return parseConfig(name, text, cmd.Root())
}

// parseConfig reads the text of a configuration file: a mapping with a key for
// each global flag and a section for each command, in which its flags and its
// sub-commands are. A key that means nothing is an error, so that a misspelt
// setting is not silently without effect.
func parseConfig(name string, text []byte, root *cobra.Command) (*config, error) {
	c := &config{name: name, values: map[string]*yaml.Node{}, cmds: map[string]*cobra.Command{}}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	var document yaml.Node
	switch err := decoder.Decode(&document); {
	case errors.Is(err, io.EOF):
		return c, nil // nothing but comments
	case err != nil:
		return nil, Exit(WrongUsage, err, "%s: %v", name, err)
	}
	if err := decoder.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, Exit(WrongUsage, err, "%s: more than one YAML document", name)
	}
	return c, c.section(root, document.Content[0], "")
}

func (c *config) section(cmd *cobra.Command, node *yaml.Node, prefix string) error {
	if isNull(node) {
		return nil // a section whose keys are all commented out
	}
	if node.Kind != yaml.MappingNode {
		what := strings.TrimSuffix(prefix, ".")
		if what == "" {
			what = "the file"
		}
		return c.failed(node, what, errors.New("it must be a mapping of names to values"))
	}
	flags, seen := own(cmd), map[string]bool{}
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		path := prefix + key.Value
		if key.Kind != yaml.ScalarNode || seen[key.Value] {
			return c.failed(key, path, errors.New("the key stands here twice, or is no plain word"))
		}
		seen[key.Value] = true
		if sub := child(cmd, key.Value); sub != nil {
			if err := c.section(sub, value, path+"."); err != nil {
				return err
			}
		} else if flags[key.Value] == nil {
			return c.failed(key, path, fmt.Errorf("there is no such setting (see %s config example)", cmd.Root().Name()))
		} else if !isNull(value) {
			c.values[path], c.cmds[path] = value, cmd
		}
	}
	return nil
}

func isNull(node *yaml.Node) bool {
	return node.Kind == yaml.ScalarNode && node.Tag == "!!null"
}

func child(cmd *cobra.Command, name string) *cobra.Command {
	for _, sub := range cmd.Commands() {
		if sub.Name() == name && configurable(sub) {
			return sub
		}
	}
	return nil
}

// assign sets a flag to the value in the file: a plain one, a list for a flag
// that can be repeated, or a mapping for one that takes NAME=VALUE.
func assign(flags *pflag.FlagSet, f *pflag.Flag, node *yaml.Node) error {
	switch node.Kind {
	case yaml.ScalarNode:
		return flags.Set(f.Name, node.Value)
	case yaml.SequenceNode:
		list, ok := f.Value.(pflag.SliceValue)
		if !ok {
			break
		}
		values, err := scalars(node.Content)
		if err != nil {
			return err
		}
		f.Changed = true
		return list.Replace(values)
	case yaml.MappingNode:
		values, err := scalars(node.Content)
		if err != nil || !strings.HasPrefix(f.Value.Type(), "stringTo") {
			break
		}
		for pair := range slices.Chunk(values, 2) {
			if err := flags.Set(f.Name, pair[0]+"="+pair[1]); err != nil {
				return err
			}
		}
		return nil
	}
	return fmt.Errorf("the value has the wrong form for a %s", f.Value.Type())
}

func scalars(nodes []*yaml.Node) ([]string, error) {
	values := make([]string, len(nodes))
	for i, n := range nodes {
		if n.Kind != yaml.ScalarNode || isNull(n) {
			return nil, errors.New("every element must be a plain value")
		}
		values[i] = n.Value
	}
	return values, nil
}
