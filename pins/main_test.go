package pins

import (
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// createIn names the folder in which a child process of TestProcessesAgree
// makes an identity.
const createIn = "PINS_TEST_CREATE_IN"

func TestMain(m *testing.M) {
	if dir := os.Getenv(createIn); dir != "" {
		id, err := LoadOrCreate(dir, []string{"localhost"}, time.Now())
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Print(id.Pin())
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// now is the wall clock of tests that do not care.
var now = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

func newID(t testing.TB, hosts ...string) *Identity {
	t.Helper()
	id, err := New(hosts, now)
	if err != nil {
		t.Fatal(err)
	}
	return id
}
