//go:build !interop || !linux

package hermesagent

import (
	"os"
	"testing"
)

func TestMain(m *testing.M) { os.Exit(unleaked{m}.Run()) }
