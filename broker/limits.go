package broker

import (
	"errors"
	"fmt"
	"time"
)

// Limits bound what a peer may take of the broker. Zero values stand for the
// defaults; what a default is stands beside each field.
type Limits struct {
	// Hosts is how many hosts may be registered at a time. 256.
	Hosts int
	// Sessions is how many sessions may be up in all, registered or not. 4096.
	Sessions int
	// Pending is how many of them one source may have that are not registered
	// yet. 256.
	Pending int
	// HostStreams is how many streams one host may have at a time. 256.
	HostStreams int
	// CredentialStreams is how many of them one credential may have. 64.
	CredentialStreams int
	// BootstrapStreams is the same for a pairing in progress. 16.
	BootstrapStreams int
	// Register bounds the time from a session's start to its registration. 10 s.
	Register time.Duration
	// Accept bounds how long a host may take to accept a stream. 5 s.
	Accept time.Duration
	// Idle ends a stream on which no payload passed either way. 20 min: longer
	// than the longest silence a Secure Link allows an upstream.
	Idle time.Duration
	// Failures is how many failed registrations one source may make in a
	// minute before it is turned away with 429. 30.
	Failures int
	// Takeover is how long the streams of a host session that a newer process
	// replaced may go on. 10 s.
	Takeover time.Duration
	// Drain is how long streams may go on after the broker was told to stop. 20 s.
	Drain time.Duration
}

// DefaultLimits are the limits of the contract.
func DefaultLimits() Limits {
	return Limits{
		Hosts: 256, Sessions: 4096, Pending: 256, HostStreams: 256, CredentialStreams: 64, BootstrapStreams: 16,
		Register: 10 * time.Second, Accept: 5 * time.Second, Idle: 20 * time.Minute,
		Failures: 30, Takeover: 10 * time.Second, Drain: 20 * time.Second,
	}
}

func (l Limits) withDefaults() Limits {
	d := DefaultLimits()
	orInt(&l.Hosts, d.Hosts)
	orInt(&l.Sessions, d.Sessions)
	orInt(&l.Pending, d.Pending)
	orInt(&l.HostStreams, d.HostStreams)
	orInt(&l.CredentialStreams, d.CredentialStreams)
	orInt(&l.BootstrapStreams, d.BootstrapStreams)
	orInt(&l.Failures, d.Failures)
	orInt(&l.Register, d.Register)
	orInt(&l.Accept, d.Accept)
	orInt(&l.Idle, d.Idle)
	orInt(&l.Takeover, d.Takeover)
	orInt(&l.Drain, d.Drain)
	return l
}

func orInt[T int | time.Duration](v *T, d T) {
	if *v == 0 {
		*v = d
	}
}

// Validate refuses limits that cannot work.
func (l Limits) Validate() error {
	var errs []error
	for name, v := range map[string]int64{
		"hosts": int64(l.Hosts), "sessions": int64(l.Sessions), "pending": int64(l.Pending), "host_streams": int64(l.HostStreams),
		"credential_streams": int64(l.CredentialStreams), "bootstrap_streams": int64(l.BootstrapStreams),
		"register": int64(l.Register), "accept": int64(l.Accept), "idle": int64(l.Idle),
		"failures": int64(l.Failures), "takeover": int64(l.Takeover), "drain": int64(l.Drain),
	} {
		if v < 0 {
			errs = append(errs, fmt.Errorf("broker limit %s is negative", name))
		}
	}
	return errors.Join(errs...)
}
