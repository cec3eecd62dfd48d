package connadapter

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/internal/lab/kinds"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/carrier"
)

// maxClose is how long closing may take, whatever the path does.
const maxClose = 5 * time.Second

// TestCloseOnFrozenPath: somewhere on the whole path nobody reads any more, and
// nothing is closed. Close of each end still returns and takes waiting calls
// with it, and so do the ends of the device and of the host's connector.
func TestCloseOnFrozenPath(t *testing.T) {
	for _, transport := range []carrier.Transport{carrier.TLS, carrier.WSS} {
		for _, leg := range []string{"device", "host"} {
			t.Run(string(transport)+" "+leg, func(t *testing.T) {
				t.Parallel()
				frozen(t, transport, leg)
			})
		}
	}
}

func frozen(t *testing.T, transport carrier.Transport, leg string) {
	s := kinds.NewSite(t, nil)
	legs := map[string]*kinds.Pipe{"device": kinds.NewPipe(t, kinds.To(s.Addr)), "host": kinds.NewPipe(t, kinds.To(s.Addr))}
	only := []carrier.Transport{transport}
	cfg := s.HostConfig()
	cfg.URL, cfg.Transports = s.URL(legs["host"].Addr()), only
	c, err := connector.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- c.Run(ctx) }()
	ended := sync.OnceFunc(func() { stop(); <-ran })
	t.Cleanup(ended)
	kinds.Await(t, "the host to register", c.Connected)
	d := s.Device(s.Route("device"), func(c *reach.DialerConfig) {
		c.URL, c.Transports = s.URL(legs["device"].Addr()).String(), only
	})
	w := &way{host: newHandout(t, c), dial: d.DialContext}
	device, host := w.ends(t)
	defer legs[leg].Thaw()
	legs[leg].Freeze()

	var calls sync.WaitGroup
	for _, end := range []net.Conn{device, host} {
		stuck := make(chan struct{})
		calls.Go(func() {
			fill(end, stuck)
		})
		calls.Go(func() { _, _ = end.Read(make([]byte, 1)) })
		<-stuck
	}
	for name, end := range map[string]net.Conn{"device": device, "host": host} {
		quick(t, "Close of the "+name+"'s end", func() { _ = end.Close() })
	}
	quick(t, "what waited in Read and Write", calls.Wait)
	quick(t, "Close of the device", func() { _ = d.Close() })
	quick(t, "the end of the connector", ended)
}

// fill writes until nothing more is taken, says so, and waits in a Write.
func fill(c net.Conn, stuck chan struct{}) {
	buf := make([]byte, 1<<20)
	for {
		_ = c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
		if n, err := c.Write(buf); err != nil && n == 0 {
			break
		}
	}
	close(stuck)
	_ = c.SetWriteDeadline(time.Time{})
	_, _ = c.Write(buf)
}

func quick(t *testing.T, what string, f func()) {
	t.Helper()
	start := time.Now()
	f()
	if took := time.Since(start); took > maxClose {
		t.Errorf("%s took %v, want less than %v", what, took, maxClose)
	}
}
