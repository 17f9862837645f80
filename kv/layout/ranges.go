// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"cmp"
	"fmt"
	"slices"
)

// Ranges returns the bytes of one region in which this rank keeps the tokens of a span in layers
// from first on, end excluded: what a lease for the request must cover. They hold every such cell
// and no other byte, ascend, and do not adjoin. Tokens outside a window are left out, and so is
// what Plan.Tail names; states are there whole, whatever the span.
//
// The time depends on the blocks of the span and on the runs that a block is cut in. Errors are
// those of CheckTables.
func (s *Side) Ranges(region, first, end int, t Tables, in Span) ([]Range, error) {
	if err := s.CheckTables(t, in); err != nil {
		return nil, err
	}
	var list []Range
	cuts := make(map[[2]int][]cut) // by group and tokens of a block
	for _, b := range s.boxes(region, first, end) {
		id := [2]int{b.group, int(b.tokens)}
		if cuts[id] == nil {
			cuts[id] = s.Groups[b.group].cuts(t[b.group], b.tokens, in)
		}
		for _, c := range cuts[id] {
			list = b.append(list, c)
		}
	}
	slices.SortFunc(list, func(a, b Range) int { return cmp.Compare(a.Off, b.Off) })
	merged := list[:0]
	for _, r := range list {
		merged = appendRange(merged, r)
	}
	return merged, nil
}

// CheckTables reports whether the tables of this rank have a slot for every token of a span that
// it keeps, and whether those slots name blocks of the pool. Errors are ErrRequest.
func (s *Side) CheckTables(t Tables, in Span) error {
	if in.From > in.To || in.To > BlocksMax {
		return fmt.Errorf("tokens %d to %d, want at most %d: %w", in.From, in.To,
			uint64(BlocksMax), ErrRequest)
	}
	checked := make(map[[2]int]bool)
	for i := range s.Views {
		v := &s.Views[i]
		if id := [2]int{v.Group, v.Tokens}; checked[id] {
			continue
		} else {
			checked[id] = true
		}
		g := &s.Groups[v.Group]
		for slot := range g.slots(uint64(v.Tokens), in) {
			switch {
			case v.Group >= len(t) || slot >= uint64(len(t[v.Group])):
				return fmt.Errorf("the block table of group %d has no slot %d, which %d tokens "+
					"need: %w", v.Group, slot, in.To, ErrRequest)
			case t[v.Group][slot] >= g.Blocks:
				return fmt.Errorf("slot %d of the block table of group %d is block %d, and the "+
					"side has %d: %w", slot, v.Group, t[v.Group][slot], g.Blocks, ErrRequest)
			}
		}
	}
	return nil
}

// CheckTarget is CheckTables for a rank that receives: no block may be in two slots, of which the
// second would overwrite the first.
func (s *Side) CheckTarget(t Tables, in Span) error {
	if err := s.CheckTables(t, in); err != nil {
		return err
	}
	for i := range s.Groups {
		v := slices.IndexFunc(s.Views, func(v View) bool { return v.Group == i })
		if v < 0 {
			continue
		}
		slotOf := make(map[uint32]uint64)
		for slot := range s.Groups[i].slots(uint64(s.Views[v].Tokens), in) {
			block := t[i][slot]
			if other, ok := slotOf[block]; ok && other != slot { // a ring comes back to one
				return fmt.Errorf("slots %d and %d of the block table of group %d are block %d "+
					"both: %w", other, slot, i, block, ErrRequest)
			}
			slotOf[block] = slot
		}
	}
	return nil
}

// below returns how many of the first n tokens of a request the rank keeps.
func (g *Group) below(n uint64) uint64 {
	shards, i := uint64(g.shards()), uint64(g.Interleave)
	if shards == 1 {
		return n
	}
	kept := n / (shards * i) * i
	if rest, begin := n%(shards*i), uint64(g.Shard)*i; rest > begin {
		kept += min(rest-begin, i)
	}
	return kept
}

