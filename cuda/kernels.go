// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
)

// Kernels holds the kernels of a card. The caller, such as backends/cuda, launches them on streams
// of its own. It may be used by any goroutine.
type Kernels struct{ card Card }

// LoadKernels has load compile the module. A card or driver that is too old is a
// *driver.UnavailableError.
func LoadKernels(c Card, load func(ptx string, kernels []string) error) (*Kernels, error) {
	if err := c.check(&moves); err != nil {
		return nil, err
	}
	if err := load(moves.PTX, moves.Kernels); err != nil {
		return nil, fmt.Errorf("load kernels: %w", err)
	}
	return &Kernels{c}, nil
}

// Names are the kernels that were loaded, in the order in which load was given them.
func (k *Kernels) Names() []string { return slices.Clone(moves.Kernels) }

// Reach is memory by its address, as a card sees it.
type Reach struct {
	At, Len uint64 // of all of it
	Stride  uint64 // bytes from one place to the next
	List    uint64 // address of an index of 32 bits for each place; 0: they count up

	// Per entries lie in each place, Step bytes from one to the next; First of them are left out
	// of the first place. Zero: one.
	Per, First uint32
	Step       uint64
}

// Loop repeats what is inside it N times, Dst and Src bytes further each time. N of 0 is no loop.
type Loop struct {
	N        uint32
	Dst, Src uint64
}

// LoopsMax is how many loops a Pattern may have.
const LoopsMax = 3

// Pattern says which entries move where, by addresses: for each i below Count, the entry at place
// Src.List[i] goes to place Dst.List[i]. With Loops, an entry is a nest of runs of Entry bytes.
type Pattern struct {
	Dst, Src Reach
	Entry    uint64         // bytes
	Loops    [LoopsMax]Loop // outermost first
	Count    int
	Tally    uint64 // address of TallyBytes, which are TallyStart before the launch
	FarDst   bool   // the destination is host memory and the source is not
}

// TallyBytes is the room that a kernel counts in.
const TallyBytes = int(tallyBytes)

// TallyStart writes a tally of nothing to at, as it must be before a launch.
func TallyStart(at []byte) { copy(at, bytesOf(&clean)) }

// Takes reports whether a kernel can move entries of that length that lie so: everything must be
// a multiple of Align. It allocates nothing, unless there are more runs than a kernel counts.
func (p *Pattern) Takes() bool {
	all := p.Entry | p.Dst.At | p.Src.At | p.Dst.Stride | p.Src.Stride
	if p.nests() {
		all |= p.Dst.Step | p.Src.Step
		for i := range p.Loops {
			all |= p.Loops[i].Dst | p.Loops[i].Src
		}
	} else if p.Dst.Stride > 0 && p.Dst.Stride < p.Entry || p.Src.Stride > 0 &&
		p.Src.Stride < p.Entry {
		return false
	}
	if all%Align != 0 || p.Entry < Align || p.Entry > EntryMax || p.Count < 0 {
		return false
	}
	var n nested
	return p.fill(&n) == nil && n.part[0].width != 0
}

// Launch writes the argument of a kernel, one struct by value, into dst and says how to launch it
// within the budget, and which of Names it is. It allocates nothing unless it fails, for the budget
// or a pattern that no kernel takes: driver.ErrBounds.
func (k *Kernels) Launch(p *Pattern, b Budget, dst []byte) (l Launch, kernel, n int, err error) {
	var a nested
	if err := p.fill(&a); err != nil {
		return Launch{}, 0, 0, err
	}
	if p.nests() {
		l, err = a.plan(&k.card, b, true)
		l.Kernel, n = KernelNest, copy(dst, bytesOf(&a))
	} else {
		l, err = a.plan(&k.card, b, false)
		n = copy(dst, bytesOf(&a.args))
	}
	if err != nil {
		return Launch{}, 0, 0, err
	}
	return l, slices.Index(moves.Kernels, l.Kernel), n, nil
}

func (p *Pattern) fill(n *nested) error {
	a := &n.args
	if p.nests() {
		if err := p.fillNest(n); err != nil {
			return err
		}
	} else {
		if err := a.begin(p.Count); err != nil {
			return err
		}
		if err := a.fill(p.Entry, p.Dst.side(), p.Src.side()); err != nil {
			return err
		}
	}
	a.dstIndex, a.srcIndex, a.tally = p.Dst.List, p.Src.List, p.Tally
	if p.Dst.List != 0 {
		a.dstPlaces = min(a.dstPlaces, skipIndex)
	}
	if p.Src.List != 0 {
		a.srcPlaces = min(a.srcPlaces, skipIndex)
	}
	if p.FarDst {
		a.flags |= farDst
	}
	return nil
}

func (r *Reach) side() side { return side{r.At, r.Len, r.Stride} }

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
	if err := n.begin(p.Count); err != nil {
		return err
	}
	n.count = rows
	if p.Entry < Align || p.Entry > EntryMax {
		return refused("bytes of a run", p.Entry, fmt.Sprintf("%d to %d", Align, EntryMax))
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
	return refused("runs", "more than an index of 31 bits counts", "several patterns")
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
