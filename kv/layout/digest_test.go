// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/stretchr/testify/require"
)

var seed = Seed{3, 1, 4, 1, 5}

// naive digests the cells of a span that one rank holds, cell by cell.
func (w *world) naive(t *testing.T, s Span, rank int) Digest {
	t.Helper()
	keys := map[kind]*digest.Key{}
	var sum Digest
	w.each(s.From, s.To, func(side int, v *View, unit int, token uint64, b []byte) {
		if side != rank {
			return
		}
		id := kind{v.Part, v.DType, v.Cell}
		if keys[id] == nil {
			k, err := digest.NewKey(seed, v.Part, v.DType, v.Cell)
			require.NoError(t, err)
			keys[id] = k
		}
		one, err := digest.Reference(b, &digest.Cells{Count: 1, Outer: digest.Axis{N: 1},
			Axis: digest.Axis{N: 1}, Coord: (uint64(v.Layer)<<20|uint64(unit))<<32 | token},
			keys[id])
		require.NoError(t, err)
		sum.Add(one)
	})
	return sum
}

// handed is a request that was handed over, with the memory of both groups.
type handed struct {
	plan     *Plan
	d        *Digester
	from, to *world
	s        Span
}

func handOver(t *testing.T, r *rand.Rand, from, to []*Side, s Span) *handed {
	t.Helper()
	p, err := NewPlan(from, to)
	require.NoError(t, err)
	d, err := p.NewDigester(seed)
	require.NoError(t, err)
	h := &handed{p, d, newWorld(r, from, s.To, 0x11), newWorld(r, to, s.To, untouched), s}
	h.from.fill(s.To)
	apply(t, p, h.from, h.to, s)
	return h
}

// sum digests one layer of an edge at one end.
func (h *handed) sum(t *testing.T, e *Edge, layer int, receiver bool, in Scope) Digest {
	t.Helper()
	held := &Held{Receiver: false, Memory: h.from.memory[e.From], Tables: h.from.tables[e.From],
		Span: h.s}
	if receiver {
		held = &Held{Receiver: true, Memory: h.to.memory[e.To], Tables: h.to.tables[e.To],
			Span: h.s}
	}
	got, err := h.d.Layer(e, layer, held, in)
	require.NoError(t, err)
	return got
}

// sums adds up the edges to each receiver, at one end.
func (h *handed) sums(t *testing.T, receiver bool, in Scope) (all Digest, ranks []Digest) {
	t.Helper()
	ranks = make([]Digest, len(h.to.sides))
	for i := range h.to.sides {
		for _, e := range h.plan.Edges(i) {
			for _, l := range e.Layers {
				ranks[i].Add(h.sum(t, &e, l, receiver, in))
			}
		}
		all.Add(ranks[i])
	}
	return all, ranks
}

// garble changes every byte that is no cell of the span.
func garble(w *world, s Span) {
	after := &world{sides: w.sides, tables: w.tables}
	for _, memory := range w.memory {
		var garbled [][]byte
		for _, m := range memory {
			b := slices.Clone(m)
			for i := range b {
				b[i] ^= 0x5A
			}
			garbled = append(garbled, b)
		}
		after.memory = append(after.memory, garbled)
	}
	var cells [][]byte
	w.each(s.From, s.To, func(_ int, _ *View, _ int, _ uint64, b []byte) {
		cells = append(cells, b)
	})
	after.each(s.From, s.To, func(_ int, _ *View, _ int, _ uint64, b []byte) {
		copy(b, cells[0])
		cells = cells[1:]
	})
	w.memory = after.memory
}

