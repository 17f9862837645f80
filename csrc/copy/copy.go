// SPDX-License-Identifier: Apache-2.0

// Package copy copies batches between two ranges of memory: in C, where one call crosses
// once, whatever it carries, and allocates nothing; with CGO_ENABLED=0 in plain Go.
package copy

import (
	"github.com/sluicehq/sluice/driver"
)

// Descs copies a batch between two ranges: from local to remote for a Write,
// back for a Read. The keys in descs are not looked at; offsets are in bytes from
// the start of each slice. Adjacent descriptors become one copy. A descriptor
// that leaves its range is answered with driver.ErrBounds before any byte moves.
// The ranges must not overlap. Memory that is gone is driver.ErrFault: some bytes were copied.
// Parallel calls are allowed. w is For the whole batch.
func Descs(op driver.Op, local, remote []byte, descs []driver.Desc, w Way) error {
	if len(descs) == 0 || len(local) == 0 || len(remote) == 0 {
		return emptyError(len(descs))
	}
	return copyDescs(op, local, remote, descs, w)
}

// Runs copies runs [first, first+n) of a pattern between two ranges, as Descs does; Run
// numbers them. The pattern has passed driver.Pattern.Check, but its lists may change
// meanwhile: a run that leaves its range is answered with driver.ErrBounds; runs before it
// were copied.
func Runs(op driver.Op, local, remote []byte, p *driver.Pattern, first, n int, w Way) error {
	if n == 0 || len(local) == 0 || len(remote) == 0 {
		return emptyError(n)
	}
	if first < 0 || n < 0 || first > p.Count*p.Runs()-n || !lists(p) {
		return driver.ErrBounds
	}
	if p.Plain() {
		return copyPlain(op, local, remote, p, first, n, w)
	}
	return copyNest(op, local, remote, p, first, n, w)
}

// Run returns a run of a pattern: those of entry 0 come first, in the order of its loops.
func Run(p *driver.Pattern, i int) driver.Desc {
	if len(p.Loops) == 0 {
		return p.Desc(i)
	}
	runs := p.Runs()
	d := p.Desc(i / runs)
	in := i % runs
	for k := len(p.Loops) - 1; k >= 0; k-- {
		l := &p.Loops[k]
		turn := uint64(in % int(l.N))
		in /= int(l.N)
		d.Local += turn * l.Local
		d.Remote += turn * l.Remote
	}
	return d
}

// lists reports whether both lists have all slots that the entries need.
func lists(p *driver.Pattern) bool {
	return covers(&p.Local, p.Count) && covers(&p.Remote, p.Count)
}

func covers(s *driver.Side, count int) bool {
	if s.List == nil {
		return true
	}
	per := max(1, int(s.Per))
	return len(s.List) >= (int(s.First)+count+per-1)/per
}

func emptyError(n int) error {
	if n == 0 {
		return nil
	}
	return driver.ErrBounds
}
