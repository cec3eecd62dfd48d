package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"
)

// MaxMessage bounds one JSON message of either protocol, in bytes, without
// the length in front of it.
const MaxMessage = 4096

// maxDepth bounds nesting: our deepest message has an object in an object, and
// later versions get some room.
const maxDepth = 8

// splitObject checks b completely and returns the members of the object it
// is, by name. encoding/json alone would take a name twice, in any case of
// letters, and broken UTF-8 as U+FFFD: three ways for two readers to disagree.
func splitObject(b []byte) (map[string]json.RawMessage, error) {
	switch {
	case len(b) > MaxMessage: // before anything is decoded
		return nil, fmt.Errorf("%w: a message of %d bytes, at most %d are allowed", ErrMalformed, len(b), MaxMessage)
	case !utf8.Valid(b):
		return nil, fmt.Errorf("%w: not UTF-8", ErrMalformed)
	case !json.Valid(b):
		return nil, fmt.Errorf("%w: not one JSON value", ErrMalformed)
	}
	w := walker{b: b, dec: json.NewDecoder(bytes.NewReader(b))}
	w.dec.UseNumber() // 1e400 in a member we ignore is no fault
	members := map[string]json.RawMessage{}
	if tok, _ := w.dec.Token(); tok != json.Delim('{') {
		return nil, fmt.Errorf("%w: not a JSON object", ErrMalformed)
	}
	if err := w.object(1, members); err != nil {
		return nil, err
	}
	return members, nil
}

// A walker goes once through JSON that is known to be valid, so that Token
// cannot fail.
type walker struct {
	b   []byte
	dec *json.Decoder
}

func (w *walker) object(depth int, members map[string]json.RawMessage) error {
	for w.dec.More() {
		tok, _ := w.dec.Token()
		name, _ := tok.(string)
		if _, twice := members[name]; twice {
			return fmt.Errorf("%w: a member occurs twice", ErrMalformed)
		}
		start := w.dec.InputOffset()
		if err := w.value(depth + 1); err != nil {
			return err
		}
		members[name] = bytes.TrimLeft(w.b[start:w.dec.InputOffset()], " \t\r\n:")
	}
	_, err := w.dec.Token() // the closing brace
	return err
}

func (w *walker) value(depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("%w: nested deeper than %d", ErrMalformed, maxDepth)
	}
	tok, err := w.dec.Token()
	switch tok {
	case json.Delim('{'):
		return w.object(depth, map[string]json.RawMessage{})
	case json.Delim('['):
		for w.dec.More() {
			if err := w.value(depth + 1); err != nil {
				return err
			}
		}
		_, err = w.dec.Token()
	}
	return err
}

// stringOf decodes a JSON string; any other value, null too, is not one.
func stringOf(raw []byte) (s string, ok bool) {
	if len(raw) == 0 || raw[0] != '"' {
		return "", false
	}
	return s, json.Unmarshal(raw, &s) == nil
}

// fields reads a message from members, or writes one, by the same list of
// calls in the message's fields method. The first error sticks and later calls
// do nothing. When reading, each call takes its member out of in: what is left
// at the end are the members nobody asked for.
type fields struct {
	in  map[string]json.RawMessage // nil when writing
	out []byte                     // the object so far, without its closing brace
	err error
}

func (f *fields) reading() bool { return f.in != nil }

func (f *fields) fail(name, why string) {
	if f.err == nil {
		f.err = fmt.Errorf("%w: %s %s", ErrMalformed, name, why)
	}
}

// take removes the member that is being read; a missing one is an error.
func (f *fields) take(name string) (raw json.RawMessage, ok bool) {
	if f.err != nil {
		return nil, false
	}
	raw, ok = f.in[name]
	if !ok {
		f.fail(name, "is missing")
	}
	delete(f.in, name)
	return raw, ok
}

func (f *fields) put(name string, raw []byte) {
	if f.err != nil {
		return
	}
	if n := len(f.out); n == 0 {
		f.out = append(f.out, '{')
	} else if f.out[n-1] != '{' {
		f.out = append(f.out, ',')
	}
	f.out = append(append(strconv.AppendQuote(f.out, name), ':'), raw...)
}

