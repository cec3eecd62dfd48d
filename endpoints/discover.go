package endpoints

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// An Interface is what the choice of LAN addresses needs to know of a network
// interface.
type Interface struct {
	Name  string
	Flags net.Flags
	Addrs []netip.Addr
}

// Addresses that look like a LAN's and are a tailnet's: carrier-grade NAT space
// for IPv4, Tailscale's own prefix for IPv6. They are offered by their own role.
var (
	cgnat      = netip.MustParsePrefix("100.64.0.0/10")
	tailscale6 = netip.MustParsePrefix("fd7a:115c:a1e0::/48")
)

// notLAN holds name prefixes of interfaces that no phone in the house reaches.
// A name is all there is to go by: to the kernel a container bridge is a bridge
// like any other, and a TAP device is an Ethernet card.
var notLAN = []string{
	// containers and virtual machines
	"docker", "br-", "veth", "cni", "virbr", "vnet", "lxc", "lxd", "podman", "flannel", "cali", "cilium", "kube", "nerdctl",
	"vmnet", "vboxnet", "vEthernet", "bridge1", // bridge100 and up: macOS virtual machines
	// tunnels
	"tun", "tap", "wg", "tailscale", "utun", "zt", "ppp", "ipsec", "nordlynx", "proton", "gre", "sit", "ip6tnl", "vxlan", "geneve", "nebula",
	// macOS device-to-device radio
	"awdl", "llw", "anpi",
	"dummy", "ifb",
}

// LANHosts are the addresses in ifs by which a device in the same network could
// reach this machine: IPv4 before IPv6, otherwise in the order given, each once.
func LANHosts(ifs []Interface) []netip.Addr {
	var v4, v6 []netip.Addr
	for _, i := range ifs {
		if !isLAN(i) {
			continue
		}
		for _, a := range i.Addrs {
			a = a.Unmap()
			switch {
			// Global unicast leaves out loopback, link-local, multicast and none.
			case !a.IsGlobalUnicast() || cgnat.Contains(a) || tailscale6.Contains(a):
			case a.Is4() && !slices.Contains(v4, a):
				v4 = append(v4, a)
			case a.Is6() && a.Zone() == "" && !slices.Contains(v6, a):
				v6 = append(v6, a)
			}
		}
	}
	return append(v4, v6...)
}

func isLAN(i Interface) bool {
	if i.Flags&net.FlagUp == 0 || i.Flags&(net.FlagLoopback|net.FlagPointToPoint) != 0 {
		return false
	}
	if i.Name == "br-lan" { // a router's own LAN, the one such name that no container engine uses
		return true
	}
	return !slices.ContainsFunc(notLAN, func(prefix string) bool { return strings.HasPrefix(i.Name, prefix) })
}

// Interfaces reads this machine's network interfaces in the kernel's order. One
// that vanishes or cannot be read meanwhile has no addresses.
func Interfaces() ([]Interface, error) {
	list, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("endpoints: list network interfaces: %w", err)
	}
	var out []Interface
	for _, i := range list {
		got := Interface{Name: i.Name, Flags: i.Flags}
		addrs, err := i.Addrs()
		if err != nil {
			addrs = nil
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				got.Addrs = append(got.Addrs, p.Addr())
			}
		}
		out = append(out, got)
	}
	return out, nil
}
