package hermesreach_test

import (
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"
	"testing"
)

const module = "github.com/hermes-reach/hermes-reach"

// Bounds of the tree. A package that outgrows them splits below itself.
const (
	maxFiles = 8   // that are no tests, in one package
	maxLines = 500 // in one file
	maxFunc  = 60  // lines of one function

	// Tests hold tables, which are data.
	maxTestLines = 700
	maxTestFunc  = 100
)

// arrows says which packages of this module the code of a package may import.
// "x/..." stands for x and everything below it, "..." for everything.
//
// Tests are free to import what they need, so that a package can be tried with
// real neighbours; Go itself refuses a circle.
//
// broker has no arrow to pins or securelink, and that is its proof: it has no
// code that could read what it carries.
var arrows = map[string][]string{
	".":                      {},
	"pins":                   {},
	"endpoints/...":          {"pins", "reach/wire", "endpoints/..."},
	"reach/wire":             {},
	"reach/carrier/...":      {"reach/wire", "reach/carrier/..."},
	"reach/link":             {"reach/wire", "reach/carrier"},
	"reach/carrier/outer":    {},
	"reach":                  {"reach/wire", "reach/carrier", "reach/link", "pins", "endpoints/...", "reach/profile"},
	"reach/profile":          {"reach/wire", "pins", "endpoints/..."},
	"reach/forward":          {"reach", "reach/profile", "reach/wire", "pins", "endpoints/...", "internal/localsock"},
	"broker/...":             {"reach/wire", "reach/carrier", "reach/link", "broker/...", "internal/localsock"},
	"connector":              {"reach/wire", "reach/carrier", "reach/link", "pins"},
	"securelink":             {"pins", "securelink/session/..."},
	"securelink/session/...": {"securelink/session/..."},
	"tailscale":              {},
	"internal/cli":           {},
	"internal/localsock":     {},
	"internal/host":          {"pins", "endpoints/...", "reach/...", "broker/...", "connector", "securelink/...", "tailscale", "internal/host", "internal/host/holder", "internal/cli", "internal/localsock"},
	"internal/host/holder":   {},
	"internal/host/operator": {"internal/host", "internal/localsock", "securelink/session/..."},
	"internal/demo":          {"..."},
	"internal/lab/...":       {"..."},
	"bench/...":              {"..."},
	"cmd/...":                {"..."},
}

// oneFileACommand are the packages without a bound on their number of files,
// because each file is one command.
var oneFileACommand = map[string]bool{"cmd/hermes-reach": true, "cmd/hermes-relay": true}

// mayPause lists the files that may call time.Sleep, each with its reason.
// Everything else waits for an event, for a clock that was handed to it, or in
// the virtual time of testing/synctest.
var mayPause = map[string]string{}

// rules are all that hold for the Go files of the tree.
var rules = map[string]rule{
	"imports run one way":           importArrows,
	"every package explains itself": packageDocs,
	"packages and files are short":  sizes,
	"functions are short":           functionLengths,
	"verification is never off":     verification,
	"nobody sleeps":                 sleeps,
	"no test is skipped":            skips,
	"nothing is left to do":         leftovers,
	"wire is pure":                  purity,
	"tests stay on loopback":        loopback,
}

func TestTree(t *testing.T) {
	files := tree(t, os.DirFS("."))
	for name, broken := range rules {
		t.Run(name, func(t *testing.T) {
			for _, violation := range broken(files) {
				t.Error(violation)
			}
		})
	}
}

// tree reads every Go file below the root, other modules and all platforms
// included.
func tree(t *testing.T, root fs.FS) []source {
	t.Helper()
	var files []source
	err := fs.WalkDir(root, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && name != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || name == "bin" || name == "dist"):
			return fs.SkipDir
		case d.IsDir() || path.Ext(name) != ".go":
			return nil
		}
		text, err := fs.ReadFile(root, name)
		if err != nil {
			return err
		}
		s, err := parse(name, string(text))
		files = append(files, s)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 4 {
		t.Fatalf("only %d Go files found: is the test run at the root?", len(files))
	}
	return files
}

// TestCIRunsWhatItSays holds .ci/run to the README, and `make test` to all tests
// with the race detector.
func TestCIRunsWhatItSays(t *testing.T) {
	ci, readme, makefile := read(t, ".ci/run"), read(t, "README.md"), read(t, "Makefile")
	told := promised(readme)
	if len(told) == 0 {
		t.Error("README.md has no block of commands after a line <!-- CI runs this -->")
	}
	for _, command := range told {
		if !runs(ci, command) {
			t.Errorf(".ci/run has no step that runs %q, which README.md tells people to type", command)
		}
	}
	for target, want := range map[string]string{
		"test":    "$(GO) test -race ./...",
		"race":    "$(GO) test -race -shuffle=on -count=$(RACECOUNT) -cpu=1,4 ./...",
		"interop": "$(GO) test -race -count=1 -timeout=20m -tags=interop ./internal/lab/hermesagent/...",
	} {
		if got := recipe(makefile, target); got != want {
			t.Errorf("make %s runs %q, want %q", target, got, want)
		}
		if !runs(ci, "make "+target) {
			t.Errorf(".ci/run has no step that runs make %s", target)
		}
	}
	for name, text := range map[string]string{".ci/run": ci, "Makefile": makefile} {
		if unfinished.MatchString(text) {
			t.Errorf("%s still has something to do: %s", name, unfinished.FindString(text))
		}
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var promisedBlocks = regexp.MustCompile("(?s)<!-- CI runs this -->\\s*```sh\n(.*?)```")

// promised lists the commands in the README's blocks marked as what CI runs.
func promised(readme string) []string {
	var commands []string
	for _, block := range promisedBlocks.FindAllStringSubmatch(readme, -1) {
		for line := range strings.Lines(block[1]) {
			command, _, _ := strings.Cut(line, "#")
			if command = strings.TrimSpace(command); command != "" {
				commands = append(commands, command)
			}
		}
	}
	return commands
}

// runs reports whether one of the script's steps is the command, with nothing
// after it but settings (NAME=value).
func runs(script, command string) bool {
	step := regexp.MustCompile(`(?m)^step "[^"]*" ` + regexp.QuoteMeta(command) + `( [A-Z]+=\S+)*$`)
	return step.MatchString(script)
}

// recipe is the only line that a make target runs.
func recipe(makefile, target string) string {
	_, rest, _ := strings.Cut(makefile, "\n"+target+":")
	_, rest, _ = strings.Cut(rest, "\n")
	line, rest, _ := strings.Cut(rest, "\n")
	if strings.HasPrefix(rest, "\t") {
		return "more than one line"
	}
	return strings.TrimPrefix(strings.TrimPrefix(line, "\t"), "@")
}

var link = regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)

// TestLinks holds that a document which one of ours points to is there.
func TestLinks(t *testing.T) {
	documents, err := fs.Glob(os.DirFS("."), "*.md")
	more, err2 := fs.Glob(os.DirFS("."), "docs/*.md")
	if err != nil || err2 != nil || len(documents) < 4 || len(more) < 2 {
		t.Fatalf("documents: %d, %d, %v, %v", len(documents), len(more), err, err2)
	}
	for _, name := range append(documents, more...) {
		for _, found := range link.FindAllStringSubmatch(read(t, name), -1) {
			if _, err := os.Stat(path.Join(path.Dir(name), found[1])); err != nil {
				t.Errorf("%s points to %s, which is not there", name, found[1])
			}
		}
	}
}
