// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

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
