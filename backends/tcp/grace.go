// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// The owner lands no bytes that are older than the age limit of their connection, which both
// sides know: the larger Grace of the two, and the time that the network takes for a round
// trip. All that the initiator sends carries a time by the owner's clock that is past. What is
// older when it would land, as after a freeze of the owner, waits until the initiator has
// confirmed that it still wants it.
//
// So the initiator knows that nothing it said lands any more once all of it, its last
// confirmation too, is older than the limit. The limit must hold a whole round trip: a time
// stamp is as old as the way of the clock to the initiator and of the frame back, and so is a
// confirmation. The initiator measures it before it begins. If it grows later, then
// confirmations come too late to be of use; the owner proposes a longer limit with its next
// question, and goes by it when the initiator has confirmed the limit with the bytes.

// roundTripMax is how much the age limit may exceed the larger Grace of both sides.
const roundTripMax = 4 * time.Second

// measured takes the time between a frame and its answer. The shortest counts.
func (p *peer) measured(took int64) {
	for was := p.roundTrip.Load(); was == 0 || took < was; was = p.roundTrip.Load() {
		if p.roundTrip.CompareAndSwap(was, took) {
			return
		}
	}
}

// setGrace settles the age limit with which the connection begins.
func (p *peer) setGrace(owner time.Duration) error {
	larger := max(p.b.cfg.Grace, min(owner, graceMax))
	took := time.Duration(p.roundTrip.Load())
	if took > roundTripMax {
		return fmt.Errorf("a round trip takes %v: bytes may be as old as Config.Grace, "+
			"%v, and %v: %w",
			took, larger, roundTripMax, driver.ErrTimeout)
	}
	p.grace, p.graceTop = int64(larger+took), int64(larger+roundTripMax)
	return nil
}

// confirm tells the owner that what we sent so far is still wanted. It is asked where that is too
// old: a connection that has ended confirms nothing. An owner that asks and does not read gets no
// answer: it asks again.
func (p *peer) confirm(c *conn, h *header) {
	if c.posted() > postedMax {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed {
		return
	}
	p.grace = max(p.grace, int64(min(h.ticket, uint64(p.graceTop)))) // before the owner hears of it
	p.lastSent = p.b.clock.Now()
	c.post(&header{kind: kindConfirm, id: h.id, ticket: uint64(p.grace)}, nil)
}

// ages is how the owner's end of a connection judges what comes. mu of the inbound guards what
// is not atomic.
type ages struct {
	limit     atomic.Int64 // what is older waits for a confirmation
	top       int64        // what limit may grow to
	proposed  int64        // the limit of the next question
	confirmed atomic.Int64 // when we asked what was confirmed last
	asked     int64        // when we asked what is not confirmed yet; 0: nothing
}

func (a *ages) begin(ours, peers time.Duration) {
	larger := max(ours, min(peers, graceMax))
	a.limit.Store(int64(larger))
	a.top = int64(larger + roundTripMax)
}

// extend goes by a longer limit, which the peer has said that it goes by.
func (a *ages) extend(limit uint64) {
	a.limit.Store(max(a.limit.Load(), int64(min(limit, uint64(a.top)))))
}

// fresh reports whether what was sent then may land now. If not, the peer is asked, and its
// readers are told to go on when it confirms; it is asked early, so that a slow network need
// not wait.
func (g *inbound) fresh(stamp int64) bool {
	now := g.b.clock.Now()
	age := now - max(min(stamp, now), g.ages.confirmed.Load())
	limit := g.ages.limit.Load()
	if age > limit/2 {
		g.challenge(now, limit)
	}
	return age <= limit
}

// challenge asks the peer whether it still wants what it sent, unless it was asked just now.
func (g *inbound) challenge(now, limit int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	a := &g.ages
	if a.asked != 0 && now-a.asked < limit/2 || g.conns[ctl] == nil || g.ended {
		return
	}
	a.asked = now
	c := g.conns[ctl]
	c.post(&header{kind: kindChallenge, id: uint64(now), ticket: uint64(max(limit, a.proposed))},
		nil)
	g.b.tasks.Start(func() { c.kick(false) }) // our caller holds locks of other connections
}

// vouched takes a confirmation. It reports false for one that answers nothing.
func (g *inbound) vouched(h *header) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	a, now, asked := &g.ages, g.b.clock.Now(), int64(h.id)
	if asked > now || asked <= 0 {
		return false
	}
	a.extend(h.ticket)
	if limit := a.limit.Load(); now-asked > limit*3/4 {
		a.proposed = min(2*limit, a.top) // it comes too late, or nearly so
	}
	a.confirmed.Store(max(asked, a.confirmed.Load()))
	if asked == a.asked {
		a.asked = 0
	}
	for _, c := range g.conns {
		if c != nil {
			c.proceed()
		}
	}
	return true
}