// has says whether an optional member is there: on the wire, or set.
func (f *fields) has(name string, set bool) bool {
	if !f.reading() {
		return set
	}
	_, ok := f.in[name]
	return ok
}

// absent refuses a member that belongs to another form of the same message.
func (f *fields) absent(name string, set bool) {
	if f.has(name, set) {
		f.fail(name, "does not belong in this message")
	}
}

// text is a string that ok accepts; want completes "… is not".
func text[T ~string](f *fields, name string, p *T, ok func(string) bool, want string) {
	if f.reading() {
		raw, found := f.take(name)
		if !found {
			return
		}
		s, isString := stringOf(raw)
		if !isString {
			f.fail(name, "is not a string")
			return
		}
		*p = T(s)
	}
	if !ok(string(*p)) {
		f.fail(name, "is not "+want)
		return
	}
	if !f.reading() {
		f.put(name, quote(string(*p)))
	}
}

// quote writes s as a JSON string. Every text that gets here has been checked
// and has no control characters, so only two characters need an escape;
// encoding/json would write six bytes for each < and a message that was read
// could be too long to be written.
func quote(s string) []byte {
	b := append(make([]byte, 0, len(s)+2), '"')
	for i := range len(s) {
		if c := s[i]; c == '"' || c == '\\' {
			b = append(b, '\\')
		}
		b = append(b, s[i])
	}
	return append(b, '"')
}

func (f *fields) opaque(name string, p *string) {
	text(f, name, p, func(s string) bool { return plainText(s, 1, MaxOpaque) }, "1 to 128 characters")
}

func (f *fields) code(name string, p *Code) {
	text(f, name, p, func(s string) bool { return Code(s).Valid() }, "1 to 32 characters of a to z and _")
}

func (f *fields) visible(name string, p *string, hi int, space bool) {
	text(f, name, p, func(s string) bool { return visible(s, hi, space) },
		"at most "+strconv.Itoa(hi)+" printable ASCII characters")
}

func (f *fields) id(name string, p *ID)         { exact(f, name, p[:]) }
func (f *fields) digest(name string, p *Digest) { exact(f, name, p[:]) }

// exact is a member that is a fixed number of bytes in canonical base64url.
func exact(f *fields, name string, p []byte) {
	s := rawURL.EncodeToString(p)
	if !f.reading() { // p is the caller's: it is not even rewritten with itself
		f.put(name, quote(s))
		return
	}
	text(f, name, &s, func(s string) bool { return decodeExact(p, s) },
		strconv.Itoa(rawURL.EncodedLen(len(p)))+" characters of canonical base64url")
}

// number is an integer literal: 1.0 and 1e0 are other JSON types to some of
// the peers, so nobody may send them.
func number[T ~int | ~int64](f *fields, name string, p *T, lo, hi int64) {
	n := int64(*p)
	if f.reading() {
		raw, found := f.take(name)
		if !found {
			return
		}
		var err error
		if n, err = strconv.ParseInt(string(raw), 10, 64); err != nil {
			f.fail(name, "is not an integer")
			return
		}
	}
	if n < lo || n > hi {
		f.fail(name, fmt.Sprintf("is not from %d to %d", lo, hi))
		return
	}
	if f.reading() {
		*p = T(n)
	} else {
		f.put(name, strconv.AppendInt(nil, n, 10))
	}
}

// version is the protocol_version; it can only have this value.
func (f *fields) version(want int) {
	v := want
	number(f, "protocol_version", &v, math.MinInt64, math.MaxInt64)
	if f.err == nil && v != want {
		f.err = fmt.Errorf("%w: protocol %d was asked for, this is %d", ErrVersion, v, want)
	}
}

func (f *fields) expiry(name string, p *Expiry) {
	if f.reading() {
		raw, found := f.take(name)
		if !found {
			return
		}
		e, ok := parseExpiry(raw)
		if !ok {
			f.fail(name, "is not Unix seconds or RFC 3339 with a zone")
			return
		}
		*p = e
		return
	}
	if !p.Valid() {
		f.fail(name, "is not from 1 to 253402300799")
		return
	}
	f.put(name, strconv.AppendInt(nil, int64(*p), 10))
}

