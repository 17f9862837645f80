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
	table [entriesMax * entryBytes]byte // of the frame that is read or served
	frag  fragment                      // what it says, where it has a pattern
	slots [slotsMax]uint32              // its list, where it has one
}

// freeList holds what is not in use, at most so many.
type freeList[T any] struct {
	most int // set before use

	mu   sync.Mutex
	free []*T
}

func (s *freeList[T]) get() *T {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.free)
	if n == 0 {
		return new(T)
	}
	x := s.free[n-1]
	s.free = s.free[:n-1]
	return x
}

func (s *freeList[T]) put(x *T) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.free) < s.most {
		s.free = append(s.free, x)
	}
}
