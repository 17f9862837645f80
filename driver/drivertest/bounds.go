// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"math"

	"github.com/sluicehq/sluice/driver"
)

var boundsChecks = []check{
	{name: "Bounds", wirings: everywhere, run: checkBounds},
	{name: "BoundsNotify", wirings: here, needs: driver.CanNotify, run: checkBoundsNotify},
	{name: "UnknownKeys", wirings: everywhere, run: checkUnknownKeys},
	{name: "ReadOnly", wirings: everywhere, run: checkReadOnly},
}

// submitting and its like return the submission of one batch, for any tag.
func (s *stage) submitting(op driver.Op, descs ...driver.Desc) func(tag uint64) error {
	return s.batching(&driver.Batch{Op: op, Descs: descs})
}

func (s *stage) notifying(msg []byte, descs ...driver.Desc) func(tag uint64) error {
	return s.batching(&driver.Batch{Op: driver.Write, Descs: descs, Tail: driver.NotifyTail,
		Notify: msg})
}

func (s *stage) scattering(op driver.Op, p *driver.Pattern) func(tag uint64) error {
	return s.batching(&driver.Batch{Op: op, Pattern: p})
}

func (s *stage) batching(b *driver.Batch) func(tag uint64) error {
	return func(tag uint64) error { return s.peer.Submit(tag, b) }
}

// refused submits what must not start. A nil want accepts every error but
// ErrFull, which would ask for another try.
func (s *stage) refused(what string, want error, submit func(tag uint64) error) {
	s.Helper()
	tag := s.near.ledger.tag()
	err := submit(tag)
	if err == nil {
		s.Errorf("%s: Submit accepted it; it completed with %v", what, s.await(tag))
		return
	}
	s.near.ledger.refuse(tag)
	if errors.Is(err, driver.ErrFull) {
		s.Errorf("%s: ErrFull would be tried again for ever", what)
	}
	if want != nil && !errors.Is(err, want) {
		s.Errorf("%s: %v, want %v", what, err, want)
	}
}

// fails submits what must fail, in Submit or at its completion.
func (s *stage) fails(what string, want error, submit func(tag uint64) error) {
	s.Helper()
	tag := s.near.ledger.tag()
	err := submit(tag)
	if err != nil {
		s.near.ledger.refuse(tag)
	} else {
		err = s.await(tag)
	}
	switch {
	case err == nil:
		s.Errorf("%s: it succeeded", what)
	case want != nil && !errors.Is(err, want):
		s.Errorf("%s: %v, want %v", what, err, want)
	}
}

// outside are ranges that leave a memory of size bytes, by offset and length.
func outside(size uint64) [][2]uint64 {
	const top = math.MaxUint64
	return [][2]uint64{
		{size, 1}, {size - 1, 2}, {0, size + 1}, {size + 1, 1}, {1, size},
		{top, 1}, {top, 2}, {top - 63, 64}, {top - 63, 65}, {top - 4095, 4096}, {top - 4095, 8192},
		{0, top}, {1, top}, {size, top - size + 1}, {1 << 63, 1 << 63},
	}
}

// cut is a pair of memories that are parts of larger ones: what lies past their
// bounds exists, so only a check of bounds keeps a batch out of it.
func (s *stage) cut(n uint64) (l, r, lAll, rAll *memory) {
	s.Helper()
	lAll, rAll = s.local(3*n), s.remote(3*n)
	l, r = lAll.slice(n, n), rAll.slice(n, n)
	s.locals[l.key] = l
	s.imports(r)
	return l, r, lAll, rAll
}

func checkBounds(s *stage) {
	n := uint64(10000)
	l, r, lAll, rAll := s.cut(n)
	good := desc(l, 0, r, 0, 1)
	for _, op := range bothOps {
		for _, o := range outside(n) {
			for side, bad := range map[string]driver.Desc{
				"local":  {Local: o[0], Len: o[1], LocalKey: l.key, RemoteKey: r.as},
				"remote": {Remote: o[0], Len: o[1], LocalKey: l.key, RemoteKey: r.as},
			} {
				what := fmt.Sprintf("%v past %s bounds, %d+%d of %d", op, side, o[0], o[1], n)
				s.refused(what, driver.ErrBounds, s.submitting(op, bad))
				if s.caps.DescsMax > 1 {
					s.refused(what+", after a good one", driver.ErrBounds,
						s.submitting(op, good, bad))
				}
			}
		}
	}
	s.compare(lAll, rAll, "after batches that were refused")
	last := n - 1
	s.move(driver.Write, desc(l, last, r, last, 1))
	copy(rAll.want[n:], r.want)
	s.compare(lAll, rAll, "after a write of the last bytes within bounds")
}

