// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"strings"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Route says which backend may serve a transfer.
type Route struct {
	// Only names the backend that must serve the transfer; if it cannot, Add fails. Empty: the
	// engine chooses the cheapest backend that serves the pair of memories.
	Only string

	// Durable makes a Write complete without error only once its bytes would survive a loss of
	// power, as those of a file do after fdatasync. The engine then chooses only backends that can
	// guarantee this, or a chain whose last hop can; if there is none, Add fails with ErrNoRoute.
	// A notification still arrives after the bytes. A durable Read is ErrNotSupported.
	Durable bool
}

func (r Route) check(e *Engine) error {
	if r.Only == "" {
		return nil
	}
	var names []string
	for _, l := range e.lanes {
		if l.caps.Name == r.Only {
			return nil
		}
		names = append(names, l.caps.Name)
	}
	return fmt.Errorf("route only %q: this engine has %s: %w", r.Only, strings.Join(names, ", "),
		ErrNoRoute)
}

// Candidate is one backend's answer for a pair of memories.
type Candidate struct {
	Backend  string        `json:"backend"`
	Usable   bool          `json:"usable"`
	Reason   string        `json:"reason"`      // why it is not usable, or how it moves the bytes
	Estimate time.Duration `json:"estimate_ns"` // time for 1 MiB in one piece; 0 unless usable
	Rate     float64       `json:"rate"`        // of the estimate, in bytes a second
	Measured bool          `json:"measured"`    // Rate was measured in this engine, not declared
	// the engine prefers any other usable candidate: see driver.LastResort
	LastResort bool `json:"last_resort"`

	conn *conn
	key  uint32
}

// Explanation is the result of Explain: all candidates, in the order of the engine's backends, and
// the choice.
type Explanation struct {
	Peer       string      `json:"peer"`
	Local      string      `json:"local"`  // kind of the local memory
	Remote     string      `json:"remote"` // kind of the peer's memory
	SameHost   bool        `json:"same_host"`
	Chosen     string      `json:"chosen"` // backend; empty: none is usable
	Why        string      `json:"why"`
	Candidates []Candidate `json:"candidates"`
}

// String returns the explanation as text, with one line for each candidate.
func (x *Explanation) String() string {
	var b strings.Builder
	where := "another host"
	if x.SameHost {
		where = "this host"
	}
	peer := "peer " + x.Peer
	if x.Peer == "" {
		peer = "a peer"
	}
	fmt.Fprintf(&b, "%s -> %s of %s on %s: %s\n", x.Local, x.Remote, peer, where, x.Why)
	for _, c := range x.Candidates {
		mark := " "
		if c.Backend == x.Chosen {
			mark = "*"
		}
		fmt.Fprintf(&b, "%s %-8s %s\n", mark, c.Backend, c.describe())
	}
	return b.String()
}

func (c *Candidate) describe() string {
	if !c.Usable {
		return "no: " + c.Reason
	}
	source := "declared"
	if c.Measured {
		source = "measured"
	}
	return fmt.Sprintf("1 MiB in about %v (%s %.1f GB/s): %s", c.Estimate.Round(time.Microsecond),
		source, c.Rate/1e9, c.Reason)
}

// Explain lists which backends could move bytes between a region and a region of a peer, which one
// the engine would choose without Route.Only, and why.
func (e *Engine) Explain(p *Peer, local *Region, remote *Remote) (Explanation, error) {
	if p.e != e || local.e != e || remote.p != p {
		return Explanation{}, &OpError{Op: "explain", Peer: p.name,
			Err: fmt.Errorf("peer, region and remote belong to different engines or peers: %w",
				ErrNoRoute)}
	}
	x := Explanation{Peer: p.name, Local: local.Kind().String(), Remote: remote.kind.String(),
		SameHost: p.host == e.host}
	x.Candidates = p.candidates(local, remote, Route{})
	if best := cheapest(x.Candidates); best != nil {
		x.Chosen = best.Backend
		x.Why = fmt.Sprintf("%s is the cheapest of %d that can", best.Backend, usable(x.Candidates))
		for _, c := range x.Candidates {
			if c.Usable && c.LastResort && !best.LastResort {
				x.Why += fmt.Sprintf("; %s only where no other can", c.Backend)
			}
		}
	} else {
		x.Why = "no backend can"
	}
	return x, nil
}

func usable(list []Candidate) (n int) {
	for i := range list {
		if list[i].Usable {
			n++
		}
	}
	return n
}

// cheapest returns the usable candidate with the smallest estimate, and a last resort only if there
// is no other.
func cheapest(list []Candidate) (best *Candidate) {
	for i := range list {
		c := &list[i]
		if c.Usable && (best == nil || best.LastResort && !c.LastResort ||
			best.LastResort == c.LastResort && c.Estimate < best.Estimate) {
			best = c
		}
	}
	return best
}

// nominalBytes is the size for which routes are compared.
const nominalBytes = 1 << 20 // 1 MiB

