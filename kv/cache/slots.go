// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"slices"
	"sync"
)

// granule is the unit of places: of memory and of disks.
const granule = 4 << 10

// slots are the places of one tier. They are cut from extents of one size, each of which holds
// blocks of one length, so that nothing is left between blocks that nobody can use. An extent that
// is empty may be cut anew. Any goroutine may call any method.
type slots struct {
	mu      sync.Mutex
	each    uint32              // granules of an extent
	extents []extent            // in order of place
	empty   []uint32            // extents that are not cut, the last one first
	partial map[uint32][]uint32 // by granules of a slot: extents with a free one, and some without
	used    int                 // slots, of all
	inUse   uint64              // granules of those
}

// extent is cut into slots of one length. owners has the entry of each, or a mark.
type extent struct {
	length uint32   // granules of a slot; 0: not cut
	used   int      // slots
	owners []uint32 // of each slot: an entry, reserved, or free
	next   []uint32 // indices of free slots, the last one first
	closed bool     // it is being emptied: nothing more is given out
	listed bool     // slots.partial has it under its length
}

const (
	freeSlot     = none - 1
	reservedSlot = none - 2
)

func newSlots(bytes, each uint64) *slots {
	s := &slots{each: uint32(each / granule), extents: make([]extent, bytes/each),
		partial: map[uint32][]uint32{}}
	for i := range s.extents {
		s.empty = append(s.empty, uint32(len(s.extents)-1-i))
	}
	return s
}

// granules is how many hold so many bytes.
func granules(bytes uint64) uint32 { return uint32((bytes + granule - 1) / granule) }

// reserve takes up to len(dst) places of a length and returns how many there were.
func (s *slots) reserve(length uint32, dst []uint32) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n < len(dst) {
		at, ok := s.open(length)
		if !ok {
			break
		}
		x := &s.extents[at]
		for n < len(dst) && len(x.next) > 0 {
			k := x.next[len(x.next)-1]
			x.next = x.next[:len(x.next)-1]
			x.owners[k] = reservedSlot
			x.used++
			s.used++
			s.inUse += uint64(length)
			dst[n] = at*s.each + k*length
			n++
		}
	}
	return n
}

// open returns an extent that has a free slot of a length.
func (s *slots) open(length uint32) (at uint32, ok bool) {
	list := s.partial[length]
	for len(list) > 0 {
		at = list[len(list)-1]
		if x := &s.extents[at]; x.length == length && len(x.next) > 0 && !x.closed {
			s.partial[length] = list
			return at, true
		}
		list = list[:len(list)-1] // full, or cut anew
		if x := &s.extents[at]; x.length == length {
			x.listed = false
		}
	}
	if len(s.empty) == 0 {
		delete(s.partial, length)
		return 0, false
	}
	at = s.empty[len(s.empty)-1]
	s.empty = s.empty[:len(s.empty)-1]
	s.cut(at, length)
	s.extents[at].listed = true
	s.partial[length] = append(list, at)
	return at, true
}

func (s *slots) cut(at, length uint32) {
	n := s.each / length
	x := &s.extents[at]
	*x = extent{length: length, owners: slices.Repeat([]uint32{freeSlot}, int(n)),
		next: make([]uint32, 0, n)}
	for k := n; k > 0; k-- {
		x.next = append(x.next, k-1)
	}
}

// own notes whose place that is.
func (s *slots) own(place, entry uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x, k := s.find(place)
	x.owners[k] = entry
}

func (s *slots) find(place uint32) (*extent, uint32) {
	x := &s.extents[place/s.each]
	return x, place % s.each / x.length
}

// giveBack ends the use of a place.
func (s *slots) giveBack(place uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := place / s.each
	x, k := s.find(place)
	x.owners[k] = freeSlot
	x.used--
	s.used--
	s.inUse -= uint64(x.length)
	x.next = append(x.next, k)
	if x.used == 0 || len(x.next) == 1 {
		s.list(at)
	}
}

// list has open find an extent that has room: as an empty one, which may be cut anew, where nothing
// is in it.
func (s *slots) list(at uint32) {
	switch x := &s.extents[at]; {
	case x.closed:
	case x.used == 0:
		*x = extent{}
		s.empty = append(s.empty, at)
	case len(x.next) > 0 && !x.listed:
		x.listed = true
		s.partial[x.length] = append(s.partial[x.length], at)
	}
}

func (s *slots) giveBackAll(places []uint32) {
	for _, place := range places {
		s.giveBack(place)
	}
}

// claim takes the place that a record names, as a file is attached. It reports false where that is
// none, or another record has it. The caller holds the lock.
func (s *slots) claim(place, length, entry uint32) bool {
	at, within := place/s.each, place%s.each
	if length == 0 || length > s.each || uint64(at) >= uint64(len(s.extents)) {
		return false
	}
	x := &s.extents[at]
	if x.length == 0 {
		s.cut(at, length)
	}
	k := within / length
	if x.length != length || within != k*length || int(k) >= len(x.owners) ||
		x.owners[k] != freeSlot {
		return false
	}
	x.owners[k] = entry
	x.used++
	s.used++
	s.inUse += uint64(length)
	return true
}

// claimed ends the claims: what nobody claimed is free.
func (s *slots) claimed() {
	s.empty = s.empty[:0]
	for i := len(s.extents) - 1; i >= 0; i-- {
		x := &s.extents[i]
		x.next = x.next[:0]
		for k, owner := range slices.Backward(x.owners) {
			if owner == freeSlot {
				x.next = append(x.next, uint32(k))
			}
		}
		s.list(uint32(i))
	}
}

// empties begins to empty the extent of a place, which is cut for a length: nothing more is given
// out from it. It returns the owners of the slots in use; ok is false where there is nothing to do,
// or another goroutine empties it.
func (s *slots) empties(place, length uint32) (owners []uint32, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := &s.extents[place/s.each]
	if x.closed || x.length != length {
		return nil, false
	}
	x.closed = true
	for _, owner := range x.owners {
		if owner != freeSlot {
			owners = append(owners, owner)
		}
	}
	return owners, true
}

// emptied ends empties: an extent in which nothing is left may be cut anew.
func (s *slots) emptied(place uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := place / s.each
	s.extents[at].closed = false
	s.list(at)
}
