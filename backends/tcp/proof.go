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

// The two proofs that nothing lands later. A Revoke is proved by the owner alone: it changes the
// ticket of the memory, and waits for the pieces that are landing. The end of a batch, or of a
// connection, is proved by the owner's word, or else by age: both sides know how old bytes may be
// when they land.

// Revoke implements driver.Memory. Pieces are of bounded size, and no peer takes part.
func (m *memory) Revoke(ctx context.Context) error {
	m.mu.Lock()
	m.revoked = true
	m.ticket.Store(newTicket()) // which no peer learns: hasTicket fails for what peers send
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

// awaitPieces returns once no piece is landing that was checked against an earlier ticket. If one
// is, a goroutine takes the gate, however many Revokes wait. It clears awaited while it holds the
// gate: so a Revoke that finds awaited set has changed the ticket before the gate is taken.
func (m *memory) awaitPieces(ctx context.Context) error {
	if m.gate.TryLock() {
		m.gate.Unlock()
		return nil
	}
	m.mu.Lock()
	awaited := m.awaited
	if awaited == nil {
		awaited = make(chan struct{})
		m.awaited = awaited
		go func() {
			m.gate.Lock()
			m.mu.Lock()
			m.awaited = nil
			m.mu.Unlock()
			m.gate.Unlock()
			close(awaited)
		}()
	}
	m.mu.Unlock()
	select {
	case <-awaited:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("revoke key %d: a piece is being copied: %w",
			m.key, driver.ContextError(ctx))
	}
}

// hasTicket reports whether a ticket is that of the memory. While the caller holds the gate, no
// Revoke returns that changes the ticket. Tickets are compared in constant time.
func (m *memory) hasTicket(ticket uint64) bool {
	diff := m.ticket.Load() ^ ticket
	return subtle.ConstantTimeEq(int32(diff), 0)&subtle.ConstantTimeEq(int32(diff>>32), 0) == 1
}

// enterGate holds the gate for a piece, if the ticket is that of the memory. Otherwise it reports
// false, and leaveGate must not follow.
func (m *memory) enterGate(ticket uint64) bool {
	m.gate.RLock()
	if !m.hasTicket(ticket) {
		m.gate.RUnlock()
		return false
	}
	return true
}

func (m *memory) leaveGate() { m.gate.RUnlock() }

// Ages. The owner lands no bytes that are older than the age limit of the connection, which both
// sides know: the larger Grace of the two, and the time of a round trip. Every frame of the
// initiator carries a time by the owner's clock that is not later than the frame was made. Bytes
// that are older when they would land, as after a freeze of the owner, wait until the initiator has
// confirmed that it still wants them (freshOrAsk, confirm).
//
// So the initiator knows that nothing it sent lands any more once all of it, its last confirmation
// too, is older than the limit (shutDown). The limit must hold a whole round trip, because a time
// is as old as the way of the owner's clock to the initiator and of the frame back, and so is a
// confirmation. The initiator measures the round trip before it begins. If it grows later,
// confirmations come too late to be of use: the owner proposes a longer limit with its next
// question, and goes by it when the initiator has confirmed it with the bytes.

// roundTripMax is how much the age limit may exceed the larger Grace of both sides.
const roundTripMax = 4 * time.Second

// noteRoundTrip keeps the shortest time between a frame and its answer.
func (p *peer) noteRoundTrip(took int64) {
	for was := p.roundTrip.Load(); was == 0 || took < was; was = p.roundTrip.Load() {
		if p.roundTrip.CompareAndSwap(was, took) {
			return
		}
	}
}

// setGrace sets the age limit with which the connection begins. owner is the owner's Grace.
func (p *peer) setGrace(owner time.Duration) error {
	larger := max(p.b.cfg.Grace, min(owner, graceMax))
	took := time.Duration(p.roundTrip.Load())
	if took > roundTripMax {
		return fmt.Errorf("a round trip takes %v: bytes may be as old as Config.Grace, "+
			"%v, and %v: %w",
			took, larger, roundTripMax, driver.ErrTimeout)
	}
	p.grace, p.graceMost = int64(larger+took), int64(larger+roundTripMax)
	return nil
}

// confirm answers an owner that asks whether this initiator still wants the frames that it has sent
// so far. After shutDown has begun it does not. An owner that asks and does not read gets no
// answer: it asks again.
func (p *peer) confirm(c *conn, h *header) {
	if c.queuedBytes() > queuedMax {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed {
		return
	}
	// Before the owner hears of the longer limit:
	p.grace = max(p.grace, int64(min(h.ticket, uint64(p.graceMost))))
	p.lastSent = p.b.clock.Now()
	c.queueFrame(&header{kind: kindConfirm, id: h.id, ticket: uint64(p.grace)}, nil)
}

// ages has what the owner's end of a connection needs to judge the age of frames, in nanoseconds of
// its own clock. inbound.mu guards the fields that are not atomic.
type ages struct {
	limit       atomic.Int64 // older frames wait for a confirmation
	most        int64        // up to which limit may grow
	proposed    int64        // the limit that the next question proposes
	confirmedAt atomic.Int64 // when the question was asked that was confirmed last
	askedAt     int64        // when the question was asked that is not confirmed yet; 0: none
}

func (a *ages) begin(ours, peers time.Duration) {
	larger := max(ours, min(peers, graceMax))
	a.limit.Store(int64(larger))
	a.most = int64(larger + roundTripMax)
}

// extend makes the limit longer, as the peer has said that it counts by that limit.
func (a *ages) extend(limit uint64) {
	a.limit.Store(max(a.limit.Load(), int64(min(limit, uint64(a.most)))))
}

// freshOrAsk reports whether a frame with this time may land now. If not, it has the peer asked,
// and onConfirm resumes the reading goroutines. It asks at half of the limit, so that frames over a
// slow network need not wait.
func (g *inbound) freshOrAsk(stamp int64) bool {
	now := g.b.clock.Now()
	age := now - max(min(stamp, now), g.ages.confirmedAt.Load())
	limit := g.ages.limit.Load()
	if age > limit/2 {
		g.askIfWanted(now, limit)
	}
	return age <= limit
}

// askIfWanted asks the peer whether it still wants what it sent, unless it was asked just now.
func (g *inbound) askIfWanted(now, limit int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	a := &g.ages
	if a.askedAt != 0 && now-a.askedAt < limit/2 || g.conns[control] == nil || g.ended {
		return
	}
	a.askedAt = now
	c := g.conns[control]
	c.queueFrame(&header{kind: kindChallenge, id: uint64(now),
		ticket: uint64(max(limit, a.proposed))}, nil)
	g.b.tasks.Start(func() { c.startWriting(false) }) // the caller holds locks of other connections
}

// onConfirm handles the peer's answer that it still wants the frames from before question h.id.
func (g *inbound) onConfirm(h *header) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	a, now, asked := &g.ages, g.b.clock.Now(), int64(h.id)
	if asked > now || asked <= 0 {
		return errMisplaced // no question was asked then
	}
	a.extend(h.ticket)
	if limit := a.limit.Load(); now-asked > limit*3/4 {
		a.proposed = min(2*limit, a.most) // the confirmation comes too late, or nearly so
	}
	a.confirmedAt.Store(max(asked, a.confirmedAt.Load()))
	if asked == a.askedAt {
		a.askedAt = 0
	}
	for _, c := range g.conns {
		if c != nil {
			c.resumeReader()
		}
	}
	return nil
}

// awaitTooOld waits until the owner says that it has stopped, or until the time has come at which
// all that was sent is too old to land; 0: nothing was sent.
func (p *peer) awaitTooOld(until int64) {
	if until == 0 {
		return
	}
	old, timer := clock.After(p.b.clock, time.Duration(until-p.b.clock.Now()))
	defer timer.Stop()
	select {
	case <-old:
	case <-p.ownerStopped:
	}
}

// Two clocks. The initiator works the owner's time out from the last time that the owner told, by
// its own clock, and two clocks do not run alike. The kernel corrects CLOCK_MONOTONIC, which Go
// reads, by at most 500 ppm for NTP (MAXFREQ of linux/timex.h: more is a step, or a slew that a
// daemon was configured for), so two hosts drift apart by at most 1,000 ppm: one part in driftPart.
// The initiator assumes that the owner's clock is that much slower. CLOCK_MONOTONIC_RAW, which
// nothing corrects, would cost Go a system call for each look.
const driftPart = 1000

// stampMax is how old the last time that the owner told may be: ownerTime lags by 60 ms then.
const stampMax = int64(time.Minute)

// slowest is how far the owner's clock has run at least while this host's clock ran that far.
func slowest(now int64) int64 { return now - now/driftPart }

// noteOwnerClock keeps what the owner's clock showed when it sent a frame that has just come.
func (p *peer) noteOwnerClock(stamp int64) {
	if stamp > 0 {
		now := p.b.clock.Now()
		p.ownerClock.Store(stamp - slowest(now)) // the owner's clock is ahead of it by now
		p.ownerClockAt.Store(now)
	}
}

// ownerTime returns a time by the owner's clock that is past. 0: it is not known, so the owner
// asks.
func (p *peer) ownerTime() int64 {
	now := p.b.clock.Now()
	if now-p.ownerClockAt.Load() > stampMax {
		return 0
	}
	return slowest(now) + p.ownerClock.Load()
}
