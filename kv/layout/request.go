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
	if layer < 0 || layer >= len(e.at) || e.at[layer] == 0 {
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
	begin, end := m.clip(s)
	if begin == end {
		return
	}
	entry, rest := begin/m.unit, begin%m.unit
	i := m.entryOf(entry)
	if rest > 0 && m.start+i*m.period == entry {
		w.part(m, i, rest, min(end-entry*m.unit, m.unit))
		i++
	}
	last := m.entryOf(end / m.unit)
	w.whole(m, i, last)
	if last >= i && end%m.unit > 0 && m.start+last*m.period == end/m.unit {
		w.part(m, last, 0, end%m.unit)
	}
}

// entryOf returns the first entry at or behind a chunk.
func (m *move) entryOf(chunk uint64) uint64 {
	if chunk <= m.start {
		return 0
	}
	return (chunk - m.start + m.period - 1) / m.period
}

// part appends tokens a to b of one entry.
func (w *writer) part(m *move, entry, a, b uint64) {
	p := w.shape(m, b-a)
	from := m.from.side(w.from, entry, 1)
	to := m.to.side(w.to, entry, 1)
	from.Base += a * m.from.token
	to.Base += a * m.to.token
	w.put(m, p, from, to)
}

// whole appends entries i to n: at once, unless a table wraps on the way.
func (w *writer) whole(m *move, i, n uint64) {
	for i < n {
		count := min(n-i, m.from.toWrap(i), m.to.toWrap(i))
		p := w.shape(m, m.unit)
		p.Count = int(count)
		w.put(m, p, m.from.side(w.from, i, count), m.to.side(w.to, i, count))
		i += count
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
