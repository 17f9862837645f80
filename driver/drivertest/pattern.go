// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

var patternChecks = []check{
	{name: "Pattern", wirings: everywhere, needs: driver.CanPattern, run: checkPattern},
	{name: "PatternMax", wirings: here, needs: driver.CanPattern, run: checkPatternMax},
	{name: "PatternBounds", wirings: here, needs: driver.CanPattern, run: checkPatternBounds},
	{name: "PatternChanges", wirings: everywhere, needs: driver.CanPattern,
		meets: true, run: checkPatternChanges},
	{name: "PatternNotKept", wirings: here, needs: driver.CanPattern, run: checkPatternNotKept},
	{name: "PatternNotify", wirings: everywhere, needs: driver.CanPattern | driver.CanNotify,
		run: checkPatternNotify},
}

// entryLen is the KV entry of one token and one layer of a common model.
const entryLen = 656

// listing makes index lists of count entries out of places.
type listing struct {
	name string
	list func(count, places int) []uint32
	once bool // each place is named once at most: fit to be written to
}

var listings = []listing{
	{"nil", func(int, int) []uint32 { return nil }, true},
	{"adjacent", func(count, _ int) []uint32 {
		return indices(count, func(i int) int { return i + 3 })
	}, true},
	{"shuffled", func(count, places int) []uint32 {
		perm := shuffled(places)
		return indices(count, func(i int) int { return perm[i] })
	}, true},
	{"runs", func(count, places int) []uint32 { // pairs of neighbours, far apart
		return indices(count, func(i int) int { return i/2*4%places + i%2 })
	}, false},
	{"repeated", func(count, _ int) []uint32 {
		return indices(count, func(i int) int { return i % 5 })
	}, false},
	{"falling", func(count, _ int) []uint32 { return falling(count) }, true},
}

func falling(count int) []uint32 {
	return indices(count, func(i int) int { return count - 1 - i })
}

func indices(count int, f func(int) int) []uint32 {
	list := make([]uint32, count)
	for i := range list {
		list[i] = uint32(f(i))
	}
	return list
}

// submitPattern starts a pattern, with a message unless that is nil, which must be accepted.
func (s *stage) submitPattern(op driver.Op, p *driver.Pattern, msg []byte) uint64 {
	s.Helper()
	b := &driver.Batch{Op: op, Pattern: p}
	if msg != nil {
		b.Tail, b.Notify = driver.NotifyTail, msg
	}
	tag, err := s.near.submitBatch(s.peerID, b)
	s.ok(err, "submit a pattern")
	return tag
}

// movePattern runs a pattern, which must succeed, and applies it to the models.
func (s *stage) movePattern(op driver.Op, p *driver.Pattern) {
	s.Helper()
	s.ok(s.await(s.submitPattern(op, p, nil)), "%v of a pattern of %d", op, p.Count)
	s.applyPattern(op, p)
}

func (s *stage) applyPattern(op driver.Op, p *driver.Pattern) {
	for i := range p.Count {
		s.apply(op, p.AppendDescs(nil, i)...)
	}
}

// geometry is a geometry of both sides.
type geometry struct {
	count                     int
	localBase, remoteBase     uint64
	localStride, remoteStride uint64
}

func (s *stage) geometries() []geometry {
	n, most := uint64(entryLen), s.caps.RunsMax
	return []geometry{
		{min(100, most), 0, 0, n, n},
		{min(100, most), 40, 7, n, 2 * n},
		{min(99, most), 1, guard, n + 1, n},
		{1, 9, 0, 0, 0},
	}
}

func checkPattern(s *stage) {
	n := uint64(entryLen)
	const places = 256
	size := 2*guard + 3*n*places
	l, r := s.local(size), s.remote(size)
	for _, shape := range s.geometries() {
		for _, from := range listings {
			for _, to := range listings {
				if !to.once {
					continue
				}
				for _, op := range bothOps {
					p := shape.pattern(l, r, n)
					here, there := from, to
					if op == driver.Read {
						here, there = to, from
					}
					p.Local.List, p.Remote.List = here.list(p.Count, places),
						there.list(p.Count, places)
					s.movePattern(op, p)
					what := fmt.Sprintf("%v of a pattern, local %s, remote %s, %+v", op, here.name,
						there.name, shape)
					if !l.expect(what) || !s.settled(r, what) {
						return
					}
				}
			}
		}
		l.paint(s.seed())
	}
}

