// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"math"

	"github.com/sluicehq/sluice/driver"
)

// The bounds of a Move.
const (
	// PartsMax is how many arrays go by one list of indices: a latent of 656 bytes and an
	// indexer key of 132, say.
	PartsMax = 2
	// EntryMax is the most bytes of an entry. What is longer than a few KiB is better moved
	// by a copy engine.
	EntryMax = 16 << 20 // 16 MiB
	// Align divides every entry and stride, and the addresses that kernels take. Multiples of 16
	// move in the widest steps, other multiples of 8 in half of them, the rest in quarters.
	Align = 4
)

// Skip32 and Skip64, -1 both, are the indices that leave an entry out.
const (
	Skip32 = math.MaxUint32
	Skip64 = math.MaxUint64
)

// Move says which entries move where: for each i below Count, the entry at place Src[i] of
// each part's source goes to place Dst[i] of its destination. A list of Src makes it a
// gather, one of Dst a scatter. The memories must not overlap, and the sources and lists must
// not change meanwhile; if a place of the destination is named twice, it ends with bytes of
// either entry.
type Move struct {
	Parts    []Part // 1 to PartsMax
	Count    int    // entries
	Dst, Src Index
}

// Part is one array of entries on each side. The zero strides mean Entry: one behind the other.
type Part struct {
	Dst, Src             []byte
	Entry                uint64 // bytes
	DstStride, SrcStride uint64 // bytes from one place to the next, at least Entry
}

// Index is a list of places, of 32 bits or of 64; without either entry i is at place i.
type Index struct {
	U32 []uint32
	U64 []uint64
}

// Tally says what became of the entries of a Move.
type Tally struct {
	Moved   uint64
	Skipped uint64 // index -1
	Bad     uint64 // an index past the end of a memory: left out
	// FirstBad is the lowest entry with a bad index, if there is one.
	FirstBad uint64
}

// LayoutError is a Move that no kernel can take, whatever the indices. It is found before any
// byte moves.
type LayoutError struct {
	Part int    // -1: the Move as a whole
	What string // "entry of 130 bytes"
	Want string // "a multiple of 4 from 4 to 16777216"
}

// Error names the part, what is wrong with it, and what would be right.
func (e *LayoutError) Error() string {
	if e.Part < 0 {
		return fmt.Sprintf("%s: want %s", e.What, e.Want)
	}
	return fmt.Sprintf("part %d: %s: want %s", e.Part, e.What, e.Want)
}

// Is makes errors.Is(err, driver.ErrBounds) true.
func (e *LayoutError) Is(target error) bool { return target == driver.ErrBounds }

// args are what kernels and twin take: struct sl_move of gather.h. The addresses of the
// lists and of the tally are left to the launcher.
type args struct {
	part                 [PartsMax]argsPart
	dstIndex, srcIndex   uint64
	dstPlaces, srcPlaces uint64
	tally, count         uint64
	parts, flags         uint32
}

// argsPart is struct sl_part.
type argsPart struct {
	dst, src             uint64
	dstStride, srcStride uint64
	entry, width         uint32
}

// The bits of args.flags.
const (
	dstWide = 1 << iota
	srcWide
	farDst
)

// Check reports whether the kernels can take a Move: a *LayoutError, or nil. It does not look
// at the indices, which are checked as they are used. The twin takes more than that: memory
// at any address.
func (m *Move) Check() error {
	var a args
	if err := m.fill(&a); err != nil {
		return err
	}
	return a.aligned()
}

func (a *args) aligned() error {
	for k := range a.part[:a.parts] {
		if a.part[k].width == 0 {
			return &LayoutError{k, "memory at an odd address", fmt.Sprintf("a multiple of %d",
				Align)}
		}
	}
	return nil
}

func (m *Move) fill(a *args) error {
	if err := a.begin(len(m.Parts), m.Count); err != nil {
		return err
	}
	for k := range m.Parts {
		p := &m.Parts[k]
		dst := side{addressOf(p.Dst), uint64(len(p.Dst)), p.DstStride}
		src := side{addressOf(p.Src), uint64(len(p.Src)), p.SrcStride}
		if err := a.fill(k, p.Entry, dst, src); err != nil {
			return err
		}
	}
	if err := m.Dst.fill(a, dstWide, &a.dstPlaces, "destination"); err != nil {
		return err
	}
	return m.Src.fill(a, srcWide, &a.srcPlaces, "source")
}

func (a *args) begin(parts, count int) error {
	if parts < 1 || parts > PartsMax {
		return &LayoutError{-1, fmt.Sprintf("%d parts", parts), fmt.Sprintf("1 to %d", PartsMax)}
	}
	if count < 0 || count > math.MaxInt32 {
		return &LayoutError{-1, fmt.Sprintf("%d entries", count),
			fmt.Sprintf("0 to %d", math.MaxInt32)}
	}
	a.count, a.parts = uint64(count), uint32(parts)
	a.dstPlaces, a.srcPlaces = math.MaxUint64, math.MaxUint64
	return nil
}

// side is one memory of a part.
type side struct{ at, n, stride uint64 }

func (a *args) fill(k int, entry uint64, dst, src side) error {
	if entry < Align || entry > EntryMax || entry%Align != 0 {
		return &LayoutError{k, fmt.Sprintf("entry of %d bytes", entry),
			fmt.Sprintf("a multiple of %d from %d to %d", Align, Align, EntryMax)}
	}
	for _, s := range [...]*side{&dst, &src} {
		if s.stride == 0 {
			s.stride = entry
		}
		if s.stride < entry || s.stride%Align != 0 {
			return &LayoutError{k, fmt.Sprintf("stride of %d bytes", s.stride),
				fmt.Sprintf("a multiple of %d, at least the entry's %d bytes", Align, entry)}
		}
	}
	a.part[k] = argsPart{dst.at, src.at, dst.stride, src.stride, uint32(entry),
		width(entry | dst.stride | src.stride | dst.at | src.at)}
	a.dstPlaces = min(a.dstPlaces, dst.places(entry))
	a.srcPlaces = min(a.srcPlaces, src.places(entry))
	return nil
}

// places is how many entries a memory has room for.
func (s *side) places(entry uint64) uint64 {
	if s.n < entry {
		return 0
	}
	return (s.n-entry)/s.stride + 1
}

// width is the widest step of which everything is a multiple; 0 if there is none.
func width(all uint64) uint32 {
	switch {
	case all%16 == 0:
		return 16
	case all%8 == 0:
		return 8
	case all%Align == 0:
		return 4
	}
	return 0
}

func (x *Index) fill(a *args, wide uint32, places *uint64, end string) error {
	switch {
	case x.U32 != nil && x.U64 != nil:
		return &LayoutError{-1, "two lists of the " + end, "indices of 32 bits or of 64"}
	case x.U64 != nil:
		a.flags |= wide
		return a.covers(uint64(len(x.U64)), end)
	case x.U32 != nil:
		*places = min(*places, Skip32) // the last index of 32 bits has another meaning
		return a.covers(uint64(len(x.U32)), end)
	}
	return nil
}

func (a *args) covers(n uint64, end string) error {
	if n < a.count {
		return &LayoutError{-1, fmt.Sprintf("%d indices of the %s", n, end),
			fmt.Sprintf("one for each of %d entries", a.count)}
	}
	return nil
}
