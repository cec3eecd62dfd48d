package connadapter

import (
	"testing"
	"time"
)

// TestPinnedCloseOnFullPath: a pinned connection whose path takes nothing more
// still closes soon; crypto/tls alone would wait 5 s to take leave.
func TestPinnedCloseOnFullPath(t *testing.T) {
	each(t, func(t *testing.T, w *way) {
		device, host := w.ends(t)
		defer host.Close()
		buf := make([]byte, 1<<20)
		for {
			_ = device.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
			if n, err := device.Write(buf); err != nil && n == 0 {
				break
			}
		}
		start := time.Now()
		_ = device.Close()
		if took := time.Since(start); took > 3*time.Second {
			t.Errorf("Close took %v", took)
		}
	})
}
