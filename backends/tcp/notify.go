// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// Messages. A notification follows the bytes of its batch: the owner delivers it when all parts of
// the batch have landed, over whichever connections they came (onPartLanded, onNotification,
// onVoid, deliverDue). Answers go the other way (Answer, onAnswer). Each direction has credit: the
// sender knows how many messages the receiver has room for, and the receiver tells it of room that
// its program has made (received).

// notifications holds the notifications of one peer that the owner has not delivered yet. The peer
// numbers its notifications without gaps, and the owner delivers them in that order. Each number
// takes one of Config.NotifyMax places, from the first frame that names it until the program has
// received the message, or the peer has withdrawn it. The peer counts the free places, so a number
// beyond them breaks the protocol. inbound.mu guards all fields.
type notifications struct {
	ring       []arrival // by number; made when the first comes
	next       uint64    // the number that the owner delivers next
	unreceived int       // messages delivered but not received by the program, ErrPeerLost included
}

// arrival says how much the owner has of one batch and of the notification that follows it.
type arrival struct {
	partsLanded uint32
	parts       uint32 // of the batch, once announced
	announced   bool   // the notification has come, or the peer has said that none follows
	failed      bool   // none follows, or bytes of the batch have not landed
	msg         []byte
}

// arrival returns the place of the notification of this number, or nil if it has none.
// Preconditions: mu is held.
func (g *inbound) arrival(number uint64) *arrival {
	n, most := &g.notifs, g.b.cfg.NotifyMax
	if number < n.next || number-n.next >= uint64(max(0, most-n.unreceived)) {
		return nil
	}
	if n.ring == nil {
		n.ring = make([]arrival, most)
	}
	return &n.ring[number%uint64(most)]
}

// expects reports whether the notification of this number has a place.
func (g *inbound) expects(number uint64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.arrival(number) != nil
}

// onPartLanded counts a part of a batch that a notification follows. It reports false if the part
// must not be acknowledged, because the inbound has halted and delivers the notification no more.
func (g *inbound) onPartLanded(c *conn, number uint64, ok bool) bool {
	g.mu.Lock()
	stopped := g.halted || g.ended
	if a := g.arrival(number); a != nil {
		a.partsLanded++
		a.failed = a.failed || !ok
	}
	credit := g.deliverDue()
	g.mu.Unlock()
	g.b.handOver(c)
	g.sendCredit(credit)
	return !stopped
}

// awaitFresh waits until the owner may deliver messages because of this frame: the frame is young
// enough, or the peer has confirmed that it still wants it.
func (g *inbound) awaitFresh(c *conn, h *header) error {
	for !g.freshOrAsk(h.stamp) {
		c.writeQueued()
		if err := c.awaitResume(); err != nil {
			return err
		}
	}
	testpoint.At("tcp: fresh") // the age was checked; messages are about to be delivered
	return nil
}

// onNotification keeps a notification until the parts of its batch have landed.
func (g *inbound) onNotification(c *conn, h *header, msg []byte) error {
	if err := g.awaitFresh(c, h); err != nil {
		return err
	}
	g.mu.Lock()
	a := g.arrival(h.message)
	if a == nil || a.announced || len(msg) > g.b.cfg.MessageMax {
		g.mu.Unlock()
		return errMisplaced
	}
	a.announced, a.parts = true, h.count
	a.msg = append(make([]byte, 0, len(msg)), msg...) // not nil, also if it is empty
	stopped := g.halted || g.ended
	credit := g.deliverDue()
	g.mu.Unlock()
	if !stopped { // else the owner does not deliver it, and must not acknowledge it
		c.queueFrame(&header{kind: kindAck, id: h.id, stamp: g.b.clock.Now()}, nil)
	}
	g.b.handOver(c)
	g.sendCredit(credit)
	return nil
}

// onVoid notes that no notification follows a batch, and delivers later ones that waited for that.
func (g *inbound) onVoid(c *conn, h *header) error {
	if err := g.awaitFresh(c, h); err != nil {
		return err
	}
	g.mu.Lock()
	a := g.arrival(h.message)
	if a == nil || a.announced {
		g.mu.Unlock()
		return errMisplaced
	}
	a.announced, a.parts, a.failed = true, h.count, true
	credit := g.deliverDue()
	g.mu.Unlock()
	g.b.handOver(c)
	g.sendCredit(credit)
	return nil
}

