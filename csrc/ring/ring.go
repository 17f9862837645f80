// SPDX-License-Identifier: Apache-2.0

// Package ring has what the C data planes share with Go: the rings by which C reports the batches
// that have ended, the form in which C takes patterns, and vendors' libraries, each opened once.
package ring

import (
	"sync/atomic"
	"unsafe"
)

// Done reports the end of a batch.
type Done struct {
	Tag    uint64
	Status int32 // 0 for success, else a status of the library
	Piece  int32 // index of the piece that failed, -1 if that is not known
}

// Ring is the Go side of sl_ring (csrc/ring.h), in C memory: C adds entries at Head, and Go takes
// them at Tail. A side that writes one field and then reads one that the other side writes must
// write it with Swap, not with Store: under the race detector, a Load may overtake a Store to
// memory that is not Go's own.
type Ring struct {
	Head, Tail *atomic.Uint64
	Armed      *atomic.Uint32 // 1: C must signal the event at its next entry
	Notifs     *atomic.Uint32 // number of messages that wait
	NotifLen   *atomic.Uint32 // bytes of the first of them
	Due        *atomic.Uint32 // 1: room has become free since Arm
	places     []Done         // their number is a power of two
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

// Poll moves entries from the ring into done, and returns their number.
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

// Arm asks C to signal the event at its next entry. It reports whether something is ready already.
// Go sets Armed before it reads the ring, and C adds to the ring before it reads Armed, so at least
// one of the two notices the other.
func (r *Ring) Arm() (ready bool) {
	r.Armed.Swap(1)
	return r.Head.Load() != r.Tail.Load() || r.Notifs.Load() != 0 ||
		r.Due.Load() != 0 && r.Due.Swap(0) != 0
}
