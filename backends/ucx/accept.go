// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// inboundID is how a hello names a connection: whose it is, and which.
type inboundID struct {
	from session.Owner
	conn uint64
}

// refusalsMax bounds the connections over Config.ConnsMax that are told so; more
// than these get no answer.
const refusalsMax = 64

func (b *Backend) inboundOf(id inboundID) *inbound {
	b.endsMu.RLock()
	defer b.endsMu.RUnlock()
	return b.inbounds[id]
}

// greet begins our end of a connection. To connect back takes time, so it happens
// beside: the peer sends nothing to this end before it was welcomed, but for a bye.
func (b *Backend) greet(worker int, m *hello) {
	from, err := decodeAddress(m.from)
	if err != nil {
		return // there is no address to answer to
	}
	if int(m.worker) >= len(from.workers) {
		return
	}
	c := &inbound{
		b: b, id: inboundID{from.owner, m.conn}, conn: b.conns.Add(1), from: from,
		worker: worker, reply: from.workers[m.worker], grace: m.grace,
	}
	if m.to != b.address.owner || b.gate.IsShut() {
		c.refusal = driver.ErrPeerLost // the backend that it means is gone, and we have its place
	}
	if !b.admit(c) {
		return
	}
	if !b.tasks.Start(c.accept) {
		c.withdraw()
	}
}

// admit puts a connection on the list, unless it is there or there are too many.
func (b *Backend) admit(c *inbound) bool {
	b.endsMu.Lock()
	defer b.endsMu.Unlock()
	most := b.cfg.ConnsMax
	if len(b.inbounds) >= most && c.refusal == nil {
		c.refusal = fmt.Errorf("%d peers, raise Config.ConnsMax: %w", len(b.inbounds),
			driver.ErrFull)
	}
	if n := b.alike(c); n >= max(1, most/2) && c.refusal == nil {
		c.refusal = fmt.Errorf("%d connections of one host, raise Config.ConnsMax: %w", n,
			driver.ErrFull)
	}
	if b.inbounds[c.id] != nil || len(b.inbounds) >= most+refusalsMax {
		return false
	}
	b.inbounds[c.id] = c
	b.accepted[c.conn] = c
	return true
}

// alike counts the connections of the same host, as their hellos say, which has half of the places
// at most. Our own process has all.
// Preconditions: b.endsMu is held.
func (b *Backend) alike(c *inbound) (n int) {
	if c.from.host == b.address.host && c.from.pid == b.address.pid {
		return 0
	}
	for _, other := range b.inbounds {
		if other.from.host == c.from.host {
			n++
		}
	}
	return n
}

// accept connects back and welcomes the peer, or tells it why not.
func (c *inbound) accept() {
	link, err := c.b.net.connect(c.worker, c.reply)
	if err != nil {
		c.withdraw()
		return
	}
	c.b.add(link.ID(), c)
	link.Bind(c.id.conn, c.grace)
	if !c.open(link) {
		c.giveBack()
	}
}

// open makes the connection usable and says so, in one step, beside a Close at
// the same time. It reports false when it is not to be used.
func (c *inbound) open(link link) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.link, c.linked = link, link.ID()
	switch {
	case c.left && c.parted: // its bye came before the welcome
		_ = link.Control(farewell{}.encode())
		return false
	case c.left:
		return false
	}
	w := welcome{conn: link.ID(), status: session.StatusOf(c.refusal), grace: uint64(c.b.cfg.Grace)}
	c.left = c.refusal != nil
	c.welcomed = c.refusal == nil
	return link.Control(w.encode()) == nil && c.welcomed
}
