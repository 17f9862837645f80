// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/backends"
)

// doneRing holds completions until Poll. A tag takes its place when Submit accepts it, so
// there is always room for its completion.
type doneRing struct {
	taken atomic.Int64 // tags accepted and not yet polled
	ready atomic.Int64 // completions in list: Poll looks here before it locks

	mu   sync.Mutex
	list []backends.Completion
	head int
	n    int
}

func (r *doneRing) init(size int) { r.list = make([]backends.Completion, size) }

// take reserves the place of one tag.
func (r *doneRing) take() bool {
	if r.taken.Add(1) <= int64(len(r.list)) {
		return true
	}
	r.taken.Add(-1)
	return false
}

func (r *doneRing) push(tag uint64, err error) {
	r.mu.Lock()
	r.list[(r.head+r.n)%len(r.list)] = backends.Completion{Tag: tag, Err: err}
	r.n++
	r.ready.Add(1)
	r.mu.Unlock()
}

func (r *doneRing) pop(done []backends.Completion) int {
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

// Poll implements backends.Backend.
func (b *Backend) Poll(done []backends.Completion) (int, error) {
	if b.gate.Enter() {
		if b.ends.Pending() {
			b.serve()
		}
		b.gate.Exit()
	}
	n := b.done.pop(done)
	if n == 0 && b.closed.Load() && b.done.taken.Load() == 0 {
		return 0, backends.ErrClosed
	}
	return n, nil
}

// FD implements backends.Armer.
func (b *Backend) FD() int { return b.event.FD() }

// Arm implements backends.Armer. The flag goes up before the look, and who brings a completion, or the end of a
// request that may be one, looks at the flag afterwards.
func (b *Backend) Arm() (ready bool, err error) {
	if !b.gate.Enter() {
		return false, backends.ErrClosed
	}
	defer b.gate.Exit()
	return b.ends.Arm() || b.done.ready.Load() > 0, nil
}

// wake signals the event if somebody armed it.
func (b *Backend) wake() {
	if b.ends.Disarm() {
		_ = b.event.Signal() // fails only when closed: nobody sleeps any more
	}
}
