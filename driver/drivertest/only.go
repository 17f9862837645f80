// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

var onlyChecks = []check{
	{name: "Only", wirings: everywhere, run: checkOnly},
	{name: "FenceFrozenOnly", wirings: Processes, meets: true, run: checkFenceFrozenOnly},
}

// only registers m once more, for peers to reach some ranges of it; nil: the backend cannot.
func (m *memory) only(ranges driver.Ranges) *memory {
	m.on.Helper()
	r, err := m.on.try(request{Do: "slice", Region: m.id, Len: m.size, Only: ranges})
	if errors.Is(err, driver.ErrNotSupported) {
		m.on.Log("not run: this memory is registered as a whole alone")
		return nil
	}
	if err != nil {
		m.on.Fatalf("register ranges: %v", err)
	}
	part := &memory{on: m.on, id: r.ID, size: m.size, key: r.Key, token: r.Data,
		want: model(m.on, m.size)}
	copy(part.want, m.want)
	return part
}

// checkOnly moves within the ranges of a Segment.Only, by each of them, and beside them.
func checkOnly(s *stage) {
	ranges := driver.Ranges{{Off: 100, Len: 1}, {Off: 4096, Len: 4096}, {Off: 8193, Len: 500},
		{Off: 20000, Len: 5000}, {Off: 31999, Len: 1}}
	whole := s.far.share(32000)
	whole.paint(s.seed())
	r := whole.only(ranges)
	if r == nil {
		return
	}
	key, _, err := s.peer.Import(r.token)
	if errors.Is(err, driver.ErrNotSupported) {
		s.Log("not run: such memory is not for this peer")
		return
	}
	s.peer.Drop(key)
	s.imports(r)
	l := s.local(32000)
	for _, op := range bothOps {
		for _, in := range ranges {
			s.move(op, desc(l, in.Off, r, in.Off, in.Len))
			s.move(op, desc(l, 7, r, in.Off+in.Len-1, 1))
		}
		s.compare(l, r, fmt.Sprintf("after every %v within the ranges", op))
	}
	beside := map[string]driver.Range{
		"before all": {Off: 0, Len: 1}, "between": {Off: 12000, Len: 64},
		"behind":      {Off: 101, Len: 1},
		"from before": {Off: 4095, Len: 2}, "past the end": {Off: 4096, Len: 4097},
		"over a gap": {Off: 8191, Len: 3}, "over all": {Off: 0, Len: 32000},
	}
	for _, op := range bothOps {
		for name, at := range beside {
			s.besides(fmt.Sprintf("%v %s", op, name), s.submitting(op, desc(l, at.Off, r, at.Off,
				at.Len)))
		}
		s.patternsBesides(op, l, r)
	}
	if s.h.Guards {
		l.paint(s.seed()) // of a batch that failed some may have landed, within the ranges
		for _, in := range ranges {
			s.move(driver.Write, desc(l, in.Off, r, in.Off, in.Len))
		}
		s.compare(l, r, "after all that was beside the ranges")
	}
	s.ok(r.revoke(), "revoke of ranges")
	s.fails("write within a range after the revoke", driver.ErrRevoked,
		s.submitting(driver.Write, desc(l, 4096, r, 4096, 64)))
}

func (s *stage) patternsBesides(op driver.Op, l, r *memory) {
	s.Helper()
	if s.peer.Can()&driver.CanPattern == 0 {
		return
	}
	p := &driver.Pattern{Count: 3, Run: 100, LocalKey: l.key, RemoteKey: r.as,
		Local:  driver.Side{Stride: 100},
		Remote: driver.Side{Base: 4096, Stride: 1000, List: []uint32{0, 3, 4}}}
	s.besides(fmt.Sprintf("%v of a pattern, one entry of it beside", op), s.scattering(op, p))
	p.Remote.List[2] = 3
	p.Loops = []driver.Loop{{N: 2, Local: 300, Remote: 12000}}
	s.besides(fmt.Sprintf("%v of a nest, one run of it beside", op), s.scattering(op, p))
}

// besides submits what is beside the ranges: refused where this side looks, and else not, since
// then the harness says too little of its backend.
func (s *stage) besides(what string, submit func(tag uint64) error) {
	s.Helper()
	if s.h.Guards {
		s.fails(what, driver.ErrBounds, submit)
		return
	}
	tag := s.near.ledger.tag()
	err := submit(tag)
	if err != nil {
		s.near.ledger.refuse(tag)
	} else {
		err = s.await(tag)
	}
	if errors.Is(err, driver.ErrBounds) {
		s.Errorf("%s was refused: set Harness.Guards", what)
	}
}

// checkFenceFrozenOnly revokes ranges against a frozen writer, while the program writes between
// them: none of its bytes may get lost, and nothing of the writer's may land.
func checkFenceFrozenOnly(s *stage) {
	const part = 128 << 10
	whole := s.home.share(8 * part)
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	l := s.far.local(8 * part)
	l.paint(s.seed())
	for round := range 4 {
		r := whole.only(driver.Ranges{{Off: part, Len: part}, {Off: 3 * part, Len: part},
			{Off: 5 * part, Len: part}})
		if r == nil {
			return
		}
		r.paint(s.seed())
		taken, err := s.far.try(request{Do: "import", Peer: back, Data: r.token})
		if errors.Is(err, driver.ErrNotSupported) {
			s.Log("not run: such memory is not for another process")
			return
		}
		s.ok(err, "import ranges")
		key := taken.Key
		var descs []driver.Desc
		for _, at := range []uint64{part, 3 * part, 5 * part} {
			descs = append(descs, s.pieces(driver.Desc{Local: at, Remote: at, Len: part,
				LocalKey: l.key, RemoteKey: key})...)
		}
		descs = descs[:min(len(descs), s.caps.DescsMax)]
		s.far.must(request{Do: "flood", Peer: back, Op: driver.Write, Descs: descs, Count: 4,
			Help: round%2 == 1})
		s.landed(r)
		time.Sleep(time.Duration(round*211) * time.Microsecond)
		s.ok(s.proc.freeze())
		stop := s.writesBetween(r, 2*part, part)
		s.ok(s.inTime("revoke of ranges against a frozen writer", r.revoke),
			"revoke of ranges against a frozen writer")
		stop()
		r.paint(s.seed())
		s.ok(s.proc.thaw())
		ok := r.watch("after the writer went on", 30*time.Millisecond)
		s.revoked()
		if !ok || !r.expect("after the revoke, when the writer had ended") {
			return
		}
	}
}

// writesBetween has the owner's program write a part of m, and read what it has written, until the
// function that it returns is called.
func (s *stage) writesBetween(m *memory, off, n uint64) (stop func()) {
	quit, done := make(chan struct{}), make(chan error, 1)
	end := sync.OnceFunc(func() { close(quit) })
	s.Cleanup(end)
	errands.run(func() {
		text := make([]byte, n)
		for seed := uint64(1); !stopped(quit); seed++ {
			_, err := s.home.try(request{Do: "paint", Region: m.id, Off: off, Len: n, Seed: seed})
			sum, err2 := s.home.try(request{Do: "digest", Region: m.id, Off: off, Len: n})
			paint(text, seed)
			if err = errors.Join(err, err2); err == nil && !bytes.Equal(sum.Data, digest(text)) {
				err = errors.New(promise.Mark + "what the program wrote between the ranges is lost")
			}
			if err != nil {
				done <- err
				return
			}
		}
		done <- nil
	})
	return func() {
		s.Helper()
		end()
		if err := <-done; err != nil {
			s.Error(err)
		}
	}
}
