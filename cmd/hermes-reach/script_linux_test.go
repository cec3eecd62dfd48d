package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// asStandIn makes the test binary serve a stand-in of the Hermes API on the
// port that Hermes itself uses.
const asStandIn = "HERMES_REACH_TEST_AS_HERMES"

func serveStandIn() {
	handler := func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/health":
		case r.Header.Get("Authorization") != "Bearer KEY":
			w.WriteHeader(http.StatusUnauthorized)
		default:
			_, _ = io.WriteString(w, "the models of the stand-in\n")
		}
	}
	srv := &http.Server{Addr: "127.0.0.1:8642", Handler: http.HandlerFunc(handler), ReadHeaderTimeout: time.Minute}
	fmt.Fprintln(os.Stderr, srv.ListenAndServe())
	os.Exit(1)
}

// TestRunByScript carries out docs/by-script.md as it stands, in a network
// namespace of its own, where its ports are free and nothing leads outside.
func TestRunByScript(t *testing.T) {
	doc, err := os.ReadFile("../../docs/by-script.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(doc), "```sh\n")
	script, _, closed := strings.Cut(rest, "```")
	if !found || !closed {
		t.Fatal("docs/by-script.md has no script")
	}
	w, dir := newWorld(t)
	bin := filepath.Join(dir, "bin")
	if err := os.Mkdir(bin, 0o700); err != nil {
		t.Fatal(err)
	}
	self := fmt.Sprintf("#!/bin/sh\n%s=1 exec %q \"$@\"\n", asProgram, os.Args[0])
	if err := os.WriteFile(filepath.Join(bin, "hermes-reach"), []byte(self), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "unshare", "--map-root-user", "--net", "--kill-child", "--pid", "--fork", "bash", "-euc",
		"ip link set lo up\n"+asStandIn+"=1 "+os.Args[0]+" &\nhermes=$!\nset -m\n"+
			strings.Replace(script, "kill %3 %2 %1\nwait", "kill %4 %3 %2 $hermes\nwait\necho all is over", 1))
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + bin + ":" + os.Getenv("PATH"), "HOME=" + dir, "GORACE=atexit_sleep_ms=0"}
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, w.logs
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s\n%s", err, out.String(), w.logs)
	}
	for _, want := range []string{
		`"path":"plugin_proxy"`, "hermes_secure_proxy", `"chosen":"plugin_proxy"`, `"open":"http://`, `"state":"connected"`, "Revoked ", "all is over",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the script did not print %s\n%s", want, out.String())
		}
	}
	if n := strings.Count(out.String(), "the models of the stand-in"); n != 3 {
		t.Errorf("the models were fetched %d times, want 3\n%s", n, out.String())
	}
}
