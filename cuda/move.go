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

// tally is struct sl_tally of gather.h: the kernels add to it what they leave out.
type tally struct{ skipped, bad, firstBad uint64 }

// clean is a tally before a launch.
var clean = tally{firstBad: math.MaxUint64}

func (t *tally) sum(count uint64) (Tally, error) {
	sum := Tally{Moved: count - t.skipped - t.bad, Skipped: t.skipped, Bad: t.bad}
	if t.bad == 0 {
		return sum, nil
	}
	sum.FirstBad = t.firstBad
	return sum, driver.ErrBounds
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

// args are what the kernels take: struct sl_move of gather.h.
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

// aligned reports whether the kernels can reach all memories: a *LayoutError, or nil.
func (a *args) aligned() error {
	for k := range a.part[:a.parts] {
		if a.part[k].width == 0 {
			return &LayoutError{k, "memory at an odd address", fmt.Sprintf("a multiple of %d",
				Align)}
		}
	}
	return nil
}

// begin sets what all parts have in common.
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

// fill sets part k, and lowers the number of places to what its memories have room for.
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

// covers reports whether a list of n indices is long enough. end is the side that it is for.
func (a *args) covers(n uint64, end string) error {
	if n < a.count {
		return &LayoutError{-1, fmt.Sprintf("%d indices of the %s", n, end),
			fmt.Sprintf("one for each of %d entries", a.count)}
	}
	return nil
}
