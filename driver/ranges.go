// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"cmp"
	"fmt"
	"slices"
)

// RangesMax is how many ranges a Segment.Only may have.
const RangesMax = 1 << 17 // 2 MiB of them

// Range is the Len bytes that begin at Off.
type Range struct{ Off, Len uint64 }

// Ranges is a set of bytes of a memory, in order; no range touches the next.
type Ranges []Range

// NewRanges makes a set of ranges in any order, which may overlap. It is ErrBounds if there is
// none, if one is empty or past size, and if more than RangesMax are left once those that touch
// are joined.
func NewRanges(list []Range, size uint64) (Ranges, error) {
	if len(list) == 0 {
		return nil, fmt.Errorf("ranges: there is none, name at least one: %w", ErrBounds)
	}
	for _, r := range list {
		if r.Len == 0 || !within(r.Off, r.Len, size) {
			return nil, fmt.Errorf("ranges: [%d, +%d) is empty, or past the %d bytes: %w", r.Off,
				r.Len, size, ErrBounds)
		}
	}
	sorted := slices.Clone(list)
	slices.SortFunc(sorted, func(a, b Range) int { return cmp.Compare(a.Off, b.Off) })
	set := sorted[:1]
	for _, r := range sorted[1:] {
		if last := &set[len(set)-1]; r.Off <= last.Off+last.Len {
			last.Len = max(last.Len, r.Off+r.Len-last.Off)
			continue
		}
		set = append(set, r)
	}
	if len(set) > RangesMax {
		return nil, fmt.Errorf("ranges: %d, at most %d: lease larger blocks, or parts of the "+
			"request: %w", len(set), RangesMax, ErrBounds)
	}
	return Ranges(slices.Clip(set)), nil
}

// Check returns an error unless r is nil or a valid set within a memory of that size.
func (r Ranges) Check(size uint64) error {
	if r != nil && len(r) == 0 || len(r) > RangesMax {
		return fmt.Errorf("ranges: %d, want 1 to %d: %w", len(r), RangesMax, ErrBounds)
	}
	for i := range r {
		if r[i].Len == 0 || !within(r[i].Off, r[i].Len, size) ||
			i > 0 && r[i].Off <= r[i-1].Off+r[i-1].Len {
			return fmt.Errorf("ranges: range %d, [%d, +%d) of %d bytes, is empty, past the end or "+
				"not behind the one before: %w", i, r[i].Off, r[i].Len, size, ErrBounds)
		}
	}
	return nil
}

// Has reports whether the n bytes at off lie within one range of the set. A nil set contains all
// bytes. at holds the index of the range that the last call found, with which the search begins.
func (r Ranges) Has(off, n uint64, at *int) bool {
	if r == nil {
		return true
	}
	i := *at
	if i >= len(r) || off < r[i].Off || off-r[i].Off >= r[i].Len {
		if i++; i >= len(r) || off < r[i].Off || off-r[i].Off >= r[i].Len {
			i = r.find(off)
		}
	}
	if i < 0 {
		return false
	}
	*at = i
	in := off - r[i].Off
	return in <= r[i].Len && n <= r[i].Len-in
}

// find returns the index of the last range that begins at off or before; -1: there is none.
func (r Ranges) find(off uint64) int {
	low, high := 0, len(r) // those below low begin at off or before, those from high on behind it
	for low < high {
		if middle := int(uint(low+high) / 2); r[middle].Off <= off {
			low = middle + 1
		} else {
			high = middle
		}
	}
	return low - 1
}

// HasRemote reports whether all bytes of the pattern's remote side are in the set. The pattern has
// passed Check. HasRemote looks at single runs only for an entry that does not lie in one range.
func (r Ranges) HasRemote(p *Pattern) bool {
	if r == nil {
		return true
	}
	extent := p.Run
	for i := range p.Loops {
		extent += uint64(p.Loops[i].N-1) * p.Loops[i].Remote
	}
	at := 0
	for i := range p.Count {
		off := p.Remote.At(i)
		if !r.Has(off, extent, &at) && !r.hasRuns(p.Loops, off, p.Run, &at) {
			return false
		}
	}
	return true
}

func (r Ranges) hasRuns(loops []Loop, off, run uint64, at *int) bool {
	if len(loops) == 0 {
		return r.Has(off, run, at)
	}
	for range loops[0].N {
		if !r.hasRuns(loops[1:], off, run, at) {
			return false
		}
		off += loops[0].Remote
	}
	return true
}
