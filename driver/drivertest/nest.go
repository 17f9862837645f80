// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

var nestChecks = []check{
	{name: "Nest", wirings: everywhere, needs: driver.CanPattern, run: checkNest},
	{name: "NestMax", wirings: here, needs: driver.CanPattern, run: checkNestMax},
	{name: "NestBounds", wirings: here, needs: driver.CanPattern, run: checkNestBounds},
	{name: "NestNotKept", wirings: here, needs: driver.CanPattern, run: checkNestNotKept},
	{name: "NestNotify", wirings: everywhere, needs: driver.CanPattern | driver.CanNotify,
		run: checkNestNotify},
	{name: "NestNoAllocation", wirings: everywhere, needs: driver.CanPattern,
		run: checkNestNoAllocation},
}

// nestRoom is the size of the memories that random nests lie in.
const nestRoom = 256 << 10

// randomNest draws a pattern of any form that fits in both memories. No byte of the side
// that is written to is named twice.
func (s *stage) randomNest(random *rand.Rand, op driver.Op, l, r *memory) *driver.Pattern {
	for {
		p := &driver.Pattern{
			Run: 1 + random.Uint64N(96), Count: 1 + random.IntN(24),
			LocalKey: l.key, RemoteKey: r.as,
		}
		for range random.IntN(driver.LoopsMax + 1) {
			p.Loops = append(p.Loops, driver.Loop{
				N:     1 + random.Uint32N(4),
				Local: random.Uint64N(400), Remote: random.Uint64N(400),
			})
		}
		p.Local, p.Remote = randomSide(random, p.Count), randomSide(random, p.Count)
		if p.Check(l.size, r.size) == nil && p.Count*p.Runs() <= s.caps.RunsMax && once(op, p) {
			return p
		}
	}
}

func randomSide(random *rand.Rand, count int) driver.Side {
	side := driver.Side{
		Base: random.Uint64N(200), Stride: 1 + random.Uint64N(8000), Step: random.Uint64N(1200),
	}
	if random.IntN(3) > 0 {
		side.Per = 1 + random.Uint32N(5)
	}
	if side.Per > 1 {
		side.First = random.Uint32N(side.Per)
	}
	if random.IntN(2) == 0 {
		slots := count
		if side.Per > 1 {
			slots = (int(side.First) + count + int(side.Per) - 1) / int(side.Per)
		}
		for _, slot := range random.Perm(slots) {
			side.List = append(side.List, uint32(slot))
		}
	}
	return side
}

// once reports whether the side that is written to names no byte twice.
func once(op driver.Op, p *driver.Pattern) bool {
	var starts []uint64
	for _, d := range allRuns(p) {
		if op == driver.Write {
			starts = append(starts, d.Remote)
		} else {
			starts = append(starts, d.Local)
		}
	}
	slices.Sort(starts)
	for i := range len(starts) - 1 {
		if starts[i+1]-starts[i] < p.Run {
			return false
		}
	}
	return true
}

func allRuns(p *driver.Pattern) (list []driver.Desc) {
	for i := range p.Count {
		list = p.AppendDescs(list, i)
	}
	return list
}

// checkNest moves nests of all forms.
func checkNest(s *stage) {
	random := rand.New(rand.NewPCG(6, 56))
	l, r := s.local(nestRoom), s.remote(nestRoom)
	for i := range 160 {
		op := bothOps[i%2]
		p := s.randomNest(random, op, l, r)
		s.movePattern(op, p)
		if i%4 > 0 && !s.Failed() { // a look at every byte takes longer than the move
			continue
		}
		s.compare(l, r, fmt.Sprintf("%v of nest %d, %+v, and up to three before", op, i, *p))
		l.paint(s.seed())
	}
}

// checkNestMax moves as many runs as a pattern may have, in one entry and in many.
func checkNestMax(s *stage) {
	runs := uint32(min(s.caps.RunsMax, 64<<10))
	inner := uint32(1)
	for inner*inner < runs {
		inner *= 2
	}
	outer := max(1, runs/inner)
	for _, count := range []int{1, 8} {
		n := outer / uint32(count)
		if n == 0 || inner*outer > runs {
			continue
		}
		size := uint64(inner) * uint64(n) * uint64(count) * 24
		l, r := s.local(size), s.remote(size)
		entry := size / uint64(count)
		p := &driver.Pattern{
			Run: 12, Count: count, LocalKey: l.key, RemoteKey: r.as,
			Loops: []driver.Loop{
				{N: n, Local: 24 * uint64(inner), Remote: 24},
				{N: inner, Local: 24, Remote: 24 * uint64(n)},
			},
			Local: driver.Side{Stride: entry}, Remote: driver.Side{Stride: entry},
		}
		for _, op := range bothOps {
			p.RemoteKey = r.as // a comparison may import anew
			s.movePattern(op, p)
			s.compare(l, r, fmt.Sprintf("%v of %d entries of %d runs", op, count, p.Runs()))
			l.paint(s.seed())
		}
	}
}

