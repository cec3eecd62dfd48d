package pyjson

import (
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Append prints a tree in the canonical form.
func Append(b []byte, n Value) []byte {
	switch n.Kind {
	case Null:
		return append(b, "null"...)
	case False:
		return append(b, "false"...)
	case True:
		return append(b, "true"...)
	case Int, Float:
		return append(b, n.Text...)
	case String:
		return AppendString(b, n.Text)
	}
	open, end := byte('['), byte(']')
	if n.Kind == Object {
		open, end = '{', '}'
	}
	b = append(b, open)
	for i, m := range n.Members {
		if i > 0 {
			b = append(b, ',')
		}
		if n.Kind == Object {
			b = append(AppendString(b, m.Key), ':')
		}
		b = Append(b, m.Value)
	}
	return append(b, end)
}

const hexDigits = "0123456789abcdef"

// AppendString quotes s in ASCII as Python does. A three-byte surrogate in s
// becomes the escape it came from; any other broken UTF-8 becomes \ufffd.
func AppendString(b []byte, s string) []byte {
	b = append(b, '"')
	for i := 0; i < len(s); {
		c := s[i]
		if c < utf8.RuneSelf {
			b = appendASCII(b, c)
			i++
			continue
		}
		r, size := utf8.DecodeRuneInString(s[i:])
		if r == utf8.RuneError && size == 1 && isSurrogate(s[i:]) {
			r, size = 0xd000|rune(s[i+1]&0x3f)<<6|rune(s[i+2]&0x3f), 3
		}
		if hi, lo := utf16.EncodeRune(r); hi != utf8.RuneError {
			b = appendUnit(appendUnit(b, hi), lo)
		} else {
			b = appendUnit(b, r)
		}
		i += size
	}
	return append(b, '"')
}

func isSurrogate(s string) bool {
	return len(s) >= 3 && s[0] == 0xed && s[1]&0xe0 == 0xa0 && s[2]&0xc0 == 0x80
}

func appendUnit(b []byte, u rune) []byte {
	return append(b, '\\', 'u', hexDigits[u>>12&0xf], hexDigits[u>>8&0xf], hexDigits[u>>4&0xf], hexDigits[u&0xf])
}

func appendASCII(b []byte, c byte) []byte {
	switch c {
	case '"', '\\':
		return append(b, '\\', c)
	case '\b':
		return append(b, '\\', 'b')
	case '\f':
		return append(b, '\\', 'f')
	case '\n':
		return append(b, '\\', 'n')
	case '\r':
		return append(b, '\\', 'r')
	case '\t':
		return append(b, '\\', 't')
	}
	if c < 0x20 || c == 0x7f {
		return appendUnit(b, rune(c))
	}
	return append(b, c)
}

// pythonFloat is repr(f): the shortest digits that read back as f, always with
// a point or an exponent, an exponent outside -4 ≤ e < 16.
func pythonFloat(f float64) string {
	s := strconv.FormatFloat(f, 'e', -1, 64)
	i := strings.IndexByte(s, 'e')
	exp, err := strconv.Atoi(s[i+1:])
	if err != nil || exp < -4 || exp >= 16 {
		return s // Go's exponents have a sign and two digits too
	}
	s = strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}
