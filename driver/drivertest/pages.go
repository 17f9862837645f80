// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"fmt"
	"math"

	"github.com/sluicehq/sluice/driver"
)

var pagesChecks = []check{
	{name: "Pages", wirings: everywhere, needs: []optional{pager}, run: checkPages},
	{name: "PagesMax", wirings: here, needs: []optional{pager}, run: checkPagesMax},
	{name: "PagesBounds", wirings: here, needs: []optional{pager}, run: checkPagesBounds},
	{name: "PagesNotKept", wirings: here, needs: []optional{pager}, run: checkPagesNotKept},
	{name: "PagesNotify", wirings: everywhere, needs: []optional{pager, notifier}, run: checkPagesNotify},
}

// entryLen is the KV entry of one token and one layer of a common model.
const entryLen = 656

// pattern makes index lists of count entries out of places.
type pattern struct {
	name string
	list func(count, places int) []uint32
	once bool // each place is named once at most: fit to be written to
}

var patterns = []pattern{
	{"nil", func(int, int) []uint32 { return nil }, true},
	{"adjacent", func(count, _ int) []uint32 { return indices(count, func(i int) int { return i + 3 }) }, true},
	{"shuffled", func(count, places int) []uint32 {
		perm := shuffled(places)
		return indices(count, func(i int) int { return perm[i] })
	}, true},
	{"runs", func(count, places int) []uint32 { // pairs of neighbours, far apart
		return indices(count, func(i int) int { return i/2*4%places + i%2 })
	}, false},
	{"repeated", func(count, _ int) []uint32 { return indices(count, func(i int) int { return i % 5 }) }, false},
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

// submitPages starts a pattern, which must be accepted.
func (s *stage) submitPages(op driver.Op, p *driver.Pages, msg []byte) uint64 {
	s.Helper()
	tag, err := s.near.start(func(tag uint64) error {
		return s.peer.(driver.Pager).SubmitPages(op, tag, p, msg)
	})
	if err != nil {
		s.Fatalf("submit pages: %v", err)
	}
	return tag
}

// movePages runs a pattern, which must succeed, and applies it to the models.
func (s *stage) movePages(op driver.Op, p *driver.Pages) {
	s.Helper()
	if err := s.await(s.submitPages(op, p, nil)); err != nil {
		s.Fatalf("%v of %d pages: %v", op, p.Count, err)
	}
	s.applyPages(op, p)
}

func (s *stage) applyPages(op driver.Op, p *driver.Pages) {
	for i := range p.Count {
		s.apply(op, p.Desc(i))
	}
}

// pageShape is a geometry of both sides.
type pageShape struct {
	count                     int
	localBase, remoteBase     uint64
	localStride, remoteStride uint64
}

func (s *stage) pageShapes() []pageShape {
	n, most := s.fit(entryLen), s.caps.PagesMax
	return []pageShape{
		{min(100, most), 0, 0, n, n},
		{min(100, most), s.fit(40), s.fit(7), n, 2 * n},
		{min(99, most), s.fit(1), guard, s.fit(n + 1), n},
		{1, s.fit(9), 0, 0, 0},
	}
}

func checkPages(s *stage) {
	n := s.fit(entryLen)
	const places = 256
	size := 2*guard + 3*n*places
	l, r := s.local(size), s.remote(size)
	for _, shape := range s.pageShapes() {
		for _, from := range patterns {
			for _, to := range patterns {
				if !to.once {
					continue
				}
				for _, op := range bothOps {
					p := shape.pages(l, r, n)
					here, there := from, to
					if op == driver.Read {
						here, there = to, from
					}
					p.Local, p.Remote = here.list(p.Count, places), there.list(p.Count, places)
					s.movePages(op, p)
					what := fmt.Sprintf("%v of pages, local %s, remote %s, %+v", op, here.name, there.name, shape)
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

func (g pageShape) pages(l, r *memory, n uint64) *driver.Pages {
	return &driver.Pages{
		Count: g.count, EntryLen: n,
		LocalBase: g.localBase, RemoteBase: g.remoteBase,
		LocalStride: g.localStride, RemoteStride: g.remoteStride,
		LocalKey: l.key, RemoteKey: r.as,
	}
}

// checkPagesMax moves as many entries as a pattern may hold.
func checkPagesMax(s *stage) {
	n, count := s.fit(24), min(s.caps.PagesMax, 64<<10)
	l, r := s.local(n*uint64(count)), s.remote(n*uint64(count))
	for _, op := range bothOps {
		g := pageShape{count: count, localStride: n, remoteStride: n}
		p := g.pages(l, r, n)
		p.Remote = falling(count)
		s.movePages(op, p)
		s.compare(l, r, fmt.Sprintf("%v of %d pages", op, count))
		l.paint(s.seed())
	}
}

// checkPagesBounds submits patterns that leave the memories: the engine checks
// them, and the backend must refuse them all the same.
func checkPagesBounds(s *stage) {
	n := s.fit(entryLen)
	l, r, lAll, rAll := s.cut(8 * n)
	good := pageShape{count: 8, localStride: n, remoteStride: n}
	for what, spoil := range map[string]func(*driver.Pages){
		"one entry too many":      func(p *driver.Pages) { p.Count++ },
		"base past the end":       func(p *driver.Pages) { p.RemoteBase = 8*n + 1 },
		"base overflows":          func(p *driver.Pages) { p.LocalBase = math.MaxUint64 - n },
		"stride overflows":        func(p *driver.Pages) { p.RemoteStride = math.MaxUint64 / 4 },
		"stride wraps to nothing": func(p *driver.Pages) { p.RemoteStride = 1 << 63 },
		"index past the end":      func(p *driver.Pages) { p.Remote = falling(8); p.Remote[7] = 8 },
		"index far past the end":  func(p *driver.Pages) { p.Local = falling(8); p.Local[3] = math.MaxUint32 },
		"entry longer than all":   func(p *driver.Pages) { p.EntryLen, p.LocalStride, p.RemoteStride = 9*n, 0, 0 },
		"entry overflows":         func(p *driver.Pages) { p.EntryLen, p.LocalStride, p.RemoteStride = -n, 0, 0 },
	} {
		for _, op := range bothOps {
			p := good.pages(l, r, n)
			spoil(p)
			s.refused(fmt.Sprintf("%v of pages, %s", op, what), driver.ErrBounds, s.paging(op, p))
		}
	}
	s.compare(lAll, rAll, "after patterns that were refused")
	s.movePages(driver.Write, good.pages(l, r, n))
}

// checkPagesNotKept overwrites the pattern, though not its lists, as soon as
// SubmitPages has returned.
func checkPagesNotKept(s *stage) {
	n, count := s.fit(16<<10), min(64, s.caps.PagesMax)
	l, r := s.local(n*64), s.remote(n*64)
	for range 4 {
		p := pageShape{count: count, localStride: n, remoteStride: n}.pages(l, r, n)
		p.Local, p.Remote = falling(count), nil
		kept := *p
		tag := s.submitPages(driver.Write, p, nil)
		*p = driver.Pages{Count: 1, EntryLen: 1}
		if err := s.await(tag); err != nil {
			s.Fatalf("write of pages: %v", err)
		}
		s.applyPages(driver.Write, &kept)
		s.compare(l, r, "pattern overwritten after SubmitPages")
		l.paint(s.seed())
	}
}

// checkPagesNotify has a message follow the entries.
func checkPagesNotify(s *stage) {
	n, count := s.fit(entryLen), min(128, s.caps.PagesMax)
	l, r := s.local(n*128), s.remote(n*128)
	for round := range 50 {
		l.paint(s.seed())
		p := pageShape{count: count, localStride: n, remoteStride: n}.pages(l, r, n)
		p.Remote = indices(count, func(i int) int { return shuffled(count)[i] })
		s.applyPages(driver.Write, p)
		v := voucher{region: r.id, len: r.size, sum: digest(r.want)}
		seen := s.verifying(1)
		tag := s.submitPages(driver.Write, p, v.encode())
		if err := s.await(tag); err != nil {
			s.Fatalf("round %d: %v", round, err)
		}
		seen()
	}
	p := pageShape{count: 1}.pages(l, r, n)
	tag := s.submitPages(driver.Write, p, []byte{})
	if err := s.await(tag); err != nil {
		s.Fatalf("pages with an empty message: %v", err)
	}
	got := s.far.must(request{Do: "receive", Count: 1}).Messages[0]
	if len(got.Data) != 0 || got.Err != nil {
		s.Errorf("an empty message arrived as %q, %v", got.Data, got.Err.orNil())
	}
}
