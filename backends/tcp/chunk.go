// SPDX-License-Identifier: Apache-2.0

package tcp

import "sync"

// A chunk is what small frames and scattered pieces go through: it stays in a cache of the
// processor, where copying costs next to nothing. Connections have one only while there is
// something in it, so that an idle one costs no memory.
const (
	chunkBytes = 64 << 10
	chunkSlack = headBytes + entriesMax*entryBytes // a head and a table more
	chunksKept = 32
)

type chunk struct {
	mem   [chunkBytes + chunkSlack]byte
	n     int
	table [entriesMax * entryBytes]byte // of the frame that is read
	slots [slotsMax]uint32              // its list, where it has one
}

// chunks are those that are not in use.
type chunks struct {
	mu   sync.Mutex
	free []*chunk
}

func (s *chunks) take() *chunk {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.free); n > 0 {
		c := s.free[n-1]
		s.free = s.free[:n-1]
		return c
	}
	return &chunk{}
}

func (s *chunks) give(c *chunk) {
	c.n = 0
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.free) < chunksKept {
		s.free = append(s.free, c)
	}
}
