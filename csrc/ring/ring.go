// SPDX-License-Identifier: Apache-2.0

// Package ring has what the C data planes share with Go: the rings in which C says which batches
// have ended, the form in which C takes patterns, and vendors' libraries that are opened once.
package ring

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

// Ring is the Go side of sl_ring (csrc/ring.h), in C memory. A side that writes and then looks at
// what the other side writes exchanges (Swap) and does not store: under the race detector, a Load
// may overtake a Store to memory that is not Go's own.
type Ring struct {
	Head, Tail *atomic.Uint64
	Armed      *atomic.Uint32
	Notifs     *atomic.Uint32 // messages that wait
	NotifLen   *atomic.Uint32 // bytes of the first of them
	Due        *atomic.Uint32 // there is room again, since Arm
	places     []Done         // a power of two
}

// New takes the addresses of a ring's fields.
func New(head, tail, armed, notifs, notifLen, due, places unsafe.Pointer, n int) Ring {
	return Ring{
		Head: (*atomic.Uint64)(head), Tail: (*atomic.Uint64)(tail), Armed: (*atomic.Uint32)(armed),
		Notifs: (*atomic.Uint32)(notifs), NotifLen: (*atomic.Uint32)(notifLen),
		Due:    (*atomic.Uint32)(due),
		places: unsafe.Slice((*Done)(places), n),
	}
}

// Poll moves ends into done and returns how many.
func (r *Ring) Poll(done []Done) int {
	tail := r.Tail.Load()
	n := int(min(r.Head.Load()-tail, uint64(len(done))))
	if n == 0 {
		return 0
	}
	for i := range n {
		done[i] = r.places[(tail+uint64(i))&uint64(len(r.places)-1)]
	}
	r.Tail.Store(tail + uint64(n))
	return n
}

// Arm puts the flag up before it looks; the other side does it the other way
// round, so one of the two sees the other.
func (r *Ring) Arm() (ready bool) {
	r.Armed.Swap(1)
	return r.Head.Load() != r.Tail.Load() || r.Notifs.Load() != 0 ||
		r.Due.Load() != 0 && r.Due.Swap(0) != 0
}
