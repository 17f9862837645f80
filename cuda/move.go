// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"math"

	"github.com/sluicehq/sluice/driver"
)

// The bounds of a Pattern.
const (
	// EntryMax is the most bytes of an entry. What is longer than a few KiB is better moved
	// by a copy engine.
	EntryMax = 16 << 20 // 16 MiB
	// Align divides every entry and stride, and the addresses that kernels take. Multiples of 16
	// move in the widest steps, other multiples of 8 in half of them, the rest in quarters.
	Align = 4
)

// skipIndex in a list of indices has the kernels leave an entry out.
const skipIndex = math.MaxUint32

// tally is struct sl_tally of gather.h: the kernels count the entries there that they do not move.
type tally struct{ skipped, bad, firstBad uint64 }

// clean is a tally before a launch.
var clean = tally{firstBad: math.MaxUint64}

// args are what the kernels take: struct sl_move of gather.h. A Pattern is its first part.
type args struct {
	part                 [2]argsPart
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

// farDst is SL_FAR_DST, a bit of args.flags.
const farDst = 4

// refused is the error of a Pattern that no kernel can take, whatever the indices.
func refused(what string, got any, want string) error {
	return fmt.Errorf("%s %v, want %s: %w", what, got, want, driver.ErrBounds)
}

// begin sets the fields that do not depend on the places of the entries.
func (a *args) begin(count int) error {
	if count < 0 || count > math.MaxInt32 {
		return refused("entries", count, fmt.Sprintf("0 to %d", math.MaxInt32))
	}
	a.count, a.parts = uint64(count), 1
	a.dstPlaces, a.srcPlaces = math.MaxUint64, math.MaxUint64
	return nil
}

// side is one of the two memories of a Pattern.
type side struct{ at, n, stride uint64 }

// fill sets where the entries lie, and lowers the number of places to what the memories have room
// for.
func (a *args) fill(entry uint64, dst, src side) error {
	if entry < Align || entry > EntryMax || entry%Align != 0 {
		return refused("bytes of an entry", entry,
			fmt.Sprintf("a multiple of %d from %d to %d", Align, Align, EntryMax))
	}
	for _, s := range [...]*side{&dst, &src} {
		if s.stride == 0 {
			s.stride = entry
		}
		if s.stride < entry || s.stride%Align != 0 {
			return refused("stride", s.stride,
				fmt.Sprintf("a multiple of %d, at least the entry's %d bytes", Align, entry))
		}
	}
	a.part[0] = argsPart{dst.at, src.at, dst.stride, src.stride, uint32(entry),
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
