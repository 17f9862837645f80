// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/stretchr/testify/require"
)

// TestTails: what lies behind the span in the last block is zero, and nothing else changes.
func TestTails(t *testing.T) {
	each(t, 200, func(t *testing.T, r *rand.Rand) {
		spec := gqa(2, 2, 4)
		spec.Tensors[0].Window = r.IntN(2) * (1 + r.IntN(20))
		p := Placement{TP: 4, BlockTokens: 1 + r.IntN(16), Blocks: 70, Ring: r.IntN(2) == 0,
			Order: pick(r, named...)}
		if spec.Tensors[0].Window == 0 && r.IntN(2) == 0 {
			p.Shards, p.Interleave = 2, 1+r.IntN(3)
		}
		sides := group(t, spec, p)
		if g := sides[0].Groups[0]; g.Ring > 1 && r.IntN(2) == 0 { // no slot more than it takes
			for _, s := range sides {
				s.Groups[0].Ring--
			}
		}
		one := Placement{BlockTokens: 12 * p.BlockTokens, Blocks: 70}
		plan, err := NewPlan(group(t, spec, one), sides)
		if p.Shards > 0 && p.BlockTokens%p.Interleave != 0 {
			require.ErrorAs(t, err, new(*UnlikeError))
			return
		}
		require.NoError(t, err)
		s := span(r, 60)
		got := newWorld(r, sides, 60, untouched)
		want := zeroed(got, s)
		for i := range sides {
			for l := range 2 {
				patterns, err := plan.Tail(nil, i, l, got.tables[i], s)
				require.NoError(t, err)
				for j := range patterns {
					zero(t, &patterns[j], got.memory[i])
				}
			}
		}
		require.Equal(t, want, got.memory)
	})
}

func zero(t *testing.T, p *driver.Pattern, memory [][]byte) {
	t.Helper()
	m := memory[p.LocalKey]
	require.NoError(t, p.Check(uint64(len(m)), p.Run))
	for _, d := range p.AppendDescs(nil, 0) {
		require.Zero(t, d.Remote)
		clear(m[d.Local : d.Local+d.Len])
	}
}

// zeroed returns what the memory of a world is after its tails are zeroed: the rest of
// the block of the last token, but for cells of the window.
func zeroed(w *world, s Span) [][][]byte {
	after := &world{sides: w.sides, tables: w.tables}
	live := map[*byte]bool{}
	for i := range w.memory {
		after.memory = append(after.memory, nil)
		for j := range w.memory[i] {
			after.memory[i] = append(after.memory[i], slices.Clone(w.memory[i][j]))
		}
	}
	if s.From == s.To {
		return after.memory
	}
	last := map[*View]uint64{} // tokens that the rank keeps
	after.each(0, s.To, func(_ int, _ *View, _ int, _ uint64, b []byte) { live[&b[0]] = true })
	whole := &world{tables: w.tables, memory: after.memory}
	for _, side := range w.sides { // the same without windows, so that all tokens are counted
		c := *side
		c.Groups = slices.Clone(side.Groups)
		for i := range c.Groups {
			c.Groups[i].Window = 0
		}
		whole.sides = append(whole.sides, &c)
	}
	whole.each(0, s.To, func(_ int, v *View, u int, _ uint64, _ []byte) {
		if u == v.First {
			last[v]++
		}
	})
	for i, side := range w.sides {
		for j := range side.Views {
			v := &side.Views[j]
			n := last[v]
			for ; n%uint64(v.Tokens) != 0; n++ {
				slot := n / uint64(v.Tokens)
				if ring := side.Groups[v.Group].Ring; ring > 0 {
					slot %= uint64(ring)
				}
				for u := range v.Count {
					at := v.Base + uint64(w.tables[i][v.Group][slot])*v.Block +
						uint64(u)*v.Unit + n%uint64(v.Tokens)*v.Token
					if b := after.memory[i][v.Region][at : at+v.Cell]; !live[&b[0]] {
						clear(b)
					}
				}
			}
		}
	}
	return after.memory
}