// deliverDue delivers, in order, the notifications whose batches have landed. The caller hands them
// over, and sends the credit that it returns to the peer. Once the inbound has halted it delivers
// none: reading goroutines may still come here with frames of their chunks.
// Preconditions: mu is held.
func (g *inbound) deliverDue() (credit int) {
	n := &g.notifs
	for n.ring != nil && !g.ended && !g.halted {
		a := &n.ring[n.next%uint64(len(n.ring))]
		if !a.announced || a.partsLanded < a.parts {
			break
		}
		if a.failed {
			credit += g.freePlace()
		} else {
			n.unreceived++
			g.b.inbox.add(message{connID: g.connID, source: g, data: a.msg})
		}
		*a = arrival{}
		n.next++
	}
	return credit
}

// freePlace counts a place that came free. It returns the credit that the caller must send to the
// peer: 0 until several places are free.
func (g *inbound) freePlace() int {
	g.creditOwed++
	if g.creditOwed < max(1, g.b.cfg.NotifyMax/4) {
		return 0
	}
	n := g.creditOwed
	g.creditOwed = 0
	return n
}

// received implements messageSource.
func (g *inbound) received() {
	g.mu.Lock()
	g.notifs.unreceived--
	last := g.forgotten && g.notifs.unreceived == 0
	credit := g.freePlace()
	g.mu.Unlock()
	if last {
		g.b.freePlaces(g)
	}
	g.sendCredit(credit)
}

// sendCredit tells the peer that it has n more places for notifications.
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
		c.sendFrame(header{kind: kindCredit, count: uint32(n)})
	}
}

// creditMax bounds the number of messages for which a peer may claim to have room.
const creditMax = 1 << 16

// Answer implements driver.Backend. An answer is a frame of the control connection. The peer says
// in its hello for how many answers it has room, and tells of more as its program receives them.
func (b *Backend) Answer(conn uint64, data []byte) error {
	b.mu.Lock()
	g := b.acceptedByConn[conn]
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
	if !g.hasAnswerRoom(c) {
		g.mu.Unlock()
		return driver.ErrFull
	}
	g.answerRoom--
	c.queueFrame(&header{kind: kindAnswer}, data) // under mu: in order
	g.mu.Unlock()
	c.startWriting(false)
	return nil
}

// hasAnswerRoom reports whether the peer has room for an answer, and reads its connection fast
// enough. If not, the backend wakes the program once that has changed.
// Preconditions: mu is held.
func (g *inbound) hasAnswerRoom(c *conn) bool {
	if c.queuedBytes() > queuedMax {
		c.answerWaitsForQueue.Store(true) // pairs with the exchange in gatherQueued
		if c.queuedBytes() > queuedMax {
			return false
		}
	}
	g.answerWaitsForRoom = g.answerRoom == 0
	return !g.answerWaitsForRoom
}

// onCredit: the peer has room for n more answers.
func (g *inbound) onCredit(n int) {
	g.mu.Lock()
	g.answerRoom = min(g.answerRoom+n, creditMax)
	waits := g.answerWaitsForRoom
	g.answerWaitsForRoom = false
	g.mu.Unlock()
	if waits {
		g.b.wakeForRoom()
	}
}

// onAnswer delivers an answer. It reports false if the owner sends more than there is room for.
func (p *peer) onAnswer(data []byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.answersHeld >= p.b.cfg.NotifyMax || len(data) > p.b.cfg.MessageMax {
		return false
	}
	if !p.failed {
		p.answersHeld++
		data = append(make([]byte, 0, len(data)), data...) // not nil, also if it is empty
		p.b.deliver(message{connID: p.connID, source: p, data: data})
	}
	return true
}

// received implements messageSource.
func (p *peer) received() {
	p.mu.Lock()
	p.answersHeld--
	p.creditOwed++
	n := p.creditOwed
	if n < max(1, p.b.cfg.NotifyMax/4) || p.failed {
		p.mu.Unlock()
		return
	}
	p.creditOwed = 0
	p.mu.Unlock()
	p.conns[control].sendFrame(header{kind: kindCredit, count: uint32(n)})
}
