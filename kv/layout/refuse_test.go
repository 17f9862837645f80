// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRefusals: sides that cannot meet are refused with part, layer, values and a cure.
func TestRefusals(t *testing.T) {
	spec := gqa(3, 4, 8)
	views := func(change func(*View)) func([]*Side) []*Side {
		return func(sides []*Side) []*Side {
			for _, s := range sides {
				change(&s.Views[5])
			}
			return sides
		}
	}
	for name, c := range map[string]struct {
		change func([]*Side) []*Side // the senders
		want   string
	}{
		"dtype": {views(func(v *View) { v.DType = "fp8" }), `layer 2, part "v": dtype: sender has ` +
			`fp8, receiver has bf16: start both engines with the same KV cache dtype`},
		"cell": {views(func(v *View) { v.Cell = 7 }), `layer 2, part "v": cell size: sender has 7 ` +
			`bytes, receiver has 8 bytes: describe both sides with the same cells: one head or ` +
			`state unit of one token`},
		"units": {views(func(v *View) { v.Units = 8 }), `layer 2, part "v": heads or units of the ` +
			`model: sender has 8, receiver has 4: load the same model on both sides`},
		"heads on no rank": {func(s []*Side) []*Side { return s[1:] }, `layer 0, part "k": head or ` +
			`unit 0: sender has it on none of ranks [1 2 3], receiver has it on rank 0: pass the ` +
			`sides of all ranks of the sending group`},
		"part on no rank": {func(s []*Side) []*Side {
			for _, side := range s {
				side.Views = side.Views[:5]
			}
			return s
		}, `layer 2, part "v": ranks that hold it: sender has none, receiver has ranks [0 1]: ` +
			`start the sending stages that have this layer, with the same parts`},
		"model": {func(s []*Side) []*Side {
			for _, side := range s {
				side.Model = "other"
			}
			return s
		}, `model: sender has other, receiver has gqa: load the same model on both sides`},
		"window": {func(s []*Side) []*Side {
			for _, side := range s {
				side.Groups[0].Window = 8
			}
			return s
		}, `layer 0, part "k": window: sender has 8, receiver has 0: keep no more tokens on the ` +
			`receiver than the sender has, or all on the sender`},
		"state": {func(s []*Side) []*Side {
			for _, side := range s {
				side.Groups[0].State = true
			}
			return s
		}, `layer 0, part "k": a state a request: sender has true, receiver has false: describe ` +
			`the layer as a state on both sides or on none`},
		"shards missing": {func(s []*Side) []*Side {
			for _, side := range s {
				side.Groups[0].Shards, side.Groups[0].Interleave = 2, 1
			}
			return s
		}, `layer 0, part "k": shards of tokens: sender has 1 of 2, receiver has 1 of 1: shard ` +
			`tokens alike on all ranks of a group, and pass the sides of all of them`},
	} {
		t.Run(name, func(t *testing.T) {
			from := c.change(group(t, spec, Placement{TP: 4, BlockTokens: 4, Blocks: 4}))
			to := group(t, spec, Placement{TP: 2, BlockTokens: 4, Blocks: 4})
			_, err := NewPlan(from, to)
			require.EqualError(t, err, c.want)
			require.ErrorAs(t, err, new(*UnlikeError))
		})
	}
	_, err := NewPlan(group(t, spec, Placement{TP: 2, Blocks: 4, BlockTokens: 4}),
		group(t, spec, Placement{TP: 8, Blocks: 4, BlockTokens: 4, Shards: 2, Interleave: 4}))
	require.EqualError(t, err, `layer 0, part "k": token shards by blocks: sender has 1 shards, `+
		`blocks of 4, receiver has 2 shards, blocks of 4: make the blocks of the sender a multiple `+
		`of 8 tokens and those of the receiver of 4, or the interleave smaller than 4`)
	mixed := [2][]*Side{group(t, spec, Placement{TP: 8, Blocks: 4}),
		group(t, spec, Placement{TP: 8, Blocks: 4})}
	mixed[0][1].Groups[0].Window, mixed[1][0].Groups[0].Window = 8, 8
	_, err = NewPlan(mixed[0], mixed[1])
	require.EqualError(t, err, `layer 0, part "k": window: sender has 8, receiver has 0: keep no `+
		`more tokens on the receiver than the sender has, or all on the sender`)
	_, err = NewPlan(nil, nil)
	require.ErrorIs(t, err, ErrGeometry)
	old := group(t, spec, Placement{Blocks: 4})
	old[0].Version = 7
	_, err = NewPlan(old, group(t, spec, Placement{Blocks: 4}))
	require.ErrorIs(t, err, ErrSideVersion)
}

