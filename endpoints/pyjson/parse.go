package pyjson

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

type parser struct {
	text  []byte
	pos   int
	depth int
}

// Parse reads one JSON value with nothing but white space around it.
func Parse(text []byte) (Value, error) {
	if len(text) > MaxText {
		return Value{}, fmt.Errorf("%w: longer than %d bytes", ErrSyntax, MaxText)
	}
	p := &parser{text: text}
	n, err := p.value()
	if err != nil {
		return Value{}, err
	}
	p.space()
	if p.pos != len(p.text) {
		return Value{}, p.fail("something follows the value")
	}
	return n, nil
}

func (p *parser) fail(what string) error {
	return fmt.Errorf("%w: %s at byte %d", ErrSyntax, what, p.pos)
}

func (p *parser) space() {
	for p.pos < len(p.text) {
		switch p.text[p.pos] {
		case ' ', '\t', '\n', '\r':
			p.pos++
		default:
			return
		}
	}
}

// peek is the next byte, 0 at the end; a 0 in the text is no JSON either way.
func (p *parser) peek() byte {
	if p.pos < len(p.text) {
		return p.text[p.pos]
	}
	return 0
}

func (p *parser) accept(c byte) bool {
	if p.peek() != c || p.pos == len(p.text) {
		return false
	}
	p.pos++
	return true
}

func (p *parser) value() (Value, error) {
	p.space()
	switch c := p.peek(); {
	case c == '{':
		return p.object()
	case c == '[':
		return p.array()
	case c == '"':
		s, err := p.str()
		return Value{Kind: String, Text: s}, err
	case c == '-' || digit(c):
		return p.number()
	}
	for word, k := range map[string]Kind{"null": Null, "true": True, "false": False} {
		if strings.HasPrefix(string(p.text[p.pos:min(len(p.text), p.pos+5)]), word) {
			p.pos += len(word)
			return Value{Kind: k}, nil
		}
	}
	return Value{}, p.fail("no value")
}

func (p *parser) enter() error {
	p.pos++ // the bracket
	if p.depth++; p.depth > MaxDepth {
		return p.fail(fmt.Sprintf("nested deeper than %d", MaxDepth))
	}
	p.space()
	return nil
}

func (p *parser) array() (Value, error) {
	if err := p.enter(); err != nil {
		return Value{}, err
	}
	defer func() { p.depth-- }()
	n := Value{Kind: Array}
	if p.accept(']') {
		return n, nil
	}
	for {
		v, err := p.value()
		if err != nil {
			return Value{}, err
		}
		n.Members = append(n.Members, Member{Value: v})
		p.space()
		if p.accept(']') {
			return n, nil
		}
		if !p.accept(',') {
			return Value{}, p.fail("neither , nor ] in an array")
		}
	}
}

func (p *parser) object() (Value, error) {
	if err := p.enter(); err != nil {
		return Value{}, err
	}
	defer func() { p.depth-- }()
	n := Value{Kind: Object}
	if p.accept('}') {
		return n, nil
	}
	for {
		p.space()
		if p.peek() != '"' {
			return Value{}, p.fail("no member name")
		}
		key, err := p.str()
		if err != nil {
			return Value{}, err
		}
		p.space()
		if !p.accept(':') {
			return Value{}, p.fail("no : after a member name")
		}
		v, err := p.value()
		if err != nil {
			return Value{}, err
		}
		n.Members = append(n.Members, Member{key, v})
		p.space()
		if p.accept('}') {
			n.Members = lastWins(n.Members)
			return n, nil
		}
		if !p.accept(',') {
			return Value{}, p.fail("neither , nor } in an object")
		}
	}
}

// lastWins sorts members by key and keeps the last of those with the same key.
// Byte order of the decoded key is code point order, also for lone surrogates.
func lastWins(ms []Member) []Member {
	slices.SortStableFunc(ms, func(a, b Member) int { return strings.Compare(a.Key, b.Key) })
	out := ms[:0]
	for i, m := range ms {
		if i+1 == len(ms) || ms[i+1].Key != m.Key {
			out = append(out, m)
		}
	}
	return out
}

