package demo

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

// TestDemo runs the whole system and holds the complete debug log of the run to
// the rule that no secret is ever logged.
func TestDemo(t *testing.T) {
	var log syncBuffer
	began := time.Now()
	r, err := runFor(t, slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range r.checks {
		t.Logf("%-55s %v  %s", c.Name, c.OK, c.Detail)
		if !c.OK {
			t.Errorf("%s: %s", c.Name, c.Detail)
		}
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("the run took %v, want less than 10 s", took)
	}
	text := log.b.String()
	if !strings.Contains(text, "host registered") || !strings.Contains(text, "client registered") {
		t.Error("the log of the run is not complete")
	}
	for name, secret := range r.secrets {
		if strings.HasSuffix(name, "path") {
			continue // a path of ours is no secret to the host itself
		}
		if strings.Contains(text, secret) {
			t.Errorf("the log holds the %s", name)
		}
	}
	if strings.Contains(text, r.site.token) {
		t.Error("the log holds the host's token")
	}
}

func runFor(t *testing.T, log *slog.Logger) (*run, error) {
	t.Helper()
	s, err := startSite(t.Context(), t.TempDir(), log)
	if err != nil {
		return nil, err
	}
	r := &run{site: s, log: log}
	r.all(t.Context())
	s.close()
	return r, nil
}
