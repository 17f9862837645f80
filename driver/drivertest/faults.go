// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

var faultChecks = []check{
	{name: "FaultsNear", wirings: everywhere, run: checkFaultsNear},
	{name: "FaultsFar", wirings: everywhere, run: checkFaultsFar},
}

// decaysBytes is how long memory is of which the second half is spoilt.
const decaysBytes = 512 << 10

// checkFaultsNear has the memory of the initiator spoilt, checkFaultsFar that of the owner, by
// their own programs: transfers that need it fail, and nothing else does.
func checkFaultsNear(s *stage) {
	if s.caps.Pairs[driver.DRAM]&(1<<driver.DRAM|1<<driver.File) == 0 {
		s.Log("not run: the backend has no hand in memory of hosts")
		return
	}
	for _, how := range decays {
		bad := s.home.decaying(how)
		s.locals[bad.key] = bad
		good := s.remote(2 * decaysBytes)
		s.home.must(request{Do: "spoil", Region: bad.id})
		for _, op := range bothOps {
			if how.forbids(op == driver.Read) {
				s.faults(fmt.Sprintf("%v, own memory is %s", op, how), op, bad, good, good)
			}
		}
		s.ok(bad.revoke(), "revoke spoilt memory")
	}
}

func checkFaultsFar(s *stage) {
	if !s.caps.Pairs.Serves(driver.DRAM, driver.DRAM) {
		s.Log("not run: the backend has no hand in memory of hosts")
		return
	}
	for _, how := range decays {
		bad := s.far.decaying(how)
		s.imports(bad)
		good := s.local(2 * decaysBytes)
		s.far.must(request{Do: "spoil", Region: bad.id})
		for _, op := range bothOps {
			if how.forbids(op == driver.Write) {
				s.faults(fmt.Sprintf("%v, the peer's memory is %s", op, how), op, good, bad, good)
			}
		}
		s.ok(bad.revoke(), "revoke spoilt memory")
	}
}

// decaying is memory that "spoil" spoils.
func (s *side) decaying(how decay) *memory {
	s.Helper()
	return s.memory(request{Do: "add", Len: decaysBytes, Decay: how})
}

// faults moves bytes between two memories, of which one is spoilt from its middle on, and good has
// twice its length.
func (s *stage) faults(what string, op driver.Op, l, r, good *memory) {
	s.Helper()
	const half = decaysBytes / 2
	at := func(off, n uint64) driver.Desc { // as far behind the middle of good
		d := desc(l, off, r, off, n)
		if good == l {
			d.Local += half
		} else {
			d.Remote += half
		}
		return d
	}
	scattered := []driver.Desc{at(half-4096, 64)} // of which the first has its bytes
	for i := range uint64(min(s.caps.DescsMax-1, 20)) {
		scattered = append(scattered, at(half+(i*5000+77), 100+i))
	}
	for how, descs := range map[string][]driver.Desc{
		"all": {at(0, decaysBytes)}, "across": {at(half-50, 100)}, "scattered": scattered,
		"long": {at(half, 100000)},
	} {
		s.fails(what+", "+how, driver.ErrFault, s.submitting(op, descs...))
		s.unharmed(what+", "+how, good)
		if op == driver.Write && s.can(driver.CanNotify) {
			s.fails(what+" with a message, "+how, driver.ErrFault,
				s.notifying([]byte("must not arrive"), descs...))
			s.unharmed(what+", "+how, good)
		}
	}
	if s.can(driver.CanPattern) {
		d := at(half, 0)
		p := &driver.Pattern{Count: 8, Run: 200, LocalKey: l.key, RemoteKey: r.as,
			Local:  driver.Side{Base: d.Local, Stride: 1000},
			Remote: driver.Side{Base: d.Remote, Stride: 3000}}
		s.fails(what+", a pattern", driver.ErrFault, s.scattering(op, p))
		s.unharmed(what+", a pattern", good)
	}
}

// unharmed has the peer serve on, and looks at bytes beside those that a transfer has named: only
// the named are unspecified after it has failed.
func (s *stage) unharmed(what string, good *memory) {
	s.Helper()
	l, r := s.local(10000), s.remote(10000)
	s.move(driver.Write, desc(l, 0, r, 0, 10000))
	s.settle(r)
	r.paint(s.seed())
	s.move(driver.Read, desc(l, 0, r, 0, 10000))
	s.compare(l, r, "after a fault: "+what)
	const edge = decaysBytes / 2
	for _, off := range []uint64{0, good.size - edge} {
		sum := good.on.must(request{Do: "digest", Region: good.id, Off: off, Len: edge}).Data
		if !bytes.Equal(sum, digest(good.want[off:][:edge])) {
			promise.Breaks(s, "%s: bytes that were not named have changed", what)
		}
	}
	s.peer.Drop(r.as)
	s.ok(l.revoke(), "revoke memory")
	s.ok(r.revoke(), "revoke memory")
}
