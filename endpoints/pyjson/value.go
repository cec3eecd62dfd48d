// Package pyjson reads JSON and prints it as Python's json.dumps does with
// sort_keys and compact separators, because signatures over pairing payloads
// cover that spelling.
//
// encoding/json cannot do it: it replaces lone surrogates and forgets whether
// a number was 3600 or 3600.0, which sign differently. So the text is read into
// a tree that keeps exactly what the printed form needs. Reading is stricter
// than Python in three ways: no NaN or Infinity, no number too large for a
// double, no bytes that are not UTF-8.
package pyjson

import (
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"
)

const (
	MaxDepth = 64        // nested arrays and objects
	MaxText  = 384 << 10 // bytes, read or printed
)

// ErrSyntax is wrapped by every error about a text. Such errors give an offset
// and never quote the text, which may hold secrets.
var ErrSyntax = errors.New("not acceptable JSON")

// Kind says what a Value is, and which of its fields count.
type Kind byte

// The kinds of JSON values.
const (
	Null Kind = iota
	False
	True
	Int    // Text: any number of digits, as Python prints them
	Float  // Text: the number as Python prints it
	String // Text: decoded; a lone surrogate as its three-byte encoding
	Array  // Members, without keys
	Object // Members, sorted by key, each key once (of several the last wins)
)

// A Value is one JSON value. The zero Value is null.
type Value struct {
	Kind    Kind
	Text    string
	Members []Member
}

// A Member is an element of an array or a member of an object.
type Member struct {
	Key   string
	Value Value
}

// Get finds a member of an object; on any other kind there is none.
func (n Value) Get(key string) (Value, bool) {
	if n.Kind != Object {
		return Value{}, false
	}
	i, ok := slices.BinarySearchFunc(n.Members, key, func(m Member, k string) int { return strings.Compare(m.Key, k) })
	if !ok {
		return Value{}, false
	}
	return n.Members[i].Value, true
}

// The accessors below read as leniently as phones do: a member that is missing
// or of another kind has its default.

// Str is a member's text, or "".
func (n Value) Str(key string) string {
	v, _ := n.Get(key)
	if v.Kind != String {
		return ""
	}
	return v.Text
}

// Strs are the strings in a member that is an array, or nil.
func (n Value) Strs(key string) []string {
	v, _ := n.Get(key)
	if v.Kind != Array {
		return nil
	}
	var out []string
	for _, m := range v.Members {
		if m.Value.Kind == String {
			out = append(out, m.Value.Text)
		}
	}
	return out
}

// Bool reports whether a member is true.
func (n Value) Bool(key string) bool {
	v, _ := n.Get(key)
	return v.Kind == True
}

// Whole is the value as a whole number, also one that Python printed as a
// float; false if it is none or does not fit.
func (n Value) Whole() (int64, bool) {
	switch n.Kind {
	case Int:
		v, err := strconv.ParseInt(n.Text, 10, 64)
		return v, err == nil
	case Float:
		f, err := strconv.ParseFloat(n.Text, 64)
		if err != nil || f != math.Trunc(f) || math.Abs(f) > 1<<53 {
			return 0, false
		}
		return int64(f), true
	}
	return 0, false
}
