// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Submit implements driver.Peer.
func (p *peer) Submit(tag uint64, x *driver.Batch) error {
	if p.passes() {
		return p.Peer.Submit(tag, x)
	}
	return p.submit(tag, x)
}

// passes reports whether no rule can concern a batch.
func (p *peer) passes() bool {
	return p.b.about&batches == 0 && p.dropping.Load() == 0
}

// hand gives a batch to the wrapped backend.
func (p *peer) hand(tag uint64, x *driver.Batch) error {
	p.entry.RLock()
	defer p.entry.RUnlock()
	if err := p.gone(); err != nil {
		return err
	}
	return p.Peer.Submit(tag, x)
}

// gone says why a connection takes nothing any more.
// Preconditions: p.entry is held.
func (p *peer) gone() error {
	switch {
	case p.closed:
		return driver.ErrClosed
	case p.lost:
		return driver.ErrPeerLost
	}
	return nil
}

// submit holds a batch against the rules.
func (p *peer) submit(tag uint64, x *driver.Batch) error {
	p.entry.RLock()
	defer p.entry.RUnlock()
	if err := p.gone(); err != nil {
		return err
	}
	if err := p.check(x); err != nil {
		return err // no rule hits what is not to be tried again
	}
	b := p.b
	b.mu.Lock()
	if p.stalled.After(time.Now()) {
		b.mu.Unlock()
		return driver.ErrFull
	}
	f := b.take()
	b.mu.Unlock()
	if f == nil {
		return driver.ErrFull
	}
	v := b.judge(&occasion{events: eventsOf(x), size: bytesOf(x), pieces: piecesOf(x),
		peer: p.number})
	if !v.hit && !b.flaps && !p.mustLine(x.Tail) {
		f.giveUp()
		return p.Peer.Submit(tag, x)
	}
	err := p.carryOut(f, tag, x, &v)
	if err != nil {
		f.giveUp()
	}
	return err
}

// giveUp gives a flight back that comes to nothing.
func (f *flight) giveUp() {
	b := f.b
	b.mu.Lock()
	defer b.mu.Unlock()
	b.vacate()
	if f.state != idle {
		f.leave()
		return
	}
	f.reset()
	b.free = append(b.free, f)
}

// carryOut does to a batch what the rules have in store for it. On an error the flight is
// as it was, or known.
func (p *peer) carryOut(f *flight, tag uint64, x *driver.Batch, v *verdict) error {
	switch v.ending {
	case refuse:
		return v.err
	case stall:
		p.stall(v.time)
		return driver.ErrFull
	case flap:
		p.flap(v.time)
		return driver.ErrPeerLost
	}
	held := v.ending == swallow || v.ending == fail || !v.start.IsZero() || p.mustLine(x.Tail)
	if v.hold > 0 {
		f.due = time.Now().Add(v.hold)
		if v.start.After(time.Now()) {
			f.due = v.start.Add(v.hold)
		}
	}
	f.kept, f.breach = v.ending == drop, v.breach
	if v.breach != (breach{}) {
		return p.breach(f, tag, x, v)
	}
	if !held {
		return p.goOn(f, tag, x)
	}
	untried := p.untried(x) // now: once it is handed on, the batch may be the caller's again
	if v.ending == swallow || v.ending == fail || len(untried) == 0 {
		return p.holdUp(f, tag, x, v)
	}
	if p.mustLine(x.Tail) { // it may have to be refused, and must not go before others
		return driver.ErrFull
	}
	if f.due.Before(v.start) {
		f.due = v.start
	}
	err := p.goOn(f, tag, x)
	if err == nil {
		p.tried(untried)
	}
	return err
}

// goOn hands a batch on at once, as a flight.
func (p *peer) goOn(f *flight, tag uint64, x *driver.Batch) error {
	f.b.mu.Lock()
	if p.dead && f.kept {
		f.b.mu.Unlock()
		return driver.ErrPeerLost
	}
	f.enter(p, tag, flying)
	f.b.mu.Unlock()
	return p.Peer.Submit(tag, x)
}

// holdUp keeps a batch for later, or for ever.
func (p *peer) holdUp(f *flight, tag uint64, x *driver.Batch, v *verdict) error {
	b := f.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if p.dead && (f.kept || v.ending == swallow) {
		return driver.ErrPeerLost
	}
	f.keep(x)
	switch v.ending {
	case swallow:
		f.enter(p, tag, swallowed)
		return nil
	case fail:
		f.enter(p, tag, over)
		if f.err = v.err; f.due.After(time.Now()) {
			f.wait(f.due)
		} else {
			f.finish(f.err)
		}
		return nil
	}
	f.enter(p, tag, waiting)
	if x.Tail != driver.NoTail {
		p.line = append(p.line, f)
		p.lined.Add(1)
	}
	if v.start.IsZero() {
		v.start = time.Now()
	}
	f.wait(v.start)
	return nil
}

// mustLine reports whether a batch must wait since its message must not overtake others.
func (p *peer) mustLine(t driver.Tail) bool { return t != driver.NoTail && p.lined.Load() > 0 }

// waits reports whether a flight must wait for a message before its own.
// Preconditions: b.mu is held.
func (p *peer) waits(f *flight) bool {
	return f.batch.Tail != driver.NoTail && len(p.line) > 0 && p.line[0] != f
}

// unline takes a flight out of its peer's line.
// Preconditions: b.mu is held.
func (p *peer) unline(f *flight) {
	for i, other := range p.line {
		if other == f {
			p.line = append(p.line[:i], p.line[i+1:]...)
			p.lined.Add(-1)
			if i == 0 && len(p.line) > 0 && p.line[0].ripe && p.line[0].state == waiting {
				p.line[0].wait(time.Now())
			}
			return
		}
	}
}

// next returns the flight that heads the line, if it may go.
// Preconditions: b.mu is held.
func (p *peer) next() *flight {
	if len(p.line) > 0 && p.line[0].ripe {
		return p.line[0]
	}
	return nil
}

// stall has the connection full for a while.
func (p *peer) stall(d time.Duration) {
	b := p.b
	b.mu.Lock()
	defer b.mu.Unlock()
	p.stalled = time.Now().Add(d)
	b.clock.set(&moment{come: b.wakeUp}, p.stalled)
}
