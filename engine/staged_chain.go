// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"strings"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// chain is how bytes go between a local memory and one of a peer.
type chain struct {
	near *lane // between the local memory and staging memory; nil: the local memory is DRAM
	by   *lane // from there to the peer's memory, or to staging memory of the peer
	far  bool  // then its engine makes the last hop
	self bool  // the peer is this engine
}

// handOver is what a hop costs beyond its backend: the goroutine that decides wakes for it.
const handOver = 10 * time.Microsecond

// chain plans the way, or says why there is none.
func (sp *stagedPeer) chain(local *Region, remote *Remote, durable bool) (c chain,
	obstacle string) {
	s, p := sp.s, sp.p
	c.self = p.isSelf()
	if s.e.cfg.StagingBytes < slotBytes {
		return c, "Config.StagingBytes leaves no staging memory"
	}
	if durable && remote.kind != driver.File {
		return c, fmt.Sprintf("%v does not survive a loss of power, as Route.Durable asks",
			remote.kind)
	}
	if local.Kind() != driver.DRAM {
		if c.near = s.nearest(local.Kind(), local.mems, func(*lane) bool {
			return true
		}); c.near == nil {
			return c, fmt.Sprintf("no backend moves %v of this engine to and from DRAM",
				local.Kind())
		}
	}
	if c.by = p.direct(remote, durable); c.by != nil && c.near != nil {
		return c, ""
	}
	if c.by != nil && (c.self || remote.kind == driver.DRAM) {
		return c, fmt.Sprintf("%s moves %v to and from %v alone", c.by.caps.Name, local.Kind(),
			remote.kind)
	}
	if c.self {
		if durable {
			return c, fmt.Sprintf("no backend moves DRAM to %v and says when it would survive a "+
				"loss of power", remote.kind)
		}
		return c, fmt.Sprintf("no backend moves %v to and from DRAM", remote.kind)
	}
	c.far = true // whether its engine can make its hop a durable one is seen when it is asked to
	c.by, obstacle = sp.carrier(remote)
	return c, obstacle
}

// nearest returns the cheapest lane that will do, by which the engine reaches memory of its own
// from DRAM.
func (s *stager) nearest(kind driver.Kind, mems []driver.Memory, will func(*lane) bool) (
	best *lane) {
	for i, l := range s.e.lanes {
		if l != s.lane && will(l) && mems[i] != nil && l.caps.Pairs.Serves(driver.DRAM, kind) &&
			(best == nil || cheaper(l, best)) {
			best = l
		}
	}
	return best
}

// direct returns the cheapest lane that reaches memory of the peer from DRAM.
func (p *Peer) direct(remote *Remote, durable bool) (best *lane) {
	for i, l := range p.e.lanes {
		if durable && !p.persists(l) || l == p.e.stager.lane || !p.alive(i) ||
			!l.caps.Pairs.Serves(driver.DRAM, remote.kind) || remote.tokens[i] == nil {
			continue
		}
		if _, err := remote.key(i); err == nil && (best == nil || cheaper(l, best)) {
			best = l
		}
	}
	return best
}

// carrier returns the lane to staging memory of the peer, or why there is none.
func (sp *stagedPeer) carrier(remote *Remote) (best *lane, obstacle string) {
	switch {
	case sp.farKinds == 0:
		return nil, "the peer gives no staging memory"
	case remote.tokens[sp.s.lane.index] == nil || !sp.farKinds.Has(remote.kind):
		return nil, fmt.Sprintf("the peer has no backend that moves %v to and from DRAM",
			remote.kind)
	}
	for i, l := range sp.s.e.lanes {
		if l == sp.s.lane || !sp.p.alive(i) || !sp.p.conns[i].notifies() ||
			!l.caps.Pairs.Serves(driver.DRAM, driver.DRAM) {
			continue
		}
		last, bestLast := sp.p.conns[i].lastResort(), best != nil &&
			sp.p.conns[best.index].lastResort()
		if best == nil || bestLast && !last || bestLast == last && cheaper(l, best) {
			best = l
		}
	}
	if best == nil {
		return nil, "no backend that connects us moves DRAM to DRAM and carries messages"
	}
	return best, ""
}

// persists reports whether a lane to the peer says when written bytes would survive a loss of
// power.
func (p *Peer) persists(l *lane) bool {
	return p.conns[l.index] != nil && p.conns[l.index].can&driver.CanDurable != 0
}

func (p *Peer) alive(lane int) bool { return p.conns[lane] != nil && !p.conns[lane].isLost() }

func cheaper(a, b *lane) bool {
	return a.caps.Cost.Estimate(1, nominalBytes) < b.caps.Cost.Estimate(1, nominalBytes)
}

// cost is that of all hops: one after the other for the first piece, and then as fast as the
// slowest. What the peer's last hop costs is not known; it is taken for one like ours.
func (c *chain) cost() (sum driver.Cost) {
	sum.Rate = c.by.caps.Cost.Rate
	for _, l := range c.lanes() {
		sum.Setup += l.caps.Cost.Setup + handOver
		sum.PerPiece += l.caps.Cost.PerPiece
		sum.Rate = min(sum.Rate, l.caps.Cost.Rate)
	}
	if c.far {
		sum.Setup += c.by.caps.Cost.Setup + 2*handOver
	}
	return sum
}

func (c *chain) lanes() []*lane {
	if c.near == nil {
		return []*lane{c.by}
	}
	return []*lane{c.near, c.by}
}

// describe draws the chain.
func (c *chain) describe(local, remote driver.Kind, slots int) string {
	var b strings.Builder
	b.WriteString(local.String())
	if c.near != nil {
		fmt.Fprintf(&b, " -%s- dram", c.near.caps.Name)
	}
	fmt.Fprintf(&b, " -%s- ", c.by.caps.Name)
	if c.far {
		b.WriteString("dram of the peer -its engine- ")
	}
	fmt.Fprintf(&b, "%v, %d pieces of %d KiB at a time", remote, slots, pieceBytes>>10)
	return b.String()
}

// shape is what a chain depends on, for one memory of the peer: the kind of the local one, which
// lanes know it, and whether writes are durable.
func shape(r *Region, durable bool) uint64 {
	lanes, kind := uint64(0), uint64(r.seg.Kind)
	if durable {
		kind |= 1 << 7
	}
	for i, m := range r.mems {
		if m != nil {
			lanes |= 1 << i
		}
	}
	return lanes<<8 | kind
}
