// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"errors"
	"slices"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// flight is a batch from Submit to its completion. Backend.mu guards it.
//
// Its way: waiting, submitting, submitted, heldBack, done. A batch that rules do not delay begins
// as submitted, one that they swallow stays swallowed until it is released.
type flight struct {
	p        *peer
	tag      uint64
	internal bool // startInternal made it: the program is not told of its end
	verdict  verdict
	state    state
	batch    driver.Batch // a copy, if the batch is submitted later or written once more

	queued   bool // peer.queued counts it: it has not been submitted
	startDue bool // the time to submit it has come

	completeAfter time.Time // its completion is held back until then
	err           error     // the outcome, once there is one
	doneInSubmit  bool      // the wrapped backend completed it before its Submit had returned
	released      bool      // nothing holds the completion back any more, for this reason:
	reason        error
}

// state is how far a flight is.
type state uint8

const (
	waiting    state = iota // to be submitted when startDue is set
	swallowed               // never to be submitted
	submitting              // a Submit of the wrapped backend is running
	submitted               // the wrapped backend has it
	heldBack                // the outcome is known, the completion is held back
	done
)

// copyBatch copies a batch, since Submit's caller may reuse it. The contract has the caller leave
// the index lists of a pattern unchanged, so those are not copied.
func copyBatch(x *driver.Batch) driver.Batch {
	y := *x
	y.Descs, y.Notify = slices.Clone(x.Descs), slices.Clone(x.Notify)
	if x.Pattern != nil {
		p := *x.Pattern
		p.Loops = slices.Clone(p.Loops)
		y.Pattern = &p
	}
	return y
}

// halved returns a copy of a batch without the second half of each piece.
func halved(x *driver.Batch) driver.Batch {
	y := copyBatch(x)
	for i := range y.Descs {
		y.Descs[i].Len -= y.Descs[i].Len / 2
	}
	if y.Pattern != nil {
		y.Pattern.Run -= y.Pattern.Run / 2
	}
	return y
}

// startAfter has a flight submitted after a time. Preconditions: b.mu is held.
func (f *flight) startAfter(d time.Duration) {
	f.state = waiting
	time.AfterFunc(d, func() {
		f.p.b.mu.Lock()
		defer f.p.b.mu.Unlock()
		f.startDue = true
		f.p.submitDue(f)
	})
}

// retryAfter is the time before a flight for which the wrapped backend had no room is tried again.
const retryAfter = 200 * time.Microsecond

// submit submits a flight that has waited to the wrapped backend. It releases b.mu meanwhile; in
// that time the flight is not completed. It reports false if the wrapped backend had no room.
// Preconditions: b.mu is held.
func (f *flight) submit() bool {
	b := f.p.b
	f.state = submitting
	b.mu.Unlock()
	err := f.p.Peer.Submit(f.tag, &f.batch)
	b.mu.Lock()
	defer b.submitEnded.Broadcast()
	switch {
	case errors.Is(err, driver.ErrFull) && !f.released:
		f.startDue = false
		f.startAfter(retryAfter)
		return false
	case errors.Is(err, driver.ErrFull): // and it was released meanwhile
		f.complete(f.reason)
	case err != nil:
		f.complete(err)
	case f.doneInSubmit:
		f.state = submitted
		f.setOutcome(f.err)
	default:
		f.state = submitted
		b.wakeUp() // for a completion that the wrapped backend made in Submit, without a wake-up
		if f.released {
			b.mu.Unlock()
			f.p.Peer.Cancel(f.tag)
			b.mu.Lock()
		}
	}
	return true
}

// setOutcome notes the outcome that the wrapped backend has for a flight.
// Preconditions: b.mu is held.
func (f *flight) setOutcome(err error) {
	switch {
	case f.p.lost && errors.Is(err, driver.ErrClosed): // flap closed the connection
		err = driver.ErrPeerLost
	case f.released && errors.Is(err, driver.ErrAborted):
		err = f.reason // submit cancelled it, since release could not complete it before
	}
	f.err = err
	if f.state == submitting {
		f.doneInSubmit = true
		return
	}
	f.completeWhenDue()
}

// completeWhenDue completes a flight that has its outcome: now, later, or not before its release.
// Preconditions: b.mu is held.
func (f *flight) completeWhenDue() {
	f.state = heldBack
	left := time.Until(f.completeAfter)
	switch {
	case f.released || f.verdict.ending != drop && left <= 0:
		f.complete(f.err)
	case f.verdict.ending != drop:
		time.AfterFunc(left, func() {
			f.p.b.mu.Lock()
			defer f.p.b.mu.Unlock()
			if f.state == heldBack {
				f.complete(f.err)
			}
		})
	}
}

// complete gives the program the completion of a flight. Preconditions: b.mu is held.
func (f *flight) complete(err error) {
	p, b := f.p, f.p.b
	f.remove()
	if f.internal {
		return
	}
	b.deliver(f.tag, err)
	if f.verdict.twice {
		b.taken++ // for the second completion
		b.deliver(f.tag, err)
	}
	if err != nil && f.verdict.lateWrite && p.endError() == nil {
		f.batch.Tail, f.batch.Notify = driver.NoTail, nil
		p.startInternal(f.batch, f.verdict.lateTime)
	}
}

// remove forgets a flight. Its place stays taken until its completion was polled.
// Preconditions: b.mu is held.
func (f *flight) remove() {
	f.state = done
	delete(f.p.b.flights, f.tag)
	f.p.dequeue(f)
}

// release stops holding a flight back: its completion comes now, or as soon as the wrapped backend
// completes it. A flight that was not submitted ends with the reason. Preconditions: b.mu is held.
func (f *flight) release(why error) {
	if !f.released {
		f.released, f.reason = true, why
	}
	switch f.state {
	case waiting, swallowed:
		f.complete(why)
	case heldBack:
		f.complete(f.err)
	}
}