func checkBoundsNotify(s *stage) {
	n := uint64(4096)
	l, r, lAll, rAll := s.cut(n)
	for _, o := range outside(n) {
		bad := []driver.Desc{{Remote: o[0], Len: o[1], LocalKey: l.key, RemoteKey: r.as}}
		s.refused("notify past bounds", driver.ErrBounds, s.notifying([]byte("must not arrive"),
			bad...))
	}
	s.compare(lAll, rAll, "after notifications that were refused")
}

func checkUnknownKeys(s *stage) {
	n := uint64(100)
	l, r := s.local(n), s.remote(n)
	dropped, closed := s.remote(n), s.local(n)
	s.peer.Drop(dropped.as)
	s.ok(closed.revoke(), "revoke memory")
	good := desc(l, 0, r, 0, n)
	for _, op := range bothOps {
		for _, key := range []uint32{r.as + 1000, r.as + 1<<16, 1 << 31, math.MaxUint32,
			dropped.as} {
			bad := good
			bad.RemoteKey = key
			s.unknownKey(fmt.Sprintf("%v with unknown remote key %d", op, key), op, good, bad)
		}
		for _, key := range []uint32{l.key + 1000, l.key + 1<<16, 1 << 31, math.MaxUint32,
			closed.key} {
			bad := good
			bad.LocalKey = key
			s.unknownKey(fmt.Sprintf("%v with unknown local key %d", op, key), op, good, bad)
		}
	}
	for _, key := range []uint32{dropped.as, r.as + 1000, math.MaxUint32} {
		s.peer.Drop(key) // of what is not there: ignored
	}
	s.compare(l, r, "after batches with unknown keys")
	s.move(driver.Write, desc(l, 0, r, 0, n)) // compare may have imported it anew
	s.compare(l, r, "after a write with good keys")
}

// unknownKey submits a bad descriptor in every way that the backend has.
func (s *stage) unknownKey(what string, op driver.Op, good, bad driver.Desc) {
	s.Helper()
	s.refused(what, driver.ErrBounds, s.submitting(op, bad))
	if s.caps.DescsMax > 1 {
		s.refused(what+", after a good one", driver.ErrBounds, s.submitting(op, good, bad))
	}
	if s.can(driver.CanNotify) && op == driver.Write {
		s.refused(what+", with a message", driver.ErrBounds, s.notifying([]byte("must not arrive"),
			bad))
	}
	if s.can(driver.CanPattern) {
		p := &driver.Pattern{Count: 1, Run: bad.Len, LocalKey: bad.LocalKey,
			RemoteKey: bad.RemoteKey}
		s.refused(what+", as a pattern", driver.ErrBounds, s.scattering(op, p))
	}
}

func checkReadOnly(s *stage) {
	n := uint64(100000)
	l, r := s.local(n), s.far.shareReadOnly(n)
	r.paint(s.seed())
	s.imports(r)
	good := []driver.Desc{desc(l, 0, r, 0, n)}
	s.refused("write to read-only memory", driver.ErrReadOnly, s.submitting(driver.Write, good...))
	if s.can(driver.CanNotify) {
		message := s.notifying([]byte("must not arrive"), good...)
		s.refused("notify with a write to read-only memory", driver.ErrReadOnly, message)
	}
	if s.can(driver.CanPattern) {
		p := &driver.Pattern{Count: 1, Run: n, LocalKey: l.key, RemoteKey: r.as}
		s.refused("a pattern to read-only memory", driver.ErrReadOnly, s.scattering(driver.Write,
			p))
	}
	s.compare(l, r, "after writes to read-only memory")
	s.move(driver.Read, desc(l, 0, r, 0, n))
	s.compare(l, r, "after a read of read-only memory")
}
