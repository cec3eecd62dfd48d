package holder

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
)

func TestOf(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := netip.MustParseAddrPort(ln.Addr().String())
	p, ok := Of(addr)
	if !ok || p.PID != os.Getpid() || p.Name == "" {
		t.Errorf("Of(%s) = %v, %v; want this process", addr, p, ok)
	}
	if _, err := Listen(ln.Addr().String()); !errors.Is(err, ErrTaken) || !strings.Contains(err.Error(), p.String()) || !strings.Contains(err.Error(), addr.String()) {
		t.Errorf("Listen on a taken address = %v, want one that names %s and %s", err, addr, p)
	}
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	if p, ok := Of(addr); ok {
		t.Errorf("Of(%s) = %v after the listener closed", addr, p)
	}
}

func TestListen(t *testing.T) {
	ln, err := Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = ln.Close()
	if _, err := Listen("127.0.0.1"); err == nil || errors.Is(err, ErrTaken) {
		t.Errorf("Listen without a port = %v", err)
	}
}
