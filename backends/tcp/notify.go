// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// notifs are what follows batches of one peer. A notification is due when all parts of its batch
// are in place, over whichever connections they came; messages are delivered by their numbers,
// which leave none out. mu of the inbound guards them.
type notifs struct {
	arrivals map[uint64]*arrival // by batch
	spare    []*arrival
	waiting  map[uint64]message // by number: due, and one before it is not
	next     uint64
	held     int  // messages that came and are not delivered
	kept     int  // messages that are delivered and not received, and the last word
	excess   int  // batches that are remembered beyond batchesPerPeer
	hoards   bool // they do not fit
}

// arrival is a batch of which something has come.
type arrival struct {
	landed uint32 // parts
	need   uint32 // of them, once told
	told   bool
	failed bool
	number uint64 // of the message
	msg    []byte
}

// Bounds on what a peer has us remember; one of ours stays far below.
const (
	arrivalsMin = 1 << 16 // or four times Config.BatchesMax
	waitingMax  = 1 << 17
	spareMax    = 64
)

func (n *notifs) of(batch uint64) *arrival {
	a := n.arrivals[batch]
	if a != nil {
		return a
	}
	if k := len(n.spare); k > 0 {
		a = n.spare[k-1]
		n.spare = n.spare[:k-1]
	} else {
		a = &arrival{}
	}
	n.arrivals[batch] = a
	return a
}

// crowded reports whether the peer has us remember too many batches.
func (g *inbound) crowded() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.overrun()
}

// overrun is crowded. Preconditions: mu is held.
func (g *inbound) overrun() bool {
	return g.notifs.hoards || len(g.notifs.arrivals) > max(arrivalsMin, 4*g.b.cfg.BatchesMax)
}

// remember counts what is remembered of batches. Preconditions: mu of the inbound is held.
func (n *notifs) remember(g *inbound) {
	excess := max(0, len(n.arrivals)+len(n.waiting)-batchesPerPeer)
	if excess != n.excess && !g.ended {
		n.hoards = !g.b.quotas.add(&g.b.quotas.batches, g.host, excess-n.excess)
		n.excess = excess
	}
}

// releaseQuota takes off the shared quota what an inbound counted there that has ended.
// Preconditions: mu of the inbound is held.
func (n *notifs) releaseQuota(g *inbound) {
	g.b.quotas.add(&g.b.quotas.batches, g.host, -n.excess)
	n.held, n.excess = 0, 0
}

// landed counts a part of a batch that a notification follows.
func (g *inbound) landed(batch uint64, ok bool) {
	g.mu.Lock()
	a := g.notifs.of(batch)
	a.landed++
	a.failed = a.failed || !ok
	credit := g.settle(batch, a)
	g.notifs.remember(g)
	g.mu.Unlock()
	g.repay(credit)
}

// noted takes a message.
func (g *inbound) noted(c *conn, h *header) verdict {
	if !g.fresh(h.stamp) {
		return paused
	}
	if len(c.in.body) > g.b.cfg.MessageMax {
		return finished
	}
	g.mu.Lock()
	if g.overrun() || len(g.notifs.waiting) > waitingMax ||
		g.notifs.held+g.notifs.kept >= g.b.cfg.NotifyMax {
		g.mu.Unlock()
		return finished
	}
	a := g.notifs.of(h.batch)
	a.told, a.need, a.number = true, h.count, h.ticket
	a.msg = append(make([]byte, 0, len(c.in.body)), c.in.body...) // not nil: a message
	g.notifs.held++
	credit := g.settle(h.batch, a)
	g.notifs.remember(g)
	g.mu.Unlock()
	c.post(&header{kind: kindAck, id: h.id, stamp: g.b.clock.Now()}, nil)
	g.repay(credit)
	return more
}

// voided takes word that no notification follows.
func (g *inbound) voided(_ *conn, h *header) verdict {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.overrun() || len(g.notifs.waiting) > waitingMax {
		return finished
	}
	a := g.notifs.of(h.batch)
	a.told, a.need, a.number, a.failed, a.msg = true, h.count, h.ticket, true, nil
	g.returned-- // the peer has taken this one's place back itself
	g.settle(h.batch, a)
	g.notifs.remember(g)
	return more
}

