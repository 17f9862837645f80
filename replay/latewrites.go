// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/pool"
	"github.com/sluicehq/sluice/replay/internal/content"
)

// lateWait is how long a block is watched before it may be used again: many
// times what a copy takes that was in hand when its request was aborted.
const lateWait = 50 * time.Millisecond

// lateWrites reuses the blocks of aborted requests at once: it takes them from the
// pool, writes poison into them, and looks whether anybody writes there. Blocks
// that a new request was faster to take are checked as its own.
type lateWrites struct {
	checker *checker
	blocks  *pool.Pool

	mu       sync.Mutex
	poisoned map[uint32]int // by which aborted request; not taken by another one since
	count    uint64         // blocks of aborted requests that were watched
}

// freed is told of a request that was aborted, right after its end.
func (w *lateWrites) freed(q *handoff.Request) {
	freed := make([]uint32, 0, len(q.Missing))
	for _, at := range q.Missing {
		freed = append(freed, q.Blocks[at])
	}
	grant, err := w.blocks.TryAcquire(make([]pool.Hash, len(freed)))
	if err != nil {
		return // the next request has them
	}
	defer grant.Release()
	for _, block := range grant.Blocks {
		w.each(block, func(b []byte) { fill(b, decodePoison) })
	}
	time.Sleep(lateWait)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, block := range grant.Blocks {
		w.look(block, requestOf(q))
		w.poisoned[block] = requestOf(q)
		if slices.Contains(freed, block) {
			w.count++
		}
	}
}

func (w *lateWrites) each(block uint32, f func(b []byte)) {
	for layer := range w.checker.geometry.Layers() {
		b, err := w.checker.layer(block, layer)
		if err == nil { // a block of the pool has a place
			f(b)
		}
	}
}

// look compares a block with the poison.
func (w *lateWrites) look(block uint32, request int) {
	layer := 0
	w.each(block, func(b []byte) {
		if content.CountWrong(b, decodePoison) > 0 {
			w.checker.mu.Lock()
			w.checker.mismatch("block %d, layer %d was written after the abort of request %d",
				block, layer, request+1)
			w.checker.mu.Unlock()
		}
		layer++
	})
}

// forget is told of each request that was granted blocks to write to.
func (w *lateWrites) forget(q *handoff.Request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, at := range q.Missing {
		delete(w.poisoned, q.Blocks[at])
	}
}

// last looks once more at what was not used since, when nothing runs.
func (w *lateWrites) last() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for block, request := range w.poisoned {
		w.look(block, request)
	}
}
