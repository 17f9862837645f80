// SPDX-License-Identifier: Apache-2.0

package tcp

// scout goes ahead of whoever copies scattered pieces, and has their memory on its way to the
// cache when they are copied: else each piece waits for memory by itself.
type scout struct {
	ranges
	mem []byte
}

const (
	scoutAhead = 8       // pieces
	scoutBytes = 2 << 10 // of each: the processor sees by itself how a longer one goes on
)

// look has the next n pieces fetched.
func (s *scout) look(n int) {
	for ; n > 0 && s.left > 0; n-- {
		off, k := s.next()
		prefetch(s.mem[off : off+min(k, scoutBytes)])
		s.advance(k)
	}
}
