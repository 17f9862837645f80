// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"errors"
	"slices"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// flight is a batch from Submit to its completion. backend.mu guards it.
type flight struct {
	p       *peer
	tag     uint64
	verdict verdict
	state   state
	batch   driver.Batch // a copy, of a flight that is handed on later
	due     time.Time    // no completion before
	hidden  bool         // the tag is ours: no program is told of the end
	pending bool         // it has not begun
	ripe    bool         // its time to begin has come
	ended   bool         // nothing holds the outcome back any more
	why     error        // it ended, the first reason if there are more
	early   bool         // err came while it was being handed on
	err     error        // the outcome, once over
}

// state is how far a flight is.
type state uint8

const (
	waiting   state = iota // to be handed on when it is ripe
	swallowed              // never to be handed on
	handing                // being handed on
	flying                 // with the wrapped backend
	over                   // its outcome is here, and held back
	gone
)

// keep returns a copy of a batch that its caller may change. The index lists of a pattern stay
// unchanged.
func keep(x *driver.Batch) driver.Batch {
	y := *x
	y.Descs, y.Notify = slices.Clone(x.Descs), slices.Clone(x.Notify)
	if x.Pattern != nil {
		p := *x.Pattern
		p.Loops = slices.Clone(p.Loops)
		y.Pattern = &p
	}
	return y
}

// corrupted is a batch without the second half of each piece.
func corrupted(x *driver.Batch) driver.Batch {
	y := keep(x)
	for i := range y.Descs {
		y.Descs[i].Len -= y.Descs[i].Len / 2
	}
	if y.Pattern != nil {
		y.Pattern.Run -= y.Pattern.Run / 2
	}
	return y
}

// wait has a flight begin after a time. Preconditions: b.mu is held.
func (f *flight) wait(d time.Duration) {
	f.state = waiting
	time.AfterFunc(d, func() {
		f.p.b.mu.Lock()
		defer f.p.b.mu.Unlock()
		f.ripe = true
		f.p.advance(f)
	})
}

// retryAfter is how long a flight waits that the wrapped backend had no room for.
const retryAfter = 200 * time.Microsecond

// handOn gives a flight that has waited to the wrapped backend. The lock is not held meanwhile: it
// is ended by nothing else before that has returned. It reports false where that had no room.
// Preconditions: b.mu is held.
func (f *flight) handOn() bool {
	b := f.p.b
	f.state = handing
	b.mu.Unlock()
	err := f.p.Peer.Submit(f.tag, &f.batch)
	b.mu.Lock()
	defer b.handed.Broadcast()
	switch {
	case errors.Is(err, driver.ErrFull) && !f.ended:
		f.ripe = false
		f.wait(retryAfter)
		return false
	case errors.Is(err, driver.ErrFull): // and its end was asked for meanwhile
		f.finish(f.why)
	case err != nil:
		f.finish(err)
	case f.early:
		f.state = flying
		f.landed(f.err)
	default:
		f.state = flying
		b.wakeUp() // a completion that came to be in Submit has no wake-up of its own
		if f.ended {
			b.mu.Unlock()
			f.p.Peer.Cancel(f.tag)
			b.mu.Lock()
		}
	}
	return true
}

// landed takes the outcome of a flight from the wrapped backend. Preconditions: b.mu is held.
func (f *flight) landed(err error) {
	switch {
	case f.p.lost && errors.Is(err, driver.ErrClosed): // it flaps
		err = driver.ErrPeerLost
	case f.ended && errors.Is(err, driver.ErrAborted):
		err = f.why // handOn cancelled it, as it could not end before
	}
	f.err = err
	if f.state == handing {
		f.early = true
		return
	}
	f.settle()
}

// settle completes a flight whose outcome is here, now or later. Preconditions: b.mu is held.
func (f *flight) settle() {
	f.state = over
	left := time.Until(f.due)
	switch {
	case f.ended || f.verdict.ending != drop && left <= 0:
		f.finish(f.err)
	case f.verdict.ending != drop:
		time.AfterFunc(left, func() {
			f.p.b.mu.Lock()
			defer f.p.b.mu.Unlock()
			if f.state == over {
				f.finish(f.err)
			}
		})
	}
}

// finish has a flight complete. Preconditions: b.mu is held.
func (f *flight) finish(err error) {
	p, b := f.p, f.p.b
	f.leave()
	if f.hidden {
		return
	}
	b.deliver(f.tag, err)
	if f.verdict.twice {
		b.places++ // gone with the second completion
		b.deliver(f.tag, err)
	}
	if err != nil && f.verdict.lateWrite && p.gone() == nil {
		f.batch.Tail, f.batch.Notify = driver.NoTail, nil
		p.launch(f.batch, f.verdict.lateTime)
	}
}

// leave makes a flight unknown. Its place stays taken while a completion needs it.
// Preconditions: b.mu is held.
func (f *flight) leave() {
	f.state = gone
	delete(f.p.b.flights, f.tag)
	f.p.begun(f)
}

// release ends the waiting of a flight, for the reason given if it has no outcome yet and will get
// none from the wrapped backend. Preconditions: b.mu is held.
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
