// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"crypto/subtle"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
)

// What nothing lands behind, and why: a Revoke ends the ticket, by the owner alone; the end of a
// batch or of a connection goes by ages, of which both sides keep account.

// Revoke implements driver.Memory: the ticket that peers know opens nothing any more, and then it
// waits for the pieces in hand, which are of bounded size. No peer takes part.
func (m *memory) Revoke(ctx context.Context) error {
	m.mu.Lock()
	m.revoked = true
	m.ticket.Store(newTicket()) // no peer learns it
	m.mu.Unlock()
	if err := m.awaitPieces(ctx); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.proved {
		m.proved = true
		m.b.memories.Free(m.key)
	}
	return nil
}

// awaitPieces returns once no piece is in hand that looked at an earlier ticket. It begins no
// goroutine unless there is one, and none beside one that waits already: that one clears landed
// while it keeps pieces out, so a Revoke that finds it there has changed the ticket before.
func (m *memory) awaitPieces(ctx context.Context) error {
	if m.gate.TryLock() {
		m.gate.Unlock()
		return nil
	}
	m.mu.Lock()
	landed := m.landed
	if landed == nil {
		landed = make(chan struct{})
		m.landed = landed
		go func() {
			m.gate.Lock()
			m.mu.Lock()
			m.landed = nil
			m.mu.Unlock()
			m.gate.Unlock()
			close(landed)
		}()
	}
	m.mu.Unlock()
	select {
	case <-landed:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("revoke key %d: a piece is being copied: %w",
			m.key, driver.ContextError(ctx))
	}
}

// hasTicket reports whether a ticket is that of the memory. Where gate is held, it stays so
// for every Revoke that returns before gate is given back. Tickets are compared in constant time.
func (m *memory) hasTicket(ticket uint64) bool {
	diff := m.ticket.Load() ^ ticket
	return subtle.ConstantTimeEq(int32(diff), 0)&subtle.ConstantTimeEq(int32(diff>>32), 0) == 1
}

// enter begins a piece. It reports false, and leave must not follow, where the ticket opens
// nothing any more.
func (m *memory) enter(ticket uint64) bool {
	m.gate.RLock()
	if !m.hasTicket(ticket) {
		m.gate.RUnlock()
		return false
	}
	return true
}

func (m *memory) leave() { m.gate.RUnlock() }

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
	if a.asked != 0 && now-a.asked < limit/2 || g.conns[control] == nil || g.ended {
		return
	}
	a.asked = now
	c := g.conns[control]
	c.post(&header{kind: kindChallenge, id: uint64(now), ticket: uint64(max(limit, a.proposed))},
		nil)
	g.b.tasks.Start(func() { c.kick(false) }) // our caller holds locks of other connections
}

// onConfirm takes a confirmation.
func (g *inbound) onConfirm(h *header) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	a, now, asked := &g.ages, g.b.clock.Now(), int64(h.id)
	if asked > now || asked <= 0 {
		return errMisplaced // it answers nothing
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
	return nil
}

// outlive waits until nothing that we said can let bytes land: the owner says that it has
// stopped, or the time has come at which all we said is too old.
func (p *peer) outlive(until int64) {
	if until == 0 {
		return
	}
	old, timer := clock.After(p.b.clock, time.Duration(until-p.b.clock.Now()))
	defer timer.Stop()
	select {
	case <-old:
	case <-p.stopped:
	}
}

// What a peer sends carries a time by the owner's clock that is past. The peer works it out by its
// own clock from the last that the owner told, and the two clocks do not run alike. The kernel
// corrects CLOCK_MONOTONIC, which this is, by at most 500 ppm for NTP (MAXFREQ of linux/timex.h:
// more is a step, or a slew that a daemon was configured for), so two hosts drift apart by at
// most 1,000 ppm: one part in driftPart. The peer takes the owner's clock for so much slower.
// CLOCK_MONOTONIC_RAW, which nothing corrects, would cost Go a system call for each look.
const driftPart = 1000

// stampMax is how old what a peer knows of the owner's clock may be. Its time lags by 60 ms then.
const stampMax = int64(time.Minute)

// steady is how far the owner's clock has come at least when ours shows that.
func steady(now int64) int64 { return now - now/driftPart }

// learn takes what the owner's clock showed when it sent this.
func (p *peer) learn(stamp int64) {
	if stamp > 0 {
		now := p.b.clock.Now()
		p.offset.Store(stamp - steady(now)) // it was later there than that when this arrived
		p.learned.Store(now)
	}
}

// stamp is a time by the owner's clock that is past: 0 if we do not know, and the owner asks.
func (p *peer) stamp() int64 {
	now := p.b.clock.Now()
	if now-p.learned.Load() > stampMax {
		return 0
	}
	return steady(now) + p.offset.Load()
}
