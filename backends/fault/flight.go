// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"errors"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// eventsOf returns the events that a batch is.
func eventsOf(x *driver.Batch) Event {
	e := Batch
	switch {
	case x.Op == driver.Read:
		e |= Read
	case len(x.Descs) > 0 || x.Pattern != nil:
		e |= Write
	}
	if x.Tail == driver.NotifyTail {
		e |= Message
	}
	return e
}

func bytesOf(x *driver.Batch) (n uint64) {
	if x.Pattern != nil {
		return x.Pattern.Bytes()
	}
	for i := range x.Descs {
		n += x.Descs[i].Len
	}
	return n
}

func piecesOf(x *driver.Batch) int {
	if x.Pattern != nil {
		return x.Pattern.Count * x.Pattern.Runs()
	}
	return len(x.Descs)
}

// flight is a batch that a rule has hit.
type flight struct {
	moment
	b *Backend
	life
}

// life is what a flight is while it is in use. backend.mu guards it.
type life struct {
	p       *peer
	tag     uint64
	state   state
	when    time.Time    // of the moment
	due     time.Time    // no completion before
	batch   driver.Batch // with descriptors, pattern and notification of its own if it was held
	pattern driver.Pattern
	loops   [driver.LoopsMax]driver.Loop // of pattern
	err     error                        // the outcome, once over
	own     bool                         // the tag is ours: no caller is told of the end
	ripe    bool                         // may start once it heads its peer's line
	kept    bool                         // drop: the outcome waits for the end
	ended   bool                         // nothing holds the outcome back any more
	why     error                        // it ended, the first reason if there are more
	arrived bool                         // err came while it was being handed on
	breach  breach
}

// state is how far a flight is.
type state uint8

const (
	idle      state = iota // free
	waiting                // to be handed on at when
	swallowed              // never to be handed on
	handing                // being handed on
	flying                 // with the wrapped backend
	over                   // its outcome is here, and held back
)

// take takes a place, or none if all are taken.
// Preconditions: b.mu is held.
func (b *Backend) take() *flight {
	if b.places >= flightsMax {
		b.starved.Store(true)
		return nil
	}
	b.places++
	if n := len(b.free); n > 0 {
		f := b.free[n-1]
		b.free = b.free[:n-1]
		return f
	}
	f := &flight{b: b}
	f.come = f.comes
	return f
}

// enter makes a flight known under its tag.
// Preconditions: b.mu is held.
func (f *flight) enter(p *peer, tag uint64, s state) {
	f.p, f.tag, f.state = p, tag, s
	f.b.flights[tag] = f
	f.b.held.Add(1)
}

// leave makes a flight unknown and free. Its place stays taken while a completion needs it.
// Preconditions: b.mu is held.
func (f *flight) leave() {
	b := f.b
	b.clock.cancel(&f.moment)
	delete(b.flights, f.tag)
	b.held.Add(-1)
	p := f.p
	p.unline(f)
	f.reset()
	p.settleDrops()
	b.free = append(b.free, f)
}

// reset forgets all but the memory that the next flight can use.
func (f *flight) reset() {
	descs, msg := f.batch.Descs[:0], f.batch.Notify[:0]
	f.life = life{}
	f.batch.Descs, f.batch.Notify = descs, msg
}

// vacate gives a place back.
// Preconditions: b.mu is held.
func (b *Backend) vacate() {
	b.places--
	if b.starved.Load() && b.starved.CompareAndSwap(true, false) {
		b.wakeUp()
	}
}

// keep copies what the caller may change. The index lists of a pattern stay unchanged.
func (f *flight) keep(x *driver.Batch) {
	descs, msg := append(f.batch.Descs[:0], x.Descs...), append(f.batch.Notify[:0], x.Notify...)
	f.batch = *x
	f.batch.Descs, f.batch.Notify = descs, msg
	if x.Pattern != nil {
		f.pattern = *x.Pattern
		f.pattern.Loops = f.loops[:copy(f.loops[:], x.Pattern.Loops)]
		f.batch.Pattern = &f.pattern
	}
}

