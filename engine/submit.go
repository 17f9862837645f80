// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"math/bits"

	"github.com/sluicehq/sluice/driver"
)

// batchesInFlight is how many batches of one transfer a backend has at most: one
// bit each in Transfer.outstanding.
const batchesInFlight = 64

// A tag names slot, generation of the post, and bit of the batch.
const (
	bitBits        = 6
	generationBits = 38
)

func tag(slot int, generation uint64, bit int) uint64 {
	return uint64(slot)<<(generationBits+bitBits) | (generation&(1<<generationBits-1))<<bitBits |
		uint64(bit)
}

func untag(tag uint64) (slot int, generation uint64, bit int) {
	return int(tag >> (generationBits + bitBits)), tag >> bitBits & (1<<generationBits - 1),
		int(tag & (1<<bitBits - 1))
}

// submit submits what may be submitted now, in order. A post has one submitter at a time,
// which therefore needs no lock: the goroutine that posts, and then the one that takes the
// post out of where it waits. It waits either for room, in the backlog of a connection, or at
// rest, for one of its own batches to end or for its turn with a notification in parts.
// spec/backlog.pml is a model of this; the steps in brackets are its labels.
//
// The caller is the submitter, and is not when submit returns. head is the connection of
// whose backlog t was the first; submit reports false when that still has no room: then t is
// the first again. A caller with a nil head must poll afterwards.
func (t *Transfer) submit(head *conn) (room bool) {
	for {
		w := t.look()
		if w.phase() != posted {
			return true // given up
		}
		next := int(t.submitted.Load())
		if w.has(stopped) { // [stop]
			t.skip(w.generation(), next)
			return true
		}
		b, flying := &t.batches[next], t.outstanding.Load()
		c := b.conn
		switch hasTurn := !b.part || c.long.take(t); {
		case !hasTurn || flying == ^uint64(0) || b.last && flying != 0:
			if !t.rest(flying, c, hasTurn) {
				return true
			}
			continue
		case c == head || c.waiting.Load() == 0: // otherwise others were here before
			over, err := t.submitNext(w.generation(), next, head)
			if over {
				return true
			}
			if !errors.Is(err, driver.ErrFull) {
				continue
			}
		}
		if !c.wait(t, c == head) {
			continue
		}
		if head != nil && c != head {
			c.lane.stir() // there may be room by now
		}
		return c != head
	}
}

// submitNext hands a batch to its backend. over: it was the last. Then the transfer may have
// ended already, and belong to the goroutine that posts it next.
func (t *Transfer) submitNext(generation uint64, next int, head *conn) (over bool, err error) {
	b, last := &t.batches[next], next+1 == len(t.batches)
	c, bit := b.conn, bits.TrailingZeros64(^t.outstanding.Load())
	t.outstanding.Or(1 << bit)
	// The index moves first: the completion may come before Submit returns.
	t.submitted.Store(int64(next + 1))
	tag := tag(t.slot, generation, bit)
	if err = c.p.Submit(tag, &b.Batch); err == nil { // [submit]
		t.submittedOne(c, head, tag)
		return last, nil
	}
	t.outstanding.And(^uint64(1 << bit))
	t.e.givenUp.ended(tag)
	t.submitted.Store(int64(next))
	if !errors.Is(err, driver.ErrFull) {
		t.fail(generation, t.backendError(c, err))
		t.mark(generation, stopped)
	}
	return false, err
}

// rest leaves the post to what ends its wait. It reports true when that has come meanwhile:
// then the caller is its submitter still, or again.
func (t *Transfer) rest(flying uint64, c *conn, hasTurn bool) bool {
	t.resting.Store(true) // [rest]
	again := t.look().has(stopped) || t.outstanding.Load() != flying ||
		!hasTurn && c.long.isTurnOf(t) // [look]
	return again && t.resting.CompareAndSwap(true, false)
}

// resume ends a rest: the post goes on with the backlog of a connection. Its caller polls
// afterwards.
func (t *Transfer) resume(c *conn) {
	if t.resting.CompareAndSwap(true, false) && !c.wait(t, false) { // [wake]
		t.submit(nil) // it is stopped, so nothing is submitted
	}
}

// takeOut makes the caller the submitter of a post that waits.
// Preconditions: the post is held.
func (t *Transfer) takeOut() bool {
	if t.resting.CompareAndSwap(true, false) {
		return true
	}
	for _, c := range t.via() {
		if c.remove(t) {
			return true
		}
	}
	return false
}

// submittedOne does what a batch that the backend has taken needs at once. It may
// be done already, and no wake-up comes for that: a caller with a nil head polls,
// the lane of head looks again, and any other lane is woken.
func (t *Transfer) submittedOne(c, head *conn, tag uint64) {
	if t.look().has(stopped) {
		c.p.Cancel(tag) // interrupt's came before the backend knew the tag
	}
	switch {
	case head == nil:
	case c == head:
		c.served.Store(true)
		c.lane.wanted.Add(1)
	default:
		c.lane.stir()
	}
}

// skip ends the batches that were never submitted.
func (t *Transfer) skip(generation uint64, next int) {
	t.mark(generation, short)
	t.submitted.Store(int64(len(t.batches)))
	t.end(generation, int64(len(t.batches)-next))
}

// end counts n batches as ended and finishes the transfer with the last.
func (t *Transfer) end(generation uint64, n int64) {
	if t.remaining.Add(-n) == 0 {
		t.settle(generation, 0)
	}
}

// endTurn lets other transfers send their notifications in parts.
func (t *Transfer) endTurn() {
	if n := len(t.batches); n > 0 && t.batches[n-1].part {
		c := t.batches[n-1].conn
		if next := c.long.give(t); next != nil {
			next.resume(c)
			c.lane.stir()
		}
	}
}

// finish takes one completion from a backend. A tag for which no transfer waits is
// counted and dropped: it belongs to a transfer that was given up, or to a
// backend that completes twice.
func (e *Engine) finish(l *lane, c *driver.Completion) {
	slot, generation, bit := untag(c.Tag)
	t := e.slots.get(slot)
	if t == nil {
		e.dropped.Add(1)
		e.givenUp.ended(c.Tag)
		return
	}
	w := t.look()
	if w.phase() != posted || w.generation()&(1<<generationBits-1) != generation {
		e.dropped.Add(1)
		e.givenUp.ended(c.Tag)
		return
	}
	generation = w.generation()
	if c.Err != nil && errors.Is(c.Err, driver.ErrUnproven) {
		t.mark(generation, unanswered)
	}
	if t.outstanding.And(^uint64(1<<bit))&(1<<bit) == 0 {
		e.dropped.Add(1)
		return
	}
	e.givenUp.ended(c.Tag)
	// The post is held: this batch is one of those that remain.
	if c.Err != nil {
		t.fail(generation, t.completionError(l, c.Err))
		t.mark(generation, short|stopped)
		if t.takeOut() { // it may wait for room at a connection that never has any
			t.submit(nil) // leaves out what has not been submitted
		}
	} else if len(t.batches) > 1 {
		t.progress(generation)
	}
	if t.resting.Load() {
		t.resume(t.p.conns[l.index]) // before end: with the last batch t is another goroutine's
	}
	t.end(generation, 1)
}

func (t *Transfer) completionError(l *lane, err error) error {
	if err == driver.ErrAborted {
		return ErrAborted // by us: no news about backend and peer
	}
	return t.backendError(t.p.conns[l.index], err)
}
