package holder

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:24E3 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 111 1 0 100 0 0 10 0
   1: 00000000:24E4 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 222 1 0 100 0 0 10 0
   2: 0100007F:24E4 0100007F:D2F0 01 00000000:00000000 00:00000000 00000000  1000        0 333 1 0 100 0 0 10 0
   3: 00000000000000000000000001000000:24E3 00000000000000000000000000000000:0000 0A 0 0 0 1000 0 444 1
   4: 0000000000000000FFFF00000100007F:24E5 00000000000000000000000000000000:0000 0A 0 0 0 1000 0 555 1
   5: nonsense
   6: zz:24E3 0:0 0A 0 0 0 0 0 666 1
`

func TestInodes(t *testing.T) {
	for addr, want := range map[string][]string{
		"127.0.0.1:9443":          {"111"},
		"[::1]:9443":              {"444"},
		"127.0.0.2:9443":          nil,
		"127.0.0.1:9444":          {"222"}, // listens everywhere; the connection beside it does not count
		"127.0.0.1:9445":          {"555"},
		"0.0.0.0:9443":            {"111", "444"},
		"[::ffff:127.0.0.1]:9443": {"111"},
		"127.0.0.1:1":             nil,
	} {
		if got := inodes(strings.NewReader(table), netip.MustParseAddrPort(addr)); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", addr, got, want)
		}
	}
}

func FuzzInodes(f *testing.F) {
	f.Add(table)
	f.Fuzz(func(_ *testing.T, text string) {
		inodes(strings.NewReader(text), netip.MustParseAddrPort("127.0.0.1:9443"))
	})
}