func digit(c byte) bool { return '0' <= c && c <= '9' }

func (p *parser) digits() int {
	from := p.pos
	for digit(p.peek()) {
		p.pos++
	}
	return p.pos - from
}

func (p *parser) number() (Value, error) {
	from := p.pos
	p.accept('-')
	if !p.accept('0') && p.digits() == 0 {
		return Value{}, p.fail("no digits in a number")
	}
	isFloat := false
	if p.accept('.') {
		isFloat = true
		if p.digits() == 0 {
			return Value{}, p.fail("no digits after a decimal point")
		}
	}
	if c := p.peek(); c == 'e' || c == 'E' {
		isFloat = true
		p.pos++
		if !p.accept('+') {
			p.accept('-')
		}
		if p.digits() == 0 {
			return Value{}, p.fail("no digits in an exponent")
		}
	}
	text := string(p.text[from:p.pos])
	if !isFloat {
		if text == "-0" {
			text = "0"
		}
		return Value{Kind: Int, Text: text}, nil
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsInf(f, 0) {
		return Value{}, p.fail("a number too large for a double")
	}
	return Value{Kind: Float, Text: pythonFloat(f)}, nil
}

var shortEscapes = map[byte]byte{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// str reads a string at its opening quote.
func (p *parser) str() (string, error) {
	p.pos++
	var out []byte
	for p.pos < len(p.text) {
		switch c := p.text[p.pos]; {
		case c == '"':
			p.pos++
			return string(out), nil
		case c == '\\':
			var err error
			if out, err = p.escape(out); err != nil {
				return "", err
			}
		case c < 0x20:
			return "", p.fail("a control character in a string")
		case c < utf8.RuneSelf:
			out = append(out, c)
			p.pos++
		default:
			r, size := utf8.DecodeRune(p.text[p.pos:])
			if r == utf8.RuneError && size == 1 {
				return "", p.fail("a string that is not UTF-8")
			}
			out = append(out, p.text[p.pos:p.pos+size]...)
			p.pos += size
		}
	}
	return "", p.fail("the text ends inside a string")
}

func (p *parser) escape(out []byte) ([]byte, error) {
	p.pos++
	c := p.peek()
	if c != 'u' {
		plain, ok := shortEscapes[c]
		if !ok {
			return nil, p.fail("an unknown escape")
		}
		p.pos++
		return append(out, plain), nil
	}
	r, ok := p.hex4(p.pos + 1)
	if !ok {
		return nil, p.fail("no four hexadecimal digits in an escape")
	}
	p.pos += 5
	if utf16.IsSurrogate(r) {
		if p.pos+1 < len(p.text) && p.text[p.pos] == '\\' && p.text[p.pos+1] == 'u' {
			low, ok := p.hex4(p.pos + 2)
			if pair := utf16.DecodeRune(r, low); ok && pair != utf8.RuneError {
				p.pos += 6
				return utf8.AppendRune(out, pair), nil
			}
		}
		return append(out, 0xe0|byte(r>>12), 0x80|byte(r>>6)&0xbf, 0x80|byte(r)&0x3f), nil
	}
	return utf8.AppendRune(out, r), nil
}

func (p *parser) hex4(at int) (rune, bool) {
	if at+4 > len(p.text) {
		return 0, false
	}
	var r rune
	for _, c := range p.text[at : at+4] {
		switch {
		case digit(c):
			r = r<<4 | rune(c-'0')
		case 'a' <= c && c <= 'f':
			r = r<<4 | rune(c-'a'+10)
		case 'A' <= c && c <= 'F':
			r = r<<4 | rune(c-'A'+10)
		default:
			return 0, false
		}
	}
	return r, true
}
