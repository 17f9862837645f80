// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

var renewChecks = []check{
	{name: "RenewUnderReads", wirings: here, meets: true, run: checkRenewUnderReads},
	{name: "RenewUnderWrites", wirings: everywhere, meets: true, run: checkRenewUnderWrites},
	{name: "RenewEnds", wirings: here, meets: true, run: checkRenewEnds},
}

// guards is memory that counts the callers inside, and the holders of its pages.
type guards struct {
	driver.Shared
	entered, inside, holds atomic.Int64
	words                  atomic.Bool // of package hostmem: C looks at them
}

func (w *guards) Enter() {
	w.Shared.Enter()
	w.entered.Add(1)
	w.inside.Add(1)
}

func (w *guards) TryEnter() bool {
	ok := w.Shared.TryEnter()
	if ok {
		w.entered.Add(1)
		w.inside.Add(1)
	}
	return ok
}

func (w *guards) Leave() {
	w.inside.Add(-1)
	w.Shared.Leave()
}

func (w *guards) Hold() (release func(), err error) {
	inner, err := w.Shared.(driver.Holder).Hold()
	if err != nil {
		return nil, err
	}
	w.holds.Add(1)
	return sync.OnceFunc(func() { w.holds.Add(-1); inner() }), nil
}

// Landings is hostmem's, for backends that land from C.
func (w *guards) Landings() (inside *atomic.Int64, phase *atomic.Int32) {
	w.words.Store(true)
	return w.Shared.(interface {
		Landings() (*atomic.Int64, *atomic.Int32)
	}).Landings()
}

// guarded registers shared memory of the near side, for as long as the check runs. nil: what the
// harness's Local makes is not shared.
func (s *stage) guarded(size uint64) (w *guards, seg driver.Segment, m driver.Memory) {
	s.Helper()
	space, err := s.near.h.Local(size)
	s.ok(err, "memory")
	s.Cleanup(func() { _ = errands.afterwards(space.free) })
	seg = space.Segment
	if _, ok := seg.Shared.(*hostmem.Buffer); !ok {
		s.Log("not run: the memory is not shared")
		return nil, seg, nil
	}
	seg.Secret = secret()
	w = &guards{Shared: seg.Shared}
	seg.Shared = w
	m, err = s.near.b.Register(seg)
	s.ok(err, "Register")
	s.Cleanup(func() { _ = m.Revoke(context.Background()) })
	return w, seg, m
}

// checkRenewUnderReads has fresh pages put under memory that reads land in: no byte is lost, by
// Enter and Leave, or by a Hold for as long as a device knows the pages.
func checkRenewUnderReads(s *stage) {
	const size, rounds = 4 << 20, 16
	w, seg, m := s.guarded(size)
	if w == nil {
		return
	}
	r := s.remote(size)
	for range rounds {
		r.paint(s.seed())
		before, renewed := w.entered.Load(), make(chan error, 1)
		errands.run(func() { renewed <- w.Renew(context.Background(), seg.SharedOff, size) })
		s.readInto(m.Key(), r)
		if err := <-renewed; err != nil && !errors.Is(err, driver.ErrBusy) {
			s.Errorf("Renew: %v", err)
		}
		if w.entered.Load() == before && w.holds.Load() == 0 && !w.words.Load() {
			s.Fatalf("a read landed without Enter, in memory without a Hold")
		}
		if !bytes.Equal(seg.Mem, r.want) {
			promise.Broken(s, "beside a Renew: %s", difference(seg.Mem, r.want))
		}
	}
	for end := time.Now().Add(s.h.Limit); w.inside.Load() > 0; runtime.Gosched() {
		if time.Now().After(end) {
			s.Fatalf("%d reads have entered and not left", w.inside.Load())
		}
	}
}

// checkRenewUnderWrites has fresh pages put under memory into which a peer writes: no byte is lost.
func checkRenewUnderWrites(s *stage) {
	const size, rounds = 4 << 20, 16
	if !s.caps.Pairs.Serves(driver.DRAM, driver.DRAM) {
		s.Log("not run: the backend does not write from memory of a host into such memory")
		return
	}
	w, seg, m := s.guarded(size)
	if w == nil {
		return
	}
	token, err := m.AppendToken(nil)
	s.ok(err, "AppendToken")
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	l := s.far.local(size)
	as := s.far.must(request{Do: "import", Peer: back, Data: token}).Key
	d := s.pieces(driver.Desc{Len: size, LocalKey: l.key, RemoteKey: as})
	for range rounds {
		l.paint(s.seed())
		begins, renewed := make(chan struct{}), make(chan error, 1)
		errands.run(func() {
			close(begins)
			renewed <- w.Renew(context.Background(), seg.SharedOff, size)
		})
		<-begins // else the write may end before
		q := request{Do: "submit", Peer: back, Op: driver.Write, Descs: d}
		s.far.must(request{Do: "await", Tag: s.far.must(q).Tag})
		if err := <-renewed; err != nil && !errors.Is(err, driver.ErrBusy) {
			s.Errorf("Renew: %v", err)
		}
		for wait := newPatience(s.h.Limit); !bytes.Equal(seg.Mem, l.want) && wait.more(); {
			// no promise without a message
		}
		if !bytes.Equal(seg.Mem, l.want) {
			promise.Broken(s, "a write beside a Renew: %s", difference(seg.Mem, l.want))
		}
	}
}

// readInto reads all of far memory to the start of near memory that is in no model.
func (s *stage) readInto(key uint32, r *memory) {
	s.Helper()
	d := driver.Desc{Len: r.size, LocalKey: key, RemoteKey: r.as}
	s.ok(s.await(s.submit(driver.Read, s.pieces(d)...)), "read")
}

// checkRenewEnds: reads that follow each other keep no Renew, the proof of a revoke, from its turn,
// unless the backend holds the pages.
func checkRenewEnds(s *stage) {
	const size, rounds = 1 << 20, 4
	w, seg, m := s.guarded(size)
	if w == nil || w.holds.Load() > 0 {
		return
	}
	r := s.remote(size)
	for range rounds {
		renewed := make(chan error, 1)
		errands.run(func() { renewed <- w.Renew(context.Background(), seg.SharedOff, size) })
		for len(renewed) == 0 {
			s.readInto(m.Key(), r)
		}
		s.ok(<-renewed, "Renew beside reads")
	}
}
