package deadlink

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"crypto/tls"

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
	goleak.VerifyTestMain(m)
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
