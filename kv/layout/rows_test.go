// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/stretchr/testify/require"
)

// times multiplies the seeds of each row; hack/soak has more.
var times = flag.Int("layout.times", 1, "how many times the usual number of random geometries")

// each runs a row of the matrix with many seeds.
func each(t *testing.T, n int, row func(t *testing.T, r *rand.Rand)) {
	t.Helper()
	for seed := range n * *times {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { row(t, random(t, seed)) })
	}
}

var named = []Order{VLLMNHD, VLLMHND, VLLMFusedNHD, VLLMFusedHND, VLLMCellsNHD, VLLMCellsHND,
	VLLMCrossNHD, VLLMCrossHND, SGLangLayer, SGLangPage, SGLangDirect, SGLangPageHead}

// TestEngineOrders: each order of an engine to each other one, with other TP and blocks.
func TestEngineOrders(t *testing.T) {
	for i, a := range named {
		for j, b := range named {
			t.Run(fmt.Sprintf("%s to %s", a, b), func(t *testing.T) {
				r := random(t, i*100+j)
				spec := gqa(2, 4, 6)
				from := group(t, spec, Placement{TP: pick(r, 1, 2, 8), BlockTokens: 4, Blocks: 12,
					Order: a})
				to := group(t, spec, Placement{TP: pick(r, 1, 4), BlockTokens: pick(r, 4, 6, 8),
					Blocks: 12, Order: b})
				hand(t, r, from, to, span(r, 40))
			})
		}
	}
}

// TestRoundTrip: what comes back from other layouts is what went out.
func TestRoundTrip(t *testing.T) {
	each(t, 40, func(t *testing.T, r *rand.Rand) {
		spec := gqa(2, 4, 6)
		place := func(tp int) []*Side {
			return group(t, spec, Placement{TP: tp, BlockTokens: 1 + r.IntN(12), Blocks: 40,
				Order: pick(r, named...)})
		}
		a, b := place(pick(r, 1, 2, 4, 8)), place(pick(r, 1, 2, 4, 8))
		there, err := NewPlan(a, b)
		require.NoError(t, err)
		back, err := NewPlan(b, a)
		require.NoError(t, err)
		s := span(r, 40)
		source, middle := newWorld(r, a, 40, 0x11), newWorld(r, b, 40, untouched)
		target := newWorld(r, a, 40, untouched)
		source.fill(40)
		apply(t, there, source, middle, s)
		apply(t, back, middle, target, s)
		expect(t, target, s)
	})
}

// TestLatent: every rank holds all of an MLA layer, and the senders take turns.
func TestLatent(t *testing.T) {
	spec := Spec{"mla", []Tensors{{Layers: count(8), Parts: []Cells{{"latent", "bf16", 1, 18}}}}}
	each(t, 30, func(t *testing.T, r *rand.Rand) {
		tp, other := pick(r, 1, 2, 4, 8), pick(r, 1, 2, 4, 8)
		p := hand(t, r, group(t, spec, Placement{TP: tp, BlockTokens: 1 + r.IntN(8), Blocks: 40}),
			group(t, spec, Placement{TP: other, BlockTokens: 1 + r.IntN(8), Blocks: 40}),
			span(r, 40))
		sent := make([]int, tp)
		for to := range other {
			for _, e := range p.Edges(to) {
				sent[e.From] += len(e.Layers)
			}
		}
		for _, n := range sent {
			require.Equal(t, 8*other/tp, n, "layers of each sender")
		}
	})
}

// TestIndexer: blocks that hold all keys and then all scales.
func TestIndexer(t *testing.T) {
	spec, err := LookupSpec("deepseek-v3.2")
	require.NoError(t, err)
	for i := range spec.Tensors {
		spec.Tensors[i].Layers = count(2)
	}
	each(t, 20, func(t *testing.T, r *rand.Rand) {
		hand(t, r, group(t, spec, Placement{TP: pick(r, 1, 2), BlockTokens: pick(r, 4, 6, 8),
			Blocks: 12}), group(t, spec, Placement{TP: pick(r, 1, 2),
			BlockTokens: pick(r, 4, 6, 8), Blocks: 12}), span(r, 40))
	})
}

