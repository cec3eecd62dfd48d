package pins

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// ErrHost is wrapped by every error of [CleanHost].
var ErrHost = errors.New("not a host name or address")

// CleanHost gives the one spelling under which hosts are compared: names in
// lower case without a final dot, addresses as [netip.Addr] prints them,
// without brackets and zone, IPv4 inside IPv6 as IPv4. It takes no port.
//
// A name whose last label is a number is refused: what is meant by 127.1 or
// 0x7f000001 differs from parser to parser.
func CleanHost(host string) (string, error) {
	text := host
	if strings.HasPrefix(text, "[") && strings.HasSuffix(text, "]") {
		text = text[1 : len(text)-1]
		if !strings.Contains(text, ":") {
			return "", fmt.Errorf("%w: brackets around %.80q, which is no IPv6 address", ErrHost, text)
		}
	}
	if addr, err := netip.ParseAddr(text); err == nil {
		return addr.Unmap().WithZone("").String(), nil
	}
	name := strings.TrimSuffix(strings.ToLower(text), ".")
	if name == "" || len(name) > 253 {
		return "", fmt.Errorf("%w: %d characters, want 1 to 253", ErrHost, len(name))
	}
	labels := strings.Split(name, ".")
	for _, label := range labels {
		if !validLabel(label) {
			return "", fmt.Errorf("%w: %.80q (international names in their xn-- form)", ErrHost, host)
		}
	}
	if last := labels[len(labels)-1]; last[0] >= '0' && last[0] <= '9' {
		return "", fmt.Errorf("%w: %.80q ends in a number but is no address", ErrHost, host)
	}
	return name, nil
}

// validLabel holds one label of a name to letters, digits, hyphen and
// underscore (home routers hand out names with underscores).
func validLabel(label string) bool {
	if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
		return false
	}
	for _, c := range []byte(label) {
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '-', c == '_':
		default:
			return false
		}
	}
	return true
}

// cleanHosts cleans a list and drops repetitions, keeping the order.
func cleanHosts(hosts []string) ([]string, error) {
	seen := make(map[string]bool, len(hosts))
	var out []string
	for _, h := range hosts {
		clean, err := CleanHost(h)
		if err != nil {
			return nil, err
		}
		if !seen[clean] {
			seen[clean] = true
			out = append(out, clean)
		}
	}
	return out, nil
}
