package host

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/pins"
)

// advertised lists HOST:PORT that devices may use, the best first: what the
// operator named, then the addresses the listeners answer on. There is always
// one: a host behind brokers only needs a name for its certificate too.
func advertised(named []string, listeners []net.Listener) []string {
	port := DefaultPort
	var hosts []string
	add := func(hostport string) {
		if slices.Contains(hosts, hostport) {
			return
		}
		hosts = append(hosts, hostport)
	}
	if len(listeners) > 0 {
		_, port, _ = net.SplitHostPort(listeners[0].Addr().String())
	}
	for _, n := range named {
		add(withPort(n, port))
	}
	for _, ln := range listeners {
		for _, h := range reachable(ln.Addr()) {
			add(h)
		}
	}
	if len(hosts) == 0 {
		add(net.JoinHostPort(localName(), port))
	}
	return hosts
}

// checkAdvertise refuses what is neither HOST nor HOST:PORT.
func checkAdvertise(named []string) error {
	for _, n := range named {
		host, port, err := net.SplitHostPort(withPort(n, DefaultPort))
		if err == nil {
			_, err = pins.CleanHost(host)
		}
		if strings.Count(n, "[") != strings.Count(n, "]") {
			err = errors.New("half a pair of brackets")
		}
		if p, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || p == 0 {
			return fmt.Errorf("%q cannot be advertised: give HOST or HOST:PORT, such as home.example.com or 203.0.113.7:9443", n)
		}
	}
	return nil
}

func withPort(host, port string) string {
	if _, _, err := net.SplitHostPort(host); err == nil {
		return host
	}
	return net.JoinHostPort(strings.Trim(host, "[]"), port)
}

// reachable gives the addresses that a device can dial for a listener: its
// own, or those of the LAN for one that listens everywhere.
func reachable(a net.Addr) []string {
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return nil
	}
	_, port, _ := net.SplitHostPort(a.String())
	if !ap.Addr().IsUnspecified() {
		return []string{net.JoinHostPort(ap.Addr().Unmap().String(), port)}
	}
	ifs, err := endpoints.Interfaces()
	if err != nil {
		return nil
	}
	var hosts []string
	for _, ip := range endpoints.LANHosts(ifs) {
		hosts = append(hosts, net.JoinHostPort(ip.String(), port))
	}
	return hosts
}

// localName is a name for a host that has no address of its own to give.
func localName() string {
	name, err := os.Hostname()
	if err == nil {
		name, _, _ = strings.Cut(strings.ToLower(name), ".")
		if clean, err := pins.CleanHost(name + ".local"); err == nil {
			return clean
		}
	}
	return "hermes-host.local"
}

// hostNames drops the ports.
func hostNames(hostports []string) []string {
	var names []string
	for _, hp := range hostports {
		if h, _, err := net.SplitHostPort(hp); err == nil {
			names = append(names, h)
		}
	}
	return names
}

// thisMachineOnly says that an address leads nowhere from another machine.
func thisMachineOnly(hostport string) bool {
	h, _, err := net.SplitHostPort(hostport)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(h)
	return h == "localhost" || err == nil && ip.IsLoopback()
}
