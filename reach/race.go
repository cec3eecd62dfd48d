package reach

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"

	"github.com/hermes-reach/hermes-reach/endpoints"
	"github.com/hermes-reach/hermes-reach/pins"
	"github.com/hermes-reach/hermes-reach/reach/wire"
)

// An Attempt is one path that was tried, or could not be, and why it failed.
type Attempt struct {
	Path Path
	Err  error
}

// An UnreachableError lists why each candidate failed. It is ErrUnreachable;
// where a host was reached and not trusted, it is a trust error as well.
type UnreachableError struct {
	Attempts []Attempt
	Cause    error // why the waiting ended before all had failed; nil = all had
}

func (e *UnreachableError) Error() string {
	var b strings.Builder
	b.WriteString(ErrUnreachable.Error())
	for i, a := range e.Attempts {
		sep := "; "
		if i == 0 {
			sep = ": "
		}
		fmt.Fprintf(&b, "%s%v: %v", sep, a.Path, a.Err)
	}
	if e.Cause != nil {
		fmt.Fprintf(&b, " (gave up: %v)", e.Cause)
	}
	return b.String()
}

// Is makes every UnreachableError ErrUnreachable.
func (e *UnreachableError) Is(target error) bool { return target == ErrUnreachable }

// Unwrap gives the reasons.
func (e *UnreachableError) Unwrap() []error {
	var errs []error
	for _, a := range e.Attempts {
		errs = append(errs, a.Err)
	}
	if e.Cause != nil {
		errs = append(errs, e.Cause)
	}
	return errs
}

// Timeout reports whether nothing but silence was met.
func (e *UnreachableError) Timeout() bool {
	for _, a := range e.Attempts {
		if class(a.Err) != "timeout" {
			return false
		}
	}
	return len(e.Attempts) > 0
}

// class names an error in a word or two, for people.
func class(err error) string {
	var netErr net.Error
	switch {
	case pins.IsTrust(err):
		return "not trusted"
	case wire.CodeOf(err) != "":
		return string(wire.CodeOf(err))
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &netErr) && netErr.Timeout():
		return "timeout"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.Is(err, errDead), errors.Is(err, net.ErrClosed), errors.Is(err, syscall.ECONNRESET):
		return "connection lost"
	}
	if _, ok := errors.AsType[*net.DNSError](err); ok {
		return "name not found"
	}
	return "failed"
}

// A plan is the order in which routes are tried.
type plan struct {
	background []*route   // better ones that kept failing: tried beside the others, waited for by nobody
	legs       [][]*route // one after the other, each with a head start
	rank       []int      // of each route by its index; a smaller one is better
}

// plan applies endpoints.Choose to what is known now. What has just failed, or
// lost a request, rests and comes last.
func (c *Client) plan() plan {
	now := c.now()
	states := make([]state, len(c.routes))
	obs := make([]endpoints.Observation, len(c.routes))
	for i, r := range c.routes {
		states[i] = r.state(now)
		obs[i] = states[i].obs
	}
	d := endpoints.Choose(now, c.cands, obs, c.want())
	var (
		p    = plan{rank: make([]int, len(c.routes))}
		last []*route
		past bool // the tier of the proved choice lies behind us
	)
	for rank, tier := range d.Tiers {
		var first, leg []*route
		for _, i := range tier {
			p.rank[i] = rank
			switch r, s := c.routes[i], states[i]; {
			case s.resting:
				last = append(last, r)
			case d.Proved && i == d.Chosen:
				first = append(first, r)
			case s.failing && !past:
				p.background = append(p.background, r)
			case s.failing:
				last = append(last, r)
			default:
				leg = append(leg, r)
			}
		}
		past = past || len(first) > 0
		for _, l := range [][]*route{first, leg} {
			if len(l) > 0 {
				p.legs = append(p.legs, l)
			}
		}
	}
	if len(last) > 0 {
		p.legs = append(p.legs, last)
	}
	return p
}

// want stays with the route in use among equals.
func (c *Client) want() endpoints.Want {
	if r := c.current.Load(); r != nil {
		return endpoints.Want{Current: &r.index}
	}
	return endpoints.Want{}
}

// ready takes an open connection of the route that comes first, if it has one,
// and lets better ones be tried meanwhile. It starts nothing that is waited for.
func (p plan) ready() (*http.ClientConn, *route) {
	if len(p.legs) == 0 {
		return nil, nil
	}
	for _, r := range p.legs[0] {
		if r.state(r.c.now()).failing {
			continue
		}
		if cc := r.reserve(); cc != nil {
			for _, b := range p.background {
				b.try()
			}
			return cc, r
		}
	}
	return nil, nil
}

// outcome is what one try in a race came to.
type outcome[T any] struct {
	r      *route
	v      T
	err    error
	waited bool // it belongs to a leg
}

