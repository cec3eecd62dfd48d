package hermesagent

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// unleaked runs the tests and then fails if a goroutine of theirs is left.
type unleaked struct{ m *testing.M }

func (u unleaked) Run() int {
	code := u.m.Run()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}
