package cli

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

const exampleHead = `# Settings of %[1]s. This file is read from config.yaml in the state folder,
# or from where --config says. Take away a # to set a value; what stands here is
# the default.
#
# The command line beats the environment, the environment beats this file. A flag
# --some-flag is SOME_FLAG with %[2]s before it in the environment, for every
# command that has it.
`

// WriteExample writes a commented configuration file with every setting of the
// commands below root, all of them commented out.
func WriteExample(out io.Writer, root *cobra.Command) error {
	w := bufio.NewWriter(out)
	fmt.Fprintf(w, exampleHead, root.Name(), EnvName(""))
	writeFlags(w, root, "")
	for _, sub := range root.Commands() {
		writeSection(w, sub, "")
	}
	return w.Flush()
}

func writeSection(w io.Writer, cmd *cobra.Command, indent string) {
	if !configurable(cmd) || !hasSettings(cmd) {
		return
	}
	fmt.Fprintf(w, "\n%s# %s: %s\n%s%s:\n", indent, cmd.CommandPath(), cmd.Short, indent, cmd.Name())
	indent += "  "
	writeFlags(w, cmd, indent)
	for _, sub := range cmd.Commands() {
		writeSection(w, sub, indent)
	}
}

func hasSettings(cmd *cobra.Command) bool {
	return len(own(cmd)) > 0 || slices.ContainsFunc(cmd.Commands(), func(sub *cobra.Command) bool {
		return configurable(sub) && hasSettings(sub)
	})
}

func writeFlags(w io.Writer, cmd *cobra.Command, indent string) {
	flags := own(cmd)
	for _, name := range slices.Sorted(maps.Keys(flags)) {
		_, text := pflag.UnquoteUsage(flags[name])
		fmt.Fprintf(w, "\n%s# %s\n%s#%s: %s\n", indent, strings.ReplaceAll(text, "\n", " "), indent, name, defaultOf(flags[name]))
	}
}

// defaultOf is a flag's default in YAML, on one line.
func defaultOf(f *pflag.Flag) string {
	if list, ok := f.Value.(pflag.SliceValue); ok && !f.Changed {
		quoted := make([]string, 0, len(list.GetSlice()))
		for _, item := range list.GetSlice() {
			quoted = append(quoted, strconv.Quote(item)) // ":9443" bare is no YAML
		}
		return "[" + strings.Join(quoted, ", ") + "]"
	}
	if strings.HasPrefix(f.Value.Type(), "stringTo") {
		return "{}"
	}
	if f.Value.Type() != "string" {
		return f.DefValue // numbers, durations and truth values are plain words
	}
	text, err := yaml.Marshal(f.DefValue)
	if err != nil {
		return `""`
	}
	return strings.TrimSuffix(string(text), "\n")
}
