// SPDX-License-Identifier: Apache-2.0

package tcp

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

// giveBack undoes take for a tag that was not accepted.
func (r *doneRing) giveBack() { r.taken.Add(-1) }

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
	n := b.done.pop(done)
	if n == 0 && b.closed.Load() && b.done.taken.Load() == 0 {
		return 0, backends.ErrClosed
	}
	return n, nil
}

// complete ends a tag.
func (b *Backend) complete(tag uint64, err error) {
	b.done.push(tag, err)
	b.wake()
}

// Bell implements backends.Ringer.
func (b *Backend) Bell() <-chan struct{} { return b.bell }

// FD implements backends.Armer. Who asks for the first time may have armed before, and heard
// nothing of what rang since: the descriptor is readable then.
func (b *Backend) FD() int {
	if !b.watched.Load() && b.watched.CompareAndSwap(false, true) {
		_ = b.event.Signal() // fails only when closed
	}
	return b.event.FD()
}

// wake rings if somebody armed.
func (b *Backend) wake() {
	if !b.armed.Load() || !b.armed.CompareAndSwap(true, false) {
		return
	}
	select {
	case b.bell <- struct{}{}:
	default: // it rings
	}
	if b.watched.Load() {
		_ = b.event.Signal() // fails only when closed: nobody sleeps any more
	}
}

// alarm is wake for news that no queue holds: room after ErrFull, a count.
func (b *Backend) alarm() {
	b.news.Store(true)
	b.wake()
}

// Arm implements backends.Armer. The flag goes up before the look, and whoever brings
// something looks at the flag afterwards: one of the two sees the other.
func (b *Backend) Arm() (ready bool, err error) {
	if b.closed.Load() {
		return false, backends.ErrClosed
	}
	b.armed.Store(true)
	return b.done.ready.Load() > 0 || b.inbox.ready.Load() > 0 || b.news.Swap(false), nil
}
