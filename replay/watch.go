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

// lateWrite is how long a block is watched before it may be used again: many
// times what a copy takes that was in hand when its request was aborted.
const lateWrite = 50 * time.Millisecond

// watch reuses the blocks of aborted requests at once: it takes them from the
// pool, writes poison into them, and looks whether anybody writes there. Blocks
// that a new request was faster to take are checked by its digests.
type watch struct {
	checker *checker
	blocks  *pool.Pool

	mu       sync.Mutex
	poisoned map[uint32]uint64 // by which aborted request; not taken by another one since
	count    uint64            // blocks of aborted requests that were watched
}

// freed is told of a request that was aborted, right after its end.
func (w *watch) freed(q *handoff.Request) {
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
		w.each(block, func(b []byte) { content.Poison(b) })
	}
	time.Sleep(lateWrite)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, block := range grant.Blocks {
		w.look(block, q.ID)
		w.poisoned[block] = q.ID
		if slices.Contains(freed, block) {
			w.count++
		}
	}
}

func (w *watch) each(block uint32, f func(b []byte)) {
	for layer := range w.checker.geometry.Layers() {
		b, err := w.checker.layer(block, layer)
		if err == nil { // a block of the pool has a place
			f(b)
		}
	}
}

// look compares a block with the poison.
func (w *watch) look(block uint32, request uint64) {
	layer := 0
	w.each(block, func(b []byte) {
		if !content.Poisoned(b) {
			w.checker.mu.Lock()
			w.checker.mismatch("block %d, layer %d was written after the abort of request %d",
				block, layer, request+1)
			w.checker.mu.Unlock()
		}
		layer++
	})
}

// forget is told of each request that was granted blocks to write to.
func (w *watch) forget(q *handoff.Request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, at := range q.Missing {
		delete(w.poisoned, q.Blocks[at])
	}
}

// last looks once more at what was not used since, when nothing runs.
func (w *watch) last() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for block, request := range w.poisoned {
		w.look(block, request)
	}
}
