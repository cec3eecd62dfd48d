package hermesreach_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// A tryout is a few files that a rule is tried on.
type tryout struct {
	files map[string]string
	want  string // part of the one violation; "" means that the rule holds
}

// TestRulesBite shows for each rule something that breaks it, and its neighbour
// that does not.
func TestRulesBite(t *testing.T) {
	tried := map[string]bool{}
	for _, group := range []map[string]map[string]tryout{treeTryouts, codeTryouts} {
		for name, cases := range group {
			tried[name] = true
			for title, try := range cases {
				t.Run(name+"/"+title, func(t *testing.T) { try.run(t, rules[name]) })
			}
		}
	}
	for name := range rules {
		if !tried[name] {
			t.Errorf("the rule %q is never shown to bite", name)
		}
	}
}

func (try tryout) run(t *testing.T, broken rule) {
	if broken == nil {
		t.Fatal("there is no such rule")
	}
	var files []source
	for name, text := range try.files {
		s, err := parse(name, text)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, s)
	}
	slices.SortFunc(files, func(a, b source) int { return strings.Compare(a.path, b.path) })
	got := broken(files)
	switch {
	case try.want == "" && len(got) != 0:
		t.Errorf("got %q, want no violation", got)
	case try.want != "" && (len(got) != 1 || !strings.Contains(got[0], try.want)):
		t.Errorf("got %q, want one violation with %q", got, try.want)
	}
}

// one is a single file.
func one(name, text, want string) tryout {
	return tryout{map[string]string{name: text}, want}
}

// imports is a file that imports a package of ours.
func imports(name, target, want string) tryout {
	return one(name, "package p\n\nimport _ \""+module+"/"+target+"\"\n", want)
}

// files is n files of one package.
func files(dir string, n int, want string) tryout {
	made := map[string]string{}
	for i := range n {
		made[fmt.Sprintf("%s/f%d.go", dir, i)] = "package p\n"
	}
	return tryout{made, want}
}

func function(lines int) string {
	return "package p\n\nfunc f() {\n" + strings.Repeat("\tg()\n", lines-2) + "}\n"
}

var treeTryouts = map[string]map[string]tryout{
	"imports run one way": {
		"the broker never reads":      imports("broker/b.go", "pins", "broker must not import pins"),
		"nor does what is below it":   imports("broker/acme/b.go", "securelink", "broker/acme must not import securelink"),
		"the broker speaks wire":      imports("broker/b.go", "reach/wire", ""),
		"and uses its store":          imports("broker/b.go", "broker/store", ""),
		"a leaf stays a leaf":         imports("pins/p.go", "reach/wire", "pins must not import reach/wire"),
		"a row is not a prefix":       imports("reach/wire/w.go", "reach/link", "reach/wire must not import reach/link"),
		"nobody imports a command":    imports("internal/host/h.go", "cmd/hermes-reach", "must not import cmd/hermes-reach"),
		"the product has no lab":      imports("internal/host/h.go", "internal/lab", "must not import internal/lab"),
		"tests may use neighbours":    imports("connector/c_test.go", "broker", ""),
		"a new package needs a row":   one("util/u.go", "package util\n", "util: the package has no row"),
		"others' packages do not ask": one("pins/p.go", "package pins\n\nimport _ \"crypto/tls\"\n", ""),
	},
	"every package explains itself": {
		"silent":         one("pins/p.go", "package pins\n", "pins: no file has a comment"),
		"about others":   one("pins/p.go", "// Package pin is\npackage pins\n", "pins: no file has a comment"),
		"only in a test": {map[string]string{"pins/p.go": "package pins\n", "pins/p_test.go": "// Package pins is\npackage pins\n"}, "pins: no file"},
		"well":           {map[string]string{"pins/p.go": "// Package pins says who.\npackage pins\n", "pins/q.go": "package pins\n"}, ""},
		"a command":      one("cmd/hermes-reach/main.go", "// Command hermes-reach is all of it.\npackage main\n", ""),
		"silent command": one("cmd/hermes-reach/main.go", "package main\n", "cmd/hermes-reach: no file"),
	},
	"packages and files are short": {
		"files":           files("pins", maxFiles+1, "pins: 9 files, at most 8"),
		"enough files":    files("pins", maxFiles, ""),
		"files of a tool": files("cmd/hermes-reach", 20, ""),
		"lines":           one("pins/p.go", "package pins\n"+strings.Repeat("\n", maxLines), "501 lines"),
		"a test's lines":  one("pins/p_test.go", "package pins\n"+strings.Repeat("\n", maxTestLines), "701 lines"),
		"enough lines":    one("pins/p.go", "package pins\n"+strings.Repeat("\n", maxLines-1), ""),
	},
	"functions are short": {
		"long":        one("pins/p.go", function(maxFunc+1), "f has 61 lines, at most 60"),
		"enough":      one("pins/p.go", function(maxFunc), ""),
		"test":        one("pins/p_test.go", function(maxTestFunc), ""),
		"a long test": one("pins/p_test.go", function(maxTestFunc+1), "f has 101 lines"),
	},
	"wire is pure": {
		"a socket":        one("reach/wire/w.go", "package wire\n\nimport \"net\"\n\nvar c, _ = net.Dial(\"tcp\", \"x\")\n", "must not call net.Dial"),
		"a clock":         one("reach/wire/w.go", "package wire\n\nimport \"time\"\n\nvar t = time.Now()\n", "must not call time.Now"),
		"a file":          one("reach/wire/w.go", "package wire\n\nimport _ \"os\"\n", "must not import os"),
		"only a name":     one("reach/wire/w.go", "package wire\n\nimport \"net\"\n\nvar h = net.JoinHostPort(\"h\", \"1\")\n", ""),
		"another package": one("reach/r.go", "package reach\n\nimport _ \"os\"\n", ""),
	},
}

