package endpoints

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func iface(name string, flags net.Flags, addrs ...string) Interface {
	i := Interface{Name: name, Flags: flags}
	for _, a := range addrs {
		i.Addrs = append(i.Addrs, netip.MustParseAddr(a))
	}
	return i
}

const upFlags = net.FlagUp | net.FlagBroadcast | net.FlagMulticast | net.FlagRunning

func TestLANHosts(t *testing.T) {
	got := LANHosts([]Interface{
		iface("lo", net.FlagUp|net.FlagLoopback, "127.0.0.1", "::1", "10.9.9.9"),
		iface("eth0", upFlags, "fe80::1", "fd00::10", "192.168.1.10", "169.254.7.7", "2001:db8::10", "fd00::10"),
		iface("wlan0", upFlags, "::ffff:192.168.1.10", "10.0.0.5", "100.64.0.9", "fd7a:115c:a1e0::1", "224.0.0.1", "0.0.0.0", "255.255.255.255"),
		iface("eth1", net.FlagBroadcast, "192.168.2.2"), // down
		iface("wwan0", upFlags|net.FlagPointToPoint, "192.168.3.3"),
		iface("br-lan", upFlags, "192.168.4.1"),
		iface("enp3s0", upFlags, "fd00::20", "172.16.0.3"),
	})
	var text []string
	for _, a := range got {
		text = append(text, a.String())
	}
	const want = "192.168.1.10 10.0.0.5 192.168.4.1 172.16.0.3 fd00::10 2001:db8::10 fd00::20"
	if s := strings.Join(text, " "); s != want {
		t.Errorf("got  %s\nwant %s", s, want)
	}
}

func TestInterfacesThatAreNoLAN(t *testing.T) {
	for _, name := range []string{"docker0", "docker_gwbridge", "br-0123456789ab", "veth12ab", "cni0", "cni-podman0", "virbr0", "podman1", "flannel.1", "cali1", "cilium_host", "lxcbr0", "lxdbr0", "kube-ipvs0", "vmnet8", "vboxnet0",
		"vEthernet (WSL)", "bridge100", "tun0", "tap0", "wg0", "wg-home", "tailscale0", "utun4", "ztabc", "ppp0", "nordlynx", "awdl0", "vxlan.calico", "dummy0"} {
		if got := LANHosts([]Interface{iface(name, upFlags, "192.168.1.10", "fd00::1")}); len(got) != 0 {
			t.Errorf("%s: %v", name, got)
		}
	}
	for _, name := range []string{"eth0", "en0", "enp3s0", "wlan0", "wlp2s0", "Ethernet", "Wi-Fi", "bond0", "br0", "bridge0", "vmbr0", "eth0.100", "end0", "usb0"} {
		if got := LANHosts([]Interface{iface(name, upFlags, "192.168.1.10")}); len(got) != 1 {
			t.Errorf("%s is left out", name)
		}
	}
}

func TestInterfaces(t *testing.T) {
	list, err := Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	loopback := slices.IndexFunc(list, func(i Interface) bool { return i.Flags&net.FlagLoopback != 0 })
	if loopback < 0 || !slices.Contains(list[loopback].Addrs, netip.MustParseAddr("127.0.0.1")) {
		t.Errorf("no loopback address among %v", list)
	}
	for _, a := range LANHosts(list) {
		if a.IsLoopback() || a.IsLinkLocalUnicast() {
			t.Errorf("%v is offered", a)
		}
	}
}
