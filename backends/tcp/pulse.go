// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// pulses is how many there are in a Failure. What a pulse sees began up to one before it, and a
// twelfth lets no host that is gone be found later than 1.2 times Failure.
const pulses = 12

// pulse gives up peers whose host is gone: for Failure it has acknowledged nothing of what our
// kernel sends it. A process that is stopped, or that its host keeps off the processors, is not
// gone: its kernel acknowledges what it does not read, and the program that began a transfer says
// how long it may take. So that there is something to acknowledge, a peer that owes us an answer is
// asked whether it is there. A connection for which no transfer waits outlasts a network that is
// out for hostFailures times Failure.
func (b *Backend) pulse() {
	if !b.entry.Enter() {
		return
	}
	defer b.entry.Exit()
	now := b.clock.Now()
	slept := now-b.beat > int64(b.cfg.Failure)/2 // we stood still
	b.beats++
	for _, p := range b.allPeers() {
		p.check(now, slept)
	}
	if b.beats%pulses == 0 {
		for _, g := range b.allAccepted() {
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

func (b *Backend) allPeers() []*peer {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Collect(maps.Keys(b.peers))
}

func (b *Backend) allAccepted() []*inbound {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Collect(maps.Values(b.accepted))
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
	if silent >= hostFailures*failure ||
		min(silent, heard, time.Duration(now-p.owesSince)) > failure {
		p.lose(errSilence(silent))
		return
	}
	if owes && time.Duration(now-p.askedAt) >= failure/2 && !p.conns[ctl].left {
		p.askedAt = now
		p.conns[ctl].send(header{kind: kindPing})
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
		if silent, _ := c.silence(now, slept); silent >= hostFailures*g.b.cfg.Failure {
			g.broken(c, errSilence(silent))
		}
	}
}

func errSilence(silent time.Duration) error {
	return fmt.Errorf("the peer's host has acknowledged nothing for %v: it is down, or out of "+
		"reach: %w", silent.Round(time.Millisecond), driver.ErrPeerLost)
}

// silence returns for how long the peer's host has acknowledged nothing of what it was sent, and
// how long ago it last acknowledged anything. Only pulse calls it.
func (c *conn) silence(now int64, slept bool) (silent, acked time.Duration) {
	s := c.b.kernel(c)
	c.left = s.left
	switch {
	case !s.waits || slept:
		c.silentSince = 0
	case c.silentSince == 0 || now-int64(s.acked) > c.silentSince:
		c.silentSince = now
	default:
		silent = time.Duration(now - c.silentSince)
	}
	return silent, s.acked
}

// outbound is what our kernel knows of the bytes that a connection was given to send.
type outbound struct {
	waits bool          // some, or a probe, are out, and not acknowledged
	left  bool          // some are out, or have not gone out
	acked time.Duration // ago the last acknowledgement came
}

// outboundOf asks the kernel. Of a connection that is closed it knows nothing.
func outboundOf(c *conn) (s outbound) {
	_ = c.raw.Control(func(fd uintptr) {
		i, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		if err == nil {
			s.waits = i.Unacked > 0 || i.Probes > 0
			s.left = i.Unacked > 0 || i.Notsent_bytes > 0
			s.acked = time.Duration(i.Last_ack_recv) * time.Millisecond
		}
	})
	return s
}
