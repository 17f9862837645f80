// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// notifications are those that follow batches of one peer. One is due when all parts of its batch
// are in place, over whichever connections they came; they are delivered by their numbers, which
// leave none out. Each number takes one of NotifyMax places from the first frame that names it
// until the program has received the message, or the peer has taken it back. The peer knows how
// many places are free, so a number beyond them is none that a peer of ours sends. mu of the
// inbound guards all.
type notifications struct {
	ring []arrival // by number; made when the first comes
	next uint64    // the number that is delivered next
	kept int       // messages that are delivered and not received, and the last word
}

// arrival is what has come of a batch that a notification follows.
type arrival struct {
	landed   uint32 // parts
	parts    uint32 // of the batch, once announced
	complete bool   // the notification has come, or word that there is none
	failed   bool   // there is none, or its bytes are not in place
	msg      []byte
}

// arrival returns the place of a number, nil for one beyond the places that the peer has.
// Preconditions: mu is held.
func (g *inbound) arrival(number uint64) *arrival {
	n, most := &g.notifs, g.b.cfg.NotifyMax
	if number < n.next || number-n.next >= uint64(max(0, most-n.kept)) {
		return nil
	}
	if n.ring == nil {
		n.ring = make([]arrival, most)
	}
	return &n.ring[number%uint64(most)]
}

// expects reports whether the peer has a place for a number.
func (g *inbound) expects(number uint64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.arrival(number) != nil
}

// onPart counts a part of a batch that a notification follows. It reports false where the peer is
// not told that the part is in place: its message is not delivered any more.
func (g *inbound) onPart(number uint64, ok bool) bool {
	g.mu.Lock()
	over := g.halted || g.ended
	if a := g.arrival(number); a != nil {
		a.landed++
		a.failed = a.failed || !ok
	}
	credit := g.deliverDue()
	g.mu.Unlock()
	g.sendCredit(credit)
	return !over
}

// awaitFresh returns once what has come may have messages delivered: once it is young enough, or
// the peer has confirmed that it still wants it.
func (g *inbound) awaitFresh(c *conn, h *header) error {
	for !g.fresh(h.stamp) {
		c.kickAnswers()
		if err := c.awaitResume(); err != nil {
			return err
		}
	}
	testpoint.At("tcp: fresh") // the age was good; messages are about to be delivered
	return nil
}

// onNotification keeps a message until the parts of its batch are in place.
func (g *inbound) onNotification(c *conn, h *header, msg []byte) error {
	if err := g.awaitFresh(c, h); err != nil {
		return err
	}
	g.mu.Lock()
	a := g.arrival(h.message)
	if a == nil || a.complete || len(msg) > g.b.cfg.MessageMax {
		g.mu.Unlock()
		return errMisplaced
	}
	a.complete, a.parts = true, h.count
	a.msg = append(make([]byte, 0, len(msg)), msg...) // not nil: a message
	over := g.halted || g.ended
	credit := g.deliverDue()
	g.mu.Unlock()
	if !over { // else it is not delivered, and may not count as sent
		c.post(&header{kind: kindAck, id: h.id, stamp: g.b.clock.Now()}, nil)
	}
	g.sendCredit(credit)
	return nil
}

// onVoid takes word that no notification follows a batch. Messages that waited for that are due.
func (g *inbound) onVoid(c *conn, h *header) error {
	if err := g.awaitFresh(c, h); err != nil {
		return err
	}
	g.mu.Lock()
	a := g.arrival(h.message)
	if a == nil || a.complete {
		g.mu.Unlock()
		return errMisplaced
	}
	a.complete, a.parts, a.failed = true, h.count, true
	credit := g.deliverDue()
	g.mu.Unlock()
	g.sendCredit(credit)
	return nil
}

// deliverDue delivers the messages whose turn has come, none of them once the inbound has halted:
// readers are not waited for, and come here with what their chunks hold. It returns how many places
// the peer is to be told of. Preconditions: mu is held.
func (g *inbound) deliverDue() (credit int) {
	n := &g.notifs
	for n.ring != nil && !g.ended && !g.halted {
		a := &n.ring[n.next%uint64(len(n.ring))]
		if !a.complete || a.landed < a.parts {
			break
		}
		if a.failed {
			credit += g.freePlace()
		} else {
			n.kept++
			g.b.deliver(message{conn: g.conn, from: g, data: a.msg})
		}
		*a = arrival{}
		n.next++
	}
	return credit
}

// freePlace counts a place for a message that came free, and says of how many the peer is to be
// told: of several at once.
func (g *inbound) freePlace() int {
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
	credit := g.freePlace()
	g.mu.Unlock()
	if left {
		g.b.freePlaces(g)
	}
	g.sendCredit(credit)
}

// sendCredit tells the peer of places for messages.
func (g *inbound) sendCredit(n int) {
	if n == 0 {
		return
	}
	g.mu.Lock()
	c := g.conns[control]
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
	c := g.conns[control]
	if g.ended || c == nil {
		g.mu.Unlock()
		return driver.ErrPeerLost
	}
	if !g.canAnswer(c) {
		g.mu.Unlock()
		return driver.ErrFull
	}
	g.room--
	c.post(&header{kind: kindAnswer}, data) // under mu: in order
	g.mu.Unlock()
	c.kick(false)
	return nil
}

// canAnswer reports whether an answer may go: there is room at the peer, and it reads what we
// wrote. Otherwise the program is told when that has changed. Preconditions: mu is held.
func (g *inbound) canAnswer(c *conn) bool {
	if c.posted() > postedMax {
		c.crowded.Store(true) // pairs with the exchange in loadQueued
		if c.posted() > postedMax {
			return false
		}
	}
	g.starved = g.room == 0
	return !g.starved
}

// onCredit takes word that the peer's program has received answers. A program that waits to answer
// is told that it may.
func (g *inbound) onCredit(n int) {
	g.mu.Lock()
	g.room = min(g.room+n, creditMax)
	starved := g.starved
	g.starved = false
	g.mu.Unlock()
	if starved {
		g.b.alarm()
	}
}

// onAnswer delivers an answer. It reports false where the owner sends more than there is room for.
func (p *peer) onAnswer(data []byte) bool {
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
	p.conns[control].send(header{kind: kindCredit, count: uint32(n)})
}