// seconds is a duration as an integer, rounded up so that nobody comes early.
func (f *fields) seconds(name string, p *time.Duration, hi int64) {
	n := int64(*p / time.Second)
	if *p%time.Second > 0 {
		n++
	}
	number(f, name, &n, 0, hi)
	if f.reading() && f.err == nil {
		*p = time.Duration(n) * time.Second
	}
}

// texts is an array of at most n strings, each accepted by ok; a missing one
// is empty.
func (f *fields) texts(name string, p *[]string, n int, ok func(string) bool, want string) {
	if f.reading() {
		if !f.has(name, false) {
			return
		}
		raw, found := f.take(name)
		if !found || len(raw) == 0 || raw[0] != '[' || json.Unmarshal(raw, p) != nil {
			f.fail(name, "is not an array of strings")
			return
		}
		if len(*p) == 0 {
			*p = nil // as when it is missing
		}
	}
	good := len(*p) <= n
	for _, s := range *p {
		good = good && ok(s)
	}
	if !good {
		f.fail(name, "is not "+want)
		return
	}
	if f.reading() {
		return
	}
	list := []byte{'['}
	for i, s := range *p {
		if i > 0 {
			list = append(list, ',')
		}
		list = append(list, quote(s)...)
	}
	f.put(name, append(list, ']'))
}

// nested is an object whose own members body reads or writes; members it does
// not ask for are ignored.
func (f *fields) nested(name string, body func(*fields)) {
	if f.err != nil {
		return
	}
	sub := &fields{}
	if f.reading() {
		raw, found := f.take(name)
		if !found {
			return
		}
		if sub.in, _ = splitObject(raw); sub.in == nil {
			f.fail(name, "is not an object")
			return
		}
	}
	body(sub)
	if sub.err != nil {
		f.err = fmt.Errorf("in %s: %w", name, sub.err)
		return
	}
	if !f.reading() {
		f.put(name, append(sub.out, '}'))
	}
}

// registration is what register has in common in both protocols.
func (f *fields) registration(role *Role, host, conn *ID, kind *Kind, token *string) {
	text(f, "role", role, func(s string) bool { return Role(s) == RoleHost || Role(s) == RoleClient }, "host or client")
	f.id("host_id", host)
	f.id("connection_id", conn)
	kinds := []Kind{KindBootstrap, KindRoute}
	check := CheckToken
	if *role == RoleHost {
		kinds, check = []Kind{KindHost}, CheckHostToken
	}
	text(f, "credential_kind", kind, func(s string) bool { return slices.Contains(kinds, Kind(s)) }, "one this role may have")
	text(f, "token", token, func(s string) bool { return check(s) == nil }, "of the form this kind has")
}

// credential names a client credential by the one id that its kind has.
func (f *fields) credential(kind *Kind, credentialID, pairingID *string) {
	text(f, "credential_kind", kind, func(s string) bool { return Kind(s) == KindRoute || Kind(s) == KindBootstrap }, "bootstrap or route")
	if *kind == KindBootstrap {
		f.opaque("pairing_id", pairingID)
		f.absent("credential_id", *credentialID != "")
	} else {
		f.opaque("credential_id", credentialID)
		f.absent("pairing_id", *pairingID != "")
	}
}

// bootstrap and route are what the two publish messages have in common in
// both protocols.
func (f *fields) bootstrap(pairingID *string, token *Digest, expires *Expiry, uses *int) {
	f.opaque("pairing_id", pairingID)
	f.digest("token_sha256", token)
	f.expiry("expires_at", expires)
	number(f, "max_uses", uses, 1, 1)
}

func (f *fields) route(credentialID *string, token *Digest, expires *Expiry, device *Digest) {
	f.opaque("credential_id", credentialID)
	f.digest("token_sha256", token)
	f.expiry("expires_at", expires)
	f.digest("device_id_hash", device)
}

// appendJSON appends the object that body writes after its type.
func appendJSON(b []byte, kind string, body func(*fields)) ([]byte, error) {
	f := &fields{}
	f.put("type", quote(kind))
	if body(f); f.err != nil {
		return b, fmt.Errorf("%s: %w", kind, f.err)
	}
	if len(f.out) >= MaxMessage {
		return b, fmt.Errorf("%s: %w: longer than %d bytes", kind, ErrMalformed, MaxMessage)
	}
	return append(append(b, f.out...), '}'), nil
}
