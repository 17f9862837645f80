// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// Span is the tokens of a request from From on, To excluded, counted from its first token.
type Span struct{ From, To uint64 }

// Tables are the block tables of one request on one rank, by the number of the Group. Slot 0
// of a table holds the request's first token, also when the span begins later. They are the
// engine's own: patterns refer to them, so they must not change until the transfer is done.
type Tables [][]uint32

// Layer appends to dst the patterns that move the tokens of a span in one layer: by the
// tables of the sender and of the receiver, whichever of the two Op makes the local side.
// LocalKey and RemoteKey hold the numbers of the regions, in Side.Regions of either side.
// States are moved whole, whatever the span. An edge that does not carry the layer, and
// a span of no token of this edge, append nothing.
//
// The time depends on the parts of the layer and not on the span. A part takes one pattern,
// one more at each end where the span cuts an entry, and one for each wrap of a ring.
//
// Layer takes the loops of patterns between the length and the capacity of dst for its own,
// so that a dst that is used again costs no allocation. Use one dst for each transfer under
// way, and not again before it is done. Errors are ErrRequest; dst is then returned as it was.
func (e *Edge) Layer(dst []driver.Pattern, layer int, from, to Tables, s Span) (
	[]driver.Pattern, error) {
	if s.From > s.To || s.To > BlocksMax {
		return dst, fmt.Errorf("tokens %d to %d, want at most %d: %w", s.From, s.To,
			uint64(BlocksMax), ErrRequest)
	}
	if !e.Carries(layer) {
		return dst, nil
	}
	w := writer{dst: dst, op: e.Op, from: from, to: to}
	i := e.at[layer] - 1
	for j := e.first[i]; j < e.first[i+1]; j++ {
		w.move(&e.moves[j], s)
		if w.short != nil {
			return dst, fmt.Errorf("layer %d: the block table of group %d has fewer slots than "+
				"%d tokens need: %w", layer, w.short.group, s.To, ErrRequest)
		}
	}
	return w.dst, nil
}

// writer appends the patterns of one call of Layer.
type writer struct {
	dst      []driver.Pattern
	op       driver.Op
	from, to Tables
	short    *end // whose table was too short
}

// clip returns the tokens of a span that the move needs.
func (m *move) clip(s Span) (from, to uint64) {
	switch {
	case m.state:
		return 0, m.unit
	case m.window > 0 && s.To-s.From > m.window:
		return s.To - m.window, s.To
	}
	return s.From, s.To
}

func (w *writer) move(m *move, s Span) {
	for _, t := range m.stretches(m.clip(s)) {
		w.stretch(m, t)
	}
}

// stretch is count entries of a move from entry on, and of each of them tokens a to a+n.
type stretch struct{ entry, count, a, n uint64 }

// stretches cuts tokens begin to end into part of an entry, whole ones, and part of the last.
func (m *move) stretches(begin, end uint64) (list [3]stretch) {
	if begin >= end {
		return list
	}
	chunk, rest := begin/m.unit, begin%m.unit
	i := m.entryOf(chunk)
	if rest > 0 && m.start+i*m.period == chunk {
		list[0] = stretch{i, 1, rest, min(end-chunk*m.unit, m.unit) - rest}
		i++
	}
	last := m.entryOf(end / m.unit)
	if last > i {
		list[1] = stretch{i, last - i, 0, m.unit}
	}
	if last >= i && end%m.unit > 0 && m.start+last*m.period == end/m.unit {
		list[2] = stretch{last, 1, 0, end % m.unit}
	}
	return list
}

// entryOf returns the first entry at or behind a chunk.
func (m *move) entryOf(chunk uint64) uint64 {
	if chunk <= m.start {
		return 0
	}
	return (chunk - m.start + m.period - 1) / m.period
}

// stretch appends a stretch: at once, unless a table wraps on the way.
func (w *writer) stretch(m *move, t stretch) {
	for t.count > 0 {
		count := min(t.count, m.from.toWrap(t.entry), m.to.toWrap(t.entry))
		p := w.shape(m, t.n)
		p.Count = int(count)
		from, to := m.from.side(w.from, t.entry, count), m.to.side(w.to, t.entry, count)
		from.Base += t.a * m.from.token
		to.Base += t.a * m.to.token
		w.put(m, p, from, to)
		t.entry += count
		t.count -= count
	}
}

// shape appends a pattern of one entry of some tokens, without its sides.
func (w *writer) shape(m *move, tokens uint64) *driver.Pattern {
	axes := [3]axis{m.parts, m.units, {tokens, m.from.token, m.to.token}}
	run, n := coalesce(m.cell, &axes)
	var loops []driver.Loop
	if len(w.dst) < cap(w.dst) {
		w.dst = w.dst[:len(w.dst)+1]
		loops = w.dst[len(w.dst)-1].Loops[:0]
	} else {
		w.dst = append(w.dst, driver.Pattern{})
	}
	if cap(loops) < driver.LoopsMax {
		loops = make([]driver.Loop, 0, driver.LoopsMax)
	}
	for _, a := range axes[:n] {
		l := driver.Loop{N: uint32(a.n), Local: a.from, Remote: a.to}
		if w.op == driver.Read {
			l.Local, l.Remote = a.to, a.from
		}
		loops = append(loops, l)
	}
	p := &w.dst[len(w.dst)-1]
	p.Run, p.Loops, p.Count = run, loops, 1
	return p
}

