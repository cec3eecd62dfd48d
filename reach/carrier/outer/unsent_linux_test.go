package outer

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"
)

// TestKernelKeepsLittle: when the other end stops, the kernel has taken what is
// under way and little more, so that what is sent next is not behind megabytes.
func TestKernelKeepsLittle(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	limitUnsent(c)
	if err := s.(*net.TCPConn).SetReadBuffer(16 << 10); err != nil {
		t.Fatal(err)
	}
	_ = c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
	taken := 0
	for {
		n, err := c.Write(make([]byte, 8<<10))
		if taken += n; err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal(err)
			}
			break
		}
	}
	// The other end's buffer, which the kernel doubles, what is unsent, and a
	// segment: loopback's are 64 KiB.
	if most := 2*(16<<10) + maxUnsent + (64 << 10) + (8 << 10); taken > most {
		t.Errorf("a stopped reader took %d bytes, want at most %d", taken, most)
	}
}