// TestStages: layers by their global numbers, cut unevenly: PP 3 to 2, and each to TP.
func TestStages(t *testing.T) {
	spec := gqa(9, 4, 4)
	stages := func(tp, block int, cuts ...int) []*Side {
		var all []*Side
		for i := range len(cuts) - 1 {
			all = append(all, group(t, spec, Placement{TP: tp, BlockTokens: block, Blocks: 12,
				Layers: [2]int{cuts[i], cuts[i+1]}})...)
		}
		return all
	}
	each(t, 10, func(t *testing.T, r *rand.Rand) {
		hand(t, r, stages(2, 4, 0, 2, 3, 9), stages(pick(r, 1, 2, 4), 6, 0, 5, 9), span(r, 40))
		hand(t, r, stages(1, 4, 0, 9), stages(2, 4, 0, 1, 8, 9), span(r, 40))
	})
	_, err := NewPlan(stages(2, 4, 0, 2, 3, 9)[:4], stages(1, 6, 0, 9))
	require.EqualError(t, err, `layer 3, part "k": ranks that hold it: sender has none, receiver `+
		`has ranks [0]: start the sending stages that have this layer, with the same parts`)
	_, err = NewPlan(stages(1, 4, 0, 9), stages(1, 6, 0, 5))
	require.EqualError(t, err, `layer 5, part "k": ranks that hold it: sender has ranks [0], `+
		`receiver has none: start the receiving stages that have this layer, with the same parts`)
}

// TestDataParallel: each data-parallel rank is a group of its own.
func TestDataParallel(t *testing.T) {
	spec := gqa(2, 4, 4)
	from := group(t, spec, Placement{TP: 4, BlockTokens: 4, Blocks: 12})
	one := group(t, spec, Placement{DP: 3, BlockTokens: 4, Blocks: 12})
	r := random(t, 1)
	hand(t, r, from, one, Span{0, 30})
	hand(t, r, one, from, Span{0, 30})
	two := append(group(t, spec, Placement{DP: 4, BlockTokens: 4, Blocks: 12}), one...)
	_, err := NewPlan(from, two)
	require.ErrorContains(t, err, "data-parallel groups 4 and 3: name the ranks of one group")
}

// TestWindows: a ring or a whole table on either side, or all tokens on the sender.
func TestWindows(t *testing.T) {
	each(t, 200, func(t *testing.T, r *rand.Rand) {
		spec := gqa(2, 2, 4)
		spec.Tensors = append(spec.Tensors, spec.Tensors[0])
		spec.Tensors[0].Layers, spec.Tensors[1].Layers = []int{0, 2}, []int{1, 3}
		spec.Tensors[1].Window = 1 + r.IntN(20)
		source := spec
		if r.IntN(3) == 0 {
			source.Tensors = slices.Clone(spec.Tensors)
			source.Tensors[1].Window = 0
		}
		place := func(spec Spec) []*Side {
			return group(t, spec, Placement{TP: pick(r, 1, 2), BlockTokens: 1 + r.IntN(8),
				Blocks: 70, Ring: r.IntN(2) == 0, Order: pick(r, named...)})
		}
		hand(t, r, place(source), place(spec), span(r, 64))
	})
}

// TestMixedRanks: ranks of one group that differ in blocks, order, window and ring are handed over
// whole, or refused: none is fed by a sender that keeps a window only, and wants more.
func TestMixedRanks(t *testing.T) {
	spec := gqa(2, 2, 4)
	each(t, 300, func(t *testing.T, r *rand.Rand) {
		windows := []int{0, 1 + r.IntN(20)}
		place := func() (sides []*Side) {
			tp := pick(r, 1, 2, 4)
			for rank := range tp {
				spec.Tensors[0].Window = pick(r, windows...)
				s, err := NewSide(spec, Placement{Rank: rank, TP: tp, BlockTokens: 1 + r.IntN(8),
					Blocks: 70, Ring: r.IntN(2) == 0, Order: pick(r, named...)})
				require.NoError(t, err)
				sides = append(sides, s)
			}
			return sides
		}
		from, to := place(), place()
		if _, err := NewPlan(from, to); err != nil {
			require.ErrorAs(t, err, new(*UnlikeError))
			return
		}
		hand(t, r, from, to, span(r, 64))
	})
}

// TestStates: states by unit and convolutions by part, channels or positions outermost.
func TestStates(t *testing.T) {
	spec := Spec{"hybrid", []Tensors{
		{Layers: []int{1}, Parts: []Cells{{"k", "bf16", 2, 4}, {"v", "bf16", 2, 4}}},
		{Layers: []int{0, 2}, Positions: 3, Parts: convCells([]string{"q", "k", "v"}, 16, 16, 32)},
		{Layers: []int{0, 2}, Positions: 1, Parts: []Cells{{"state", "fp32", 8, 20}}},
	}}
	each(t, 60, func(t *testing.T, r *rand.Rand) {
		place := func() []*Side {
			return group(t, spec, Placement{TP: pick(r, 1, 2, 4, 8), BlockTokens: 1 + r.IntN(8),
				Blocks: 40, StateOrder: pick(r, StateDS, StateSD)})
		}
		hand(t, r, place(), place(), span(r, 30))
	})
}

