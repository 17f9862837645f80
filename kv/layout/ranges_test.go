// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestRanges: the bytes of all cells of a span and of some layers, and no other byte.
func TestRanges(t *testing.T) {
	each(t, 400, func(t *testing.T, r *rand.Rand) {
		spec, place := anySpec(r)
		w := newWorld(r, group(t, spec, place()), 40, 0)
		s := span(r, 40)
		first, end := pick(r, 0, 0, 1), pick(r, 2, LayersMax)
		w.each(s.From, s.To, func(_ int, v *View, _ int, _ uint64, b []byte) {
			for i := range b {
				if v.Layer >= first && v.Layer < end {
					b[i] = 1
				}
			}
		})
		for i, side := range w.sides {
			for region, memory := range w.memory[i] {
				got, err := side.Ranges(region, first, end, w.tables[i], s)
				require.NoError(t, err)
				require.Equal(t, ones(memory), got, "rank %d, region %d", i, region)
			}
		}
	})
}

// ones returns the runs of bytes that are not zero.
func ones(memory []byte) []Range {
	var list []Range
	for at := 0; at < len(memory); at++ {
		begin := at
		for at < len(memory) && memory[at] != 0 {
			at++
		}
		if at > begin {
			list = append(list, Range{Off: uint64(begin), Len: uint64(at - begin)})
		}
	}
	return list
}

// TestRangesAreFew: a block of all heads is one run in each order that keeps it together.
func TestRangesAreFew(t *testing.T) {
	spec, err := LookupSpec("llama3.1-70b")
	require.NoError(t, err)
	table := make([]uint32, 512)
	for i := range table {
		table[i] = uint32(2 * i)
	}
	for order, want := range map[Order]int{VLLMNHD: 80 * 2 * 512, VLLMFusedHND: 80 * 512,
		VLLMCellsNHD: 80 * 512, VLLMCellsHND: 80 * 512, VLLMCrossHND: 512, SGLangPage: 2 * 512,
		SGLangPageHead: 2 * 512} {
		side := group(t, spec, Placement{TP: 4, Blocks: 1024, Order: order})[3]
		began := time.Now()
		got, err := side.Ranges(0, 0, 80, Tables{table}, Span{0, 8192})
		require.NoError(t, err)
		require.Len(t, got, want, order)
		t.Logf("%s: %d ranges in %v", order, want, time.Since(began))
	}
}

// TestRangesErrors: tables that do not hold the span are refused.
func TestRangesErrors(t *testing.T) {
	side := group(t, gqa(1, 2, 4), Placement{BlockTokens: 4, Blocks: 12})[0]
	for name, c := range map[string]struct {
		t    Tables
		s    Span
		want string
	}{
		"span":     {Tables{{1}}, Span{2, 1}, "tokens 2 to 1"},
		"far":      {Tables{{1}}, Span{0, 1 << 40}, "tokens 0 to 1099511627776"},
		"short":    {Tables{{1, 2}}, Span{3, 9}, "group 0 has no slot 2"},
		"no table": {nil, Span{0, 1}, "group 0 has no slot 0"},
		"block":    {Tables{{99, 12, 3}}, Span{4, 9}, "slot 1 of the block table of group 0 is "},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := side.Ranges(0, 0, 1, c.t, c.s)
			require.ErrorIs(t, err, ErrRequest)
			require.ErrorContains(t, err, c.want)
			require.Nil(t, got)
		})
	}
}

// TestPlanFingerprint: equal for equal sides in one order, and for no others.
func TestPlanFingerprint(t *testing.T) {
	of := func(from, to []*Side) [32]byte {
		p, err := NewPlan(from, to)
		require.NoError(t, err)
		sum, err := p.Fingerprint()
		require.NoError(t, err)
		require.Equal(t, from, p.Senders())
		require.Equal(t, to, p.Receivers())
		return sum
	}
	place := func(tp, block int) []*Side {
		return group(t, gqa(2, 4, 4), Placement{TP: tp, BlockTokens: block, Blocks: 12})
	}
	a, b, c := place(2, 4), place(1, 4), place(1, 6)
	require.Equal(t, of(a, b), of(place(2, 4), place(1, 4)))
	turned := []*Side{a[1], a[0]}
	all := [][32]byte{of(a, b), of(b, a), of(a, c), of(turned, b), of(b, b)}
	for i := range all {
		require.Equal(t, i, slices.Index(all, all[i]))
	}
}

// TestCheckTarget: a receiver may not get two blocks of tokens into one block, but for a ring,
// which comes back to each of its own.
func TestCheckTarget(t *testing.T) {
	side := group(t, gqa(1, 2, 8), Placement{BlockTokens: 4, Blocks: 12})[0]
	require.NoError(t, side.CheckTarget(Tables{{3, 5, 7}}, Span{0, 12}))
	require.NoError(t, side.CheckTables(Tables{{3, 5, 3}}, Span{0, 12}), "a sender may")
	require.ErrorContains(t, side.CheckTarget(Tables{{3, 5, 3}}, Span{0, 12}),
		"slots 0 and 2 of the block table of group 0 are block 3 both")
	require.NoError(t, side.CheckTarget(Tables{{3, 5, 3}}, Span{4, 12}), "slot 0 is not received")
	require.ErrorIs(t, side.CheckTarget(Tables{{3}}, Span{0, 12}), ErrRequest)

	ring := *side
	ring.Groups = []Group{{Blocks: 12, Window: 12, Ring: 3}}
	require.NoError(t, ring.CheckTarget(Tables{{3, 5, 7}}, Span{0, 14}))
	require.ErrorIs(t, ring.CheckTarget(Tables{{3, 5, 5}}, Span{0, 14}), ErrRequest)
}