// slots calls yield for each slot that holds tokens of a span, with the first and the end of those
// tokens in its block.
func (g *Group) slots(block uint64, in Span) func(yield func(slot uint64, tokens Span) bool) {
	begin, end := g.below(in.From), g.below(in.To)
	switch {
	case g.State:
		begin, end = 0, block
	case g.Window > 0 && in.To-in.From > uint64(g.Window):
		begin = g.below(in.To - uint64(g.Window))
	}
	return func(yield func(uint64, Span) bool) {
		for at := begin; at < end; {
			slot := at / block
			next := min(end, (slot+1)*block)
			part := Span{at - slot*block, next - slot*block}
			if g.Ring > 0 {
				slot %= uint64(g.Ring)
			}
			if !yield(slot, part) {
				return
			}
			at = next
		}
	}
}

// cut is the tokens of a span that lie in one block.
type cut struct {
	block  uint32
	tokens Span
}

func (g *Group) cuts(table []uint32, block uint64, in Span) []cut {
	list := []cut{} // not nil, also when it is empty
	for slot, tokens := range g.slots(block, in) {
		list = append(list, cut{table[slot], tokens})
	}
	slices.SortFunc(list, func(a, b cut) int { return cmp.Compare(a.block, b.block) })
	return list
}

// box is what one or several views have in a block: for each token and unit a run of bytes.
type box struct {
	shape
	base, run uint64
}

type shape struct {
	group                int
	tokens, block, token uint64
	units, unit          uint64 // one unit: 0 bytes from each to the next
}

// boxes returns the views of a region and some layers, joined where their cells adjoin.
func (s *Side) boxes(region, first, end int) []box {
	var list []box
	for i := range s.Views {
		v := &s.Views[i]
		if v.Region != region || v.Layer < first || v.Layer >= end {
			continue
		}
		b := box{shape{v.Group, uint64(v.Tokens), v.Block, v.Token, uint64(v.Count), v.Unit},
			v.Base, v.Cell}
		b.fold()
		list = append(list, b)
	}
	for joined := true; joined; {
		slices.SortFunc(list, func(a, b box) int {
			return cmp.Or(a.compare(&b.shape), cmp.Compare(a.base, b.base))
		})
		joined = false
		kept := list[:0]
		for _, b := range list {
			last := len(kept) - 1
			if last < 0 || kept[last].shape != b.shape || kept[last].base+kept[last].run != b.base {
				kept = append(kept, b)
				continue
			}
			kept[last].run += b.run
			joined = true
		}
		list = kept
		for i := range list {
			list[i].fold()
		}
	}
	slices.SortFunc(list, func(a, b box) int { return cmp.Compare(a.base, b.base) })
	return list
}

func (s *shape) compare(t *shape) int {
	return cmp.Or(cmp.Compare(s.group, t.group), cmp.Compare(s.tokens, t.tokens),
		cmp.Compare(s.block, t.block), cmp.Compare(s.token, t.token),
		cmp.Compare(s.units, t.units), cmp.Compare(s.unit, t.unit))
}

// fold takes units that adjoin into the run.
func (b *box) fold() {
	if b.units > 1 && b.unit == b.run {
		b.run, b.units = b.run*b.units, 1
	}
	if b.units == 1 {
		b.unit = 0
	}
}

// append appends the runs of one block.
func (b *box) append(dst []Range, c cut) []Range {
	at := b.base + uint64(c.block)*b.block + c.tokens.From*b.token
	outer, inner := axis{n: b.units, from: b.unit}, axis{n: c.tokens.To - c.tokens.From,
		from: b.token}
	run := b.run
	if inner.from == run || inner.n == 1 {
		run, inner.n = run*inner.n, 1
	}
	if outer.from == run {
		run, outer.n = run*outer.n, 1
	}
	if inner.from > outer.from { // in the order of the addresses
		inner, outer = outer, inner
	}
	for i := range outer.n {
		for j := range inner.n {
			dst = appendRange(dst, Range{Off: at + i*outer.from + j*inner.from, Len: run})
		}
	}
	return dst
}

// appendRange appends a range, or makes the last one longer by it.
func appendRange(dst []Range, r Range) []Range {
	if last := len(dst) - 1; last >= 0 && r.Off >= dst[last].Off &&
		r.Off <= dst[last].Off+dst[last].Len {
		dst[last].Len = max(dst[last].Len, r.Off+r.Len-dst[last].Off)
		return dst
	}
	return append(dst, r)
}
