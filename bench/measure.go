package bench

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"
)

// patience bounds everything that should take milliseconds.
const patience = 10 * time.Second

// setups is how many connections are made at once.
const setups = 16

// device measures one path.
type device struct {
	dial Dialer
	tls  *tls.Config
}

// connect dials, shakes hands and says what the origin should do.
func (d *device) connect(ctx context.Context, cmd byte) (*tls.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	raw, err := d.dial(ctx)
	if err != nil {
		return nil, err
	}
	c := tls.Client(raw, d.tls)
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(err, raw.Close())
	}
	if _, err := c.Write([]byte{cmd}); err != nil {
		return nil, errors.Join(err, raw.Close())
	}
	return c, nil
}

// down gives the bytes that came from the origin on one stream, and in how long.
func (d *device) down(ctx context.Context, length time.Duration) (n int64, took time.Duration, err error) {
	c, err := d.connect(ctx, cmdDown)
	if err != nil {
		return 0, 0, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(length + patience))
	start := time.Now()
	asked := false
	buf := make([]byte, chunk)
	for {
		m, err := c.Read(buf)
		n += int64(m)
		if err == io.EOF { //nolint:errorlint // the orderly end is never wrapped
			return n, time.Since(start), nil
		}
		if err != nil {
			return n, time.Since(start), fmt.Errorf("download: %w", err)
		}
		if !asked && time.Since(start) > length {
			asked = true
			if _, err := c.Write([]byte{0}); err != nil {
				return n, time.Since(start), fmt.Errorf("end the download: %w", err)
			}
		}
	}
}

// up gives the bytes that the origin counted on one stream, and in how long.
func (d *device) up(ctx context.Context, length time.Duration) (n int64, took time.Duration, err error) {
	c, err := d.connect(ctx, cmdUp)
	if err != nil {
		return 0, 0, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(length + patience))
	start := time.Now()
	buf := make([]byte, chunk)
	for time.Since(start) < length {
		m, err := c.Write(buf)
		n += int64(m)
		if err != nil {
			return n, time.Since(start), fmt.Errorf("upload: %w", err)
		}
	}
	count := make([]byte, 8)
	if err := c.CloseWrite(); err != nil {
		return n, time.Since(start), fmt.Errorf("end the upload: %w", err)
	}
	if _, err := io.ReadFull(c, count); err != nil {
		return n, time.Since(start), fmt.Errorf("end of the upload: %w", err)
	}
	took = time.Since(start)
	if got := binary.BigEndian.Uint64(count); got != uint64(n) { //nolint:gosec // a count
		return n, took, fmt.Errorf("upload: %d bytes sent, %d arrived", n, got)
	}
	return n, took, nil
}

// pings sends one message after the other and gives each round trip in order of
// size.
func (d *device) pings(ctx context.Context, length time.Duration) ([]time.Duration, error) {
	c, err := d.connect(ctx, cmdEcho)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return pings(c, length)
}

func pings(c *tls.Conn, length time.Duration) ([]time.Duration, error) {
	_ = c.SetDeadline(time.Now().Add(length + patience))
	buf := make([]byte, pingSize)
	var trips []time.Duration
	for start := time.Now(); time.Since(start) < length || len(trips) == 0; {
		sent := time.Now()
		if _, err := c.Write(buf); err != nil {
			return nil, fmt.Errorf("ping: %w", err)
		}
		if _, err := io.ReadFull(c, buf); err != nil {
			return nil, fmt.Errorf("ping: %w", err)
		}
		trips = append(trips, time.Since(sent))
	}
	slices.Sort(trips)
	return trips, nil
}

// setup counts connections: dial, handshake, one byte back, close.
func (d *device) setup(ctx context.Context, length time.Duration) (n int, took time.Duration, err error) {
	var mu sync.Mutex
	var all sync.WaitGroup
	start := time.Now()
	for range setups {
		all.Go(func() {
			for again := true; again; {
				c, e := d.hello(ctx)
				if e == nil {
					_ = c.Close()
				}
				mu.Lock()
				if n++; e != nil {
					n, err = n-1, e
				}
				again = err == nil && time.Since(start) < length
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return n, time.Since(start), err
}

// hello makes a connection that has proved itself by one byte, and is idle.
func (d *device) hello(ctx context.Context) (*tls.Conn, error) { return d.wait(ctx, cmdHello, 1) }

// wait makes a connection, reads the n bytes that the origin sends, and leaves
// it idle.
func (d *device) wait(ctx context.Context, cmd byte, n int64) (*tls.Conn, error) {
	c, err := d.connect(ctx, cmd)
	if err != nil {
		return nil, err
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.CopyN(io.Discard, c, n); err != nil {
		return nil, errors.Join(fmt.Errorf("first bytes: %w", err), c.Close())
	}
	return c, c.SetDeadline(time.Time{})
}

// idle makes n connections that are idle after they got bytes each.
func (d *device) idle(ctx context.Context, n int, cmd byte, bytes int64) (conns []*tls.Conn, err error) {
	var mu sync.Mutex
	var all sync.WaitGroup
	slots := make(chan struct{}, setups)
	for range n {
		slots <- struct{}{}
		all.Go(func() {
			c, e := d.wait(ctx, cmd, bytes)
			<-slots
			mu.Lock()
			defer mu.Unlock()
			if e != nil {
				err = e
				return
			}
			conns = append(conns, c)
		})
	}
	all.Wait()
	return conns, err
}
