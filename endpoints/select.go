package endpoints

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"
)

// How long an observation counts, from the start of the probe that made it.
const (
	HealthyFor = 60 * time.Second
	FailedFor  = 2 * time.Second
)

// Health is what a probe found.
type Health int

// A candidate nobody has tried is unknown, as is one whose last observation is
// too old.
const (
	Unknown Health = iota
	Healthy
	Failed
)

// An Observation is the last thing known about a candidate for one surface.
type Observation struct {
	Health Health
	At     time.Time     // when the probe started
	RTT    time.Duration // of a healthy one; 0 = not measured
	Class  string        // of a failed one: a word for people, such as "timeout" or "wrong pin"
}

// at is what the observation is worth at a time. One from the future tells of a
// clock that was set, so it proves nothing.
func (o Observation) at(now time.Time) Health {
	if age := now.Sub(o.At); age < 0 || age >= lasts(o.Health) {
		return Unknown
	}
	return o.Health
}

func lasts(h Health) time.Duration {
	if h == Healthy {
		return HealthyFor
	}
	return FailedFor
}

// Want is what a device asks of a candidate.
type Want struct {
	Surface        Surface // "" = any
	AllowPlaintext bool    // the user's consent, for this profile, to be read by everyone on the way
	// Current is the index of the candidate in use, for staying among equals; a
	// pointer, so that the zero Want means none.
	Current *int
}

// Reasons of a Decision. ReasonUnreachable and ReasonNotUsable are followed by
// ": " and why.
const (
	ReasonChosen      = "chosen"
	ReasonWorse       = "worse than chosen"
	ReasonUnproved    = "unproved"
	ReasonUnreachable = "unreachable"
	ReasonNotUsable   = "not usable"
)

// A Decision says which candidate to use, and for each why or why not.
type Decision struct {
	Chosen  int       // index of the candidate, -1 = none
	Proved  bool      // Chosen is known healthy; false = try it, nothing is known to be better
	Reasons []string  // one for each candidate
	Tiers   [][]int   // the usable candidates in the order they come; equals share a tier
	Probe   []int     // usable candidates that would win if they proved healthy now, best first
	Retry   time.Time // when Choose may answer better by the passing of time alone; zero = never
}

// Order groups the indices of candidates into tiers, best first: supported
// before experimental, then by ascending priority. Inside a tier they keep their
// order. A tier is tried only when every tier before it failed.
func Order(cands []Candidate) [][]int {
	order := make([]int, len(cands))
	for i := range order {
		order[i] = i
	}
	return tiers(cands, order)
}

func tiers(cands []Candidate, order []int) [][]int {
	slices.SortStableFunc(order, func(a, b int) int { return compare(cands[a], cands[b]) })
	var out [][]int
	for k, i := range order {
		if k == 0 || compare(cands[order[k-1]], cands[i]) != 0 {
			out = append(out, nil)
		}
		out[len(out)-1] = append(out[len(out)-1], i)
	}
	return out
}

func compare(a, b Candidate) int {
	if a.IsExperimental() != b.IsExperimental() {
		if a.IsExperimental() {
			return 1
		}
		return -1
	}
	return cmp.Compare(a.Priority, b.Priority)
}

// Choose picks a candidate by strict priority. It is a pure function: obs[i]
// belongs to cands[i], missing ones are unknown.
//
//   - A candidate that is not usable (see Usable) is never chosen.
//   - The first tier with a healthy candidate wins, however fast a later one is.
//     Among its healthy ones the current stays; else the fastest wins, then the
//     first.
//   - If none is healthy, the first unproved one is chosen to be tried, with
//     Proved false. If all have just failed, none is chosen until Retry.
func Choose(now time.Time, cands []Candidate, obs []Observation, want Want) Decision {
	d := Decision{Chosen: -1, Reasons: make([]string, len(cands))}
	seen := make([]Observation, len(cands))
	copy(seen, obs)
	var usable []int
	for i, c := range cands {
		if err := c.Usable(now, want); err != nil {
			d.Reasons[i] = fmt.Sprintf("%s: %v", ReasonNotUsable, err)
			continue
		}
		usable = append(usable, i)
	}
	d.Tiers = tiers(cands, usable)
	d.pick(now, seen, want)
	d.explain(now, seen)
	return d
}

func (d *Decision) pick(now time.Time, obs []Observation, want Want) {
	for _, tier := range d.Tiers {
		var unproved []int
		for _, i := range tier {
			switch obs[i].at(now) {
			case Healthy:
				if !d.Proved || better(i, d.Chosen, obs, want) {
					d.Chosen, d.Proved = i, true
				}
			case Unknown:
				unproved = append(unproved, i)
			}
		}
		if d.Proved {
			return // equals that are unproved would not win
		}
		d.Probe = append(d.Probe, unproved...)
	}
	if len(d.Probe) > 0 {
		d.Chosen = d.Probe[0]
	}
}