// candidates asks each backend whether it can move bytes between two memories. The chain through
// staging memory is a candidate if the route names it. It also is one if no single backend serves
// the pair and at least one of the memories is not DRAM.
func (p *Peer) candidates(local *Region, remote *Remote, route Route) []Candidate {
	list := make([]Candidate, 0, len(p.e.lanes))
	for i, l := range p.e.lanes {
		staged := l == p.e.stager.lane
		if staged && route.Only != Staged && (usable(list) > 0 ||
			local.Kind() == driver.DRAM && remote.kind == driver.DRAM) {
			continue
		}
		c := Candidate{Backend: l.caps.Name, conn: p.conns[i]}
		switch cost := l.caps.Cost; {
		case route.Only != "" && route.Only != l.caps.Name:
			c.Reason = "the route names only " + route.Only
		case !l.caps.Pairs.Serves(local.Kind(), remote.kind):
			c.Reason = fmt.Sprintf("does not move %v to or from %v", local.Kind(), remote.kind)
			if l.caps.Reach == driver.InProcess {
				c.Reason += " of a peer: it serves memory of its own process"
			}
		case c.conn == nil:
			c.Reason = p.reasons[i]
		case c.conn.isLost():
			c.Reason = "the connection is lost: connect anew"
		case staged:
			var text string
			cost, text, c.Reason = p.chains().route(local, remote, route.Durable)
			if c.Reason != "" {
				break
			}
			key, err := remote.key(i)
			if err != nil {
				c.Reason = err.Error()
				break
			}
			c.key = key
			c.accept(cost, text)
		case route.Durable && c.conn.can&driver.CanDurable == 0:
			c.Reason = notDurable
		case local.mems[i] == nil:
			c.Reason = "the local region is not registered with it"
		case remote.tokens[i] == nil:
			c.Reason = "the peer gave no token for it"
		default:
			key, err := remote.key(i)
			if err != nil {
				c.Reason = fmt.Sprintf("import: %v", err)
				break
			}
			c.key, c.LastResort = key, c.conn.lastResort()
			c.accept(cost, c.conn.p.Explain(local.mems[i].Key(), key))
		}
		list = append(list, c)
	}
	return list
}

// accept marks the candidate as usable. Its estimate uses the measured rate, if there is one,
// instead of the declared one in cost.
func (c *Candidate) accept(cost driver.Cost, how string) {
	cost.Rate, c.Measured = c.conn.counters.estimate(c.conn.peer.e.now(), cost.Rate)
	c.Usable, c.Reason, c.Rate, c.Estimate = true, how, cost.Rate, cost.Estimate(1, nominalBytes)
}

const notDurable = "it does not say when written bytes would survive a loss of power, as " +
	"Route.Durable asks"

// choose picks the connection for a pair of memories, and returns the key of the remote one. The
// Remote caches the choice, since most entries of a list have the same pair. For the first entry of
// a list, choose repeats the search from time to time (rateHalfLife), since measured rates change.
func (p *Peer) choose(local *Region, remote *Remote, route Route, first bool) (*conn, uint32,
	error) {
	remote.mu.Lock()
	c, key := remote.chosen, remote.chosenAt
	cached := c != nil && remote.routeFor == local && remote.route == route && !c.isLost() &&
		!(first && p.e.now() >= remote.until)
	remote.mu.Unlock()
	if cached && (c != p.staged() || p.chains().hasChain(local, remote, route.Durable)) {
		return c, key, nil // a cached chain is no longer there once it has lost a connection
	}
	list := p.candidates(local, remote, route)
	best := cheapest(list)
	if best == nil {
		return nil, 0, p.noRoute(local, remote, list)
	}
	remote.mu.Lock()
	defer remote.mu.Unlock()
	remote.routeFor, remote.route, remote.until = local, route, p.e.now()+rateHalfLife
	remote.chosen, remote.chosenAt = best.conn, best.key
	return best.conn, best.key, nil
}

// noRoute returns the error for a pair that no backend serves, with the reason of each candidate.
func (p *Peer) noRoute(local *Region, remote *Remote, list []Candidate) error {
	var why []string
	lost, known := 0, 0
	for i := range list {
		why = append(why, list[i].Backend+": "+list[i].Reason)
		if c := p.conns[i]; c != nil {
			known++
			if c.isLost() {
				lost++
			}
		}
	}
	cause := ErrNoRoute
	if known > 0 && lost == known {
		cause = ErrPeerLost
	}
	if err := remote.importError(); err != nil && lost == 0 {
		cause = err
	}
	return &OpError{Op: "route", Peer: p.name, Err: fmt.Errorf("%v to %v of region %s: %s: %w",
		local.Kind(), remote.kind, remote.name, strings.Join(why, "; "), cause)}
}

// messenger returns the live connection that carries notifications at the lowest setup cost, and a
// last resort only if there is no other.
func (p *Peer) messenger(route Route) (best *conn) {
	for _, c := range p.conns {
		if c == nil || !c.notifies() || c.isLost() ||
			(route.Only != "" && route.Only != c.lane.caps.Name) {
			continue
		}
		if best == nil || best.lastResort() && !c.lastResort() ||
			best.lastResort() == c.lastResort() &&
				c.lane.caps.Cost.Setup < best.lane.caps.Cost.Setup {
			best = c
		}
	}
	return best
}

// notifies reports whether the connection carries notifications.
func (c *conn) notifies() bool { return c.can&driver.CanNotify != 0 }

func (c *conn) lastResort() bool { return c.can&driver.LastResort != 0 }
