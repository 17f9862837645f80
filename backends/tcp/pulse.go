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

// pulses is how often pulse runs in the time of Config.Failure. It sees a silence up to one period
// late, at its beginning and at its end: so a host is given up after at most 1.2 times Failure.
const pulses = 12

// pulse gives up peers whose host is gone: its kernel has acknowledged nothing of what was sent to
// it for Config.Failure. A process that is stopped, or kept off its processors, is not gone: its
// kernel acknowledges what it does not read, and the program that began a transfer says how long it
// may take. So that there is something to acknowledge, pulse sends a ping to a peer that owes an
// answer. Where no transfer waits, a connection outlasts a network that is out for
// session.IdleFailures times Failure.
func (b *Backend) pulse() {
	if !b.entry.Enter() {
		return
	}
	defer b.entry.Exit()
	now := b.clock.Now()
	slept := now-b.lastPulse > int64(b.cfg.Failure)/2 // this process was stopped meanwhile
	b.pulseCount++
	b.mu.Lock()
	peers, accepted := slices.Collect(maps.Keys(b.peers)), slices.Collect(maps.Values(b.accepted))
	b.mu.Unlock()
	for _, p := range peers {
		p.checkHost(now, slept)
	}
	if b.pulseCount%pulses == 0 {
		for _, g := range accepted {
			g.checkHost(now, slept)
		}
	}
	b.schedulePulse(now)
}

// schedulePulse has pulse called a period after now, unless the backend is closed.
func (b *Backend) schedulePulse(now int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed.Load() {
		b.lastPulse = now
		b.pulseTimer = b.clock.AfterFunc(b.cfg.Failure/pulses, b.pulse)
	}
}

// checkHost gives the peer up if its host is gone.
func (p *peer) checkHost(now int64, slept bool) {
	p.mu.Lock()
	owes := len(p.byTag) > 0
	p.mu.Unlock()
	p.importMu.RLock()
	owes = owes || len(p.importAnswers) > 0
	p.importMu.RUnlock()
	if !owes || slept {
		p.idleAt = now
	}
	if !owes && p.b.pulseCount%pulses != 0 {
		return
	}
	failure := p.b.cfg.Failure
	var silent, heard time.Duration = 0, math.MaxInt64
	for _, c := range p.conns {
		each, acked := c.silence(now, slept)
		silent, heard = max(silent, each), min(heard, acked)
	}
	// A host without room for what one connection brings may drop it silently, and acknowledge what
	// the others bring.
	if silent >= session.IdleFailures*failure ||
		min(silent, heard, time.Duration(now-p.idleAt)) > failure {
		p.lose()
		return
	}
	if owes && time.Duration(now-p.pingedAt) >= failure/2 && !p.conns[control].pendingAtPulse {
		p.pingedAt = now
		p.conns[control].sendFrame(header{kind: kindPing})
	}
}

// checkHost breaks the connections of a peer whose host is gone.
func (g *inbound) checkHost(now int64, slept bool) {
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

// silence returns for how long the other host has acknowledged nothing of what was sent to it over
// this connection, and how long ago it last acknowledged anything. Only pulse calls it.
func (c *conn) silence(now int64, slept bool) (silent, acked time.Duration) {
	s := c.b.queryOutbound(c)
	c.pendingAtPulse = s.Pending
	return c.silenceWatch.Look(s, now, slept), s.SinceAck
}
