// SPDX-License-Identifier: Apache-2.0

package engine

// life is the state of a Transfer in one word: the generation of its post, its phase, and
// what its outcome will be. It changes by compare-and-swap alone. Once the phase is ending
// the outcome is fixed: an outcome that was told never changes.
type life uint64

// The phases of a Transfer.
const (
	idle      life = iota
	preparing      // in Post: the last outcome is gone, the new deadline not yet set
	posted
	ending // the outcome is fixed, and about to be told
	done
	closed

	phaseMask life = 7
)

// What is known of the outcome, beside the cause.
const (
	stopped life = 1 << (3 + iota) // nothing more is submitted
	short                          // a batch failed or was left out
	// a peer did not answer for pieces that it has in hand: see Staged
	unanswered
	unproven  // given up: a backend may still use the memory
	cancelled // past its deadline: its batches are cancelled
	severed   // and its connections closed

	lifeBits = 16 // below the generation
)

func (w life) phase() life        { return w & phaseMask }
func (w life) has(flag life) bool { return w&flag != 0 }
func (w life) generation() uint64 { return uint64(w >> lifeBits) }

// underWay reports whether the transfer was posted and its outcome is not told yet.
func (w life) underWay() bool { return w.phase() == posted || w.phase() == ending }

// atRest reports whether the list may be changed and posted.
func (w life) atRest() bool { return w.phase() == idle || w.phase() == done }

// anyPost stands for whatever generation is under way.
const anyPost = ^uint64(0)

// isPost reports whether the post of that generation is under way.
func (t *Transfer) isPost(generation uint64) bool {
	w := t.look()
	return w.underWay() && (w.generation() == generation || generation == anyPost)
}

func (t *Transfer) look() life { return life(t.word.Load()) }

func (t *Transfer) swap(old, new life) bool {
	return t.word.CompareAndSwap(uint64(old), uint64(new))
}

// mark sets flags of a post. It reports false when the outcome of that is fixed already.
func (t *Transfer) mark(generation uint64, flags life) bool {
	for {
		w := t.look()
		switch {
		case w.phase() != posted || w.generation() != generation:
			return false
		case w&flags == flags || t.swap(w, w|flags):
			return true
		}
	}
}

// advance sets a flag of a post once. It reports whether it did.
func (t *Transfer) advance(generation uint64, flag life) bool {
	for {
		w := t.look()
		if w.phase() != posted || w.generation() != generation || w.has(flag) {
			return false
		}
		if t.swap(w, w|flag) {
			return true
		}
	}
}

// cause is why a post failed.
type cause struct {
	generation uint64
	err        error
}

// fail keeps the first cause of a post. Whether it counts is for the flag short to say.
func (t *Transfer) fail(generation uint64, err error) {
	for {
		old := t.cause.Load()
		if old != nil && old.generation >= generation {
			return
		}
		if t.cause.CompareAndSwap(old, &cause{generation, err}) {
			return
		}
	}
}

// outcome is that of a post whose phase is ending or done. An Abort that came when every
// batch had succeeded has ended nothing, and what was to follow the data has gone.
func (t *Transfer) outcome(w life) error {
	if c := t.cause.Load(); w.has(short) && c != nil && c.generation == w.generation() {
		return c.err
	}
	return nil
}

// settle fixes the outcome and tells it, unless that was done already. From then on the
// transfer belongs to the goroutine that posts it next.
func (t *Transfer) settle(generation uint64, flags life) {
	w := t.look()
	for ; w.phase() == posted && w.generation() == generation; w = t.look() {
		if t.swap(w, w&^phaseMask|ending|flags) {
			break
		}
	}
	if w.phase() != posted || w.generation() != generation {
		return
	}
	w = t.look() // ending: no other goroutine changes it
	if w.has(unanswered) {
		t.lastUnanswered.Store(generation)
	}
	t.record(t.outcome(w))
	t.endTurn()
	if t.greets != nil && !w.has(short) {
		t.greets.greeted.Store(true)
	}
	hook := t.hook
	t.word.Store(uint64(w&^phaseMask | done))
	t.sleepers.wake()
	if t.watched.Load() {
		t.announce()
	}
	if hook != nil {
		hook()
	}
}

// holdPost keeps the next Post from preparing until letGo: a goroutine looks at batches of the
// post that is under way. It reports false where none is.
func (t *Transfer) holdPost() (generation uint64, ok bool) {
	t.holds.Add(1)
	if w := t.look(); w.phase() == posted {
		return w.generation(), true
	}
	t.letGo()
	return 0, false
}

func (t *Transfer) letGo() { t.holds.Add(-1) }