// checkNestBounds submits nests that leave the memories. What lies past them exists.
func checkNestBounds(s *stage) {
	const n = 64
	l, r, lAll, rAll := s.cut(16 * n)
	good := func() *driver.Pattern { // fills both memories
		return &driver.Pattern{
			Run: n, Count: 4, LocalKey: l.key, RemoteKey: r.as,
			Loops:  []driver.Loop{{N: 2, Local: 8 * n, Remote: n}, {N: 2, Local: n, Remote: 8 * n}},
			Local:  driver.Side{Stride: 2 * n},
			Remote: driver.Side{Stride: 4 * n, Step: 2 * n, Per: 2},
		}
	}
	for what, spoil := range map[string]func(*driver.Pattern){
		"a turn too many":        func(p *driver.Pattern) { p.Loops[0].N++ },
		"a turn too many inside": func(p *driver.Pattern) { p.Loops[1].N++ },
		"a wider loop":           func(p *driver.Pattern) { p.Loops[1].Remote++ },
		"a loop that overflows": func(p *driver.Pattern) {
			p.Loops[0].Local = math.MaxUint64 / 2
		},
		"a loop that wraps around": func(p *driver.Pattern) {
			p.Loops[0].N, p.Loops[0].Remote = 3, 1<<63
		},
		"a loop of nothing": func(p *driver.Pattern) { p.Loops[0].N = 0 },
		"more runs than can be": func(p *driver.Pattern) {
			p.Loops = slices.Repeat([]driver.Loop{{N: 1 << 31}}, 3)
		},
		"more loops than can be": func(p *driver.Pattern) {
			p.Loops = make([]driver.Loop, driver.LoopsMax+1)
		},
		"a wider step":              func(p *driver.Pattern) { p.Remote.Step += n },
		"a step that overflows":     func(p *driver.Pattern) { p.Remote.Step = math.MaxUint64 },
		"a first that is past":      func(p *driver.Pattern) { p.Remote.First = 2 },
		"a first that needs a slot": func(p *driver.Pattern) { p.Remote.First = 1 },
		"a slot past the end":       func(p *driver.Pattern) { p.Remote.List = []uint32{0, 2} },
		"a slot far past the end": func(p *driver.Pattern) {
			p.Remote.List = []uint32{math.MaxUint32, 0}
		},
		"a list of too few slots":    func(p *driver.Pattern) { p.Remote.List = []uint32{0} },
		"a longer run":               func(p *driver.Pattern) { p.Run++ },
		"a base that moves all":      func(p *driver.Pattern) { p.Local.Base = 1 },
		"more entries than there is": func(p *driver.Pattern) { p.Count++ },
	} {
		for _, op := range bothOps {
			p := good()
			spoil(p)
			s.refused(fmt.Sprintf("%v of a nest with %s", op, what), driver.ErrBounds,
				s.scattering(op, p))
		}
	}
	s.compare(lAll, rAll, "after nests that were refused")
	s.movePattern(driver.Write, good())
}

// checkNestNotKept overwrites the pattern and its loops, though not its lists, as soon as
// Submit has returned.
func checkNestNotKept(s *stage) {
	l, r := s.local(2<<20), s.remote(2<<20)
	for range 4 {
		p := &driver.Pattern{
			Run: 8 << 10, Count: 8, LocalKey: l.key, RemoteKey: r.as,
			Loops:  []driver.Loop{{N: 4, Local: 8 << 10, Remote: 8 << 10}},
			Local:  driver.Side{Stride: 64 << 10, Step: 32 << 10, Per: 2},
			Remote: driver.Side{Stride: 32 << 10, List: falling(8)},
		}
		kept := *p
		kept.Loops = slices.Clone(p.Loops)
		tag := s.submitPattern(driver.Write, p, nil)
		p.Loops[0] = driver.Loop{N: 1}
		*p = driver.Pattern{Count: 1, Run: 1}
		s.ok(s.await(tag), "write of a nest")
		s.applyPattern(driver.Write, &kept)
		s.compare(l, r, "nest overwritten after Submit")
		l.paint(s.seed())
	}
}

// checkNestNotify has a message follow a nest.
func checkNestNotify(s *stage) {
	random := rand.New(rand.NewPCG(1, 2))
	l, r := s.local(nestRoom), s.remote(nestRoom)
	for i := range 40 {
		l.paint(s.seed())
		p := s.randomNest(random, driver.Write, l, r)
		s.applyPattern(driver.Write, p)
		v := voucher{region: r.id, len: r.size, sum: digest(r.want)}
		seen := s.verifying(1)
		s.ok(s.await(s.submitPattern(driver.Write, p, v.encode())), "nest %d with a message", i)
		seen()
	}
}

func checkNestNoAllocation(s *stage) {
	l, r := s.local(1<<20), s.remote(1<<20)
	p := &driver.Pattern{
		Run: 512, Count: 32, LocalKey: l.key, RemoteKey: r.as,
		Loops: []driver.Loop{
			{N: 2, Local: 16 << 10, Remote: 1 << 10},
			{N: 8, Local: 1 << 10, Remote: 2 << 10},
		},
		Local: driver.Side{Stride: 32 << 10}, Remote: driver.Side{Stride: 32 << 10,
			List: falling(32)},
	}
	for _, op := range bothOps {
		s.noAllocation(op.String()+" of a nest", s.scattering(op, p))
	}
}
