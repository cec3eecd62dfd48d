// Package holder says which process holds a TCP port, so that "address in use"
// can name what is in the way. It only reads what the system shows this user
// anyway; where that is too little, the answer is that nobody is known.
package holder

import (
	"bufio"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// ErrTaken says that a process listens on the address already.
var ErrTaken = errors.New("the address is taken")

// wsaInUse is what Windows says for EADDRINUSE.
const wsaInUse = syscall.Errno(10048)

// Listen listens on a TCP address. When that is taken, the error is ErrTaken
// and names the address and, where it can be seen, who has it.
func Listen(addr string) (net.Listener, error) {
	ln, err := net.Listen("tcp", addr)
	if err == nil || !errors.Is(err, syscall.EADDRINUSE) && !errors.Is(err, wsaInUse) {
		return ln, err
	}
	who := "by another process"
	if op, ok := errors.AsType[*net.OpError](err); ok {
		if tcp, ok := op.Addr.(*net.TCPAddr); ok {
			if p, ok := Of(tcp.AddrPort()); ok {
				who = "by " + p.String()
			}
		}
	}
	return nil, fmt.Errorf("listen on %s: %w %s", addr, ErrTaken, who)
}

// A Process holds a port.
type Process struct {
	PID  int
	Name string
}

func (p Process) String() string { return fmt.Sprintf("%s (process %d)", p.Name, p.PID) }

const listening = "0A" // TCP_LISTEN, as /proc/net/tcp writes it

// inodes finds the listening sockets in a table like /proc/net/tcp that keep
// others from listening on addr: the same port on the same or on every address.
func inodes(table io.Reader, addr netip.AddrPort) (found []string) {
	lines := bufio.NewScanner(table)
	for lines.Scan() {
		f := strings.Fields(lines.Text())
		if len(f) < 10 || f[3] != listening {
			continue
		}
		at, ok := parseAddr(f[1])
		if !ok || at.Port() != addr.Port() {
			continue
		}
		everywhere := at.Addr().IsUnspecified() || !addr.Addr().IsValid() || addr.Addr().IsUnspecified()
		if (everywhere || at.Addr() == addr.Addr().Unmap()) && !slices.Contains(found, f[9]) {
			found = append(found, f[9])
		}
	}
	return found
}

// parseAddr reads 0100007F:24E3: words of four bytes in the order of the
// machine, taken as little-endian, then the port in hex.
func parseAddr(text string) (netip.AddrPort, bool) {
	host, port, ok := strings.Cut(text, ":")
	raw, err := hex.DecodeString(host)
	n, err2 := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil || err2 != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(raw); i += 4 {
		slices.Reverse(raw[i : i+4])
	}
	addr, ok := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(addr.Unmap(), uint16(n)), ok
}