// TestRequestErrors: a table that is too short is refused, and dst stays as it was.
func TestRequestErrors(t *testing.T) {
	spec := gqa(1, 2, 8)
	p, err := NewPlan(group(t, spec, Placement{Blocks: 9, BlockTokens: 4}),
		group(t, spec, Placement{Blocks: 9, BlockTokens: 6}))
	require.NoError(t, err)
	e := p.Edges(0)[0]
	enough, short := Tables{{1, 2, 3}}, Tables{{1}}
	for name, c := range map[string]struct {
		from, to Tables
		s        Span
	}{
		"sender":   {short, enough, Span{0, 12}},
		"receiver": {enough, short, Span{0, 12}},
		"none":     {nil, enough, Span{0, 1}},
		"span":     {enough, enough, Span{2, 1}},
		"huge":     {enough, enough, Span{0, 1 << 40}},
		"part":     {enough, short, Span{7, 8}},
	} {
		t.Run(name, func(t *testing.T) {
			dst, err := e.Layer(nil, 0, c.from, c.to, c.s)
			require.ErrorIs(t, err, ErrRequest)
			require.Empty(t, dst)
		})
	}
	dst, err := e.Layer(nil, 5, enough, enough, Span{0, 12})
	require.NoError(t, err, "a layer that the edge does not carry")
	require.Empty(t, dst)
	_, err = p.Tail(nil, 0, 0, short, Span{0, 11})
	require.ErrorIs(t, err, ErrRequest)
	_, err = p.Tail(nil, 1, 0, enough, Span{0, 11})
	require.ErrorIs(t, err, ErrRequest)
}

// TestModels: for each model and pair of rank counts, with other blocks and orders in turn,
// the edges to a rank carry its bytes, no more and no less.
func TestModels(t *testing.T) {
	names := []string{"llama3.1-8b", "llama3.1-70b", "qwen3-235b-a22b", "gpt-oss-120b",
		"deepseek-v3.2", "qwen3-next-80b", "nemotron-h-8b", "kimi-linear-48b"}
	tps, blocks := []int{1, 2, 4, 8, 16}, []int{16, 64, 128}
	orders := []Order{VLLMNHD, VLLMHND}
	for i, name := range names {
		spec, err := LookupSpec(name)
		require.NoError(t, err)
		for j, a := range tps {
			for k, b := range tps {
				n := i + j*len(tps) + k
				from := group(t, spec, Placement{TP: a, Blocks: 600, Order: orders[n%2],
					BlockTokens: blocks[n%3]})
				to := group(t, spec, Placement{TP: b, Blocks: 600, Order: orders[n/2%2],
					BlockTokens: blocks[n/3%3]})
				p, err := NewPlan(from, to)
				require.NoError(t, err)
				got := map[int]uint64{}
				for _, info := range p.Explain() {
					got[info.ToRank] += info.Bytes
				}
				for _, s := range to {
					require.Equal(t, weight(s), got[s.Rank], "%s, %d to %d, rank %d", name, a, b,
						s.Rank)
				}
			}
		}
	}
}

// weight is what a rank keeps of a prompt of ExplainTokens tokens.
func weight(s *Side) uint64 {
	var sum uint64
	for _, v := range s.Views {
		n := uint64(ExplainTokens)
		if g := s.Groups[v.Group]; g.State {
			n = uint64(v.Tokens)
		} else if g.Window > 0 {
			n = uint64(g.Window)
		}
		sum += n * uint64(v.Count) * v.Cell
	}
	return sum
}

// TestReplicas: the ranks that hold the same heads share their readers, also in models of which
// only some layers have heads, or have a window.
func TestReplicas(t *testing.T) {
	for name, ranks := range map[string]int{"qwen3-235b-a22b": 8, "qwen3-next-80b": 8,
		"gpt-oss-120b": 16, "kimi-linear-48b": 7} {
		spec, err := LookupSpec(name)
		require.NoError(t, err)
		spec.Tensors = slices.DeleteFunc(spec.Tensors, func(t Tensors) bool {
			return t.Positions > 0
		})
		for _, to := range []int{1, 2, 4, 8, 16} {
			if ranks == 7 && to > 1 {
				continue // seven layers in turn, of one reader
			}
			p, err := NewPlan(group(t, spec, Placement{TP: ranks, Blocks: 9}),
				group(t, spec, Placement{TP: to, Blocks: 9}))
			require.NoError(t, err)
			sent := map[int]uint64{}
			for _, info := range p.Explain() {
				sent[info.FromRank] += info.Bytes
			}
			require.Len(t, sent, ranks)
			for rank, n := range sent {
				require.Equal(t, sent[0], n, "%s to %d, rank %d", name, to, rank)
			}
		}
	}
}
