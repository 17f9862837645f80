// SPDX-License-Identifier: Apache-2.0

package session

import (
	"slices"
	"sync"
	"sync/atomic"
)

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
