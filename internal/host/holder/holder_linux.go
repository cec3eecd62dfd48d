package holder

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Of finds who holds addr. An address without a host means every address.
func Of(addr netip.AddrPort) (Process, bool) {
	var socks []string
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		f, err := os.Open(name)
		if err != nil {
			continue
		}
		socks = append(socks, inodes(f, addr)...)
		_ = f.Close()
	}
	if len(socks) == 0 {
		return Process{}, false
	}
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return Process{}, false
	}
	for _, dir := range dirs {
		if holds(dir, socks) {
			return process(dir)
		}
	}
	return Process{}, false
}

// holds looks through the open files of a process. Those of other users cannot
// be read, and a process may end meanwhile: neither is anybody's fault.
func holds(dir string, socks []string) bool {
	files, err := os.ReadDir(filepath.Join(dir, "fd"))
	if err != nil {
		return false
	}
	for _, f := range files {
		to, err := os.Readlink(filepath.Join(dir, "fd", f.Name()))
		sock, ok := strings.CutPrefix(to, "socket:[")
		if err == nil && ok && slices.Contains(socks, strings.TrimSuffix(sock, "]")) {
			return true
		}
	}
	return false
}

func process(dir string) (Process, bool) {
	pid, err := strconv.Atoi(filepath.Base(dir))
	if err != nil {
		return Process{}, false
	}
	name, err := os.ReadFile(filepath.Join(dir, "comm"))
	if err != nil {
		return Process{}, false
	}
	return Process{PID: pid, Name: strings.TrimSpace(string(name))}, true
}
