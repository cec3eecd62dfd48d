//go:build !linux

package holder

import "net/netip"

// Of knows nobody on this system.
func Of(netip.AddrPort) (Process, bool) { return Process{}, false }