// TestShards: interleaved shards of tokens on either side or both.
func TestShards(t *testing.T) {
	spec := gqa(2, 2, 4)
	each(t, 150, func(t *testing.T, r *rand.Rand) {
		interleave := pick(r, 1, 2, 4)
		place := func(shards int) []*Side {
			return group(t, spec, Placement{TP: 8, BlockTokens: 16 * (1 + r.IntN(2)), Blocks: 40,
				Shards: shards, Interleave: interleave, Order: pick(r, named...)})
		}
		from, to := place(pick(r, 2, 4)), place(pick(r, 2, 4))
		one := group(t, spec, Placement{TP: pick(r, 1, 4), BlockTokens: 16, Blocks: 40})
		s := span(r, 150)
		hand(t, r, from, to, s)
		hand(t, r, from, one, s)
		hand(t, r, one, to, s)
	})
}

// TestUnevenParts: three parts at even distances on one side and uneven ones on the other.
func TestUnevenParts(t *testing.T) {
	spec := gqa(2, 4, 6)
	spec.Tensors[0].Parts = append(spec.Tensors[0].Parts, Cells{"x", "bf16", 4, 6})
	even := group(t, spec, Placement{TP: 2, BlockTokens: 4, Blocks: 12})
	uneven := group(t, spec, Placement{TP: 2, BlockTokens: 4, Blocks: 12})
	for _, s := range uneven {
		s.Regions[0].Bytes += 100
		for i := range s.Views {
			if s.Views[i].Part == "x" && s.Views[i].Layer == 1 {
				s.Views[i].Base += 100
			}
		}
	}
	r := random(t, 1)
	hand(t, r, even, uneven, Span{3, 40})
	hand(t, r, uneven, even, Span{3, 40})
}

// TestGoldenRuns: runs that the matrix of cases foretells.
func TestGoldenRuns(t *testing.T) {
	runs := func(spec Spec, from, to Placement, layer int) []string {
		p, err := NewPlan(group(t, spec, from), group(t, spec, to))
		require.NoError(t, err)
		var list []string
		e := p.Edges(0)[0]
		table := make([]uint32, 512)
		tables := Tables{table, table, table}
		patterns, err := e.Layer(nil, layer, tables, tables, Span{0, 8192})
		require.NoError(t, err)
		for _, p := range patterns {
			list = append(list, fmt.Sprintf("%d x %d x %d", p.Count, p.Runs(), p.Run))
		}
		if e.Op == driver.Read {
			list = append(list, "pull")
		}
		return list
	}
	llama, err := LookupSpec("llama3.1-70b")
	require.NoError(t, err)
	qwen, err := LookupSpec("qwen3-next-80b")
	require.NoError(t, err)
	sparse, err := LookupSpec("deepseek-v3.2")
	require.NoError(t, err)
	const blocks = 600
	nhd := func(tp, b int) Placement { return Placement{TP: tp, BlockTokens: b, Blocks: blocks} }
	hnd := func(tp, b int) Placement {
		return Placement{TP: tp, BlockTokens: b, Blocks: blocks, Order: VLLMFusedHND}
	}
	require.Equal(t, []string{"512 x 2 x 4096"}, runs(llama, hnd(8, 16), hnd(4, 16), 0))
	require.Equal(t, []string{"512 x 1 x 16384"}, runs(llama, hnd(4, 16), hnd(4, 16), 0))
	require.Equal(t, []string{"512 x 32 x 256", "pull"}, runs(llama, nhd(8, 16), nhd(4, 16), 0))
	require.Equal(t, []string{"512 x 32 x 256"}, runs(llama, nhd(4, 16), nhd(8, 16), 0))
	require.Equal(t, []string{"512 x 2 x 8192"}, runs(llama, nhd(4, 16), nhd(4, 64), 0))
	require.Equal(t, []string{"1 x 2 x 3072", "1 x 1 x 6144", "1 x 1 x 262144"},
		runs(qwen, nhd(4, 16), nhd(2, 16), 0))
	require.Equal(t, []string{"512 x 1 x 10496", "512 x 1 x 2048", "512 x 1 x 64"},
		runs(sparse, nhd(8, 16), nhd(4, 64), 6))
}