// settle ends a batch of which all has come, and delivers what is due. It returns how many
// places for messages the peer is to be told of; mu is held.
func (g *inbound) settle(batch uint64, a *arrival) (credit int) {
	n := &g.notifs
	if !a.told || a.landed < a.need {
		return 0
	}
	delete(n.arrivals, batch)
	if a.failed {
		if a.msg != nil {
			n.held--
		}
		n.waiting[a.number] = message{}
		credit = g.returns()
	} else {
		n.waiting[a.number] = message{conn: g.conn, from: g, data: a.msg}
	}
	*a = arrival{}
	if len(n.spare) < spareMax {
		n.spare = append(n.spare, a)
	}
	for {
		l, ok := n.waiting[n.next]
		if !ok {
			return credit
		}
		delete(n.waiting, n.next)
		n.next++
		if l.from != nil && !g.ended {
			n.held--
			n.kept++
			g.b.deliver(l)
		}
	}
}

// returns counts a place for a message that came free, and says when the peer is to be told.
func (g *inbound) returns() int {
	g.returned++
	if g.returned < max(1, g.b.cfg.NotifyMax/4) {
		return 0
	}
	n := g.returned
	g.returned = 0
	return n
}

// received implements taker.
func (g *inbound) received() {
	g.mu.Lock()
	g.notifs.kept--
	left := g.left && g.notifs.kept == 0
	credit := g.returns()
	g.mu.Unlock()
	if left {
		g.b.depart(g)
	}
	g.repay(credit)
}

// repay tells the peer of places for messages.
func (g *inbound) repay(n int) {
	if n == 0 {
		return
	}
	g.mu.Lock()
	c := g.conns[ctl]
	if g.ended {
		c = nil
	}
	g.mu.Unlock()
	if c != nil {
		c.send(header{kind: kindCredit, count: uint32(n)})
	}
}

// creditMax bounds the room for messages that a peer may claim to have.
const creditMax = 1 << 16

// Answer implements driver.Backend. An answer is a frame of the control connection. The peer
// says with its hello for how many it has room, and gives room back as its program receives
// them.
func (b *Backend) Answer(conn uint64, data []byte) error {
	b.mu.Lock()
	g := b.byConn[conn]
	b.mu.Unlock()
	if g == nil {
		return driver.ErrPeerLost
	}
	if most := min(b.cfg.MessageMax, g.answerMax); len(data) > most {
		return fmt.Errorf("answer of %d bytes, at most %d: %w", len(data), most, driver.ErrBounds)
	}
	g.mu.Lock()
	c := g.conns[ctl]
	if g.ended || c == nil {
		g.mu.Unlock()
		return driver.ErrPeerLost
	}
	if !g.takeRoom(c) {
		g.mu.Unlock()
		return driver.ErrFull
	}
	c.post(&header{kind: kindAnswer}, data) // under mu: in order
	g.mu.Unlock()
	c.kick(false)
	return nil
}

// takeRoom reports whether an answer may go: there is room at the peer, and it reads what we wrote.
// Otherwise the program is told when that has changed. Preconditions: mu is held.
func (g *inbound) takeRoom(c *conn) bool {
	crowded := false
	if c.posted() > postedMax {
		c.crowded.Store(true) // pairs with the exchange in takePosted
		crowded = c.posted() > postedMax
	}
	if crowded || g.room == 0 {
		g.starved = true
		return false
	}
	g.room--
	return true
}

// credited takes word that the peer's program has received answers.
func (g *inbound) credited(n int) {
	g.mu.Lock()
	g.room = min(g.room+n, creditMax)
	g.mu.Unlock()
	g.eased()
}

// eased implements end: it tells a program that waits to answer that it may.
func (g *inbound) eased() {
	g.mu.Lock()
	starved := g.starved
	g.starved = false
	g.mu.Unlock()
	if starved {
		g.b.alarm()
	}
}

// took delivers an answer. It reports false where the owner sends more than there is room for.
func (p *peer) took(data []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.kept >= p.b.cfg.NotifyMax || len(data) > p.b.cfg.MessageMax {
		return false
	}
	if !p.failed {
		p.kept++
		kept := append(make([]byte, 0, len(data)), data...) // not nil: a message
		p.b.deliver(message{conn: p.conn, from: p, data: kept})
	}
	return true
}

// received implements taker.
func (p *peer) received() {
	p.mu.Lock()
	p.kept--
	p.returned++
	n := p.returned
	if n < max(1, p.b.cfg.NotifyMax/4) || p.failed {
		p.mu.Unlock()
		return
	}
	p.returned = 0
	p.mu.Unlock()
	p.conns[ctl].send(header{kind: kindCredit, count: uint32(n)})
}
