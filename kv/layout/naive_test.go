// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"encoding/binary"
	"hash/fnv"
	"math/rand/v2"
	"testing"

	"github.com/sluicehq/sluice/driver"
	"github.com/stretchr/testify/require"
)

// cell is the content of one cell, from its coordinates alone.
func cell(v *View, unit int, token uint64) []byte {
	h := fnv.New64a()
	h.Write([]byte(v.Part))
	var at [24]byte
	binary.LittleEndian.PutUint64(at[:], uint64(v.Layer))
	binary.LittleEndian.PutUint64(at[8:], uint64(unit))
	binary.LittleEndian.PutUint64(at[16:], token)
	h.Write(at[:])
	seed := h.Sum64()
	b := make([]byte, v.Cell)
	for i := range b {
		b[i] = byte(seed>>(8*(i%8))) ^ byte(i/8*31)
	}
	return b
}

// world is one group of ranks with memory and the tables of one request.
type world struct {
	sides  []*Side
	memory [][][]byte // by side and region
	tables []Tables
}

// newWorld fills all memory with one byte, and deals random slots out.
func newWorld(r *rand.Rand, sides []*Side, tokens uint64, fill byte) *world {
	w := &world{sides: sides}
	for _, s := range sides {
		var memory [][]byte
		for _, area := range s.Regions {
			m := make([]byte, area.Bytes)
			for i := range m {
				m[i] = fill
			}
			memory = append(memory, m)
		}
		w.memory = append(w.memory, memory)
		var t Tables
		for g := range s.Groups {
			n := 1
			for _, v := range s.Views {
				if v.Group == g && !s.Groups[g].State {
					n = (int(tokens) + v.Tokens - 1) / v.Tokens
				}
			}
			if s.Groups[g].Ring > 0 {
				n = s.Groups[g].Ring
			}
			var table []uint32
			for _, b := range r.Perm(int(s.Groups[g].Blocks))[:n] {
				table = append(table, uint32(b))
			}
			t = append(t, table)
		}
		w.tables = append(w.tables, t)
	}
	return w
}

// each calls f for every cell of tokens from a to b that a rank holds. It is written from
// the documentation of Group and View alone, token by token.
func (w *world) each(a, b uint64, f func(side int, v *View, unit int, token uint64, bytes []byte)) {
	for i, s := range w.sides {
		for j := range s.Views {
			v := &s.Views[j]
			g := s.Groups[v.Group]
			from, to := a, b
			if g.State {
				from, to = 0, uint64(v.Tokens)
			} else if g.Window > 0 && b > uint64(g.Window) {
				from = max(a, b-uint64(g.Window))
			}
			kept := uint64(0)
			for t := range to {
				if g.Shards > 1 && int(t)/g.Interleave%g.Shards != g.Shard {
					continue
				}
				n := kept
				kept++
				if t < from {
					continue
				}
				slot := n / uint64(v.Tokens)
				if g.Ring > 0 {
					slot %= uint64(g.Ring)
				}
				block := uint64(w.tables[i][v.Group][slot])
				for u := range v.Count {
					at := v.Base + block*v.Block + uint64(u)*v.Unit + n%uint64(v.Tokens)*v.Token
					f(i, v, v.First+u, t, w.memory[i][v.Region][at:at+v.Cell])
				}
			}
		}
	}
}

// fill writes the cells of all tokens up to n.
func (w *world) fill(n uint64) {
	w.each(0, n, func(_ int, v *View, unit int, token uint64, b []byte) {
		copy(b, cell(v, unit, token))
	})
}

// apply moves a span along all edges, by the runs of the driver's own expansion.
func apply(t *testing.T, p *Plan, from, to *world, s Span) {
	t.Helper()
	var patterns []driver.Pattern
	for i := range to.sides {
		for _, e := range p.Edges(i) {
			for _, l := range e.Layers {
				var err error
				patterns, err = e.Layer(patterns[:0], l, from.tables[e.From], to.tables[e.To], s)
				require.NoError(t, err)
				for j := range patterns {
					copyRuns(t, &patterns[j], e, from.memory[e.From], to.memory[e.To])
				}
			}
		}
	}
}

func copyRuns(t *testing.T, p *driver.Pattern, e Edge, from, to [][]byte) {
	t.Helper()
	var runs []driver.Desc
	for i := range p.Count {
		runs = p.AppendDescs(runs, i)
	}
	if e.Op == driver.Read {
		src, dst := from[p.RemoteKey], to[p.LocalKey]
		require.NoError(t, p.Check(uint64(len(dst)), uint64(len(src))))
		for _, d := range runs {
			copy(dst[d.Local:d.Local+d.Len], src[d.Remote:d.Remote+d.Len])
		}
		return
	}
	src, dst := from[p.LocalKey], to[p.RemoteKey]
	require.NoError(t, p.Check(uint64(len(src)), uint64(len(dst))))
	for _, d := range runs {
		copy(dst[d.Remote:d.Remote+d.Len], src[d.Local:d.Local+d.Len])
	}
}

const untouched = 0xEE

// expect compares every byte of the receivers with the naive reshape of a span.
func expect(t *testing.T, to *world, s Span) {
	t.Helper()
	want := &world{sides: to.sides, tables: to.tables}
	for i := range to.memory {
		var memory [][]byte
		for _, m := range to.memory[i] {
			fresh := make([]byte, len(m))
			for j := range fresh {
				fresh[j] = untouched
			}
			memory = append(memory, fresh)
		}
		want.memory = append(want.memory, memory)
	}
	want.each(s.From, s.To, func(_ int, v *View, unit int, token uint64, b []byte) {
		copy(b, cell(v, unit, token))
	})
	for i := range to.memory {
		for j := range to.memory[i] {
			if string(want.memory[i][j]) != string(to.memory[i][j]) {
				for k := range to.memory[i][j] {
					require.Equalf(t, want.memory[i][j][k], to.memory[i][j][k],
						"rank %d, region %d, byte %d, span %v", i, j, k, s)
				}
			}
		}
	}
}

// group lays out all ranks of a spec.
func group(t testing.TB, spec Spec, p Placement) []*Side {
	t.Helper()
	var sides []*Side
	for r := range max(1, p.TP) {
		p.Rank = r
		s, err := NewSide(spec, p)
		require.NoError(t, err)
		sides = append(sides, s)
	}
	return sides
}

// hand hands one request over, and checks every byte of the receivers.
func hand(t *testing.T, r *rand.Rand, from, to []*Side, s Span) *Plan {
	t.Helper()
	p, err := NewPlan(from, to)
	require.NoError(t, err)
	source, target := newWorld(r, from, s.To, 0x11), newWorld(r, to, s.To, untouched)
	source.fill(s.To)
	apply(t, p, source, target, s)
	expect(t, target, s)
	return p
}

// gqa is grouped-query attention of some layers.
func gqa(layers, heads int, head uint64) Spec {
	return Spec{Name: "gqa", Tensors: []Tensors{{Layers: count(layers), Parts: []Cells{
		{"k", "bf16", heads, head}, {"v", "bf16", heads, head}}}}}
}

func count(n int) []int {
	list := make([]int, n)
	for i := range list {
		list[i] = i
	}
	return list
}
