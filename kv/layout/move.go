// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"fmt"
	"math"
	"strconv"
)

// axis is n cells or runs of cells, with the bytes from one to the next on both sides.
type axis struct{ n, from, to uint64 }

// end is one side of a move.
type end struct {
	base, block, token uint64 // bytes
	step               uint64 // bytes from an entry to the next in a block
	per                uint64 // entries a block
	tokens             uint64 // of a block
	ring               uint64 // slots of the table; 0: it does not wrap
	region, group      int
}

// move is the cells of one part of one layer that go from one rank to another. They are cut
// into entries that lie in one block on both sides: entry e is the tokens of chunk
// start + e*period, a chunk being unit consecutive tokens.
type move struct {
	from, to            end
	unit, start, period uint64
	cell                uint64 // bytes
	units, parts        axis   // heads or state units; parts of the same shape
	first               uint64 // global number of the first unit
	part                int    // index in Edge.parts of the first part
	window              uint64 // 0: all tokens
	state               bool
}

// unlike compares what both holders of a part must have in common.
func unlike(k key, from, to *holder) error {
	f, t := from.view, to.view
	mismatch := func(what string, a, b any, cure string) error {
		return &UnlikeError{k.layer, k.part, what, fmt.Sprint(a), fmt.Sprint(b), cure}
	}
	bytes := func(n uint64) string { return strconv.FormatUint(n, 10) + " bytes" }
	switch {
	case f.DType != t.DType:
		return mismatch("dtype", f.DType, t.DType,
			"start both engines with the same KV cache dtype")
	case f.Cell != t.Cell:
		return mismatch("cell size", bytes(f.Cell), bytes(t.Cell),
			"describe both sides with the same cells: one head or state unit of one token")
	case f.Units != t.Units:
		return mismatch("heads or units of the model", f.Units, t.Units,
			"load the same model on both sides")
	case from.group.State != to.group.State:
		return mismatch("a state a request", from.group.State, to.group.State,
			"describe the layer as a state on both sides or on none")
	case from.group.State && f.Tokens != t.Tokens:
		return mismatch("positions of a state", f.Tokens, t.Tokens,
			"load the same model on both sides, with the same speculative tokens")
	case from.group.Window != 0 && to.group.Window != from.group.Window:
		return mismatch("window", from.group.Window, to.group.Window,
			"keep no more tokens on the receiver than the sender has, or all on the sender")
	}
	return nil
}

// allShards wants the ranks of each of two groups to hold every token.
func allShards(k key, senders, readers []holder) error {
	from, allFrom := shardsOf(senders)
	to, allTo := shardsOf(readers)
	if allFrom && allTo {
		return nil
	}
	return &UnlikeError{k.layer, k.part, "shards of tokens", from, to,
		"shard tokens alike on all ranks of a group, and pass the sides of all of them"}
}

// shardsOf says in words which shards there are, and whether they are all.
func shardsOf(holders []holder) (string, bool) {
	g := holders[0].group
	have := make(map[int]bool)
	for i := range holders {
		h := holders[i].group
		if h.shards() != g.shards() || h.Interleave != g.Interleave {
			return fmt.Sprintf("%d by %d and %d by %d", g.shards(), g.Interleave, h.shards(),
				h.Interleave), false
		}
		have[h.Shard] = true
	}
	return fmt.Sprintf("%d of %d", len(have), g.shards()), len(have) == g.shards()
}

