// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/internal/hostmem"
)

// scratchMax is the size of the memory that the baseline writes in turn: several times the largest
// CPU caches, as the decode process's pool is.
const scratchMax = 1 << 30 // 1 GiB

// baseline copies the same pieces as the transfer by memcpy within this process: from the same
// staging memory to host memory, whatever kind of memory the pool is.
type baseline struct {
	memory  *hostmem.Buffer
	at      uint64 // where the next piece goes
	threads int
	bytes   uint64
	took    time.Duration
}

// baselineBytes is the size of that memory.
func baselineBytes(layerBytes, poolBytes uint64) uint64 {
	return max(min(scratchMax, poolBytes), layerBytes)
}

func newBaseline(bytes uint64, threads int) (*baseline, error) {
	m, err := hostmem.Alloc(bytes, hostmem.Options{Purpose: "replay-memcpy", Populate: true})
	if err != nil {
		return nil, fmt.Errorf("allocate baseline memory: %w", err)
	}
	return &baseline{memory: m, threads: threads}, nil
}

// time is how long it has copied; a nil baseline never has.
func (b *baseline) time() time.Duration {
	if b == nil {
		return 0
	}
	return b.took
}

// run copies the pieces, at most one layer, and adds up time and bytes.
func (b *baseline) run(pieces [][]byte) {
	var total uint64
	for _, p := range pieces {
		total += uint64(len(p))
	}
	dst := b.memory.Bytes()
	if b.at+total > uint64(len(dst)) {
		b.at = 0
	}
	dst = dst[b.at:]
	b.at += total
	start := time.Now()
	if b.threads == 1 {
		copyAll(dst, pieces)
	} else {
		b.spread(dst, pieces)
	}
	b.took += time.Since(start)
	b.bytes += total
}

// spread copies the pieces with several threads, each a contiguous part of the list.
func (b *baseline) spread(dst []byte, pieces [][]byte) {
	var all sync.WaitGroup
	for t := range b.threads {
		share := pieces[len(pieces)*t/b.threads : len(pieces)*(t+1)/b.threads]
		to := dst
		for _, p := range share {
			dst = dst[len(p):]
		}
		all.Go(func() { copyAll(to, share) })
	}
	all.Wait()
}

func copyAll(dst []byte, pieces [][]byte) {
	for _, p := range pieces {
		dst = dst[copy(dst, p):]
	}
}
