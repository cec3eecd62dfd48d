package host

import (
	"context"
	"time"

	"github.com/hermes-reach/hermes-reach/securelink"
)

// statusTimeout bounds the probes of the services.
const statusTimeout = 4 * time.Second

// Status is what runs here, for people and for `status --json`.
type Status struct {
	Version    string                     `json:"version"`
	Pin        string                     `json:"pin"`
	Listeners  []string                   `json:"listeners"`
	Addresses  []string                   `json:"addresses"` // what devices are told
	Brokers    []BrokerStatus             `json:"brokers"`
	Namespaces map[string]NamespaceStatus `json:"namespaces"`
	Devices    int                        `json:"devices"`
}

// BrokerStatus is the state of the sessions to one broker.
type BrokerStatus struct {
	URL       string `json:"url"`
	State     string `json:"state"`    // connected, connecting or waiting
	Sessions  int    `json:"sessions"` // that are up
	Protocol  int    `json:"protocol"`
	Transport string `json:"transport,omitempty"`
	Error     string `json:"error,omitempty"` // of the last attempt, while none is up
}

// NamespaceStatus says whether devices get through to a service, and why not.
type NamespaceStatus struct {
	Open    bool   `json:"open"`
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
}

// Status tells the state of now. It probes the services that were not probed
// for a while.
func (h *Host) Status(ctx context.Context) Status {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	st := Status{
		Version: h.cfg.Version, Pin: h.identity.Pin().String(), Listeners: []string{}, Brokers: []BrokerStatus{},
		Addresses: h.authorities(), Namespaces: namespaces(h.server.Status(ctx)), Devices: len(h.sessions.Devices()),
	}
	for _, a := range h.Addrs() {
		st.Listeners = append(st.Listeners, a.String())
	}
	for _, b := range h.brokers() {
		st.Brokers = append(st.Brokers, brokerStatus(b))
	}
	return st
}

func namespaces(s securelink.Status) map[string]NamespaceStatus {
	out := make(map[string]NamespaceStatus, len(s.Namespaces))
	for _, n := range s.Namespaces {
		out[n.Name] = NamespaceStatus{Open: n.Open, Reason: n.Code, Message: n.Message}
	}
	return out
}

func brokerStatus(r *running) BrokerStatus {
	st := BrokerStatus{URL: r.broker.URL.String(), State: "connecting", Protocol: 2}
	for _, slot := range r.conn.Status() {
		switch {
		case slot.State == "connected":
			st.State, st.Transport = slot.State, slot.Transport
			st.Sessions++
		case st.State != "connected" && slot.State == "waiting":
			st.State = slot.State
		}
		if slot.Err != nil {
			st.Error = slot.Err.Error()
		}
	}
	if st.Sessions > 0 {
		st.Error = ""
	}
	return st
}
