package pyjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// golden.json was written by CPython: see golden.py beside it.
func goldenRows(t testing.TB) [][2]*string {
	t.Helper()
	text, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var rows [][2]*string
	if err := json.Unmarshal(text, &rows); err != nil {
		t.Fatal(err)
	}
	if len(rows) < 2000 {
		t.Fatalf("%d rows in golden.json, want at least 2000", len(rows))
	}
	return rows
}

func TestPrintsAsPython(t *testing.T) {
	for _, row := range goldenRows(t) {
		v, err := Parse([]byte(*row[0]))
		switch want := row[1]; {
		case want == nil && err == nil:
			t.Errorf("Parse(%q) = %s, Python refuses it", *row[0], Append(nil, v))
		case want == nil:
			if !errors.Is(err, ErrSyntax) {
				t.Errorf("Parse(%q): %v is not an ErrSyntax", *row[0], err)
			}
		case err != nil:
			// The one difference: Python forgets a member that a later one of
			// the same name replaced, even a number it could not print.
			if !strings.Contains(err.Error(), "too large for a double") {
				t.Errorf("Parse(%q): %v", *row[0], err)
			}
		default:
			if got := string(Append(nil, v)); got != *want {
				t.Errorf("%q\n  ours   %s\n  Python %s", *row[0], got, *want)
			}
		}
	}
}

func TestFloats(t *testing.T) {
	for in, want := range map[string]string{
		"1e15": "1000000000000000.0", "1e16": "1e+16", "123456789012345680.0": "1.2345678901234568e+17",
		"0.0001": "0.0001", "0.00001": "1e-05", "-0.0": "-0.0", "-0": "0", "-0e7": "-0.0", "1E5": "100000.0",
		"5e-324": "5e-324", "1e-400": "0.0", "1e22": "1e+22", "1.5e300": "1.5e+300", "1e100": "1e+100", "0.1": "0.1",
	} {
		v, err := Parse([]byte(in))
		if got := string(Append(nil, v)); err != nil || got != want {
			t.Errorf("%s prints as %s, %v; want %s", in, got, err, want)
		}
	}
}

func TestRefuses(t *testing.T) {
	for name, in := range map[string]string{
		"raw invalid UTF-8":    "\"\xff\"",
		"raw surrogate":        "\"\xed\xa0\x80\"",
		"overlong":             "\"\xc0\xaf\"",
		"byte order mark":      "\ufeff{}",
		"too deep":             strings.Repeat("[", MaxDepth+1) + strings.Repeat("]", MaxDepth+1),
		"too long":             strings.Repeat(" ", MaxText) + "1",
		"NUL at the end":       "1\x00",
		"NUL alone":            "\x00",
		"overridden overflow":  `{"a":1e999,"a":1}`,
		"NaN":                  `{"a":NaN}`,
		"negative infinity":    `-Infinity`,
		"capital word":         `True`,
		"a secret in the text": `{"key":"hunter2" "x"}`,
	} {
		_, err := Parse([]byte(in))
		if !errors.Is(err, ErrSyntax) {
			t.Errorf("%s: %v, want ErrSyntax", name, err)
		} else if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: the error quotes the text: %v", name, err)
		}
	}
	deep := strings.Repeat("[", MaxDepth) + strings.Repeat("]", MaxDepth)
	if _, err := Parse([]byte(deep)); err != nil {
		t.Errorf("depth %d: %v", MaxDepth, err)
	}
}

func TestCutAnywhere(t *testing.T) {
	whole := `{"a":[1,-2.5e+3,"x\ud83d\ude80\n",true,null],"b":{"c":false}}`
	for i := range whole {
		if _, err := Parse([]byte(whole[:i])); err == nil {
			t.Errorf("the first %d bytes parse", i)
		}
	}
}

func TestSurrogates(t *testing.T) {
	for in, want := range map[string]string{
		`"\ud83d\ude80"`:       `"\ud83d\ude80"`,
		`"\uD83D\uDE80"`:       `"\ud83d\ude80"`,
		"\"\U0001f680\"":       `"\ud83d\ude80"`,
		`"\ud83d"`:             `"\ud83d"`,
		`"\ude80\ud83d"`:       `"\ude80\ud83d"`,
		`"\ud83d\ud83d\ude80"`: `"\ud83d\ud83d\ude80"`,
		`"\ud83dx"`:            `"\ud83dx"`,
		`"\ud83d\n"`:           `"\ud83d\n"`,
		`"\udbff\udfff"`:       `"\udbff\udfff"`,
		`"\ufffd"`:             `"\ufffd"`,
		`{"\uffff":1,"\ud83d\ude80":2,"\ud83d":3,"\ue000":4}`: `{"\ud83d":3,"\ue000":4,"\uffff":1,"\ud83d\ude80":2}`,
	} {
		v, err := Parse([]byte(in))
		if got := string(Append(nil, v)); err != nil || got != want {
			t.Errorf("%s prints as %s, %v; want %s", in, got, err, want)
		}
	}
	if got := string(AppendString(nil, "a\xffb\xed\xa0")); got != `"a\ufffdb\ufffd\ufffd"` {
		t.Errorf("broken UTF-8 prints as %s", got)
	}
}

func TestAccessors(t *testing.T) {
	v, err := Parse([]byte(`{"s":"x","n":null,"t":true,"l":["a",1,"b"],"i":7,"f":7.0,"h":7.5,"big":1e30,"huge":99999999999999999999}`))
	if err != nil {
		t.Fatal(err)
	}
	if v.Str("s") != "x" || v.Str("n") != "" || v.Str("i") != "" || v.Str("none") != "" {
		t.Error("Str")
	}
	if !v.Bool("t") || v.Bool("s") || v.Bool("none") {
		t.Error("Bool")
	}
	if got := strings.Join(v.Strs("l"), ","); got != "a,b" || v.Strs("s") != nil {
		t.Errorf("Strs = %s", got)
	}
	for key, want := range map[string]bool{"i": true, "f": true, "h": false, "big": false, "huge": false, "s": false, "none": false} {
		m, _ := v.Get(key)
		if n, ok := m.Whole(); ok != want || ok && n != 7 {
			t.Errorf("Whole of %s = %d, %v", key, n, ok)
		}
	}
	if _, ok := (Value{Kind: Array, Members: []Member{{Key: "s"}}}).Get("s"); ok {
		t.Error("an array has a member by name")
	}
}

// What prints must parse and print the same, and encoding/json must agree that
// it is JSON.
func FuzzParse(f *testing.F) {
	for i, row := range goldenRows(f) {
		if i%20 == 0 {
			f.Add([]byte(*row[0]))
		}
	}
	f.Add([]byte("{\"\xed\xa0\x80\":1}"))
	f.Fuzz(func(t *testing.T, in []byte) {
		v, err := Parse(in)
		if err != nil {
			if !errors.Is(err, ErrSyntax) {
				t.Errorf("%v is not an ErrSyntax", err)
			}
			return
		}
		if !json.Valid(in) {
			t.Error("parsed what encoding/json refuses")
		}
		out := Append(nil, v)
		if len(out) > MaxText {
			return
		}
		again, err := Parse(out)
		if err != nil {
			t.Fatalf("printed %q: %v", out, err)
		}
		if twice := Append(nil, again); !bytes.Equal(out, twice) {
			t.Errorf("%q prints as %q, then as %q", in, out, twice)
		}
		for _, c := range out {
			if c < 0x20 || c > 0x7e {
				t.Fatalf("byte %#x in %q", c, out)
			}
		}
	})
}
