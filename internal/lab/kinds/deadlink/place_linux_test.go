package deadlink

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hermes-reach/hermes-reach/broker/store"
	"github.com/hermes-reach/hermes-reach/connector"
	"github.com/hermes-reach/hermes-reach/internal/lab"
	"github.com/hermes-reach/hermes-reach/internal/lab/kinds"
	"github.com/hermes-reach/hermes-reach/reach"
	"github.com/hermes-reach/hermes-reach/reach/link"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

const brokerName = "broker.test"

// A place is a host, a broker and a device, each on a network of its own, and a
// device that asks the host something all the time. That also keeps sessions
// busy: their own pings are too rare for the short times of a test.
type place struct {
	t      testing.TB
	router *router
	host   *netns
	broker *netns
	device *netns
	pipe   *kinds.Pipe // nil, or what the host's connections go through

	ca     *lab.CA
	job    brokerJob
	proc   *exec.Cmd
	stdin  io.Closer
	conn   *connector.Connector
	dialer *reach.Dialer
	seen   atomic.Int64 // Unix nanoseconds of the last answer
}

// newPlace builds it all up and returns when the host has answered.
func newPlace(t testing.TB, deadAfter time.Duration, throughPipe bool) *place {
	t.Helper()
	p := &place{t: t, host: newNetns(t, "10.1.0.1"), broker: newNetns(t, "10.2.0.1"), device: newNetns(t, "10.3.0.1")}
	p.router = newRouter(t, p.host, p.broker, p.device)
	p.job = brokerJob{Listen: "10.2.0.1:443", DeadAfter: deadAfter}
	token, hostID, route := wire.NewToken(), wire.NewID(), wire.NewToken()
	p.writeState(token, hostID, route)
	p.startBroker()
	t.Cleanup(func() { p.stopBroker() })
	toBroker := func() (net.Conn, error) { return p.host.dial(context.Background(), p.job.Listen) }
	if throughPipe {
		p.pipe = kinds.NewPipe(t, toBroker)
	}
	url, err := wire.ParseBrokerURL("wss://"+brokerName+"/v1/connect", false)
	if err != nil {
		t.Fatal(err)
	}
	p.conn, err = connector.New(connector.Config{
		URL: url, HostID: hostID, Token: token, TLS: p.ca.Client(), Instance: wire.NewID(), Epoch: 1, Agent: "kinds/1",
		Sessions: 1, Link: link.Config{DeadAfter: deadAfter},
		NetDial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			if p.pipe != nil {
				return new(net.Dialer).DialContext(ctx, network, p.pipe.Addr())
			}
			return p.host.dial(ctx, p.job.Listen)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	kinds.Run(t, p.conn.Run)
	kinds.Echo(t, p.conn)
	p.dialer, err = reach.NewDialer(reach.DialerConfig{
		URL: url.String(), HostID: hostID, Kind: wire.KindRoute, Token: route, TLS: p.ca.Client(), Agent: "kinds/1",
		Link:    link.Config{DeadAfter: deadAfter},
		NetDial: func(ctx context.Context, _, _ string) (net.Conn, error) { return p.device.dial(ctx, p.job.Listen) },
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.dialer.Close() })
	kinds.Run(t, p.keepAsking)
	kinds.Await(t, "the host's first answer", func() bool { return p.seen.Load() > 0 })
	return p
}

// writeState enrols the host and lets the device dial it.
func (p *place) writeState(token string, hostID wire.ID, route string) {
	p.t.Helper()
	dir := p.t.TempDir()
	p.job.Store = filepath.Join(dir, "broker.db")
	p.job.Cert, p.job.Key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	var err error
	if p.ca, err = lab.NewCA(); err != nil {
		p.t.Fatal(err)
	}
	if err := p.ca.WriteFiles(dir, brokerName); err != nil {
		p.t.Fatal(err)
	}
	st, err := store.Open(p.job.Store, nil)
	if err != nil {
		p.t.Fatal(err)
	}
	defer func() { _ = st.Close() }()
	if err := st.AddHost("home", hostID, wire.DigestOf(token)); err != nil {
		p.t.Fatal(err)
	}
	if err := st.Publish(store.Credential{
		Host: hostID, Kind: wire.KindRoute, ID: "device", Digest: wire.DigestOf(route), Expires: time.Now().Add(time.Hour),
	}); err != nil {
		p.t.Fatal(err)
	}
}

// startBroker starts the broker's process and returns when it listens. It may
// be called from any goroutine.
func (p *place) startBroker() {
	job, err := json.Marshal(p.job)
	if err != nil {
		p.t.Error(err)
		return
	}
	cmd := exec.Command(os.Args[0]) //nolint:gosec,noctx // this test itself, ended by the closing of its input
	cmd.Env = append(os.Environ(), brokerEnv+"="+string(job))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		p.t.Error(err)
		return
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = p.broker.start(cmd)
	}
	if err == nil {
		_, err = bufio.NewReader(out).ReadString('\n')
	}
	if err != nil {
		p.t.Errorf("start the broker: %v", err)
	}
	p.proc, p.stdin = cmd, in
}

// stopBroker ends it in order.
func (p *place) stopBroker() {
	_ = p.stdin.Close()
	_ = p.proc.Wait()
}

// killBroker ends it as kill -9 does.
func (p *place) killBroker() {
	_ = p.proc.Process.Kill()
	_ = p.proc.Wait()
}

// keepAsking asks the host again and again, a few at once: one that hangs does
// not keep the others from noticing that the host is back.
func (p *place) keepAsking(ctx context.Context) error {
	var all sync.WaitGroup
	defer all.Wait()
	for range 3 {
		all.Go(func() {
			tick := time.NewTicker(50 * time.Millisecond)
			defer tick.Stop()
			for {
				start := time.Now()
				if p.ask(ctx) == nil {
					p.answered(start)
				}
				select {
				case <-tick.C:
				case <-ctx.Done():
					return
				}
			}
		})
	}
	return nil
}

// answered notes when the latest question was asked that has been answered.
func (p *place) answered(asked time.Time) {
	for {
		old := p.seen.Load()
		if old >= asked.UnixNano() || p.seen.CompareAndSwap(old, asked.UnixNano()) {
			return
		}
	}
}

// ask opens a stream to the host and wants one byte back.
func (p *place) ask(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	c, err := p.dialer.DialContext(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if _, err := c.Write([]byte{1}); err != nil {
		return err
	}
	_, err = io.ReadFull(c, make([]byte, 1))
	return err
}

// hostsOnline asks the broker's health page from the device's network.
func (p *place) hostsOnline(client *http.Client) (int, error) {
	res, err := client.Get("https://" + brokerName + "/health") //nolint:noctx // the client has a timeout
	if err != nil {
		return 0, err
	}
	defer func() { _ = res.Body.Close() }()
	var page struct {
		Hosts *int `json:"hosts_online"`
	}
	if err := json.NewDecoder(res.Body).Decode(&page); err != nil || page.Hosts == nil {
		return 0, fmt.Errorf("the health page does not say how many hosts are online: %w", err)
	}
	return *page.Hosts, nil
}

func (p *place) httpClient() *http.Client {
	cfg := p.ca.Client()
	cfg.ServerName = brokerName
	return &http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{
		TLSClientConfig: cfg, MaxConnsPerHost: 1,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return p.device.dial(ctx, p.job.Listen) },
	}}
}
