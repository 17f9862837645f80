// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime"

	"github.com/sluicehq/sluice/driver"
)

// The life of a post is four functions, in this order: Post checks the transfer and starts it,
// submit hands its batches to the backend, finish takes each completion that lane.poll finds, and
// settle tells the outcome. backlog.go has the places where a post waits, deadline.go its early
// end.

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

// Post starts the transfer and returns at once. Errors that it returns are misuse
// (ErrBusy, ErrClosed, an empty list); everything that happens on the way is the
// transfer's outcome. It allocates nothing unless the list has changed.
func (t *Transfer) Post() error {
	if t.e.isClosing() {
		return errPostClosed
	}
	// From here on the transfer is this goroutine's, until a backend has its first batch.
	from := t.state()
	if !from.atRest() || from.has(unproven) || !t.swap(from, from&^phaseMask|preparing) {
		return t.misuse("post")
	}
	for t.pins.Load() != 0 {
		runtime.Gosched() // a goroutine is about to see that the last post is over
	}
	// A list that has changed is cut into batches. Its bounds were checked when it was made.
	if err := t.prepare(); err != nil {
		t.stateWord.Store(uint64(from))
		return err
	}
	if t.resource != nil {
		if err := t.e.schedule.enter(t); err != nil {
			t.stateWord.Store(uint64(from))
			return err
		}
	}
	// An atomic store costs as much as the whole check before it, hence the loads.
	if len(t.completed) > 0 {
		select {
		case <-t.completed:
		default:
		}
	}
	if t.cause.Load() != nil {
		t.cause.Store(nil)
	}
	t.submitted.Store(0)
	t.remaining.Store(int64(len(t.batches)))
	t.postedAt = t.e.now()
	for i := range t.groups {
		if g := &t.groups[i]; !t.quiet && g.measuresRate() {
			g.conn.counters.enter(t.postedAt)
		}
	}
	t.deadline.Store(int64(t.postedAt + t.e.cfg.TransferTimeout))
	t.stateWord.Store(t.e.slots.renew(t)<<stateBits | uint64(posted))
	t.e.sweeper.watch()

	t.submit(nil)
	t.poll() // a small batch mostly ends within Submit
	return nil
}

var errPostClosed = fmt.Errorf("post transfer: the engine is closed: %w", ErrClosed)

// submit hands the batches to their backends, in order, as many as there is room for. A post has
// one submitter at a time, which therefore needs no lock: the goroutine that posts, and then the
// one that takes the post out of where it waits. A post waits either for room, in the backlog of a
// connection, or parked, for one of its own batches to end or for its turn with a fragmented
// notification, or, below SwapIn, in the queue of its resource (scheduler.go). spec/backlog.pml is
// a model of this, but for the last; the words in brackets are its labels.
//
// The caller is the submitter, and is not when submit returns. head is the connection of whose
// backlog t was the first; submit reports false when that still has no room: then t is the first
// again. A caller with a nil head must poll afterwards.
func (t *Transfer) submit(head *conn) (room bool) {
	for {
		w := t.state()
		if w.phase() != posted {
			return true // given up
		}
		generation, next := w.generation(), int(t.submitted.Load())
		if w.has(stopped) { // [stop] the batches that were not submitted end here
			t.mark(generation, short)
			t.submitted.Store(int64(len(t.batches)))
			t.end(generation, int64(len(t.batches)-next))
			return true
		}
		b, flying := &t.batches[next], t.outstanding.Load()
		c, last := b.conn, next+1 == len(t.batches)
		if flying == ^uint64(0) || b.last && flying != 0 {
			if t.parkUntilProgress(flying, nil) {
				continue
			}
			return true
		}
		if s := t.e.schedule; s != nil {
			switch s.request(t, generation) {
			case ended:
				continue
			case queued:
				return true
			}
		}
		if b.part && !c.fragments.tryLock(t) { // behind the turn: what is queued must not have it
			if t.parkUntilProgress(flying, c) {
				continue
			}
			return true
		}
		if c == head || c.waiting.Load() == 0 { // otherwise other posts were here before
			// The index moves first: the completion may come before Submit returns.
			bit := bits.TrailingZeros64(^flying)
			tag := tag(t.slot, generation, bit)
			if t.grants != nil {
				t.grants.inFlight[bit].Store(b.bytes)
			}
			t.outstanding.Or(1 << bit)
			t.submitted.Store(int64(next + 1))
			err := c.p.Submit(tag, &b.Batch) // [submit]
			if err == nil {
				// After the last batch the transfer may have ended already, and belong to the
				// goroutine that posts it next.
				if t.state().has(stopped) {
					c.p.Cancel(tag) // interrupt's came before the backend knew the tag
				}
				if head != nil {
					c.pollAgain(head)
				}
				if last {
					return true
				}
				continue
			}
			t.batchEnded(bit)
			t.submitted.Store(int64(next))
			if !errors.Is(err, driver.ErrFull) {
				t.fail(generation, t.backendError(c, err))
				t.mark(generation, stopped)
				continue
			}
			if s := t.e.schedule; s != nil {
				s.watch(t) // tick may have taken it for one that has begun
			}
		}
		if !c.enqueue(t, c == head) {
			continue
		}
		if head != nil && c != head {
			c.lane.wakeProgress() // there may be room by now
		}
		return c != head
	}
}

