package deadlink

import (
	"encoding/binary"
	"net/netip"
	"sync"
	"testing"
)

// A router is the network between namespaces.
type router struct {
	mu    sync.Mutex
	ports map[netip.Addr]*port // by the address that others see
	tasks sync.WaitGroup
}

// A port is where one namespace is plugged in.
type port struct {
	ns      *netns
	outside netip.Addr // its address as others see it
	// What does not pass: packets from it, packets to it, and of the latter
	// those that reset a TCP connection.
	noFrom, noTo, noReset bool
}

func newRouter(t testing.TB, spaces ...*netns) *router {
	r := &router{ports: make(map[netip.Addr]*port)}
	for _, ns := range spaces {
		p := &port{ns: ns, outside: ns.addr}
		r.ports[ns.addr] = p
		r.tasks.Go(func() { r.run(p) })
	}
	t.Cleanup(func() {
		for _, ns := range spaces {
			_ = ns.tun.Close()
		}
		r.tasks.Wait()
	})
	return r
}

// run forwards what one namespace sends.
func (r *router) run(from *port) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.ns.tun.Read(buf)
		if err != nil {
			return
		}
		if to := r.route(from, buf[:n]); to != nil {
			_, _ = to.tun.Write(buf[:n]) // what does not fit is lost, as on any network
		}
	}
}

// Offsets in an IPv4 header, and a TCP flag.
const (
	ipProtocol, ipChecksum, ipSource, ipTarget = 9, 10, 12, 16
	tcpFlags, tcpChecksum                      = 13, 16
	protocolTCP, flagReset                     = 6, 4
)

// route says where a packet goes, nil for nowhere, and puts the addresses into
// it that the receiver should see.
func (r *router) route(from *port, p []byte) *netns {
	if len(p) < 20 || p[0]>>4 != 4 {
		return nil // IPv6 looks for routers; there are none
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	to := r.ports[address(p, ipTarget)]
	if to == nil || from.noFrom || to.noTo {
		return nil
	}
	head := int(p[0]&15) * 4
	if to.noReset && p[ipProtocol] == protocolTCP && len(p) >= head+20 && p[head+tcpFlags]&flagReset != 0 {
		return nil
	}
	translate(p, ipSource, from.outside)
	translate(p, ipTarget, to.ns.addr)
	return to.ns
}

func address(p []byte, at int) netip.Addr { return netip.AddrFrom4([4]byte(p[at : at+4])) }

// translate changes an address and the checksums that it is part of.
func translate(p []byte, at int, addr netip.Addr) {
	head := int(p[0]&15) * 4
	for i, b := range [][]byte{addr.AsSlice()[:2], addr.AsSlice()[2:]} {
		old, now := binary.BigEndian.Uint16(p[at+2*i:]), binary.BigEndian.Uint16(b)
		adjust(p[ipChecksum:], old, now)
		if p[ipProtocol] == protocolTCP && len(p) >= head+20 {
			adjust(p[head+tcpChecksum:], old, now)
		}
		binary.BigEndian.PutUint16(p[at+2*i:], now)
	}
}

// adjust is RFC 1624: the checksum after one word of what it covers changed.
func adjust(sum []byte, old, now uint16) {
	v := uint32(^binary.BigEndian.Uint16(sum)) + uint32(^old) + uint32(now)
	for v > 0xffff {
		v = v>>16 + v&0xffff
	}
	binary.BigEndian.PutUint16(sum, ^uint16(v))
}

// set changes what passes at the port of ns.
func (r *router) set(ns *netns, change func(*port)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for addr, p := range r.ports {
		if p.ns == ns {
			delete(r.ports, addr)
			change(p)
			r.ports[p.outside] = p
			return
		}
	}
}

// Changes for set.
func cut(p *port)       { p.noFrom, p.noTo = true, true }
func cutFrom(p *port)   { p.noFrom = true }
func cutTo(p *port)     { p.noTo = true }
func repair(p *port)    { p.noFrom, p.noTo = false, false }
func hideRST(p *port)   { p.noReset = true }
func readdress(p *port) { p.outside = p.outside.Next() }
