// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"math"
	"slices"
)

// Kernels are those of a card, for a caller that launches them on streams of its own, as the
// backend of this name does. It may be used by any goroutine.
type Kernels struct{ card Card }

// LoadKernels has load compile the module. A card or driver that is too old is a
// *driver.UnavailableError.
func LoadKernels(c Card, load func(ptx string, kernels []string) error) (*Kernels, error) {
	if err := c.check(); err != nil {
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

// Pattern is a Move of one part by addresses. With Loops, an entry is a nest of runs of Entry
// bytes.
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

// TallyStart writes what the room must hold before a launch.
func TallyStart(at []byte) { copy(at, (&tally{firstBad: math.MaxUint64}).bytes()) }

// Takes reports whether a kernel can move entries of that length that lie so: everything must be
// a multiple of Align.
func (p *Pattern) Takes() bool {
	var n nested
	return p.fill(&n) == nil && n.aligned() == nil
}

// Launch writes the argument of a kernel, one struct by value, into dst and says how to launch it
// within the budget, and which of Names it is. It allocates nothing unless it fails. Errors are
// those of Plan.
func (k *Kernels) Launch(p *Pattern, b Budget, dst []byte) (l Launch, kernel, n int, err error) {
	var a nested
	if err := p.fill(&a); err != nil {
		return Launch{}, 0, 0, err
	}
	if p.nests() {
		if l, err = a.plan(&k.card, b, VariantRows); err != nil {
			return Launch{}, 0, 0, err
		}
		l.Kernel, l.Why = KernelNest, "nests move through registers"
		return l, slices.Index(moves.Kernels, KernelNest), copy(dst, a.bytes()), nil
	}
	if l, err = a.best(&k.card, b); err != nil {
		return Launch{}, 0, 0, err
	}
	return l, slices.Index(moves.Kernels, l.Kernel), copy(dst, a.args.bytes()), nil
}

func (p *Pattern) fill(n *nested) error {
	a := &n.args
	if p.nests() {
		if err := p.fillNest(n); err != nil {
			return err
		}
	} else {
		if err := a.begin(1, p.Count); err != nil {
			return err
		}
		if err := a.fill(0, p.Entry, p.Dst.side(), p.Src.side()); err != nil {
			return err
		}
	}
	a.dstIndex, a.srcIndex, a.tally = p.Dst.List, p.Src.List, p.Tally
	if p.Dst.List != 0 {
		a.dstPlaces = min(a.dstPlaces, Skip32)
	}
	if p.Src.List != 0 {
		a.srcPlaces = min(a.srcPlaces, Skip32)
	}
	if p.FarDst {
		a.flags |= farDst
	}
	return nil
}

func (r *Reach) side() side { return side{r.At, r.Len, r.Stride} }
