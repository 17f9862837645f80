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

// lateWait is how long freed watches a block before other requests may use it: many times as long
// as a copy takes that was in flight when its request was aborted.
const lateWait = 50 * time.Millisecond

// lateWrites checks that no write lands in the blocks of an aborted request. It takes the blocks
// from the pool as soon as they are free, fills them with poison, and looks later whether the
// poison has changed. If a new request takes a block first, the checks of that request cover it.
type lateWrites struct {
	checker *checker
	blocks  *pool.Pool

	mu       sync.Mutex
	poisoned map[uint32]int // blocks that hold poison, with the number of the aborted request
	count    uint64         // blocks of aborted requests that were watched
}

// freed watches the blocks of an aborted request. The caller calls it right after the request ends.
func (w *lateWrites) freed(q *handoff.Request) {
	freed := make([]uint32, 0, len(q.Missing))
	for _, at := range q.Missing {
		freed = append(freed, q.Blocks[at])
	}
	grant, err := w.blocks.TryAcquire(make([]pool.Hash, len(freed)))
	if err != nil {
		return // a new request was faster
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

// each calls f with the bytes of each layer of a block.
func (w *lateWrites) each(block uint32, f func(b []byte)) {
	for layer := range w.checker.geometry.Layers() {
		b, err := w.checker.layer(block, layer)
		if err == nil { // always, for a block of the pool
			f(b)
		}
	}
}

// look reports a mismatch if a block does not hold the poison.
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

// forget stops watching the blocks that a new request may write to.
func (w *lateWrites) forget(q *handoff.Request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, at := range q.Missing {
		delete(w.poisoned, q.Blocks[at])
	}
}

// last checks all blocks that still hold poison once more, when no request runs any more.
func (w *lateWrites) last() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for block, request := range w.poisoned {
		w.look(block, request)
	}
}