// finish takes one completion from a backend; lane.poll calls it. It counts and drops a tag for
// which no transfer waits: that belongs to a transfer that was given up, or to a backend that
// completes twice.
func (e *Engine) finish(l *lane, c *driver.Completion) {
	slot, generation, bit := untag(c.Tag)
	t := e.slots.get(slot)
	w := state(0)
	if t != nil {
		w = t.state()
	}
	room := uint64(0)
	if w.phase() == posted && t.grants != nil &&
		w.generation()&(1<<generationBits-1) == generation {
		room = t.grants.inFlight[bit].Swap(0) // before the bit may be another batch's
	}
	if t == nil || w.generation()&(1<<generationBits-1) != generation || !t.batchEnded(bit) ||
		w.phase() != posted {
		e.dropped.Add(1)
		return
	}
	generation = w.generation()
	// The post stays under way until end: this batch is one of those that remain.
	if c.Err != nil {
		if errors.Is(c.Err, driver.ErrUnproven) {
			t.mark(generation, unanswered)
		}
		t.fail(generation, t.completionError(l, c.Err))
		t.mark(generation, short|stopped)
		if t.claim() { // it may wait for room at a connection that never has any
			t.submit(nil) // leaves out the batches that were not submitted
		}
	}
	if room > 0 { // of which one that has failed gets none any more
		e.schedule.release(t, room)
	}
	if len(t.batches) > 1 {
		if c.Err == nil {
			t.extendDeadline(generation)
		}
		if t.waitingForRoom.Load() { // before end: with the last batch t is another goroutine's
			t.resume(t.p.conns[l.index])
		}
	}
	t.end(generation, 1)
}

// batchEnded clears the bit of a batch that a backend has no more. It reports whether it was set.
func (t *Transfer) batchEnded(bit int) bool {
	was := t.outstanding.And(^uint64(1 << bit))
	if was == 1<<bit && t.state().phase() == closed {
		t.e.slots.free(t) // given up and closed: Close has left this to the last batch
	}
	return was&(1<<bit) != 0
}

// end counts n batches as ended and settles the post with the last.
func (t *Transfer) end(generation uint64, n int64) {
	if t.remaining.Add(-n) == 0 {
		t.settle(generation, 0)
	}
}

// settle fixes the outcome of a post, counts it, and wakes the goroutines that wait for it, unless
// that was done already. From then on the transfer belongs to the goroutine that posts it next.
func (t *Transfer) settle(generation uint64, flags state) {
	w := t.state()
	for ; w.phase() == posted && w.generation() == generation; w = t.state() {
		if t.swap(w, w&^phaseMask|ending|flags) {
			break
		}
	}
	if w.phase() != posted || w.generation() != generation {
		return
	}
	w = t.state() // ending: no other goroutine changes it
	t.record(t.outcome(w))
	if t.resource != nil {
		t.e.schedule.leave(t)
	}
	if w.has(unanswered) {
		t.lastUnanswered.Store(generation)
	}
	var hook func()
	if x := t.extras; x != nil {
		hook = x.hook
		if c := x.fragments; c != nil { // another transfer may send a fragmented notification
			if next := c.fragments.unlock(t); next != nil {
				next.resume(c)
				c.lane.wakeProgress()
			}
		}
		if x.greets != nil && !w.has(short) {
			x.greets.greeted.Store(true)
		}
	}
	t.stateWord.Store(uint64(w&^phaseMask | done))
	t.sleepers.wake()
	if hook != nil {
		hook()
	}
}

// extras is what few transfers have beside their bytes; nil for all others.
type extras struct {
	hook      func() // called when a post is done; it must not block: see OnDone
	greets    *conn  // whose hello is among the batches; nil: none
	fragments *conn  // by which the notification goes in parts; nil: in one
}

// extra returns the extras of a transfer at rest, for a change.
func (t *Transfer) extra() *extras {
	if t.extras == nil {
		t.extras = &extras{}
	}
	return t.extras
}