// anySpec is one of the rows of the matrix, and how to place it.
func anySpec(r *rand.Rand) (Spec, func() Placement) {
	all := orders()
	place := func() Placement {
		return Placement{TP: pick(r, 1, 2, 4, 8), BlockTokens: 1 + r.IntN(16), Blocks: 44,
			Order: all[r.IntN(len(all))]}
	}
	spec := gqa(1+r.IntN(3), pick(r, 1, 2, 4, 8), uint64(1+r.IntN(40)))
	switch r.IntN(5) {
	case 0:
		spec.Tensors[0].Window = 1 + r.IntN(20)
		return spec, func() Placement {
			p := place()
			p.Ring = r.IntN(2) == 0
			return p
		}
	case 1:
		interleave := pick(r, 1, 2, 4)
		spec = gqa(1+r.IntN(3), 2, uint64(1+r.IntN(40)))
		return spec, func() Placement {
			return Placement{TP: 8, BlockTokens: 16 * (1 + r.IntN(2)), Blocks: 44,
				Shards: pick(r, 1, 2, 4), Interleave: interleave, Order: pick(r, named...)}
		}
	case 2:
		spec.Tensors = append(spec.Tensors,
			Tensors{Layers: []int{5, 6}, Positions: 3, Order: StateDS,
				Parts: convCells([]string{"q", "k", "v"}, 16, 16, 32)},
			Tensors{Layers: []int{5}, Positions: 1, Order: StateDS,
				Parts: []Cells{{"state", "fp32", 8, 20}}})
	case 3:
		spec.Tensors = append(spec.Tensors, Tensors{Layers: []int{0, 1}, Order: VLLMFusedNHD,
			Parts: []Cells{{"key", "fp8", 1, 12}, {"scale", "fp32", 1, 4}}})
	}
	return spec, place
}

// TestDigestAcrossLayouts: both ends of each edge have the same digest, receivers have that of
// their cells, and nothing else counts.
func TestDigestAcrossLayouts(t *testing.T) {
	each(t, 150, func(t *testing.T, r *rand.Rand) {
		spec, place := anySpec(r)
		source := spec
		if r.IntN(2) == 0 {
			source.Tensors = slices.Clone(spec.Tensors)
			source.Tensors[0].Window = 0 // the sender has all tokens
		}
		s := span(r, 40)
		h := handOver(t, r, group(t, source, place()), group(t, spec, place()), s)
		for i := range h.to.sides {
			for _, e := range h.plan.Edges(i) {
				for _, l := range e.Layers {
					require.Equal(t, h.sum(t, &e, l, false, Scope{}),
						h.sum(t, &e, l, true, Scope{}), "layer %d", l)
				}
			}
		}
		_, ranks := h.sums(t, true, Scope{})
		for i := range ranks {
			require.Equal(t, h.to.naive(t, s, i), ranks[i], "rank %d", i)
		}
		garble(h.from, s)
		garble(h.to, s)
		for _, receiver := range []bool{false, true} {
			_, again := h.sums(t, receiver, Scope{})
			require.Equal(t, ranks, again)
		}
	})
}

// corrupt damages the memory of receivers in ways that a sum without coordinates misses.
var corrupt = map[string]func(h *handed){
	"two blocks swapped": func(h *handed) {
		table := h.to.tables[0][0]
		table[1], table[2] = table[2], table[1]
	},
	"a block twice": func(h *handed) { h.to.tables[0][0][2] = h.to.tables[0][0][1] },
	"the same flip in two blocks": func(h *handed) {
		h.to.each(0, h.s.To, func(side int, v *View, unit int, token uint64, b []byte) {
			if size := uint64(v.Tokens); side == 0 && v.Part == "k" && unit == v.First &&
				(token == size || token == 2*size) {
				b[1] ^= 0x10
			}
		})
	},
	"K for V": func(h *handed) {
		h.to.each(0, h.s.To, func(side int, v *View, unit int, token uint64, b []byte) {
			other := *v
			other.Part = map[string]string{"k": "v", "v": "k"}[v.Part]
			copy(b, cell(&other, unit, token))
		})
	},
	"a token too far": func(h *handed) {
		h.to.each(0, h.s.To, func(side int, v *View, unit int, token uint64, b []byte) {
			copy(b, cell(v, unit, token+1))
		})
	},
	"the head of rank mod heads": func(h *handed) {
		h.to.each(0, h.s.To, func(side int, v *View, unit int, token uint64, b []byte) {
			copy(b, cell(v, side%v.Units, token))
		})
	},
	"another layer": func(h *handed) {
		h.to.each(0, h.s.To, func(side int, v *View, unit int, token uint64, b []byte) {
			other := *v
			other.Layer = 1 - v.Layer
			copy(b, cell(&other, unit, token))
		})
	},
}

