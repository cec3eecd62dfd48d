package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hermes-reach/hermes-reach/internal/cli"
)

func TestMan(t *testing.T) {
	if code, stdout, stderr := run(t, "man"); code != cli.Done || !strings.Contains(stdout, `.TH "HERMES-REACH" "1"`) || stderr != "" {
		t.Errorf("man: %d, %.80q, %q", code, stdout, stderr)
	}
	dir := t.TempDir()
	if code, stdout, stderr := run(t, "man", "--dir", dir); code != cli.Done || stdout+stderr != "" {
		t.Errorf("man --dir: %d, %q, %q", code, stdout, stderr)
	}
	page, err := os.ReadFile(filepath.Join(dir, "hermes-reach-config-example.1"))
	if err != nil || !strings.Contains(string(page), "hermes-reach config example") {
		t.Errorf("its page for a command: %v, %.80q", err, page)
	}
	if code, _, stderr := run(t, "man", "--dir", filepath.Join(dir, "nowhere")); code != cli.Failed || !strings.Contains(stderr, "nowhere") {
		t.Errorf("man into nowhere: %d, %q", code, stderr)
	}
}
