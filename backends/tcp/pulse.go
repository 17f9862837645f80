// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"maps"
	"math"
	"slices"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// pulses is how many there are in a Failure. What a pulse sees began up to one before it, and a
// twelfth lets no host that is gone be found later than 1.2 times Failure.
const pulses = 12

// pulse gives up peers whose host is gone: for Failure it has acknowledged nothing of what our
// kernel sends it. A process that is stopped, or that its host keeps off the processors, is not
// gone: its kernel acknowledges what it does not read, and the program that began a transfer says
// how long it may take. So that there is something to acknowledge, a peer that owes us an answer is
// asked whether it is there. A connection for which no transfer waits outlasts a network that is
// out for session.IdleFailures times Failure.
func (b *Backend) pulse() {
	if !b.entry.Enter() {
		return
	}
	defer b.entry.Exit()
	now := b.clock.Now()
	slept := now-b.beat > int64(b.cfg.Failure)/2 // we stood still
	b.beats++
	b.mu.Lock()
	peers, accepted := slices.Collect(maps.Keys(b.peers)), slices.Collect(maps.Values(b.accepted))
	b.mu.Unlock()
	for _, p := range peers {
		p.check(now, slept)
	}
	if b.beats%pulses == 0 {
		for _, g := range accepted {
			g.check(now, slept)
		}
	}
	b.awaitPulse(now)
}

// awaitPulse has pulse called a period after now, unless the backend is closed by then.
func (b *Backend) awaitPulse(now int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed.Load() {
		b.beat = now
		b.pulsing = b.clock.AfterFunc(b.cfg.Failure/pulses, b.pulse)
	}
}

// check is pulse's look at a peer.
func (p *peer) check(now int64, slept bool) {
	p.mu.Lock()
	owes := len(p.byTag) > 0
	p.mu.Unlock()
	p.importMu.RLock()
	owes = owes || len(p.asked) > 0
	p.importMu.RUnlock()
	if !owes || slept {
		p.owesSince = now
	}
	if !owes && p.b.beats%pulses != 0 {
		return
	}
	failure := p.b.cfg.Failure
	var silent, heard time.Duration = 0, math.MaxInt64
	for _, c := range p.conns {
		each, acked := c.silence(now, slept)
		silent, heard = max(silent, each), min(heard, acked)
	}
	// A host that has no room for what one connection brings may drop it without a word, and answer
	// on the others.
	if silent >= session.IdleFailures*failure ||
		min(silent, heard, time.Duration(now-p.owesSince)) > failure {
		p.lose()
		return
	}
	if owes && time.Duration(now-p.askedAt) >= failure/2 && !p.conns[control].left {
		p.askedAt = now
		p.conns[control].send(header{kind: kindPing})
	}
}

// check is pulse's look at who sends to us.
func (g *inbound) check(now int64, slept bool) {
	g.mu.Lock()
	conns := slices.Clone(g.conns)
	g.mu.Unlock()
	for _, c := range conns {
		if c == nil {
			continue
		}
		if silent, _ := c.silence(now, slept); silent >= session.IdleFailures*g.b.cfg.Failure {
			g.broken(c, driver.ErrPeerLost)
		}
	}
}

// silence returns for how long the peer's host has acknowledged nothing of what it was sent, and
// how long ago it last acknowledged anything. Only pulse calls it.
func (c *conn) silence(now int64, slept bool) (silent, acked time.Duration) {
	s := c.b.kernel(c)
	c.left = s.Pending
	return c.host.Look(s, now, slept), s.SinceAck
}