// finish has a flight complete: Poll finds it.
// Preconditions: b.mu is held.
func (f *flight) finish(err error) {
	b := f.b
	f.aftermath(err)
	switch {
	case f.own || f.breach.is(forget):
		b.vacate()
	default:
		b.deliver(driver.Completion{Tag: f.tag, Err: err})
		if f.breach.is(duplicate) {
			b.places++ // gone with the second completion
			b.deliver(driver.Completion{Tag: f.tag, Err: err})
		}
	}
	f.leave()
}

func (b *Backend) deliver(c driver.Completion) {
	b.ready = append(b.ready, c)
	b.held.Add(1)
	b.signal()
}

// comes is what happens at the moment of a flight. The moment may be one of the flight's
// earlier lives: what counts is what it is now.
func (f *flight) comes() {
	b := f.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if f.when.After(time.Now()) {
		return
	}
	switch f.state {
	case waiting:
		f.ripe = true
		f.start()
	case over:
		if !f.kept {
			f.finish(f.err)
		}
	}
}

// wait sets the moment of a flight.
// Preconditions: b.mu is held.
func (f *flight) wait(at time.Time) {
	f.when = at
	f.b.clock.set(&f.moment, at)
}

// retryAfter is how long a flight waits that the wrapped backend had no room for.
const retryAfter = 200 * time.Microsecond

// start hands a flight that is ripe on, and those behind it in its line, unless it must
// wait for one before it. The lock is not held meanwhile.
// Preconditions: b.mu is held, and it runs in the clock's goroutine.
func (f *flight) start() {
	for f != nil && f.state == waiting && f.ripe && !f.p.waits(f) {
		p := f.p
		f.state = handing // nothing else ends it until that is over
		f.b.mu.Unlock()
		err := p.hand(f.tag, &f.batch)
		f.b.mu.Lock()
		if errors.Is(err, driver.ErrFull) && !f.ended {
			f.state = waiting
			f.wait(time.Now().Add(retryAfter))
			f.b.reap()
			return
		}
		f.handed(err)
		p.b.handed.Broadcast()
		f = p.next()
	}
}

// handed goes on with a flight that the wrapped backend has taken or refused.
// Preconditions: b.mu is held.
func (f *flight) handed(err error) {
	p, tag := f.p, f.tag
	switch {
	case errors.Is(err, driver.ErrFull): // and its end was asked for meanwhile
		f.finish(f.why)
		return
	case err != nil:
		f.finish(err)
		return
	}
	p.unline(f)
	f.state = flying
	p.settleDrops()
	p.b.wakeUp() // a completion that came to be in Submit has no wake-up of its own
	if f.arrived {
		if f.observe(f.err) {
			f.finish(f.err)
		}
		return
	}
	if f.ended {
		f.b.mu.Unlock()
		p.Peer.Cancel(tag)
		f.b.mu.Lock()
	}
}

// observe takes the outcome of a flight from the wrapped backend. It reports whether that
// is to be delivered now.
// Preconditions: b.mu is held.
func (f *flight) observe(err error) (now bool) {
	switch {
	case f.p.flapped && errors.Is(err, driver.ErrClosed):
		err = driver.ErrPeerLost
	case f.ended && errors.Is(err, driver.ErrAborted):
		err = f.why // handed cancelled it, as it could not end before
	}
	f.err = err
	if f.state == handing {
		f.arrived = true
		return false
	}
	if !f.ended && f.kept {
		f.state = over
		return false
	}
	if !f.ended && f.due.After(time.Now()) {
		f.state = over
		f.wait(f.due)
		return false
	}
	return true
}

// release ends the waiting of a flight, for the reason given if it has no outcome yet and
// will get none from the wrapped backend.
// Preconditions: b.mu is held.
func (f *flight) release(why error) {
	if !f.ended {
		f.ended, f.why = true, why
	}
	switch f.state {
	case waiting, swallowed:
		f.finish(why)
	case over:
		f.finish(f.err)
	}
}
