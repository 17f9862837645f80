// SPDX-License-Identifier: Apache-2.0

package tcp

// prefetcher is a cursor that runs ahead of a copy of scattered runs and has the processor fetch
// their memory: else each run waits for memory by itself.
type prefetcher struct {
	ranges
	mem []byte
}

const (
	prefetchAhead = 8       // runs
	prefetchBytes = 2 << 10 // of each: the hardware prefetcher follows a longer one by itself
)

// fetch prefetches the first bytes of the next n runs.
func (s *prefetcher) fetch(n int) {
	for ; n > 0 && s.left > 0; n-- {
		off, k := s.next()
		prefetch(s.mem[off : off+min(k, prefetchBytes)])
		s.advance(k)
	}
}
