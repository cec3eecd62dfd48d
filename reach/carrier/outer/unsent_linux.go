package outer

import (
	"net"

	"golang.org/x/sys/unix"
)

// maxUnsent is how much the kernel keeps of what it has not sent yet.
const maxUnsent = 32 << 10

// limitUnsent bounds what waits in the kernel, if c has a socket. What is under
// way is not counted, so a fast link stays full.
func limitUnsent(c net.Conn) {
	t, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	raw, err := t.SyscallConn()
	if err != nil {
		return
	}
	// A system that refuses is a little slower with small messages, no more.
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, maxUnsent)
	})
}