// settled is settle and expect.
func (s *stage) settled(m *memory, when string) bool {
	s.Helper()
	s.settle(m)
	return m.expect(when)
}

func (g geometry) pattern(l, r *memory, n uint64) *driver.Pattern {
	return &driver.Pattern{
		Count: g.count, Run: n, LocalKey: l.key, RemoteKey: r.as,
		Local:  driver.Side{Base: g.localBase, Stride: g.localStride},
		Remote: driver.Side{Base: g.remoteBase, Stride: g.remoteStride},
	}
}

// checkPatternMax moves as many entries as a pattern may hold.
func checkPatternMax(s *stage) {
	n, count := uint64(24), min(s.caps.RunsMax, 64<<10)
	l, r := s.local(n*uint64(count)), s.remote(n*uint64(count))
	for _, op := range bothOps {
		g := geometry{count: count, localStride: n, remoteStride: n}
		p := g.pattern(l, r, n)
		p.Remote.List = falling(count)
		s.movePattern(op, p)
		s.compare(l, r, fmt.Sprintf("%v of a pattern of %d", op, count))
		l.paint(s.seed())
	}
}

// checkPatternBounds submits patterns that leave the memories: the engine checks
// them, and the backend must refuse them all the same.
func checkPatternBounds(s *stage) {
	n := uint64(entryLen)
	l, r, lAll, rAll := s.cut(8 * n)
	good := geometry{count: 8, localStride: n, remoteStride: n}
	for what, spoil := range map[string]func(*driver.Pattern){
		"one entry too many":      func(p *driver.Pattern) { p.Count++ },
		"base past the end":       func(p *driver.Pattern) { p.Remote.Base = 8*n + 1 },
		"base overflows":          func(p *driver.Pattern) { p.Local.Base = math.MaxUint64 - n },
		"stride overflows":        func(p *driver.Pattern) { p.Remote.Stride = math.MaxUint64 / 4 },
		"stride wraps to nothing": func(p *driver.Pattern) { p.Remote.Stride = 1 << 63 },
		"index past the end": func(p *driver.Pattern) {
			p.Remote.List = falling(8)
			p.Remote.List[7] = 8
		},
		"index far past the end": func(p *driver.Pattern) {
			p.Local.List = falling(8)
			p.Local.List[3] = math.MaxUint32
		},
		"entry longer than all": func(p *driver.Pattern) {
			p.Run, p.Local.Stride, p.Remote.Stride = 9*n, 0, 0
		},
		"entry overflows": func(p *driver.Pattern) {
			p.Run, p.Local.Stride, p.Remote.Stride = -n, 0, 0
		},
	} {
		for _, op := range bothOps {
			p := good.pattern(l, r, n)
			spoil(p)
			s.refused(fmt.Sprintf("%v of a pattern, %s", op, what), driver.ErrBounds,
				s.scattering(op, p))
		}
	}
	s.compare(lAll, rAll, "after patterns that were refused")
	s.movePattern(driver.Write, good.pattern(l, r, n))
	one := geometry{count: 1, localStride: 1 << 62, remoteStride: 1 << 63}
	s.movePattern(driver.Write, one.pattern(l, r, n)) // no entry lies a stride away
}

