package hermesreach_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// A source is one parsed Go file of the tree.
type source struct {
	path string // from the root, with slashes
	text string
	set  *token.FileSet
	file *ast.File
}

func parse(name, text string) (source, error) {
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, name, text, parser.ParseComments|parser.SkipObjectResolution)
	return source{path: name, text: text, set: set, file: file}, err
}

func (s source) dir() string          { return path.Dir(s.path) }
func (s source) test() bool           { return strings.HasSuffix(s.path, "_test.go") }
func (s source) line(p token.Pos) int { return s.set.Position(p).Line }
func (s source) at(p token.Pos, format string, args ...any) string {
	return fmt.Sprintf("%s:%d: %s", s.path, s.line(p), fmt.Sprintf(format, args...))
}

// A rule names what breaks it, one line for each place, in the order of files.
type rule func([]source) []string

// each makes a rule of a check of one node.
func each(check func(s source, n ast.Node) string) rule {
	return func(files []source) (broken []string) {
		for _, s := range files {
			for n := range ast.Preorder(s.file) {
				if v := check(s, n); v != "" {
					broken = append(broken, s.at(n.Pos(), "%s", v))
				}
			}
		}
		return broken
	}
}

// packages groups the files that are no tests by their folder.
func packages(files []source) map[string][]source {
	found := map[string][]source{}
	for _, s := range files {
		if !s.test() {
			found[s.dir()] = append(found[s.dir()], s)
		}
	}
	return found
}

// covers reports whether the pattern of an arrow stands for the folder.
func covers(pattern, dir string) bool {
	if pattern == "..." || pattern == dir {
		return true
	}
	base, below := strings.CutSuffix(pattern, "/...")
	return below && (dir == base || strings.HasPrefix(dir, base+"/"))
}

func importArrows(files []source) (broken []string) {
	for dir, sources := range packages(files) {
		var row string
		for pattern := range arrows {
			if covers(pattern, dir) && len(pattern) > len(row) {
				row = pattern
			}
		}
		if row == "" {
			broken = append(broken, fmt.Sprintf("%s: the package has no row in the table of arrows: say what it may import", dir))
			continue
		}
		for _, s := range sources {
			for _, i := range s.file.Imports {
				name, _ := strconv.Unquote(i.Path.Value)
				target, ours := strings.CutPrefix(name, module+"/")
				allowed := func(pattern string) bool { return covers(pattern, target) }
				if ours && !slices.ContainsFunc(arrows[row], allowed) {
					broken = append(broken, s.at(i.Pos(), "%s must not import %s", dir, target))
				}
			}
		}
	}
	return slices.Sorted(slices.Values(broken))
}

func packageDocs(files []source) (broken []string) {
	found := packages(files)
	for _, dir := range slices.Sorted(maps.Keys(found)) {
		documented := func(s source) bool {
			want := "Package " + s.file.Name.Name + " "
			if s.file.Name.Name == "main" {
				want = "Command " + path.Base(dir) + " "
			}
			return s.file.Doc != nil && strings.HasPrefix(s.file.Doc.Text(), want)
		}
		if !slices.ContainsFunc(found[dir], documented) {
			broken = append(broken, fmt.Sprintf("%s: no file has a comment that explains the package (%q…)", dir, "// Package name"))
		}
	}
	return broken
}

func sizes(files []source) (broken []string) {
	for dir, sources := range packages(files) {
		if n := len(sources); n > maxFiles && !oneFileACommand[dir] {
			broken = append(broken, fmt.Sprintf("%s: %d files, at most %d: split the package below itself", dir, n, maxFiles))
		}
	}
	for _, s := range files {
		bound := maxLines
		if s.test() {
			bound = maxTestLines
		}
		if n := strings.Count(s.text, "\n"); n > bound {
			broken = append(broken, fmt.Sprintf("%s: %d lines, at most %d", s.path, n, bound))
		}
	}
	return slices.Sorted(slices.Values(broken))
}

var functionLengths = each(func(s source, n ast.Node) string {
	f, ok := n.(*ast.FuncDecl)
	if !ok || f.Body == nil {
		return ""
	}
	bound := maxFunc
	if s.test() {
		bound = maxTestFunc
	}
	if lines := s.line(f.End()) - s.line(f.Pos()) + 1; lines > bound {
		return fmt.Sprintf("%s has %d lines, at most %d", f.Name.Name, lines, bound)
	}
	return ""
})

// The switch that turns verification off, and the hook that a resumed session
// does not call. Put together here, so that this file does not break its own rule.
var (
	skipVerify = "Insecure" + "SkipVerify"
	peerHook   = "VerifyPeer" + "Certificate"
)

