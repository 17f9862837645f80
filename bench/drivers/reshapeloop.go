// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"context"
	"sync"

	kvlayout "github.com/sluicehq/sluice/kv/layout"
)

// spot is where one rank keeps one part of one layer of a request. It is written from the
// documentation of layout.View and layout.Group, and has no part of a layout.Plan.
type spot struct {
	view  *kvlayout.View
	group *kvlayout.Group
	side  int
	mem   []byte
	table []uint32
}

func newSpot(g *rankGroup, side int, v *kvlayout.View) spot {
	return spot{view: v, group: &g.sides[side].Groups[v.Group], side: side,
		mem: g.held[side][v.Region], table: g.tables[side][v.Group]}
}

// holds reports whether the rank has a token.
func (s *spot) holds(t uint64) bool {
	return s.group.Shards <= 1 ||
		t/uint64(s.group.Interleave)%uint64(s.group.Shards) == uint64(s.group.Shard)
}

// of returns where the first unit of a token lies.
func (s *spot) of(t uint64) uint64 {
	v, g := s.view, s.group
	if g.Shards > 1 {
		i := uint64(g.Interleave)
		t = t/(i*uint64(g.Shards))*i + t%i
	}
	slot := t / uint64(v.Tokens)
	if g.Ring > 0 {
		slot %= uint64(g.Ring)
	}
	return v.Base + uint64(s.table[slot])*v.Block + t%uint64(v.Tokens)*v.Token
}

// loopPiece is the units of one part of one layer that one rank copies from another.
type loopPiece struct {
	src, dst             spot
	srcFirst, dstFirst   uint64 // bytes to the first unit of both
	units, unit          uint64 // heads or state units; tokens in one block on both sides
	begin, end           uint64 // tokens
	cell                 uint64
	srcUnit, dstUnit     uint64 // strides
	srcToken, dstToken   uint64
	tokensJoin, unitJoin bool // cells of tokens, or of units, are contiguous on both sides
}

// reshapeLoop is what a program does that has both groups in its memory, and knows both layouts:
// for each part of each layer it copies the longest runs that are contiguous in both.
type reshapeLoop struct{ threads [][]loopPiece }

func loopBetween(from, to *rankGroup, tokens uint64, threads int) *reshapeLoop {
	type key struct {
		layer int
		part  string
	}
	senders := map[key][]spot{}
	for i, s := range from.sides {
		for j := range s.Views {
			v := &s.Views[j]
			k := key{v.Layer, v.Part}
			senders[k] = append(senders[k], newSpot(from, i, v))
		}
	}
	l := &reshapeLoop{threads: make([][]loopPiece, threads)}
	n := 0
	for i, s := range to.sides {
		for j := range s.Views {
			v := &s.Views[j]
			dst := newSpot(to, i, v)
			for _, src := range replicas(senders[key{v.Layer, v.Part}], &dst) {
				p := newLoopPiece(src, dst, tokens)
				l.threads[n%threads] = append(l.threads[n%threads], p)
				n++
			}
		}
	}
	return l
}

// replicas returns one sender of each range of units and shard of tokens that a reader needs:
// of those that have the same, another one for each layer and reader.
func replicas(senders []spot, to *spot) (list []spot) {
	type holding struct{ first, shard int }
	same := map[holding][]spot{}
	var order []holding
	for _, s := range senders {
		if s.view.First >= to.view.First+to.view.Count ||
			to.view.First >= s.view.First+s.view.Count {
			continue
		}
		h := holding{s.view.First, s.group.Shard}
		if same[h] == nil {
			order = append(order, h)
		}
		same[h] = append(same[h], s)
	}
	for _, h := range order {
		list = append(list, same[h][(to.view.Layer+to.side)%len(same[h])])
	}
	return list
}

func newLoopPiece(src, dst spot, tokens uint64) loopPiece {
	s, d := src.view, dst.view
	first := max(s.First, d.First)
	p := loopPiece{src: src, dst: dst, cell: s.Cell, end: tokens,
		srcFirst: uint64(first-s.First) * s.Unit, dstFirst: uint64(first-d.First) * d.Unit,
		units:   uint64(min(s.First+s.Count, d.First+d.Count) - first),
		unit:    gcd(uint64(s.Tokens), uint64(d.Tokens)),
		srcUnit: s.Unit, dstUnit: d.Unit, srcToken: s.Token, dstToken: d.Token}
	for _, g := range []*kvlayout.Group{src.group, dst.group} {
		if g.Shards > 1 {
			p.unit = gcd(p.unit, uint64(g.Interleave))
		}
	}
	if w := uint64(dst.group.Window); w > 0 {
		p.begin = tokens - min(tokens, w)
	}
	if dst.group.State {
		p.unit, p.begin, p.end = uint64(d.Tokens), 0, uint64(d.Tokens)
	}
	p.tokensJoin = s.Token == p.cell && d.Token == p.cell
	p.unitJoin = s.Unit == p.cell && d.Unit == p.cell
	return p
}

func gcd(a, b uint64) uint64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// copy copies all chunks of tokens that lie in one block on both sides.
func (p *loopPiece) copy() {
	for t := p.begin; t < p.end; {
		n := min(p.unit-t%p.unit, p.end-t)
		if p.src.holds(t) && p.dst.holds(t) {
			p.chunk(p.dst.mem[p.dst.of(t)+p.dstFirst:], p.src.mem[p.src.of(t)+p.srcFirst:], n)
		}
		t += n
	}
}

func (p *loopPiece) chunk(dst, src []byte, tokens uint64) {
	tokenRun, unitRun := tokens*p.cell, p.units*p.cell
	switch {
	case p.tokensJoin && (p.units == 1 || p.srcUnit == tokenRun && p.dstUnit == tokenRun):
		copy(dst[:p.units*tokenRun], src)
	case p.tokensJoin:
		strided(dst, src, p.units, p.dstUnit, p.srcUnit, tokenRun)
	case p.unitJoin && p.srcToken == unitRun && p.dstToken == unitRun:
		copy(dst[:tokens*unitRun], src)
	case p.unitJoin:
		strided(dst, src, tokens, p.dstToken, p.srcToken, unitRun)
	case p.dstToken < p.dstUnit:
		for u := range p.units {
			strided(dst[u*p.dstUnit:], src[u*p.srcUnit:], tokens, p.dstToken, p.srcToken, p.cell)
		}
	default:
		for t := range tokens {
			strided(dst[t*p.dstToken:], src[t*p.srcToken:], p.units, p.dstUnit, p.srcUnit, p.cell)
		}
	}
}

// strided copies n runs.
func strided(dst, src []byte, n, dstStride, srcStride, run uint64) {
	for i := range n {
		copy(dst[i*dstStride:][:run], src[i*srcStride:])
	}
}

// move copies the whole request.
func (l *reshapeLoop) move(context.Context) error {
	var all sync.WaitGroup
	for _, list := range l.threads[1:] {
		all.Go(func() {
			for i := range list {
				list[i].copy()
			}
		})
	}
	for i := range l.threads[0] {
		l.threads[0][i].copy()
	}
	all.Wait()
	return nil
}
