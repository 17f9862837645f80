// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

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
