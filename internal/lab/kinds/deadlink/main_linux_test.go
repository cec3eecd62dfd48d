package deadlink

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/hermes-reach/hermes-reach/broker"
	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/reach/link"
)

// brokerEnv holds the brokerJob of a test binary that is a broker.
const brokerEnv = "KINDS_DEADLINK_BROKER"

// A brokerJob is what a broker's process needs to know.
type brokerJob struct {
	Store, Cert, Key string // files
	Listen           string
	DeadAfter        time.Duration
}

func TestMain(m *testing.M) {
	if job := os.Getenv(brokerEnv); job != "" {
		if err := serveBroker(job); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Geteuid() != 0 && os.Getenv(againEnv) == "" {
		os.Exit(again())
	}
	goleak.VerifyTestMain(m)
}

// againEnv marks the run inside a user namespace.
const againEnv = "KINDS_DEADLINK_AGAIN"

// again runs this binary as root of a user namespace: network namespaces are
// root's to make, and anybody may be root in one of his own.
func again() int {
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), againEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}},
	}
	err := cmd.Run()
	if cmd.ProcessState == nil {
		fmt.Fprintf(os.Stderr, "this test makes network namespaces: run it as root, or allow user namespaces (%v)\n", err)
		return 1
	}
	return cmd.ProcessState.ExitCode()
}

// serveBroker is the broker's process. It ends when its standard input does, so
// that it never outlives the test, and says on its standard output that it
// listens.
func serveBroker(text string) error {
	var job brokerJob
	if err := json.Unmarshal([]byte(text), &job); err != nil {
		return err
	}
	st, err := store.Open(job.Store, nil)
	if err != nil {
		return err
	}
	cert, err := tls.LoadX509KeyPair(job.Cert, job.Key)
	if err != nil {
		return err
	}
	b, err := broker.New(broker.Config{
		Store: st, TLS: &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12},
		Limits: broker.Limits{Accept: time.Second, Drain: time.Millisecond}, Link: link.Config{DeadAfter: job.DeadAfter},
	})
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp4", job.Listen)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(context.Background())
	go func() { _, _ = io.Copy(io.Discard, os.Stdin); stop() }()
	fmt.Println("listening")
	return b.Serve(ctx, ln)
}
