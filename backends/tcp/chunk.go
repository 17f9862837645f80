// SPDX-License-Identifier: Apache-2.0

package tcp

import "sync"

const (
	chunkBytes = 64 << 10
	chunkSlack = headBytes + entriesMax*entryBytes // room for one more head and table
	chunksKept = 32
)

// chunk is the buffer of a connection for small frames and scattered runs. It is small enough to
// stay in a cache of the processor, where copying costs next to nothing. A connection has one only
// while there is something in it, so that an idle connection costs no memory.
type chunk struct {
	mem [chunkBytes + chunkSlack]byte
	n   int // bytes of mem that are to be written

	// of the frame that is read or answered: its table or fragment as bytes, the fragment decoded,
	// and the list of slots of that
	table [entriesMax * entryBytes]byte
	frag  fragment
	slots [slotsMax]uint32
}

// freeList keeps unused values for their next use.
type freeList[T any] struct {
	most int // how many it keeps

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
