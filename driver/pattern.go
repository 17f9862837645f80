// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"math"
	"math/bits"
)

// LoopsMax is how many loops one entry of a Pattern may have.
const LoopsMax = 3

// Pattern is Count scattered entries of one shape between one pair of memories. An entry
// is a contiguous run of Run bytes or, with Loops, a nest of such runs. In memory that is
// written to, a byte that is named twice holds one of the values afterwards.
type Pattern struct {
	Run   uint64 // contiguous bytes
	Loops []Loop // outermost first, at most LoopsMax; none: an entry is one run
	Count int    // entries

	Local, Remote       Side
	LocalKey, RemoteKey uint32
}

// Loop repeats what is inside it N times, each Local and Remote bytes behind the one before.
type Loop struct {
	N             uint32
	Local, Remote uint64 // bytes
}

// Side says where the entries lie in one of the two memories: entry i at
// Base + List[(First+i)/Per]*Stride + ((First+i)%Per)*Step. It is a list of slots, such
// as blocks of a KV cache, of Stride bytes each, with Per entries in each slot. With a List a
// Stride may be less than an entry: its numbers are units then, such as pages of memory.
type Side struct {
	Base, Stride, Step uint64   // bytes
	First              uint32   // entries of the first slot that are left out; below Per
	Per                uint32   // entries a slot; 0 is 1
	List               []uint32 // numbers of the slots; nil counts up from 0
}

// At returns the offset of entry i.
func (s *Side) At(i int) uint64 {
	slot, in := uint64(i), uint64(0)
	if s.Per > 1 {
		slot, in = (uint64(s.First)+slot)/uint64(s.Per), (uint64(s.First)+slot)%uint64(s.Per)
	}
	if s.List != nil {
		slot = uint64(s.List[slot])
	}
	return s.Base + slot*s.Stride + in*s.Step
}

// slots returns how many slots count entries need.
func (s *Side) slots(count int) int {
	if s.Per <= 1 {
		return count
	}
	return int((uint64(s.First) + uint64(count) + uint64(s.Per) - 1) / uint64(s.Per))
}

// Plain reports whether the pattern has neither loops nor slots of several entries.
func (p *Pattern) Plain() bool {
	return len(p.Loops) == 0 && p.Local.Per <= 1 && p.Remote.Per <= 1
}

// EntryLen returns the bytes of one entry.
func (p *Pattern) EntryLen() uint64 { return p.Run * uint64(p.Runs()) }

// Runs returns how many contiguous runs one entry has.
func (p *Pattern) Runs() int {
	n := 1
	for i := range p.Loops {
		n *= int(p.Loops[i].N)
	}
	return n
}

// Bytes returns the sum of all entries.
func (p *Pattern) Bytes() uint64 { return uint64(p.Count) * p.EntryLen() }

// Desc returns entry i of a plain pattern as a descriptor, or the first run of that of another.
func (p *Pattern) Desc(i int) Desc {
	return Desc{Local: p.Local.At(i), Remote: p.Remote.At(i), Len: p.Run, LocalKey: p.LocalKey,
		RemoteKey: p.RemoteKey}
}

// AppendDescs appends all runs of entry i as descriptors, in the order of the loops.
func (p *Pattern) AppendDescs(dst []Desc, i int) []Desc {
	return appendRuns(dst, p.Loops, p.Desc(i))
}

func appendRuns(dst []Desc, loops []Loop, at Desc) []Desc {
	if len(loops) == 0 {
		return append(dst, at)
	}
	for range loops[0].N {
		dst = appendRuns(dst, loops[1:], at)
		at.Local += loops[0].Local
		at.Remote += loops[0].Remote
	}
	return dst
}