var codeTryouts = map[string]map[string]tryout{
	"verification is never off": {
		"elsewhere":       one("reach/r.go", "package reach\n\nvar c = tls.Config{"+skipVerify+": true}\n", "belongs in one function of pins"),
		"in a test":       one("pins/p_test.go", "package pins\n\nvar c = tls.Config{"+skipVerify+": true}\n", "belongs in one function of pins"),
		"in another file": one("internal/lab/x.go", "package lab\n\nfunc f(c *tls.Config) { c."+skipVerify+" = true }\n", "belongs in one function of pins"),
		"in pins":         one("pins/p.go", "package pins\n\nfunc f() { c."+skipVerify+" = true }\n", ""),
		"twice":           one("pins/p.go", "package pins\n\nfunc f() { c."+skipVerify+" = true }\nfunc g() { c."+skipVerify+" = true }\n", "more than one function: [f g]"),
		"not in one":      one("pins/p.go", "package pins\n\nvar c = tls.Config{"+skipVerify+": true}\n", "outside a function"),
		"the wrong hook":  one("pins/p.go", "package pins\n\nvar c = tls.Config{"+peerHook+": f}\n", "use VerifyConnection"),
	},
	"nobody sleeps": {
		"a test":      one("pins/p_test.go", "package pins\n\nfunc f() { time.Sleep(1) }\n", "pins/p_test.go:3: time.Sleep"),
		"the product": one("pins/p.go", "package pins\n\nfunc f() { time.Sleep(1) }\n", "time.Sleep"),
		"virtual":     one("pins/p_test.go", "package pins\n\nfunc f() { synctest.Test(t, func() { time.Sleep(1) }) }\n", ""),
		"after it":    one("pins/p_test.go", "package pins\n\nfunc f() { synctest.Test(t, g); time.Sleep(1) }\n", "time.Sleep"),
		"a timer":     one("pins/p.go", "package pins\n\nfunc f() { <-time.After(1) }\n", ""),
	},
	"no test is skipped": {
		"skip":         one("pins/p_test.go", "package pins\n\nfunc f(t *testing.T) { t.Skip() }\n", "t.Skip: a test passes or fails"),
		"with words":   one("pins/p_test.go", "package pins\n\nfunc f(b *testing.B) { b.Skipf(\"x\") }\n", "b.Skipf"),
		"another Skip": one("pins/p_test.go", "package pins\n\nfunc f() { decoder.Skip() }\n", ""),
	},
	"nothing is left to do": {
		"left":       one("pins/p.go", "package pins\n\n// TO"+"DO: the rest\n", "something to do"),
		"in code":    one("pins/p.go", "package pins\n\nfunc f() {\n\tg() // FIX"+"ME\n}\n", "pins/p.go:4"),
		"nothing":    one("pins/p.go", "package pins\n\n// What there is to do is done.\n", ""),
		"not a word": one("pins/p.go", "package pins\n\n// MASTO"+"DON\n", ""),
	},
	"tests stay on loopback": {
		"every interface": one("pins/p_test.go", "package pins\n\nvar l, _ = net.Listen(\"tcp\", \":0\")\n", "use 127.0.0.1:0"),
		"by its number":   one("pins/p_test.go", "package pins\n\nvar l, _ = net.ListenPacket(\"udp\", \"0.0.0.0:9\")\n", "use 127.0.0.1:0"),
		"with a context":  one("pins/p_test.go", "package pins\n\nvar l, _ = lc.Listen(ctx, \"tcp\", \"[::]:0\")\n", "use 127.0.0.1:0"),
		"loopback":        one("pins/p_test.go", "package pins\n\nvar l, _ = net.Listen(\"tcp\", \"127.0.0.1:0\")\n", ""),
	},
}

// TestCIChecksBite does the same for what holds .ci/run to its word.
func TestCIChecksBite(t *testing.T) {
	const script = "step \"tests\" make test\nstep \"fuzz\" make fuzz FUZZTIME=5s\n#step \"lint\" make lint\nstep \"race\" make race || true\n"
	for command, want := range map[string]bool{
		"make test": true, "make fuzz": true, "make lint": false, "make race": false, "make": false,
	} {
		if got := runs(script, command); got != want {
			t.Errorf("runs(%q) = %v, want %v", command, got, want)
		}
	}
	readme := "<!-- CI runs this -->\n```sh\nmake test   # all of them\n\n```\n```sh\nmake bench\n```\n"
	if got := promised(readme); !slices.Equal(got, []string{"make test"}) {
		t.Errorf("promised = %q, want only make test", got)
	}
	if got := recipe("x:\n\ty\n\ntest: ## run\n\t@go test\n\nz:\n", "test"); got != "go test" {
		t.Errorf("recipe = %q, want go test", got)
	}
	if got := recipe("\ntest:\n\tgo test\n\tgo vet\n", "test"); got == "go test" {
		t.Error("recipe hides a second line")
	}
}
