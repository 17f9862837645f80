// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"
	"sync"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// inboundID is how a hello names a connection: whose it is, and which.
type inboundID struct {
	from session.Owner
	conn uint64
}

// inbound is our end of a connection that a peer began: over it the peer reaches our memory and
// sends messages.
type inbound struct {
	b       *Backend
	id      inboundID
	conn    uint64 // its number
	from    address
	worker  int
	reply   []byte // the address of the peer's worker
	grace   uint64
	refusal error // why it is not welcome

	closing sync.Once

	mu       sync.Mutex // held no longer than one crossing into C that does not wait
	link     link       // nil: not made yet, or closed
	linkID   uint64     // 0: it was never made
	welcomed bool
	ended    bool // no more messages come from the peer
	reported bool // Receive has told the program so, or need not
	closed   bool // the link has been closed
}

// refusalsMax bounds the connections over Config.ConnsMax that are told so; more
// than these get no answer.
const refusalsMax = 64

// onHello begins our end of a connection. To connect back takes time, so a task does it: the peer
// sends nothing to this end before it was welcomed, but for a bye.
func (b *Backend) onHello(worker int, m *hello) {
	from, err := decodeAddress(m.from)
	if err != nil || int(m.worker) >= len(from.workers) {
		return // there is no address to answer to
	}
	c := &inbound{
		b: b, id: inboundID{from.owner, m.conn}, conn: b.conns.Add(1), from: from,
		worker: worker, reply: from.workers[m.worker], grace: m.grace,
	}
	if m.to != b.address.owner || b.gate.IsShut() {
		c.refusal = driver.ErrPeerLost // the backend that it means is gone, and we have its place
	}
	if b.admit(c) && !b.tasks.Start(c.accept) {
		c.remove()
	}
}

// admit puts a connection on the list, unless it is there or there are too many. Those of one host,
// as their hellos say, have half of the places at most; our own process has all.
func (b *Backend) admit(c *inbound) bool {
	b.endsMu.Lock()
	defer b.endsMu.Unlock()
	most, alike := b.cfg.ConnsMax, 0
	for _, other := range b.inbounds {
		if other.from.host == c.from.host {
			alike++
		}
	}
	ours := c.from.host == b.address.host && c.from.pid == b.address.pid
	switch {
	case c.refusal != nil:
	case len(b.inbounds) >= most:
		c.refusal = fmt.Errorf("%d peers, raise Config.ConnsMax: %w", len(b.inbounds),
			driver.ErrFull)
	case !ours && alike >= max(1, most/2):
		c.refusal = fmt.Errorf("%d connections of one host, raise Config.ConnsMax: %w", alike,
			driver.ErrFull)
	}
	if b.inbounds[c.id] != nil || len(b.inbounds) >= most+refusalsMax {
		return false
	}
	b.inbounds[c.id] = c
	b.accepted[c.conn] = c
	return true
}

// accept connects back, and sends a welcome or a refusal. c.mu is held while it does so, so that a
// bye or a Close at the same time comes before or after.
func (c *inbound) accept() {
	link, err := c.b.net.connect(c.worker, c.reply)
	if err != nil {
		c.remove()
		return
	}
	c.b.add(link.ID(), c)
	link.Bind(c.id.conn, c.grace)
	c.mu.Lock()
	c.link, c.linkID = link, link.ID()
	useless := c.ended // its bye came before the welcome
	if !useless {
		w := welcome{conn: link.ID(), status: session.StatusOf(c.refusal),
			grace: uint64(c.b.cfg.Grace)}
		c.welcomed, c.ended = c.refusal == nil, c.refusal != nil
		useless = link.Control(encodeControl(&w)) != nil || c.ended
	}
	c.mu.Unlock()
	if useless {
		c.closeLink()
	}
}

// onMessage implements end.
func (c *inbound) onMessage(message any) {
	switch m := message.(type) {
	case *importRequest:
		a := importAnswer{id: m.id, status: session.StatusRevoked}
		if mem := c.b.table.At(m.key); mem != nil {
			a = mem.answer(m)
		}
		// A peer that is lost needs no answer.
		c.withLink(func(l link) { _ = l.Control(encodeControl(&a)) })
	case *bye: // the program is told, unless the peer's program never had this connection
		c.end(!m.abandoned)
	}
}

// onLost implements end. Nothing that the peer has sent lands once our end is over.
func (c *inbound) onLost(bool) {
	c.withLink(func(l link) { l.End(ucp.Lost, false) })
	c.end(true)
}

// end notes that no more messages come. With tell it has Receive report that to the program. A task
// closes the link, by which C tells the peer; while the backend closes, Backend.Close does that.
func (c *inbound) end(tell bool) {
	c.mu.Lock()
	linked, first := c.link != nil, !c.ended
	c.ended = true
	if first {
		c.reported = !tell || !c.welcomed
	}
	tell = first && !c.reported
	c.mu.Unlock()
	if tell {
		c.b.words.Add(c)
		c.b.wake()
	}
	if linked {
		c.b.tasks.Start(c.closeLink)
	}
}

// answer sends a notification to the end that began the connection.
func (c *inbound) answer(msg []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link == nil || c.ended {
		return driver.ErrPeerLost
	}
	return c.link.Notify(msg)
}

// number implements end.
func (c *inbound) number() uint64 { return c.conn }

// remote implements end.
func (c *inbound) remote() *address { return &c.from }

// withLink implements end.
func (c *inbound) withLink(f func(link)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link != nil {
		f(c.link)
	}
}

// closeLink closes the link, once.
func (c *inbound) closeLink() {
	c.closing.Do(func() {
		c.mu.Lock()
		link := c.link
		c.link = nil
		if !c.ended || c.refusal != nil { // the backend closes, or the program never had it
			c.ended, c.reported = true, true
		}
		c.mu.Unlock()
		if link != nil {
			_ = link.Close(c.b.cfg.Grace)
		}
		c.mu.Lock()
		c.closed = true
		c.mu.Unlock()
		c.removeIfOver()
	})
}

// removeIfOver takes the connection off the lists once its link is closed and the program knows of
// its end. Until then its messages, which carry its id, may wait for Receive.
func (c *inbound) removeIfOver() {
	c.mu.Lock()
	over := c.reported && c.closed
	c.mu.Unlock()
	if over {
		c.remove()
	}
}

// remove takes the connection off the lists.
func (c *inbound) remove() {
	c.mu.Lock()
	id := c.linkID
	c.mu.Unlock()
	c.b.remove(id)
	c.b.endsMu.Lock()
	delete(c.b.inbounds, c.id)
	delete(c.b.accepted, c.conn)
	c.b.endsMu.Unlock()
}
