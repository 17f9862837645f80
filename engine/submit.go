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
	generationBits = 42
)

func tag(slot int, generation uint64, bit int) uint64 {
	return uint64(slot)<<(generationBits+bitBits) | (generation&(1<<generationBits-1))<<bitBits | uint64(bit)
}

func untag(tag uint64) (slot int, generation uint64, bit int) {
	return int(tag >> (generationBits + bitBits)), tag >> bitBits & (1<<generationBits - 1), int(tag & (1<<bitBits - 1))
}

// The states of Transfer.pumping.
const (
	noPump = iota
	onePump
	pumpAgain // another goroutine came meanwhile
)

// pump submits what may be submitted now. One goroutine at a time does it,
// without a lock: another that comes meanwhile sets a flag and goes. It returns false when
// connection from, whose backlog t heads, still has no room; with a nil from, and
// for other connections, a transfer that finds no room joins the backlog itself.
// A caller with a nil from must poll afterwards.
func (t *Transfer) pump(from *conn) bool {
	for !t.pumping.CompareAndSwap(noPump, onePump) {
		if t.pumping.CompareAndSwap(onePump, pumpAgain) || t.pumping.Load() == pumpAgain {
			return true
		}
	}
	for {
		full := t.submitMore(from)
		if full != nil && full != from {
			full.push(t)
			if from != nil {
				full.lane.stir() // there may be room by now
			}
		}
		if t.pumping.CompareAndSwap(onePump, noPump) {
			return full == nil || full != from
		}
		t.pumping.Store(onePump) // it was pumpAgain
		if full != nil && full == from {
			t.pumping.Store(noPump)
			return false // the backlog brings us back
		}
	}
}

// submitMore returns the connection that had no room, if one had none.
func (t *Transfer) submitMore(from *conn) (full *conn) {
	for {
		w := t.look()
		if w.phase() != posted {
			return nil
		}
		next := int(t.submitted.Load())
		if next >= len(t.batches) {
			return nil
		}
		if w.has(stopped) {
			t.skip(w.generation(), next)
			return nil
		}
		b, flying := &t.batches[next], t.outstanding.Load()
		if flying == ^uint64(0) || (b.last && flying != 0) {
			return nil // its completions bring us back
		}
		c := b.conn
		if b.part && !c.long.take(t) {
			return nil // the transfer whose turn it is brings us back
		}
		if c != from && c.waiting.Load() > 0 {
			return c // others were here before
		}
		bit := bits.TrailingZeros64(^flying)
		t.outstanding.Or(1 << bit)
		// The index moves first: the completion may come before Submit returns.
		t.submitted.Store(int64(next + 1))
		tag := tag(t.slot, w.generation(), bit)
		err := t.submitBatch(b, tag, next, bit)
		if err == nil {
			t.submittedOne(c, from, tag)
			continue
		}
		t.outstanding.And(^uint64(1 << bit))
		t.submitted.Store(int64(next))
		if errors.Is(err, driver.ErrFull) {
			return c
		}
		t.fail(w.generation(), t.backendError(c, err))
		t.mark(w.generation(), stopped)
	}
}

func (t *Transfer) submitBatch(b *batch, tag uint64, index, bit int) error {
	if b.sum != nil {
		return b.submitSum(t, tag, index, bit)
	}
	return b.conn.p.Submit(tag, &b.Batch)
}

// submittedOne does what a batch that the backend has taken needs at once. It may
// be done already, and no wake-up comes for that: a caller with a nil from polls,
// the lane of from looks again, and any other lane is woken.
func (t *Transfer) submittedOne(c, from *conn, tag uint64) {
	if t.look().has(stopped) {
		c.p.Cancel(tag) // interrupt's came before the backend knew the tag
	}
	switch {
	case from == nil:
	case c == from:
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
		for _, next := range c.long.give(t) {
			c.push(next)
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
		return
	}
	w := t.look()
	if w.phase() != posted || w.generation()&(1<<generationBits-1) != generation {
		e.dropped.Add(1)
		return
	}
	later, err := t.moved(bit, c.Tag, c.Err)
	if later {
		return
	}
	if err != nil {
		if errors.Is(err, driver.ErrUnproven) {
			t.mark(w.generation(), unanswered)
		}
		err = t.completionError(l, err)
	}
	t.endBatch(l, w.generation(), bit, err)
}

// endBatch ends the batch of a bit.
func (t *Transfer) endBatch(l *lane, generation uint64, bit int, err error) {
	if t.outstanding.And(^uint64(1<<bit))&(1<<bit) == 0 {
		t.e.dropped.Add(1)
		return
	}
	if err != nil {
		t.fail(generation, err)
		t.mark(generation, short|stopped)
	}
	// Taken before end: with the last batch the transfer is another goroutine's.
	more := int(t.submitted.Load()) < len(t.batches)
	t.end(generation, 1)
	if more {
		t.p.conns[l.index].push(t)
	}
}

func (t *Transfer) completionError(l *lane, err error) error {
	if err == driver.ErrAborted {
		return ErrAborted // by us: no news about backend and peer
	}
	return t.backendError(t.p.conns[l.index], err)
}