// verification holds that the switch stands in one function of pins, where a pin
// check takes its place, and nowhere else: not in a test, a string or a comment.
func verification(files []source) (broken []string) {
	holders := map[string]bool{}
	for _, s := range files {
		if strings.Contains(s.text, peerHook+":") || strings.Contains(s.text, "."+peerHook+" =") {
			broken = append(broken, fmt.Sprintf("%s: %s is not called for a resumed session: use VerifyConnection", s.path, peerHook))
		}
		if !strings.Contains(s.text, skipVerify) {
			continue
		}
		if s.dir() != "pins" || s.test() {
			broken = append(broken, fmt.Sprintf("%s: %s belongs in one function of pins", s.path, skipVerify))
			continue
		}
		for _, d := range s.file.Decls {
			for n := range ast.Preorder(d) {
				if id, ok := n.(*ast.Ident); !ok || id.Name != skipVerify {
					continue
				}
				f, ok := d.(*ast.FuncDecl)
				if !ok {
					broken = append(broken, s.at(n.Pos(), "%s outside a function", skipVerify))
					continue
				}
				holders[f.Name.Name] = true
			}
		}
	}
	if len(holders) > 1 {
		broken = append(broken, fmt.Sprintf("pins: %s in more than one function: %v", skipVerify, slices.Sorted(maps.Keys(holders))))
	}
	return broken
}

// calls names the function of a call as it is written: "time.Sleep".
func calls(n ast.Node) (name string, args []ast.Expr) {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return "", nil
	}
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return "", nil
	}
	if x, ok := sel.X.(*ast.Ident); ok {
		return x.Name + "." + sel.Sel.Name, call.Args
	}
	return "." + sel.Sel.Name, call.Args
}

// sleeps finds time.Sleep, except where a test sleeps in virtual time.
func sleeps(files []source) (broken []string) {
	for _, s := range files {
		var bubbles []ast.Node
		for n := range ast.Preorder(s.file) {
			name, _ := calls(n)
			switch within := func(b ast.Node) bool { return b.Pos() <= n.Pos() && n.End() <= b.End() }; {
			case name == "synctest.Test":
				bubbles = append(bubbles, n)
			case name == "time.Sleep" && mayPause[s.path] == "" && !slices.ContainsFunc(bubbles, within):
				broken = append(broken, s.at(n.Pos(), "time.Sleep: wait for an event or for an injected clock"))
			}
		}
	}
	return broken
}

var skipping = regexp.MustCompile(`^(t|b|f|tb|rt)\.Skip(f|Now)?$`)

var skips = each(func(s source, n ast.Node) string {
	if name, _ := calls(n); s.test() && skipping.MatchString(name) {
		return name + ": a test passes or fails"
	}
	return ""
})

// Also put together here, for the same reason.
var unfinished = regexp.MustCompile(`\b(TO` + `DO|FIX` + `ME|XX` + `X)\b`)

func leftovers(files []source) (broken []string) {
	for _, s := range files {
		for _, group := range s.file.Comments {
			for _, c := range group.List {
				if word := unfinished.FindString(c.Text); word != "" {
					broken = append(broken, s.at(c.Pos(), "a comment that leaves something to do: %s", word))
				}
			}
		}
	}
	return broken
}

var (
	impureImport = []string{"os", "net/http", "crypto/tls", "os/exec"}
	impureCall   = regexp.MustCompile(`^(net\.(Dial|Listen)\w*|time\.(Now|Since|Until|Sleep|After|AfterFunc|Tick|NewTimer|NewTicker))$`)
)

// purity holds that reach/wire does no I/O and reads no clock.
var purity = each(func(s source, n ast.Node) string {
	if s.dir() != "reach/wire" || s.test() {
		return ""
	}
	if i, ok := n.(*ast.ImportSpec); ok {
		if name, _ := strconv.Unquote(i.Path.Value); slices.Contains(impureImport, name) {
			return "reach/wire is pure: it must not import " + name
		}
	}
	if name, _ := calls(n); impureCall.MatchString(name) {
		return "reach/wire is pure: it must not call " + name
	}
	return ""
})

var everywhere = regexp.MustCompile(`^"(0\.0\.0\.0|\[::\])?:\d*"$`)

// loopback holds that no test opens a port to the network.
var loopback = each(func(s source, n ast.Node) string {
	name, args := calls(n)
	if !s.test() || len(args) < 2 || !strings.Contains(name, ".Listen") {
		return ""
	}
	if lit, ok := args[len(args)-1].(*ast.BasicLit); ok && everywhere.MatchString(lit.Value) {
		return name + " on every interface: use 127.0.0.1:0"
	}
	return ""
})