// checkPatternChanges has a program change an index list, by mistake, while its batch is under way.
// The batch may fail, and the connection stays. No byte outside the memories that it names is
// written or read, wherever the list leads.
func checkPatternChanges(s *stage) {
	if raceEnabled {
		s.Log("not run: the change is a data race")
		return
	}
	n, count := uint64(entryLen), min(256, s.caps.RunsMax)
	l, r, lAll, rAll := s.cut(uint64(count) * n)
	for _, op := range bothOps {
		p := geometry{count: count, localStride: n, remoteStride: n}.pattern(l, r, n)
		p.Local.List, p.Remote.List = falling(count), falling(count)
		s.movePattern(op, p) // from now on a move within bounds changes nothing
		copy(lAll.want[l.size:], l.want)
		copy(rAll.want[l.size:], r.want)
		lists := map[string][]uint32{"local": p.Local.List, "remote": p.Remote.List}
		for name, list := range lists {
			s.movePatternThatChanges(op, p, &list[count-1])
			s.compare(lAll, rAll, fmt.Sprintf("%v while the %s list changes", op, name))
		}
		s.movePattern(op, p)
	}
}

// movePatternThatChanges moves a pattern again and again, while an entry of a list, which names
// the first place, names places outside of the memory at times.
func (s *stage) movePatternThatChanges(op driver.Op, p *driver.Pattern, entry *uint32) {
	s.Helper()
	const rounds = 64
	outside := [...]uint32{uint32(p.Count), math.MaxUint32}
	over, changing := make(chan struct{}), make(chan struct{})
	var changes atomic.Int64
	go func() {
		defer close(changing)
		for i := 0; ; i++ {
			changes.Add(1)
			for _, place := range []uint32{outside[i%len(outside)], 0} {
				atomic.StoreUint32(entry, place)
				for range rand.IntN(64) { // another moment each time
					runtime.Gosched()
				}
			}
			select {
			case <-over:
				return
			default:
			}
		}
	}()
	defer func() { close(over); <-changing }()
	for i := 0; i < rounds || changes.Load() < rounds; i++ {
		runtime.Gosched() // where there is one processor, too, the list changes
		tag, err := s.near.submitBatch(s.peerID, &driver.Batch{Op: op, Pattern: p})
		if err == nil {
			err = s.await(tag)
		}
		if err != nil && !errors.Is(err, driver.ErrBounds) {
			s.Fatalf("%v of a list that changes: %v, want nil or ErrBounds", op, err)
		}
	}
}

// checkPatternNotKept overwrites the pattern, though not its lists, as soon as
// Submit has returned.
func checkPatternNotKept(s *stage) {
	n, count := uint64(16<<10), min(64, s.caps.RunsMax)
	l, r := s.local(n*64), s.remote(n*64)
	for range 4 {
		p := geometry{count: count, localStride: n, remoteStride: n}.pattern(l, r, n)
		p.Local.List = falling(count)
		kept := *p
		tag := s.submitPattern(driver.Write, p, nil)
		*p = driver.Pattern{Count: 1, Run: 1}
		s.ok(s.await(tag), "write of a pattern")
		s.applyPattern(driver.Write, &kept)
		s.compare(l, r, "pattern overwritten after Submit")
		l.paint(s.seed())
	}
}

// checkPatternNotify has a message follow the entries.
func checkPatternNotify(s *stage) {
	n, count := uint64(entryLen), min(128, s.caps.RunsMax)
	l, r := s.local(n*128), s.remote(n*128)
	for round := range 50 {
		l.paint(s.seed())
		p := geometry{count: count, localStride: n, remoteStride: n}.pattern(l, r, n)
		p.Remote.List = indices(count, func(i int) int { return shuffled(count)[i] })
		s.applyPattern(driver.Write, p)
		v := voucher{region: r.id, len: r.size, sum: digest(r.want)}
		seen := s.verifying(1)
		tag := s.submitPattern(driver.Write, p, v.encode())
		s.ok(s.await(tag), "round %d", round)
		seen()
	}
	p := geometry{count: 1}.pattern(l, r, n)
	tag := s.submitPattern(driver.Write, p, []byte{})
	s.ok(s.await(tag), "a pattern with an empty message")
	got := s.far.must(request{Do: "receive", Count: 1}).Messages[0]
	if len(got.Data) != 0 || got.Err != nil {
		s.Errorf("an empty message arrived as %q, %v", got.Data, got.Err.orNil())
	}
}