// newMove returns the move of units begin to end, and false where the two shards have no
// token in common.
func newMove(k key, from, to *holder, begin, stop int) (move, bool, error) {
	f, t := from.view, to.view
	m := move{cell: f.Cell, state: from.group.State, period: 1, first: uint64(begin),
		window: uint64(to.group.Window), units: axis{uint64(stop - begin), f.Unit, t.Unit},
		parts: axis{n: 1}, from: newEnd(from, begin), to: newEnd(to, begin)}
	if m.state {
		m.unit, m.from.per, m.to.per = uint64(f.Tokens), 1, 1
		return m, true, nil
	}
	fs, ts := uint64(from.group.shards()), uint64(to.group.shards())
	m.unit = gcd(uint64(f.Tokens), uint64(t.Tokens))
	if fs > 1 || ts > 1 {
		m.unit = uint64(max(from.group.Interleave, to.group.Interleave))
		if fs > 1 && ts > 1 && from.group.Interleave != to.group.Interleave {
			return m, false, &UnlikeError{k.layer, k.part, "interleave of token shards",
				fmt.Sprint(from.group.Interleave), fmt.Sprint(to.group.Interleave),
				"start both engines with the same interleave"}
		}
	}
	// Chunks that both hold: start mod fs is the one's shard, mod ts the other's.
	m.period = fs / gcd(fs, ts) * ts
	for m.start = uint64(from.group.Shard); m.start%ts != uint64(to.group.Shard); m.start += fs {
		if m.start >= m.period {
			return m, false, nil
		}
	}
	ok := m.from.cut(m.unit, m.start, m.period, fs) && m.to.cut(m.unit, m.start, m.period, ts)
	if !ok {
		return m, false, &UnlikeError{k.layer, k.part, "token shards by blocks",
			fmt.Sprintf("%d shards, blocks of %d", fs, f.Tokens),
			fmt.Sprintf("%d shards, blocks of %d", ts, t.Tokens),
			fmt.Sprintf("make the blocks of the sender a multiple of %d tokens and those of the "+
				"receiver of %d, or the interleave smaller than %d", m.period/fs*m.unit,
				m.period/ts*m.unit, m.unit)}
	}
	return m, true, nil
}

func newEnd(h *holder, begin int) end {
	v := h.view
	return end{base: v.Base + uint64(begin-v.First)*v.Unit, block: v.Block, token: v.Token,
		tokens: uint64(v.Tokens), ring: uint64(h.group.Ring), region: v.Region, group: v.Group}
}

// cut lays the entries over the blocks of one side, of that many shards. Each entry must lie
// in one block, and each block begin with the same part of a period.
func (e *end) cut(unit, start, period, shards uint64) bool {
	step := period / shards * unit // tokens of this side from an entry to the next
	if e.tokens%step != 0 {
		return false
	}
	e.per = e.tokens / step
	e.step = step * e.token
	e.base += start / shards * unit * e.token
	return true
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// join takes the cells of n in, if they are those of m at a constant distance on both sides:
// V behind K, or the keys of an indexer.
func (m *move) join(n *move) bool {
	a, b := *m, *n
	from, to := b.from.base-a.from.base, b.to.base-a.to.base
	if b.from.base < a.from.base || b.to.base < a.to.base || b.parts.n != 1 {
		return false
	}
	if a.parts.n > 1 && (from != a.parts.n*a.parts.from || to != a.parts.n*a.parts.to) {
		return false
	}
	parts := axis{a.parts.n + 1, from, to}
	if a.parts.n > 1 {
		parts.from, parts.to = a.parts.from, a.parts.to
	}
	a.from.base, a.to.base, a.parts, a.part = 0, 0, axis{}, 0
	b.from.base, b.to.base, b.parts = 0, 0, axis{}
	if a != b {
		return false
	}
	m.parts = parts
	return true
}

// runs returns how many contiguous runs an entry has on each side by itself.
func (m *move) runs() (from, to uint64) {
	one := [3]axis{m.parts, m.units, {m.unit, m.from.token, m.to.token}}
	other := one
	for i := range one {
		one[i].to, other[i].from = one[i].from, other[i].to
	}
	run, _ := coalesce(m.cell, &one)
	run2, _ := coalesce(m.cell, &other)
	return m.entry() / run, m.entry() / run2
}

// entry returns the bytes of an entry.
func (m *move) entry() uint64 { return m.cell * m.parts.n * m.units.n * m.unit }

// coalesce joins axes that are contiguous on both sides, and returns the contiguous bytes and
// how many axes are left, the outermost first.
func coalesce(run uint64, axes *[3]axis) (uint64, int) {
	n := 0
	for _, a := range *axes {
		if a.n > 1 {
			axes[n] = a
			n++
		}
	}
	for i := 1; i < n; i++ { // by stride, descending
		for j := i; j > 0 && axes[j].to > axes[j-1].to; j-- {
			axes[j], axes[j-1] = axes[j-1], axes[j]
		}
	}
	for n > 0 && axes[n-1].from == run && axes[n-1].to == run {
		run *= axes[n-1].n
		n--
	}
	for i := n - 1; i > 0; i-- {
		in, out := axes[i], axes[i-1]
		if out.from != in.n*in.from || out.to != in.n*in.to || out.n*in.n > math.MaxUint32 {
			continue
		}
		axes[i-1] = axis{in.n * out.n, in.from, in.to}
		copy(axes[i:], axes[i+1:n])
		n--
	}
	return run, n
}