// TestDigestChanges: each corruption changes the sum of the request, of each replica too.
func TestDigestChanges(t *testing.T) {
	for name, change := range corrupt {
		t.Run(name, func(t *testing.T) {
			r := random(t, len(name))
			spec := gqa(2, 4, 32)
			for range 20 {
				h := handOver(t, r, group(t, spec, Placement{TP: pick(r, 1, 2, 4), Blocks: 44,
					BlockTokens: 1 + r.IntN(8)}), group(t, spec, Placement{TP: 8, Blocks: 44,
					BlockTokens: 1 + r.IntN(8), Order: pick(r, named...)}), Span{0, 40})
				change(h)
				want, _ := h.sums(t, false, Scope{})
				got, _ := h.sums(t, true, Scope{})
				require.NotEqual(t, want.A, got.A)
				require.NotEqual(t, want.B, got.B)
				require.Equal(t, want.Cells, got.Cells)
			}
		})
	}
}

// TestLocate: the error names layer, part, heads and tokens of the cells that were changed.
func TestLocate(t *testing.T) {
	each(t, 100, func(t *testing.T, r *rand.Rand) {
		spec, place := anySpec(r)
		h := handOver(t, r, group(t, spec, place()), group(t, spec, place()), span(r, 40))
		to := r.IntN(len(h.to.sides))
		edges := h.plan.Edges(to)
		if len(edges) == 0 {
			return
		}
		e := &edges[r.IntN(len(edges))]
		layer := e.Layers[r.IntN(len(e.Layers))]
		asked, last, broken := 0, 1<<20, errors.New("broken")
		differ := func(in Scope) (bool, error) {
			if asked++; asked > last {
				return false, broken
			}
			return h.sum(t, e, layer, true, in) != h.sum(t, e, layer, false, in), nil
		}
		require.NoError(t, e.Locate(layer, h.s, differ))
		asked = 0
		want := MismatchError{FromRank: e.plan.from[e.From].Rank, ToRank: e.plan.to[to].Rank,
			Layer: layer}
		changes := 1 + r.IntN(3)
		h.to.each(h.s.From, h.s.To, func(side int, v *View, unit int, token uint64, b []byte) {
			moved := h.sum(t, e, layer, true, Scope{Part: v.Part, Units: [2]int{unit, unit + 1},
				Tokens: Span{token, token + 1}})
			if side != to || v.Layer != layer || moved.Cells == 0 || changes == 0 ||
				want.Part != "" && want.Part != v.Part || r.IntN(4) > 0 {
				return
			}
			require.Equal(t, uint64(1), moved.Cells)
			changes--
			b[r.IntN(len(b))] ^= 1 << r.IntN(8)
			if want.Part == "" {
				want.Part, want.Units = v.Part, [2]int{unit, unit + 1}
				want.Tokens = Span{token, token + 1}
			}
			want.Units = [2]int{min(want.Units[0], unit), max(want.Units[1], unit+1)}
			want.Tokens = Span{min(want.Tokens.From, token), max(want.Tokens.To, token+1)}
		})
		err := e.Locate(layer, h.s, differ)
		if want.Part == "" {
			require.NoError(t, err)
			return
		}
		require.Equal(t, &want, err)
		require.ErrorIs(t, err, ErrMismatch)
		require.NoError(t, e.Locate(99, h.s, differ))
		asked, last = 0, r.IntN(asked)
		require.ErrorIs(t, e.Locate(layer, h.s, differ), broken)
	})
}

