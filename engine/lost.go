// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// givenUp lists the batches that backends still have of transfers that were given up: their bytes
// may land until the batch ends after all.
type givenUp struct {
	count atomic.Int64 // of tags; 0 lets a completion pass without the lock

	mu   sync.Mutex // guards what follows
	tags map[uint64]struct{}
}

// list adds what a post has outstanding. A batch that ends beside it is listed, and forgotten by
// the goroutine that clears its bit, or here. Those of a chain are left out: its hops are posts
// themselves.
func (g *givenUp) list(t *Transfer, generation uint64) {
	if !slices.ContainsFunc(t.via(), func(c *conn) bool { return c.lane != t.e.stager.lane }) {
		return
	}
	listed := t.outstanding.Load()
	g.mu.Lock()
	if g.tags == nil {
		g.tags = map[uint64]struct{}{}
	}
	for left := listed; left != 0; left &= left - 1 {
		g.tags[tag(t.slot, generation, bits.TrailingZeros64(left))] = struct{}{}
	}
	g.count.Store(int64(len(g.tags)))
	g.mu.Unlock()
	for ended := listed &^ t.outstanding.Load(); ended != 0; ended &= ended - 1 {
		g.ended(tag(t.slot, generation, bits.TrailingZeros64(ended)))
	}
}

// ended forgets a batch. It must be called after its bit was cleared.
func (g *givenUp) ended(tag uint64) {
	if g.count.Load() == 0 {
		return
	}
	g.mu.Lock()
	delete(g.tags, tag)
	g.count.Store(int64(len(g.tags)))
	g.mu.Unlock()
}

// proof is an error as long as there are any.
func (g *givenUp) proof() error {
	if n := g.count.Load(); n > 0 {
		return fmt.Errorf("backends have %d batches in hand that were given up: do not reuse "+
			"their memory: %w", n, driver.ErrUnproven)
	}
	return nil
}
