// SPDX-License-Identifier: Apache-2.0

package csrc

import (
	"sync/atomic"
	"unsafe"
)

// Done is the end of a batch.
type Done struct {
	Tag    uint64
	Status int32 // 0, or why not: in the words of the library
	Piece  int32 // that failed, -1 where that is not known
}

// ring is the Go side of sl_ring, in C memory.
type ring struct {
	head, tail *atomic.Uint64
	armed      *atomic.Uint32
	notes      *atomic.Uint32 // messages that wait
	noteLen    *atomic.Uint32 // bytes of the first of them
	due        *atomic.Uint32 // a count was reached or there is room again, since arm
	places     []Done         // a power of two
}

// newRing takes the addresses of a ring's fields.
func newRing(head, tail, armed, notes, noteLen, due, places unsafe.Pointer, n int) ring {
	return ring{
		head: (*atomic.Uint64)(head), tail: (*atomic.Uint64)(tail), armed: (*atomic.Uint32)(armed),
		notes: (*atomic.Uint32)(notes), noteLen: (*atomic.Uint32)(noteLen),
		due:    (*atomic.Uint32)(due),
		places: unsafe.Slice((*Done)(places), n),
	}
}

func (r *ring) poll(done []Done) int {
	tail := r.tail.Load()
	n := int(min(r.head.Load()-tail, uint64(len(done))))
	if n == 0 {
		return 0
	}
	for i := range n {
		done[i] = r.places[(tail+uint64(i))&uint64(len(r.places)-1)]
	}
	r.tail.Store(tail + uint64(n))
	return n
}

// arm puts the flag up before it looks; the other side does it the other way
// round, so one of the two sees the other.
func (r *ring) arm() (ready bool) {
	r.armed.Store(1)
	return r.head.Load() != r.tail.Load() || r.notes.Load() != 0 || r.due.Load() != 0 &&
		r.due.Swap(0) != 0
}
