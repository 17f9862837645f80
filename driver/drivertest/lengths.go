// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

var lengthChecks = []check{
	{name: "Lengths", wirings: everywhere, run: checkLengths},
	{name: "DescsMax", wirings: everywhere, run: checkDescsMax},
	{name: "Neighbours", wirings: everywhere, run: checkNeighbours},
	{name: "DescsNotKept", wirings: everywhere, run: checkDescsNotKept},
	{name: "SeveralMemories", wirings: everywhere, run: checkSeveralMemories},
}

// The lengths around a cache line, a page, and past every inline limit.
var lengths = []uint64{1, 63, 64, 65, 4095, 4096, 4097, 1<<20 + 1}

var bothOps = [...]driver.Op{driver.Write, driver.Read}

// guard lies before and after every range.
const guard = 4096

// pieces cuts a copy into descriptors of at most LenMax.
func (s *stage) pieces(d driver.Desc) (list []driver.Desc) {
	most := s.caps.LenMax
	if most == 0 {
		most = d.Len
	}
	for d.Len > 0 {
		part := d
		part.Len = min(d.Len, most)
		list = append(list, part)
		d.Local, d.Remote, d.Len = d.Local+part.Len, d.Remote+part.Len, d.Len-part.Len
	}
	return list
}

// compare settles and then looks at every byte of both sides.
func (s *stage) compare(l, r *memory, when string) {
	s.Helper()
	s.settle(r)
	if !l.expect(when) || !r.expect(when) {
		s.FailNow()
	}
}

func checkLengths(s *stage) {
	for _, n := range lengths {
		l, r := s.local(n+2*guard), s.remote(n+2*guard)
		for _, op := range bothOps {
			for _, offs := range [][2]uint64{{guard, guard}, {0, 1}, {7, 2 * guard},
				{2*guard - 1, 33}} {
				lOff, rOff := offs[0], offs[1]
				s.move(op, s.pieces(desc(l, lOff, r, rOff, n))...)
				s.compare(l, r, fmt.Sprintf("%v of %d bytes, local %d, remote %d", op, n, lOff,
					rOff))
				l.paint(s.seed())
			}
		}
	}
}

// checkDescsMax scatters as many pieces as a batch may hold, and one or two.
func checkDescsMax(s *stage) {
	unit := uint64(40)
	most := min(s.caps.DescsMax, 64<<10)
	l, r := s.local(2*unit*uint64(most)), s.remote(2*unit*uint64(most))
	for _, count := range []int{1, min(2, most), most} {
		for _, op := range bothOps {
			descs := make([]driver.Desc, count)
			for i, at := range shuffled(most)[:count] {
				descs[i] = desc(l, 2*unit*uint64(i), r, 2*unit*uint64(at)+unit, unit)
			}
			s.move(op, descs...)
			s.compare(l, r, fmt.Sprintf("%v of %d descriptors", op, count))
			l.paint(s.seed())
		}
	}
}

// shuffled returns a permutation of n indices, the same each time.
func shuffled(n int) []int { return rand.New(rand.NewPCG(6, 56)).Perm(n) }

// neighbours are batches whose descriptors touch or overlap: on both sides, so
// that a backend may merge them, on one side only, and in falling order. The
// numbers are units: local, remote, length.
var neighbours = []struct {
	name   string
	pieces [][3]uint64
}{
	{"adjacent on both sides", [][3]uint64{{0, 1, 1}, {1, 2, 1}, {2, 3, 1}}},
	{"adjacent here only", [][3]uint64{{0, 1, 1}, {1, 5, 1}, {2, 3, 1}}},
	{"adjacent there only", [][3]uint64{{0, 1, 1}, {4, 2, 1}, {2, 3, 1}}},
	{"in falling order", [][3]uint64{{2, 3, 1}, {1, 2, 1}, {0, 1, 1}}},
	{"the same bytes twice", [][3]uint64{{0, 1, 3}, {1, 2, 4}}},
	{"a gap of one unit", [][3]uint64{{0, 0, 1}, {2, 2, 1}}},
	{"a source within another", [][3]uint64{{0, 1, 3}, {1, 8, 1}}},
}

func checkNeighbours(s *stage) {
	u := uint64(100)
	l, r := s.local(16*u), s.remote(16*u)
	for _, n := range neighbours {
		for _, op := range bothOps {
			var batch []driver.Desc
			for _, p := range n.pieces[:min(len(n.pieces), s.caps.DescsMax)] {
				d := desc(l, p[0]*u, r, p[1]*u, p[2]*u)
				if op == driver.Read { // the same shape, seen from the other side
					d.Local, d.Remote = d.Remote, d.Local
				}
				batch = append(batch, d)
			}
			s.move(op, batch...)
			s.compare(l, r, fmt.Sprintf("%v of descriptors %s", op, n.name))
			l.paint(s.seed())
		}
	}
}

// checkDescsNotKept overwrites the descriptors as soon as Submit has returned.
func checkDescsNotKept(s *stage) {
	n := uint64(1 << 20)
	l, r := s.local(4*n), s.remote(4*n)
	for range 8 {
		batch := s.pieces(desc(l, 0, r, 0, n))
		batch = batch[:min(len(batch), s.caps.DescsMax)]
		given := slices.Clone(batch)
		tag := s.submit(driver.Write, given...)
		for i := range given {
			given[i] = desc(l, 2*n, r, 3*n, 1)
		}
		s.ok(s.await(tag), "write")
		s.apply(driver.Write, batch...)
		s.compare(l, r, "descriptors overwritten after Submit")
		l.paint(s.seed())
	}
}

// checkSeveralMemories names other keys in each descriptor of one batch, among
// them a part that is registered a second time.
func checkSeveralMemories(s *stage) {
	n := uint64(5000)
	var ls, rs [3]*memory
	for i := range ls {
		ls[i], rs[i] = s.local(4*n), s.remote(4*n)
	}
	part := rs[2].slice(2*n, n)
	s.imports(part)
	batch := []driver.Desc{
		desc(ls[0], 0, rs[1], n, n), desc(ls[1], n, rs[0], 0, n),
		desc(ls[2], 0, rs[0], 3*n, n), desc(ls[0], 3*n, rs[2], 0, n), desc(ls[1], 0, part, 0, n),
	}
	batch = batch[:min(len(batch), s.caps.DescsMax)]
	s.move(driver.Write, batch...)
	copy(rs[2].want[2*n:], part.want)
	for i := range ls {
		s.compare(ls[i], rs[i], fmt.Sprintf("memory %d of a batch over several", i))
	}
}
