// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"fmt"
	"math"
	"math/bits"
)

// LoopsMax is how many loops a Pattern may have.
const LoopsMax = 3

// Pattern describes Count scattered entries of the same shape, to copy between two memories. An
// entry is one contiguous run of Run bytes or, with Loops, several runs at regular distances. If
// two entries write the same byte, it holds one of the two values afterwards.
type Pattern struct {
	Run   uint64 // contiguous bytes
	Loops []Loop // nested, outermost first, at most LoopsMax; none: an entry is one run
	Count int    // entries

	Local, Remote       Side
	LocalKey, RemoteKey uint32
}

// Loop repeats the loops inside it, or the run, N times. Each repetition lies Local bytes further
// in the local memory than the one before, and Remote bytes further in the remote one.
type Loop struct {
	N             uint32
	Local, Remote uint64 // distance of two repetitions, in bytes
}

// Side says where the entries lie in one of the two memories. The memory is divided into slots of
// Stride bytes, such as the blocks of a KV cache, and each slot holds Per entries. List names the
// slots to use. Entry i lies at
//
//	Base + List[(First+i)/Per]*Stride + ((First+i)%Per)*Step
//
// With a List, Stride may be less than an entry: the numbers are units then, such as pages.
type Side struct {
	Base, Stride, Step uint64   // bytes: of slot 0, between slots, between entries of a slot
	First              uint32   // entries to skip in the first slot of List; less than Per
	Per                uint32   // entries per slot; 0 means 1
	List               []uint32 // slot numbers; nil means 0, 1, 2, …
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

// slots returns how many slots count entries occupy, with the First skipped ones.
func (s *Side) slots(count int) int {
	if s.Per <= 1 {
		return count
	}
	return int((uint64(s.First) + uint64(count) + uint64(s.Per) - 1) / uint64(s.Per))
}

// Plain reports whether each entry is one run and has a slot of its own.
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

// Bytes returns the bytes of all entries together.
func (p *Pattern) Bytes() uint64 { return uint64(p.Count) * p.EntryLen() }

// Desc returns the first run of entry i as a descriptor. Without loops that is the whole entry.
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
	local, remote, ok := p.Run, p.Run, true // extent of an entry: from its first to its last byte
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

// reach returns extent + n*step, and ok unless that overflows.
func reach(extent, n, step uint64, ok bool) (uint64, bool) {
	over, product := bits.Mul64(n, step)
	sum, carry := bits.Add64(extent, product, 0)
	return sum, ok && over == 0 && carry == 0
}

// checkSide checks that all entries, each of that extent, lie within size bytes of memory.
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
		// the highest index within a slot that an entry has
		in := min(uint64(s.First)+uint64(p.Count), uint64(s.Per)) - 1
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

// slotsWithin returns how many slots fit into the memory. A slot number below it cannot lead out of
// bounds or overflow, so that checkSide needs only one comparison for each number.
func slotsWithin(size, base, extent, stride uint64) uint64 {
	if base > size || extent > size-base {
		return 0
	}
	if stride == 0 {
		return 1 << 32 // all slots are at the same place
	}
	return (size-base-extent)/stride + 1
}

func slotBoundsError(side string, index, room, size uint64) error {
	return fmt.Errorf("pattern: %s slot %d is past the %d that fit in %d bytes: %w", side, index,
		room, size, ErrBounds)
}
