package host

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/hermes-reach/hermes-reach/internal/localsock"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// TestEnrollingAtOnceLosesNothing: of enrolments at the same moment each is
// stored, or its caller is told to try again.
func TestEnrollingAtOnceLosesNothing(t *testing.T) {
	dir := t.TempDir()
	var all sync.WaitGroup
	for i := range 8 {
		u, err := wire.ParseBrokerURL(fmt.Sprintf("wss://broker%d.example.com", i), true)
		if err != nil {
			t.Fatal(err)
		}
		all.Go(func() {
			e, err := OpenEnrolled(dir)
			if err != nil {
				t.Error(err)
				return
			}
			for { // as a person who is told to try again
				_, err := e.Add(wire.HostLine{URL: u, HostID: wire.NewID(), Token: wire.NewToken()})
				if !errors.Is(err, localsock.ErrLocked) {
					if err != nil {
						t.Error(err)
					}
					return
				}
			}
		})
	}
	all.Wait()
	e, err := OpenEnrolled(dir)
	if err != nil {
		t.Fatal(err)
	}
	if list, err := e.List(); err != nil || len(list) != 8 {
		t.Errorf("%d brokers are stored, %v; want 8", len(list), err)
	}
}
