package deadlink

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// A netns is a network namespace with one interface, whose packets the test
// reads and writes.
type netns struct {
	addr netip.Addr
	tun  *os.File
	fd   int // keeps the namespace, which has no name
}

// newNetns makes a namespace whose interface has the address and leads to all
// of 10/8.
func newNetns(t testing.TB, addr string) *netns {
	t.Helper()
	ns := &netns{addr: netip.MustParseAddr(addr)}
	made := make(chan error)
	go func() {
		// The thread stays in the namespace and dies with this goroutine.
		runtime.LockOSThread()
		made <- ns.enterNew()
	}()
	if err := <-made; err != nil {
		t.Fatalf("make a network namespace: %v: this test needs Linux, root and /dev/net/tun", err)
	}
	t.Cleanup(func() { _ = ns.tun.Close(); _ = unix.Close(ns.fd) })
	return ns
}

func (ns *netns) enterNew() error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the namespace: %w", err)
	}
	ns.fd = fd
	tun, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("open /dev/net/tun: %w", err)
	}
	req, err := unix.NewIfreq("lab0")
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(tun, unix.TUNSETIFF, req); err != nil {
		return fmt.Errorf("make the interface: %w", err)
	}
	ns.tun = os.NewFile(uintptr(tun), "lab0")
	return ns.configure()
}

// configure gives the interface its address, with 10/8 on link, and sets it up.
func (ns *netns) configure() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	for _, set := range []struct {
		what string
		req  uint
		fill func(*unix.Ifreq) error
	}{
		{"address", unix.SIOCSIFADDR, func(r *unix.Ifreq) error { return r.SetInet4Addr(ns.addr.AsSlice()) }},
		{"mask", unix.SIOCSIFNETMASK, func(r *unix.Ifreq) error { return r.SetInet4Addr([]byte{255, 0, 0, 0}) }},
		{"flags", unix.SIOCSIFFLAGS, func(r *unix.Ifreq) error { r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING); return nil }},
	} {
		r, err := unix.NewIfreq("lab0")
		if err == nil {
			err = set.fill(r)
		}
		if err == nil {
			err = unix.IoctlIfreq(s, set.req, r)
		}
		if err != nil {
			return fmt.Errorf("set the interface's %s: %w", set.what, err)
		}
	}
	return nil
}

// do runs f on a thread inside the namespace: sockets and processes that f
// makes itself belong to it.
func (ns *netns) do(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread must not be used again
		if err := unix.Setns(ns.fd, unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter the namespace: %w", err)
			return
		}
		done <- f()
	}()
	return <-done
}

// dial connects from inside to addr, an address and not a name: a resolver
// would work on other threads.
func (ns *netns) dial(ctx context.Context, addr string) (net.Conn, error) {
	var c net.Conn
	err := ns.do(func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, "tcp4", addr)
		return err
	})
	return c, err
}

func (ns *netns) start(cmd *exec.Cmd) error { return ns.do(cmd.Start) }
