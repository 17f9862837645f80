// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"sync"
	"sync/atomic"
)

// state is that of a Transfer in one word: the generation of its post, its phase, and what its
// outcome will be. It changes by compare-and-swap alone. Once the phase is ending the outcome is
// fixed: an outcome that was told never changes.
type state uint64

// The phases of a Transfer.
const (
	idle      state = iota
	preparing       // in Post: the last outcome is gone, the new deadline not yet set
	posted
	ending // the outcome is fixed, and about to be told
	done
	closed

	phaseMask state = 7
)

// The flags of a post.
const (
	stopped state = 1 << (3 + iota) // nothing more is submitted
	short                           // a batch failed or was left out
	// a peer did not answer for pieces that it has in hand: see Staged
	unanswered
	unproven  // given up: a backend may still use the memory
	cancelled // past its deadline: its batches are cancelled
	severed   // and its connections closed

	stateBits = 16 // below the generation
)

func (w state) phase() state        { return w & phaseMask }
func (w state) has(flag state) bool { return w&flag != 0 }
func (w state) generation() uint64  { return uint64(w >> stateBits) }

// underWay reports whether the transfer was posted and its outcome is not told yet.
func (w state) underWay() bool { return w.phase() == posted || w.phase() == ending }

// atRest reports whether the list may be changed and posted.
func (w state) atRest() bool { return w.phase() == idle || w.phase() == done }

// anyPost stands for whatever generation is under way.
const anyPost = ^uint64(0)

// isPost reports whether the post of that generation is under way.
func (t *Transfer) isPost(generation uint64) bool {
	w := t.state()
	return w.underWay() && (w.generation() == generation || generation == anyPost)
}

func (t *Transfer) state() state { return state(t.stateWord.Load()) }

func (t *Transfer) swap(old, new state) bool {
	return t.stateWord.CompareAndSwap(uint64(old), uint64(new))
}

// mark sets flags of a post. It reports false when the outcome of that is fixed already.
func (t *Transfer) mark(generation uint64, flags state) bool {
	for {
		w := t.state()
		switch {
		case w.phase() != posted || w.generation() != generation:
			return false
		case w&flags == flags || t.swap(w, w|flags):
			return true
		}
	}
}

// advance sets a flag of a post once. It reports whether it did.
func (t *Transfer) advance(generation uint64, flag state) bool {
	for {
		w := t.state()
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
func (t *Transfer) outcome(w state) error {
	if c := t.cause.Load(); w.has(short) && c != nil && c.generation == w.generation() {
		return c.err
	}
	return nil
}

// pin keeps the next Post waiting until unpin: the caller looks at batches of the post that is
// under way. It reports false where none is.
func (t *Transfer) pin() (generation uint64, ok bool) {
	t.pins.Add(1)
	if w := t.state(); w.phase() == posted {
		return w.generation(), true
	}
	t.unpin()
	return 0, false
}

func (t *Transfer) unpin() { t.pins.Add(-1) }

// slots gives each live transfer a small number, so that a completion finds it
// by its tag without a lock or a map. A slot's generation only grows, whatever
// transfer has it: a tag of the past matches none.
type slots struct {
	live       []atomic.Pointer[Transfer]
	generation []uint64 // the last one given out; touched by the holder alone

	mu     sync.Mutex // guards the fields below
	used   int        // slots that were ever taken
	unused []int
}

func (s *slots) init(n int) {
	s.live = make([]atomic.Pointer[Transfer], n)
	s.generation = make([]uint64, n)
}

func (s *slots) acquire(t *Transfer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch n := len(s.unused); {
	case n > 0:
		t.slot, s.unused = s.unused[n-1], s.unused[:n-1]
	case s.used == len(s.live):
		return false
	default:
		t.slot = s.used
		s.used++
	}
	s.live[t.slot].Store(t)
	return true
}

// free frees the slot, unless that has been done.
func (s *slots) free(t *Transfer) {
	if !s.live[t.slot].CompareAndSwap(t, nil) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.unused = append(s.unused, t.slot)
}

// renew returns the generation of a new post of t.
func (s *slots) renew(t *Transfer) (generation uint64) {
	s.generation[t.slot]++
	return s.generation[t.slot]
}

// posted counts the transfers that are under way.
func (s *slots) posted() (n int) {
	s.mu.Lock()
	used := s.used
	s.mu.Unlock()
	for i := range used {
		if t := s.live[i].Load(); t != nil && t.state().underWay() {
			n++
		}
	}
	return n
}

// proof is an error as long as backends have batches of transfers that were given up.
func (s *slots) proof() error {
	n := 0
	for i := range s.live {
		if t := s.live[i].Load(); t != nil {
			n += t.unended()
		}
	}
	if n > 0 {
		return fmt.Errorf("backends have %d batches in hand that were given up: do not reuse "+
			"their memory: %w", n, ErrUnproven)
	}
	return nil
}

func (s *slots) get(slot int) *Transfer {
	if slot >= len(s.live) {
		return nil
	}
	return s.live[slot].Load()
}