// put completes a pattern, or takes note that a table is too short.
func (w *writer) put(m *move, p *driver.Pattern, from, to driver.Side) {
	if from.List == nil {
		w.short = &m.from
	}
	if to.List == nil {
		w.short = &m.to
	}
	p.Local, p.Remote = from, to
	p.LocalKey, p.RemoteKey = uint32(m.from.region), uint32(m.to.region)
	if w.op == driver.Read {
		p.Local, p.Remote = to, from
		p.LocalKey, p.RemoteKey = p.RemoteKey, p.LocalKey
	}
}

// toWrap returns how many entries from i on lie before the table wraps.
func (e *end) toWrap(i uint64) uint64 {
	if e.ring == 0 {
		return 1 << 62
	}
	round := e.per * e.ring
	return round - i%round
}

// side returns where count entries from i on lie. The List is nil if the table is too short.
func (e *end) side(tables Tables, i, count uint64) driver.Side {
	slot, in := i/e.per, i%e.per
	if e.ring > 0 {
		slot %= e.ring
	}
	slots := (in + count + e.per - 1) / e.per
	s := driver.Side{Base: e.base, Stride: e.block}
	if e.group >= len(tables) || slot+slots > uint64(len(tables[e.group])) {
		return s
	}
	s.List = tables[e.group][slot : slot+slots : slot+slots]
	if count == 1 || e.per == 1 {
		s.Base += in * e.step
		return s
	}
	s.Step, s.Per, s.First = e.step, uint32(e.per), uint32(in)
	return s
}

// Tail appends to dst the bytes of one layer that lie behind a span in the last block of the
// receiver of that index, at most one pattern for each part. No edge writes them, and they
// may hold what another request left there, so the receiver must fill them with zeros before
// its engine reads whole blocks. The Local side names them. The Remote side is Run bytes at
// offset 0, for a Read from a region of zeros. States have no tail; of a ring, tokens of
// the window are left out.
//
// Time, allocations, the loops in dst and errors are as for Edge.Layer.
func (p *Plan) Tail(dst []driver.Pattern, to, layer int, t Tables, s Span) (
	[]driver.Pattern, error) {
	if s.From > s.To || s.To > BlocksMax || to < 0 || to >= len(p.to) {
		return dst, fmt.Errorf("receiver %d, tokens %d to %d, want at most %d: %w", to, s.From,
			s.To, uint64(BlocksMax), ErrRequest)
	}
	if layer < 0 || layer >= len(p.layers[to]) {
		return dst, nil
	}
	w := writer{dst: dst, to: t}
	for _, v := range p.layers[to][layer] {
		g := &p.to[to].Groups[v.Group]
		kept, stop := g.tail(s, uint64(v.Tokens))
		if kept >= stop {
			continue
		}
		slot := kept / uint64(v.Tokens)
		if g.Ring > 0 {
			slot %= uint64(g.Ring)
		}
		if v.Group >= len(t) || slot >= uint64(len(t[v.Group])) {
			return dst, fmt.Errorf("layer %d: the block table of group %d has no slot %d: %w",
				layer, v.Group, slot, ErrRequest)
		}
		m := move{cell: v.Cell, parts: axis{n: 1}, units: axis{uint64(v.Count), v.Unit, v.Unit}}
		m.from.token, m.to.token = v.Token, v.Token
		pattern := w.shape(&m, stop-kept)
		for i := range pattern.Loops {
			pattern.Loops[i].Remote = 0
		}
		pattern.Local = driver.Side{Base: v.Base + kept%uint64(v.Tokens)*v.Token, Stride: v.Block,
			List: t[v.Group][slot : slot+1 : slot+1]}
		pattern.Remote = driver.Side{}
		pattern.LocalKey, pattern.RemoteKey = uint32(v.Region), 0
	}
	return w.dst, nil
}

// tail returns the tokens of a rank behind a span, up to the end of its last block: those
// that it keeps are numbered from 0. There is none where the first is not below the second.
func (g *Group) tail(s Span, block uint64) (kept, stop uint64) {
	if g.State || s.From == s.To {
		return 0, 0
	}
	kept = g.below(s.To)
	stop = (kept + block - 1) / block * block
	if g.Ring > 0 { // what lies there is older by a round, and of the window from oldest on
		oldest := s.To - min(s.To, uint64(g.Window))
		stop = min(stop, oldest+uint64(g.Ring)*block)
	}
	return kept, stop
}

// byLayer indexes the views of a side.
func byLayer(s *Side) [][]*View {
	var list [][]*View
	for i := range s.Views {
		v := &s.Views[i]
		for len(list) <= v.Layer {
			list = append(list, nil)
		}
		list[v.Layer] = append(list[v.Layer], v)
	}
	return list
}
