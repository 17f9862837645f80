// SPDX-License-Identifier: Apache-2.0

package session

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// Completions holds completions in the order in which they came. A tag takes its place when Submit
// accepts it, so there is always room for its completion. All methods but Init may be called by
// any goroutine at any time.
type Completions struct {
	taken atomic.Int64 // tags accepted and not yet popped
	ready atomic.Int64 // completions in list: Pop looks here before it locks

	mu   sync.Mutex
	list []driver.Completion
	head int
	n    int
}

// Init makes room for so many tags.
func (r *Completions) Init(size int) { r.list = make([]driver.Completion, size) }

// Take reserves the place of one tag. It reports false if there is none.
func (r *Completions) Take() bool {
	for n := r.taken.Load(); n < int64(len(r.list)); n = r.taken.Load() {
		if r.taken.CompareAndSwap(n, n+1) {
			return true
		}
	}
	return false // all are taken: a Pop to come makes room
}

// GiveBack undoes Take for a tag that was not accepted.
func (r *Completions) GiveBack() { r.taken.Add(-1) }

// Taken is how many tags have a place.
func (r *Completions) Taken() int64 { return r.taken.Load() }

// Ready is how many completions Pop would find.
func (r *Completions) Ready() int64 { return r.ready.Load() }

// Push completes a tag that has a place.
func (r *Completions) Push(tag uint64, err error) {
	r.mu.Lock()
	r.list[(r.head+r.n)%len(r.list)] = driver.Completion{Tag: tag, Err: err}
	r.n++
	r.ready.Add(1)
	r.mu.Unlock()
}

// Pop moves completions into done and returns how many. It costs one load when there is none.
func (r *Completions) Pop(done []driver.Completion) int {
	if r.ready.Load() == 0 || len(done) == 0 {
		return 0
	}
	r.mu.Lock()
	n := min(r.n, len(done))
	for i := range n {
		done[i] = r.list[r.head]
		r.list[r.head].Err = nil // keep no error alive
		r.head = (r.head + 1) % len(r.list)
	}
	r.n -= n
	r.ready.Add(int64(-n))
	r.mu.Unlock()
	r.taken.Add(int64(-n))
	return n
}

// LastWords is the connections whose end the program has yet to hear of. The caller adds
// from any goroutine; Pending and Drop are for one at a time.
type LastWords[C any] struct {
	armed atomic.Bool
	count atomic.Int64 // of list: looked at before the lock

	mu   sync.Mutex
	list []C
}

// Add notes an end. Then Disarm says whether a sleeper must be woken for it.
func (l *LastWords[C]) Add(c C) {
	l.mu.Lock()
	l.list = append(l.list, c)
	l.count.Add(1)
	l.mu.Unlock()
}

// Pending appends those that are there now.
func (l *LastWords[C]) Pending(dst []C) []C {
	if l.count.Load() == 0 {
		return dst
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return append(dst, l.list...)
}

// Drop takes the first n off: they are told.
func (l *LastWords[C]) Drop(n int) {
	l.mu.Lock()
	l.list = slices.Delete(l.list, 0, n)
	l.count.Add(-int64(n))
	l.mu.Unlock()
}

// Arm asks for a wake-up and reports whether an end waits already. The flag goes
// up before the look, and Add comes before Disarm: one of the two sees the other.
func (l *LastWords[C]) Arm() bool {
	l.armed.Store(true)
	return l.count.Load() > 0
}

// Disarm reports whether a wake-up was asked for, once.
func (l *LastWords[C]) Disarm() bool {
	return l.armed.Load() && l.armed.CompareAndSwap(true, false)
}
