// SPDX-License-Identifier: Apache-2.0

package main

// #include "faces.h"
import "C"

import (
	"math"

	"github.com/sluicehq/sluice/engine"
)

//export slgoTransferAddPattern
func slgoTransferAddPattern(h, local, other C.uint64_t, p *C.struct_sluice_pattern,
	f *C.struct_slgo_fault) C.int {
	t, err := hold(h)
	if err != nil {
		return answer(f, err)
	}
	defer t.release()
	r, m, err := pair(local, other)
	if err != nil {
		return answer(f, err)
	}
	pattern, err := patternOf(p)
	if err != nil {
		return answer(f, err)
	}
	return answer(f, t.t.AddPattern(r.r, m.m, pattern))
}

func patternOf(p *C.struct_sluice_pattern) (engine.Pattern, error) {
	var none engine.Pattern
	switch {
	case p.flags != 0 || p.reserved != 0:
		return none, argument("sluice_pattern: flags %#x and reserved %d: there are none", p.flags,
			p.reserved)
	case p.count == 0 || p.count > math.MaxInt32:
		return none, argument("count is %d, from 1 to %d", p.count, math.MaxInt32)
	case int(p.loops_count) > len(p.loops):
		return none, argument("%d loops, at most %d", p.loops_count, len(p.loops))
	}
	out := engine.Pattern{Run: uint64(p.run), Count: int(p.count)}
	for i := range p.loops[:p.loops_count] {
		l := &p.loops[i]
		if l.reserved != 0 {
			return none, argument("sluice_loop.reserved is %d", l.reserved)
		}
		out.Loops = append(out.Loops, engine.Loop{N: uint32(l.n), Local: uint64(l.local),
			Remote: uint64(l.remote)})
	}
	var err error
	if out.Local, err = sideOf(&p.local, uint64(p.count)); err != nil {
		return none, err
	}
	out.Remote, err = sideOf(&p.remote, uint64(p.count))
	return out, err
}

// sideOf reads one side of a pattern of count entries.
func sideOf(s *C.struct_sluice_side, count uint64) (engine.Side, error) {
	per := max(1, uint64(s.per))
	slots := (uint64(s.first) + count + per - 1) / per
	list, err := indices(s.list, int(slots))
	return engine.Side{Base: uint64(s.base), Stride: uint64(s.stride), Step: uint64(s.step),
		First: uint32(s.first), Per: uint32(s.per), List: list}, err
}