// TestDigestErrors: a table that names what is not there is refused, and nothing is read.
func TestDigestErrors(t *testing.T) {
	r := random(t, 1)
	spec := gqa(2, 2, 8)
	h := handOver(t, r, group(t, spec, Placement{BlockTokens: 4, Blocks: 12}),
		group(t, spec, Placement{BlockTokens: 6, Blocks: 12}), Span{3, 40})
	e := &h.plan.Edges(0)[0]
	good := Held{Receiver: true, Memory: h.to.memory[0], Tables: h.to.tables[0],
		Span: h.s}
	for name, c := range map[string]struct {
		change func(*Held)
		want   error
	}{
		"span":         {func(h *Held) { h.Span = Span{2, 1} }, ErrRequest},
		"far":          {func(h *Held) { h.Span.To = 1 << 40 }, ErrRequest},
		"table":        {func(h *Held) { h.Tables = Tables{{1}} }, ErrRequest},
		"no table":     {func(h *Held) { h.Tables = nil }, ErrRequest},
		"no memory":    {func(h *Held) { h.Memory = nil }, ErrRequest},
		"empty memory": {func(h *Held) { h.Memory = [][]byte{{}} }, driver.ErrBounds},
		"short memory": {func(h *Held) { h.Memory = [][]byte{h.Memory[0][:9]} }, driver.ErrBounds},
		"block": {func(h *Held) {
			h.Tables = Tables{{0, 1, 2, 1 << 31, 4, 5, 6}}
		}, driver.ErrBounds},
	} {
		t.Run(name, func(t *testing.T) {
			held := good
			c.change(&held)
			got, err := h.d.Layer(e, 0, &held, Scope{})
			require.ErrorIs(t, err, c.want)
			require.Zero(t, got)
		})
	}
	got, err := h.d.Layer(e, 7, &good, Scope{})
	require.NoError(t, err, "a layer that the edge does not carry")
	require.Zero(t, got)
	other, err := NewPlan(h.from.sides, h.to.sides)
	require.NoError(t, err)
	_, err = h.d.Layer(&other.Edges(0)[0], 0, &good, Scope{})
	require.ErrorIs(t, err, ErrRequest, "the edge of another plan")
	for _, in := range []Scope{{Part: "x"}, {Units: [2]int{-5, 0}}, {Units: [2]int{2, 9}},
		{Units: [2]int{2, 1}}, {Tokens: Span{40, 50}}, {Tokens: Span{9, 8}}} {
		got, err = h.d.Layer(e, 0, &good, in)
		require.NoError(t, err)
		require.Zero(t, got, "%+v", in)
	}
}

// TestDigestDoesNotAllocate: also of a layer of many blocks, and narrowed down.
func TestDigestDoesNotAllocate(t *testing.T) {
	r := random(t, 1)
	spec := gqa(2, 4, 64)
	h := handOver(t, r, group(t, spec, Placement{TP: 4, Blocks: 70, BlockTokens: 16}),
		group(t, spec, Placement{TP: 2, Blocks: 70, Order: VLLMHND}), Span{3, 1000})
	e := &h.plan.Edges(0)[1]
	held := &Held{Receiver: true, Memory: h.to.memory[0], Tables: h.to.tables[0],
		Span: h.s}
	require.Zero(t, testkit.AllocsPerRun(20, func() {
		_, err := h.d.Layer(e, 1, held, Scope{})
		_, err2 := h.d.Layer(e, 1, held, Scope{Part: "v", Tokens: Span{5, 7}})
		if err != nil || err2 != nil {
			panic("no digest")
		}
	}))
}

// BenchmarkDigest digests layers of llama3.1-70b at TP8 to TP4, a prompt of 8,192 tokens: the
// sender in blocks of one head, the receiver of two.
func BenchmarkDigest(b *testing.B) {
	spec, err := LookupSpec("llama3.1-70b")
	require.NoError(b, err)
	spec.Tensors[0].Layers = count(2)
	from := group(b, spec, Placement{TP: 8, Blocks: 600})
	to := group(b, spec, Placement{TP: 4, Blocks: 600, BlockTokens: 64, Order: VLLMHND})
	p, err := NewPlan(from, to)
	require.NoError(b, err)
	d, err := p.NewDigester(seed)
	require.NoError(b, err)
	r := rand.New(rand.NewPCG(1, 1))
	s := Span{0, ExplainTokens}
	e := &p.Edges(0)[0]
	for name, w := range map[string]*world{"sender": newWorld(r, from[:1], s.To, 7),
		"receiver": newWorld(r, to[:1], s.To, 7)} {
		b.Run(name, func(b *testing.B) {
			held := &Held{Receiver: name == "receiver", Memory: w.memory[0], Tables: w.tables[0],
				Span: s}
			b.ReportAllocs()
			b.SetBytes(int64(ExplainTokens * 2 * 256))
			for b.Loop() {
				_, err = d.Layer(e, 1, held, Scope{})
			}
			require.NoError(b, err)
		})
	}
}
