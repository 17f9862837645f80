// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"math"
	"math/bits"
)

// nested is struct sl_nested of gather.h: what the kernel for nests takes.
type nested struct {
	args
	nest
}

// nest is struct sl_nest.
type nest struct {
	dstLoop, srcLoop                   [LoopsMax]uint64
	dstStep, srcStep                   uint64
	loop                               [LoopsMax]uint32
	runs                               uint32
	dstPer, srcPer, dstFirst, srcFirst uint32
}

// nests reports whether the pattern is for the kernel for nests.
func (p *Pattern) nests() bool {
	if p.Dst.Per > 1 || p.Src.Per > 1 {
		return true
	}
	for i := range p.Loops {
		if p.Loops[i].N > 0 {
			return true
		}
	}
	return false
}

// fillNest is fill for nests. An entry here is one run.
func (p *Pattern) fillNest(n *nested) error {
	runs, all := uint64(1), p.Entry
	for i := range p.Loops {
		l := &p.Loops[i]
		n.loop[i], n.dstLoop[i], n.srcLoop[i] = max(l.N, 1), l.Dst, l.Src
		runs *= uint64(n.loop[i]) // of two numbers of 32 bits, or too many already
		all |= l.Dst | l.Src
		if runs > math.MaxInt32 {
			return tooManyRuns()
		}
	}
	over, rows := bits.Mul64(runs, uint64(max(p.Count, 0)))
	if over != 0 || rows > math.MaxInt32 {
		return tooManyRuns()
	}
	if err := n.begin(1, int(rows)); err != nil {
		return err
	}
	if p.Count < 0 || p.Entry < Align || p.Entry > EntryMax {
		return &LayoutError{0, fmt.Sprintf("%d entries of runs of %d bytes", p.Count, p.Entry),
			fmt.Sprintf("runs of %d to %d bytes", Align, EntryMax)}
	}
	n.runs = uint32(runs)
	n.dstPer, n.dstFirst, n.dstStep = max(p.Dst.Per, 1), p.Dst.First, p.Dst.Step
	n.srcPer, n.srcFirst, n.srcStep = max(p.Src.Per, 1), p.Src.First, p.Src.Step
	all |= p.Dst.At | p.Src.At | p.Dst.Stride | p.Src.Stride | n.dstStep | n.srcStep
	n.part[0] = argsPart{p.Dst.At, p.Src.At, p.Dst.Stride, p.Src.Stride, uint32(p.Entry),
		width(all)}
	n.dstPlaces = p.places(&p.Dst, n.dstLoop, n.loop)
	n.srcPlaces = p.places(&p.Src, n.srcLoop, n.loop)
	return nil
}

func tooManyRuns() error {
	return &LayoutError{-1, "more runs than an index of 31 bits counts", "several patterns"}
}

// places is how many places of a side its memory has room for: 0 where not even one, or
// where the pattern is out of all bounds.
func (p *Pattern) places(r *Reach, loop [LoopsMax]uint64, rounds [LoopsMax]uint32) uint64 {
	extent, carry := p.Entry, uint64(0)
	add := func(n, step uint64) {
		over, product := bits.Mul64(n, step)
		sum, c := bits.Add64(extent, product, 0)
		extent, carry = sum, carry|over|c
	}
	for i := range loop {
		add(uint64(rounds[i])-1, loop[i])
	}
	if per := uint64(max(r.Per, 1)); per > 1 {
		in := min(uint64(r.First)+uint64(p.Count), per)
		add(max(in, 1)-1, r.Step)
	}
	switch {
	case carry != 0 || r.Len < extent || uint64(r.First)+uint64(p.Count) > math.MaxUint32:
		return 0
	case r.Stride == 0:
		return math.MaxUint64
	}
	return (r.Len-extent)/r.Stride + 1
}