// A racer runs one race: see race.
type racer[T any] struct {
	c       *Client
	ctx     context.Context // of the tries
	plan    plan
	try     func(*route, context.Context) (T, error)
	drop    func(T)
	results chan outcome[T]

	started []*route
	pending int
	waiting int // of those pending, how many belong to a leg
	failed  []Attempt
}

// race tries the routes of a plan and gives the first success. Each leg gets a
// head start before the next is tried beside it; what runs goes on, and a leg
// that has failed is not waited for. Of successes that are there at the same
// time the better wins; the others are dropped, also those that come later.
func race[T any](ctx context.Context, c *Client, p plan, try func(*route, context.Context) (T, error), drop func(T)) (T, *route, error) {
	dialing, cancel := context.WithCancel(c.ctx)
	rc := &racer[T]{c: c, ctx: dialing, plan: p, try: try, drop: drop, results: make(chan outcome[T], len(c.routes))}
	stop := context.AfterFunc(ctx, cancel)
	v, r, err := rc.run(ctx)
	stop()
	rc.leave(cancel)
	return v, r, err
}

func (rc *racer[T]) run(ctx context.Context) (v T, r *route, err error) {
	rc.start(rc.plan.background, false)
	next := 0
	var head chan struct{}
	stopHead := func() bool { return true }
	defer func() { stopHead() }()
	for {
		for next < len(rc.plan.legs) && rc.waiting == 0 || next < len(rc.plan.legs) && head == nil {
			leg := rc.plan.legs[next]
			next++
			stopHead()
			head, stopHead = rc.head(leg)
			rc.start(leg, true)
		}
		if rc.pending == 0 {
			return v, nil, rc.unreachable(ctx)
		}
		select {
		case o := <-rc.results:
			if won, ok := rc.take(o); ok {
				return won.v, won.r, nil
			}
		case <-head:
			head = nil
		case <-ctx.Done():
			return v, nil, rc.unreachable(ctx)
		}
	}
}

// head runs out when the next leg may start.
func (rc *racer[T]) head(leg []*route) (chan struct{}, func() bool) {
	now := rc.c.now()
	d := leg[0].headStart(now)
	for _, r := range leg[1:] {
		d = max(d, r.headStart(now))
	}
	over := make(chan struct{})
	return over, rc.c.timer(d, func() { close(over) })
}

func (rc *racer[T]) start(routes []*route, waited bool) {
	for _, r := range routes {
		rc.started = append(rc.started, r)
		rc.pending++
		if waited {
			rc.waiting++
		}
		if !rc.c.spawn(func() {
			v, err := rc.try(r, rc.ctx)
			rc.results <- outcome[T]{r, v, err, waited}
		}) {
			rc.results <- outcome[T]{r: r, err: ErrClosed, waited: waited}
		}
	}
}

// take counts an outcome, and with a success looks whether a better one is
// there already.
func (rc *racer[T]) take(o outcome[T]) (best outcome[T], ok bool) {
	for {
		rc.pending--
		if o.waited {
			rc.waiting--
		}
		switch {
		case o.err != nil:
			rc.failed = append(rc.failed, Attempt{o.r.Path, o.err})
		case !ok:
			best, ok = o, true
		case rc.plan.rank[o.r.index] < rc.plan.rank[best.r.index]:
			rc.drop(best.v)
			best = o
		default:
			rc.drop(o.v)
		}
		if !ok {
			return best, false
		}
		select {
		case o = <-rc.results:
		default:
			return best, true
		}
	}
}

// leave drops what the tries that still run bring in. A success of theirs has
// been noted by then: the next request knows of it.
func (rc *racer[T]) leave(cancel context.CancelFunc) {
	n := rc.pending
	if n == 0 || !rc.c.spawn(func() {
		defer cancel()
		rc.drain(n)
	}) {
		cancel()
		if n > 0 { // closed: the tries end at once
			rc.drain(n)
		}
	}
}

func (rc *racer[T]) drain(n int) {
	for range n {
		if o := <-rc.results; o.err == nil {
			rc.drop(o.v)
		}
	}
}

// unreachable lists all candidates: those that failed, that had not answered
// when the caller gave up, and that could not be used.
func (rc *racer[T]) unreachable(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return context.Cause(ctx)
	}
	if rc.c.ctx.Err() != nil {
		return ErrClosed
	}
	e := &UnreachableError{Attempts: rc.failed}
	if ctx.Err() != nil {
		e.Cause = context.Cause(ctx)
		for _, r := range rc.started {
			if !rc.hasFailed(r) {
				e.Attempts = append(e.Attempts, Attempt{r.Path, fmt.Errorf("no answer yet: %w", context.DeadlineExceeded)})
			}
		}
	}
	e.Attempts = append(e.Attempts, rc.c.unused...)
	return e
}

func (rc *racer[T]) hasFailed(r *route) bool {
	for _, a := range rc.failed {
		if a.Path == r.Path {
			return true
		}
	}
	return false
}
