package endpoints

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"net/url"
	"strings"
)

const (
	inviteScheme = "hermes-relay://"
	maxInvite    = 256 << 10 // bytes of pasted text, in which an invite stands somewhere
	maxTries     = 16        // invites in one text
)

// ErrInvite is wrapped by every error about a text in which no invite was
// found. The errors quote nothing: an invite is a secret as a whole.
var ErrInvite = errors.New("endpoints: no invite found")

// InviteURL is a payload as a line to paste. It carries the exact bytes of the
// payload, so that a signature over them still holds.
func InviteURL(payload []byte) string {
	return inviteScheme + "pair?payload=" + base64.RawURLEncoding.EncodeToString(payload)
}

// ParseInvite finds a payload in what a person pasted: an invite URL anywhere in
// the text, the payload's JSON, or its JSON as base64 or base64url with or
// without padding, which may be broken into lines. Payload.Raw is the JSON as it
// was minted.
func ParseInvite(text string) (*Payload, error) {
	if len(text) > maxInvite {
		return nil, fmt.Errorf("%w: the text is longer than %d bytes", ErrInvite, maxInvite)
	}
	var firstErr error
	rest := text
	for range maxTries {
		at := indexFold(rest, inviteScheme)
		if at < 0 {
			break
		}
		rest = rest[at+len(inviteScheme):]
		p, err := parseInviteRest(rest)
		if err == nil {
			return p, nil
		}
		if firstErr == nil {
			firstErr = err
		}
	}
	if firstErr != nil {
		return nil, firstErr
	}
	text = strings.TrimSpace(strings.TrimPrefix(text, "\ufeff"))
	if text == "" {
		return nil, fmt.Errorf("%w: the text is empty", ErrInvite)
	}
	return parseValue(strings.Join(strings.Fields(text), ""), text)
}

// parseInviteRest reads what follows hermes-relay://, up to where the URL ends.
func parseInviteRest(s string) (*Payload, error) {
	if i := strings.IndexFunc(s, endsURL); i >= 0 {
		s = s[:i]
	}
	s, _, _ = strings.Cut(s, "#")
	path, query, _ := strings.Cut(s, "?")
	if len(path) < 4 || !strings.EqualFold(path[:4], "pair") || len(path) > 4 && path[4] != '/' {
		return nil, fmt.Errorf("%w: the link is not hermes-relay://pair", ErrInvite)
	}
	values := map[string]string{}
	for part := range strings.SplitSeq(query, "&") {
		name, value, _ := strings.Cut(part, "=")
		if _, twice := values[name]; !twice {
			values[name] = value
		}
	}
	value := firstOf(values["payload"], values["p"], strings.Trim(path[4:], "/"))
	// Not QueryUnescape: a "+" is one of base64's characters here.
	value, err := url.PathUnescape(value)
	if err != nil || value == "" {
		return nil, fmt.Errorf("%w: the link carries no payload: was it cut off?", ErrInvite)
	}
	return parseValue(value, value)
}

// endsURL says which characters cannot be in an invite URL: what surrounds one
// in prose, quotes and markup.
func endsURL(r rune) bool { return r <= ' ' || r >= 0x7f || strings.ContainsRune("\"'<>`\\|^()[]", r) }

// parseValue reads JSON, or text as base64 of JSON.
func parseValue(text, asJSON string) (*Payload, error) {
	if strings.HasPrefix(asJSON, "{") {
		return ParsePayload([]byte(asJSON))
	}
	text = strings.TrimRight(text, ".,;:!?}*=") // padding, and the end of a sentence
	text = strings.NewReplacer("-", "+", "_", "/").Replace(text)
	raw, err := base64.RawStdEncoding.DecodeString(text)
	if err != nil {
		return nil, fmt.Errorf("%w: neither an invite link, nor JSON, nor base64", ErrInvite)
	}
	raw = bytes.TrimSpace(raw)
	if !bytes.HasPrefix(raw, []byte("{")) {
		return nil, fmt.Errorf("%w: what it carries is not a payload", ErrInvite)
	}
	return ParsePayload(raw)
}

// indexFold is strings.Index for an ASCII needle in any case. Lowering the text
// would move its offsets where lower case has another length.
func indexFold(s, needle string) int {
	for i := 0; i+len(needle) <= len(s); i++ {
		if strings.EqualFold(s[i:i+len(needle)], needle) {
			return i
		}
	}
	return -1
}