// Check reports whether the pattern is well formed and stays within both sizes.
func (p *Pattern) Check(localSize, remoteSize uint64) error {
	if p.Count <= 0 || p.Count > math.MaxInt32 || p.Run == 0 {
		return fmt.Errorf("pattern: %d entries of runs of %d bytes: %w", p.Count, p.Run, ErrBounds)
	}
	if len(p.Loops) > LoopsMax {
		return fmt.Errorf("pattern: %d loops, at most %d: %w", len(p.Loops), LoopsMax, ErrBounds)
	}
	runs := uint64(1)
	local, remote, ok := p.Run, p.Run, true // bytes from the first to the last of an entry
	for i := range p.Loops {
		l := &p.Loops[i]
		if l.N == 0 {
			return fmt.Errorf("pattern: loop %d runs 0 times: %w", i, ErrBounds)
		}
		var over uint64
		over, runs = bits.Mul64(runs, uint64(l.N))
		local, ok = reach(local, uint64(l.N)-1, l.Local, ok && over == 0)
		remote, ok = reach(remote, uint64(l.N)-1, l.Remote, ok)
	}
	over, entry := bits.Mul64(runs, p.Run)
	if over2, _ := bits.Mul64(entry, uint64(p.Count)); !ok || over != 0 || over2 != 0 ||
		runs > math.MaxInt32 {
		return fmt.Errorf("pattern: entries of %d runs of %d bytes are too large: %w", runs, p.Run,
			ErrBounds)
	}
	if err := p.checkSide("local", &p.Local, local, localSize); err != nil {
		return err
	}
	return p.checkSide("remote", &p.Remote, remote, remoteSize)
}

// reach returns extent + n*step, and whether nothing has overflowed.
func reach(extent, n, step uint64, ok bool) (uint64, bool) {
	over, product := bits.Mul64(n, step)
	sum, carry := bits.Add64(extent, product, 0)
	return sum, ok && over == 0 && carry == 0
}

// checkSide compares all entries, of extent bytes from first to last, with the memory's size.
func (p *Pattern) checkSide(side string, s *Side, extent, size uint64) error {
	if s.Per > 1 && s.First >= s.Per || s.Per <= 1 && s.First != 0 {
		return fmt.Errorf("pattern: %s side begins with entry %d of slots of %d: %w", side, s.First,
			max(1, s.Per), ErrBounds)
	}
	slots := s.slots(p.Count)
	if s.List != nil && len(s.List) != slots {
		return fmt.Errorf("pattern: %s list has %d of %d slots: %w", side, len(s.List), slots,
			ErrBounds)
	}
	if s.Per > 1 {
		in := min(uint64(s.First)+uint64(p.Count), uint64(s.Per)) - 1 // the last entry in any slot
		var ok bool
		if extent, ok = reach(extent, in, s.Step, true); !ok {
			return fmt.Errorf("pattern: %s slots of %d entries are too large: %w", side, s.Per,
				ErrBounds)
		}
	}
	if s.Stride < extent && s.Stride != 0 && s.List == nil && s.Per <= 1 && len(p.Loops) == 0 {
		return fmt.Errorf("pattern: %s stride %d is below the entry length %d: %w", side, s.Stride,
			extent, ErrBounds)
	}
	room := slotsWithin(size, s.Base, extent, s.Stride)
	if s.List == nil {
		if uint64(slots) > room {
			return slotBoundsError(side, uint64(slots-1), room, size)
		}
		return nil
	}
	for _, slot := range s.List {
		if uint64(slot) >= room {
			return slotBoundsError(side, uint64(slot), room, size)
		}
	}
	return nil
}

// slotsWithin returns how many slots fit, so that one comparison per index checks bounds
// and overflow alike.
func slotsWithin(size, base, extent, stride uint64) uint64 {
	if base > size || extent > size-base {
		return 0
	}
	if stride == 0 {
		return 1 << 32 // every number names the same slot
	}
	return (size-base-extent)/stride + 1
}

func slotBoundsError(side string, index, room, size uint64) error {
	return fmt.Errorf("pattern: %s slot %d is past the %d that fit in %d bytes: %w", side, index,
		room, size, ErrBounds)
}
