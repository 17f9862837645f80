// SPDX-License-Identifier: Apache-2.0

package session

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// Completions is a queue of completions. Submit reserves room for a batch's completion when it
// accepts the batch (Take), so Push never fails. Any goroutine may call the methods at any time,
// except that Init must come first.
type Completions struct {
	taken atomic.Int64 // tags accepted and not yet popped
	ready atomic.Int64 // completions in list: Pop looks here before it locks

	mu   sync.Mutex
	list []driver.Completion
	head int
	n    int
}

// Init sets how many tags can be reserved.
func (r *Completions) Init(size int) { r.list = make([]driver.Completion, size) }

// Take reserves room for the completion of one tag. It returns false if there is none.
func (r *Completions) Take() bool {
	for n := r.taken.Load(); n < int64(len(r.list)); n = r.taken.Load() {
		if r.taken.CompareAndSwap(n, n+1) {
			return true
		}
	}
	return false // all are taken: a Pop to come makes room
}

// GiveBack undoes Take for a batch that was not accepted.
func (r *Completions) GiveBack() { r.taken.Add(-1) }

// Taken returns how many tags are reserved and not popped yet.
func (r *Completions) Taken() int64 { return r.taken.Load() }

// Ready returns how many completions Pop would find.
func (r *Completions) Ready() int64 { return r.ready.Load() }

// Push adds the completion of a tag for which Take has reserved room.
func (r *Completions) Push(tag uint64, err error) {
	r.mu.Lock()
	r.list[(r.head+r.n)%len(r.list)] = driver.Completion{Tag: tag, Err: err}
	r.n++
	r.ready.Add(1)
	r.mu.Unlock()
}

// Pop moves completions into done and returns how many. If there is none, it costs one atomic load.
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

// LastWords is a queue of connections that have ended, until the program is told. Any goroutine may
// call Add; only one at a time may call Pending and Drop.
type LastWords[C any] struct {
	armed atomic.Bool
	count atomic.Int64 // of list: looked at before the lock

	mu   sync.Mutex
	list []C
}

// Add adds a connection that has ended. The caller then calls Disarm, which says whether it must
// wake a sleeping program.
func (l *LastWords[C]) Add(c C) {
	l.mu.Lock()
	l.list = append(l.list, c)
	l.count.Add(1)
	l.mu.Unlock()
}

// Pending appends the connections in the queue to a list.
func (l *LastWords[C]) Pending(dst []C) []C {
	if l.count.Load() == 0 {
		return dst
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return append(dst, l.list...)
}

// Drop removes the first n connections: the program was told of them.
func (l *LastWords[C]) Drop(n int) {
	l.mu.Lock()
	l.list = slices.Delete(l.list, 0, n)
	l.count.Add(-int64(n))
	l.mu.Unlock()
}

// Arm asks for a wake-up, and reports whether a connection is in the queue already. Arm sets its
// flag before it looks at the queue, and Add comes before Disarm: so one of the two sees the other.
func (l *LastWords[C]) Arm() bool {
	l.armed.Store(true)
	return l.count.Load() > 0
}

// Disarm reports, once, whether a wake-up was asked for.
func (l *LastWords[C]) Disarm() bool {
	return l.armed.Load() && l.armed.CompareAndSwap(true, false)
}