// better compares two healthy candidates of one tier, i after j in order.
func better(i, j int, obs []Observation, want Want) bool {
	if want.Current != nil && (*want.Current == i || *want.Current == j) {
		return *want.Current == i
	}
	a, b := obs[i].RTT, obs[j].RTT
	return a > 0 && (b <= 0 || a < b)
}

// explain fills in the reasons of usable candidates, and when time alone will
// change the answer.
func (d *Decision) explain(now time.Time, obs []Observation) {
	passed := false // the tier of a proved choice lies behind us
	for _, tier := range d.Tiers {
		for _, i := range tier {
			h := obs[i].at(now)
			d.Reasons[i] = reason(h, obs[i].Class, i == d.Chosen, passed)
			if h == Unknown {
				continue
			}
			if end := obs[i].At.Add(lasts(h)); d.Retry.IsZero() || end.Before(d.Retry) {
				d.Retry = end
			}
		}
		passed = passed || d.Proved && slices.Contains(tier, d.Chosen)
	}
}

func reason(h Health, class string, chosen, passed bool) string {
	switch {
	case chosen:
		return ReasonChosen
	case h == Failed && class != "":
		return ReasonUnreachable + ": " + bounded(class)
	case h == Failed:
		return ReasonUnreachable
	case h == Healthy || passed:
		return ReasonWorse
	}
	return ReasonUnproved
}

// Usable says why a candidate cannot be used, or nil. It fails closed: a
// candidate that names Secure Link or Reach is used with a valid pin or not at
// all, also where it has a plain address besides.
func (c Candidate) Usable(now time.Time, want Want) error {
	switch {
	case c.Role.IsBroker() || c.Broker != nil:
		if err := c.BrokerValid(now); err != nil {
			return err
		}
	case c.pinned():
		if err := c.ProxyValid(); err != nil {
			return err
		}
	}
	if !c.Offers(want.Surface) {
		if want.Surface == "" {
			return errors.New("it says nowhere to connect")
		}
		return fmt.Errorf("it does not offer the %s", bounded(string(want.Surface)))
	}
	if c.SecurityOf(want.Surface) == SecurityPlaintext && !want.AllowPlaintext {
		return errors.New("it is not encrypted and plaintext is not allowed for this host")
	}
	return nil
}

// pinned reports whether the candidate claims to be Secure Link or Reach.
func (c Candidate) pinned() bool {
	return c.Proxy != nil || c.Role == RolePluginProxy || c.Role.IsBroker() || c.Broker != nil
}

// Offers reports whether the candidate leads to the surface; "" = to any.
func (c Candidate) Offers(s Surface) bool {
	if c.pinned() {
		return c.Proxy != nil && (s == "" || c.Proxy.Has(s))
	}
	switch s {
	case "":
		return c.Relay != nil || c.API != nil || c.Dashboard != nil
	case SurfaceRelay:
		return c.Relay != nil
	case SurfaceAPI:
		return c.API != nil
	case SurfaceDashboard:
		return c.Dashboard != nil
	}
	return false
}

// SecurityOf is how a candidate protects a surface, judged by what is in it and
// never by its role or its own claim: a payload can call anything tailscale.
// Without a surface it is the worst of those it offers; "" means that there is
// nothing to judge.
func (c Candidate) SecurityOf(s Surface) string {
	if c.pinned() {
		switch {
		case c.Proxy == nil || c.ProxyValid() != nil || !c.Offers(s):
			return ""
		case c.Broker != nil || c.Role.IsBroker():
			return SecurityE2E
		}
		return SecurityPinned
	}
	label := ""
	add := func(surface Surface, offered, secure bool) {
		if !offered || s != "" && s != surface || label == SecurityPlaintext {
			return
		}
		label = SecurityPlaintext
		if secure {
			label = SecurityTLS
		}
	}
	add(SurfaceRelay, c.Relay != nil, c.Relay != nil && secureURL(c.Relay.URL))
	add(SurfaceAPI, c.API != nil, c.API != nil && c.API.TLS)
	add(SurfaceDashboard, c.Dashboard != nil, c.Dashboard != nil && secureURL(c.Dashboard.URL))
	return label
}

func secureURL(s string) bool {
	u, err := url.Parse(s)
	return err == nil && u.Host != "" && (strings.EqualFold(u.Scheme, "https") || strings.EqualFold(u.Scheme, "wss"))
}
