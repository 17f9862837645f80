// SPDX-License-Identifier: Apache-2.0

package tcp

// prefetcher goes ahead of a copy of scattered pieces, and has their memory on its way to the
// cache when they are copied: else each piece waits for memory by itself.
type prefetcher struct {
	ranges
	mem []byte
}

const (
	prefetchAhead = 8       // pieces
	prefetchBytes = 2 << 10 // of each: the processor sees by itself how a longer one goes on
)

// fetch has the next n pieces fetched.
func (s *prefetcher) fetch(n int) {
	for ; n > 0 && s.left > 0; n-- {
		off, k := s.next()
		prefetch(s.mem[off : off+min(k, prefetchBytes)])
		s.advance(k)
	}
}