// TestEngine moves requests by transfers of an engine over the mem backend.
func TestEngine(t *testing.T) {
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Name: "both", Backends: []driver.Backend{b}})
	require.NoError(t, err)
	defer e.Close()
	self, err := e.Self()
	require.NoError(t, err)
	each(t, 24, func(t *testing.T, r *rand.Rand) {
		spec := gqa(2, 4, 6)
		place := func() []*Side {
			return group(t, spec, Placement{TP: pick(r, 1, 2, 8), BlockTokens: 1 + r.IntN(8),
				Blocks: 40, Order: pick(r, named...)})
		}
		from, to, s := place(), place(), Span{uint64(r.IntN(20)), uint64(20 + r.IntN(20))}
		plan, err := NewPlan(from, to)
		require.NoError(t, err)
		source, target := newWorld(r, from, s.To, 0x11), newWorld(r, to, s.To, untouched)
		source.fill(s.To)
		for i := range to {
			for _, edge := range plan.Edges(i) {
				post(t, e, self, edge, source, target, s)
			}
		}
		expect(t, target, s)
	})
}

// post moves all layers of an edge by one transfer. Each side has one region.
func post(t *testing.T, e *engine.Engine, self *engine.Peer, edge Edge, from, to *world, s Span) {
	t.Helper()
	name := fmt.Sprintf("%s %d %d", t.Name(), edge.From, edge.To)
	mine, theirs := from.memory[edge.From][0], to.memory[edge.To][0]
	if edge.Op == driver.Read {
		mine, theirs = theirs, mine
	}
	local, err := e.Register(name+" local", engine.HostSegment(mine))
	require.NoError(t, err)
	defer local.Close()
	there, err := e.Register(name+" remote", engine.HostSegment(theirs))
	require.NoError(t, err)
	defer there.Close()
	remote, err := self.Remote(name + " remote")
	require.NoError(t, err)
	tr, err := e.NewTransfer(self, edge.Op, engine.Route{})
	require.NoError(t, err)
	defer tr.Close()
	for _, l := range edge.Layers {
		patterns, err := edge.Layer(nil, l, from.tables[edge.From], to.tables[edge.To], s)
		require.NoError(t, err)
		for _, p := range patterns {
			require.NoError(t, tr.AddPattern(local, remote, p))
		}
	}
	require.NoError(t, tr.Post())
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	require.NoError(t, tr.Wait(ctx))
}

// large is a plan of two groups of 8 of llama3.1-70b with other orders and blocks.
func large(t testing.TB) (from, to []*Side) {
	t.Helper()
	spec, err := LookupSpec("llama3.1-70b")
	require.NoError(t, err)
	return group(t, spec, Placement{TP: 8, Blocks: 1 << 16, Order: VLLMNHD}),
		group(t, spec, Placement{TP: 8, Blocks: 1 << 16, BlockTokens: 64, Order: VLLMFusedHND})
}

// TestLayerIsConstant: no allocation, and as many patterns for a long prompt as for a short.
func TestLayerIsConstant(t *testing.T) {
	plan, err := NewPlan(large(t))
	require.NoError(t, err)
	e := plan.Edges(3)[0]
	tables := Tables{make([]uint32, 1<<16)}
	dst := make([]driver.Pattern, 0, 8)
	var lengths []int
	for _, s := range []Span{{5, 100}, {5, 8100}, {5, 1_000_003}} {
		dst, err = e.Layer(dst[:0], 7, tables, tables, s)
		require.NoError(t, err)
		lengths = append(lengths, len(dst))
		require.Zero(t, testkit.AllocsPerRun(100, func() {
			dst, err = e.Layer(dst[:0], 7, tables, tables, s)
			dst, err = plan.Tail(dst, 3, 7, tables, s)
		}))
		require.NoError(t, err)
	}
	require.Equal(t, []int{3, 3, 3}, lengths)
}

func BenchmarkNewPlan(b *testing.B) {
	for _, name := range []string{"llama3.1-70b", "deepseek-v3.2", "qwen3-next-80b"} {
		spec, err := LookupSpec(name)
		require.NoError(b, err)
		from := group(b, spec, Placement{TP: 8, Blocks: 1 << 12})
		to := group(b, spec, Placement{TP: 8, Blocks: 1 << 12, BlockTokens: 64, Order: VLLMHND})
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				_, err := NewPlan(from, to)
				require.NoError(b, err)
			}
		})
	}
}

func BenchmarkLayer(b *testing.B) {
	plan, err := NewPlan(large(b))
	require.NoError(b, err)
	e := plan.Edges(3)[0]
	tables := Tables{make([]uint32, 1<<16)}
	var dst []driver.Pattern
	for _, s := range []Span{{0, 8192}, {5, 8100}, {5, 1_000_003}} {
		b.Run(fmt.Sprintf("%d to %d", s.From, s.To), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				dst, err = e.Layer(dst[:0], 7, tables, tables, s)
			}
			require.NoError(b, err)
		})
	}
}
