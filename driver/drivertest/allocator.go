// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

var allocatorChecks = []check{
	{name: "AllocatorFresh", wirings: Self, ownMemory: true, run: checkAllocatorFresh},
	{name: "AllocatorBounds", wirings: Self, ownMemory: true, run: checkAllocatorBounds},
	{name: "AllocatorCloseTwice", wirings: Self, ownMemory: true, run: checkAllocatorCloseTwice},
	{name: "AllocatorOutlives", wirings: Self, ownMemory: true, run: checkAllocatorOutlives},
	{name: "AllocatorLeak", wirings: Self, ownMemory: true, run: checkAllocatorLeak},
	{name: "AllocatorMoves", wirings: everywhere, ownMemory: true, run: checkAllocatorMoves},
	{name: "AllocatorSlices", wirings: everywhere, ownMemory: true, run: checkAllocatorSlices},
	{name: "AllocatorReuse", wirings: everywhere, ownMemory: true, run: checkAllocatorReuse},
	{name: "AllocatorFrozen", wirings: Processes, ownMemory: true, run: checkAllocatorFrozen},
}

// alloc asks the near backend for memory, which it must have.
func (s *stage) alloc(n uint64) (driver.Segment, io.Closer) {
	s.Helper()
	seg, owner, err := s.near.b.Alloc(n)
	s.ok(err, "Alloc(%d)", n)
	return seg, owner
}

// checkAllocatorFresh looks at what Alloc returns, and once more when the bytes
// of the first round may have come back.
func checkAllocatorFresh(s *stage) {
	for range 2 {
		var owners []io.Closer
		var held [][]byte
		for _, n := range []uint64{1, 4095, 4096, 4097, 1<<20 + 1, heapMin} {
			seg, owner := s.allocOutside(n)
			s.Cleanup(func() { _ = owner.Close() })
			if fault := unlike(seg, n); fault != "" {
				s.Fatalf("Alloc(%d): %s", n, fault)
			}
			paint(seg.Mem, n)
			owners, held = append(owners, owner), append(held, seg.Mem)
		}
		for _, mem := range held {
			if want := painted(uint64(len(mem)), uint64(len(mem))); !bytes.Equal(mem, want) {
				promise.Broken(s, "memory of %d bytes overlaps other memory: %s", len(mem),
					difference(mem, want))
			}
		}
		for _, owner := range owners {
			s.closes(owner)
		}
	}
}

// heapMin is more than anybody else takes of the Go heap meanwhile.
const heapMin = 16 << 20

// allocOutside is alloc of what must not lie in the Go heap.
func (s *stage) allocOutside(n uint64) (driver.Segment, io.Closer) {
	s.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	seg, owner := s.alloc(n)
	runtime.ReadMemStats(&after)
	if took := after.TotalAlloc - before.TotalAlloc; took >= max(n, heapMin) {
		s.Fatalf("Alloc(%d) took %d bytes of the Go heap", n, took)
	}
	return seg, owner
}

// unlike says what a fresh segment of n bytes should be and is not.
func unlike(seg driver.Segment, n uint64) string {
	blank := seg
	blank.Kind, blank.Len, blank.Mem, blank.Shared, blank.SharedOff = 0, 0, nil, nil, 0
	page := uintptr(os.Getpagesize())
	switch {
	case seg.Kind != driver.DRAM:
		return fmt.Sprintf("kind %v, want DRAM", seg.Kind)
	case seg.Len != n || uint64(len(seg.Mem)) != n:
		return fmt.Sprintf("Len %d of %d bytes", seg.Len, len(seg.Mem))
	case blank.Secret != [16]byte{}:
		return "it has a Secret, which is the engine's to draw"
	case blank.ReadOnly || blank.Device != 0 || blank.Addr != 0 || blank.FD != 0 ||
		blank.FileOff != 0:
		return fmt.Sprintf("fields that do not belong to DRAM, or ReadOnly, are set: %+v", blank)
	case addressOf(seg.Mem)%page != 0:
		return fmt.Sprintf("it lies at %#x, not at a multiple of %d", addressOf(seg.Mem), page)
	}
	if zero := make([]byte, n); !bytes.Equal(seg.Mem, zero) {
		return "it is not zeroed: " + difference(seg.Mem, zero)
	}
	return ""
}

// closes gives memory back, which must succeed.
func (s *stage) closes(owner io.Closer) {
	s.Helper()
	if err := s.inTime("close memory of Alloc", owner.Close); err != nil {
		s.Errorf("close memory of Alloc: %v", err)
	}
}

func checkAllocatorBounds(s *stage) {
	for _, n := range []uint64{0, 1 << 60, 1 << 63, math.MaxUint64} {
		seg, owner, err := s.near.b.Alloc(n)
		if !errors.Is(err, driver.ErrBounds) {
			s.Errorf("Alloc(%d): %v, want %v", n, err, driver.ErrBounds)
		}
		if err != nil && (owner != nil || seg.Mem != nil) {
			s.Errorf("Alloc(%d) returned memory beside its error", n)
		}
		if err == nil {
			s.closes(owner)
		}
	}
}

// checkAllocatorCloseTwice gives memory back that was registered and such as
// never was; the end of the check closes both once more.
func checkAllocatorCloseTwice(s *stage) {
	n := uint64(1 << 20)
	used := s.home.own(n)
	used.paint(s.seed())
	used.expect("fresh memory, painted")
	s.ok(used.unregister(), "close the registration")
	_, unused := s.alloc(n)
	for range 2 {
		s.closes(unused)
		if err := s.inTime("close memory of Alloc", s.near.region(used.id).space.Free); err != nil {
			s.Errorf("close memory of Alloc: %v", err)
		}
	}
}

// checkAllocatorOutlives closes the backend first, over memory that is still
// registered and such as never was.
func checkAllocatorOutlives(s *stage) {
	n := uint64(1 << 20)
	m := s.home.own(n)
	m.paint(s.seed())
	seg, owner := s.alloc(n)
	paint(seg.Mem, 5)
	s.ok(s.inTime("close backend", s.near.b.Close), "close backend")
	m.expect("memory of Alloc after Backend.Close")
	m.paint(s.seed())
	m.expect("memory of Alloc, written after Backend.Close")
	if want := painted(n, 5); !bytes.Equal(seg.Mem, want) {
		promise.Breaks(s, "memory of Alloc after Backend.Close: %s", difference(seg.Mem, want))
	}
	s.closes(owner)
	s.closes(owner)
	_, late, err := s.near.b.Alloc(n)
	if !errors.Is(err, driver.ErrClosed) {
		s.Errorf("Alloc after Backend.Close: %v, want %v", err, driver.ErrClosed)
	}
	if err == nil {
		s.closes(late)
	}
}

// checkAllocatorLeak takes and gives back again and again, with a registration
// and without. What is kept shows in the resident memory of the process.
func checkAllocatorLeak(s *stage) {
	const rounds = 12
	n := uint64(16 << 20)
	before := resident(s)
	for round := range rounds {
		seg, owner := s.alloc(n)
		paint(seg.Mem, s.seed())
		if round%2 == 0 {
			seg.Secret = secret()
			m, err := s.near.b.Register(seg)
			s.ok(err, "register memory of Alloc")
			s.ok(s.inTime("close the registration", m.Close), "close the registration")
		}
		s.closes(owner)
	}
	if now := resident(s); now > before+rounds/3*n {
		s.Errorf("%d times %d bytes, all given back, left %d bytes resident, before %d", rounds, n,
			now, before)
	}
}

// resident returns the bytes of this process that are in memory.
func resident(s *stage) uint64 {
	s.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	s.ok(err)
	var size, pages uint64
	if _, err := fmt.Sscan(string(text), &size, &pages); err != nil {
		s.Fatalf("read /proc/self/statm: %v", err)
	}
	return pages * uint64(os.Getpagesize())
}

// checkAllocatorMoves moves bytes between memory of the backends and memory from
// elsewhere, in every pairing.
func checkAllocatorMoves(s *stage) {
	n := uint64(300_000)
	locals := map[string]*memory{"own": s.home.own(n), "other": s.local(n)}
	remotes := map[string]*memory{"own": s.far.own(n), "other": s.remote(n)}
	s.locals[locals["own"].key] = locals["own"]
	s.imports(remotes["own"])
	unit := uint64(64)
	for lName, l := range locals {
		for rName, r := range remotes {
			for _, op := range bothOps {
				l.paint(s.seed())
				s.move(op, s.batch(l, r, n)...)
				s.move(op, desc(l, unit, r, 3*unit, 2*unit))
				s.compare(l, r, fmt.Sprintf("%v between %s and %s memory", op, lName, rName))
			}
		}
	}
}

// checkAllocatorSlices registers parts of one allocation on each side.
func checkAllocatorSlices(s *stage) {
	n := uint64(4096)
	l, r := s.home.own(8*n), s.far.own(8*n)
	s.locals[l.key] = l
	s.imports(r)
	for i := range uint64(4) {
		part, there := l.slice(i*n, 2*n), r.slice((5-i)*n, 3*n)
		s.locals[part.key] = part
		s.imports(there)
		part.paint(s.seed())
		copy(l.want[i*n:], part.want)
		s.move(driver.Write, desc(part, n, there, 2*n, n), desc(part, 0, there, 0, n))
		copy(r.want[(5-i)*n:], there.want)
		s.fails("write past a slice", driver.ErrBounds, s.submitting(driver.Write,
			desc(part, 0, there, 2*n, n+1)))
		s.compare(l, r, "after writes through slices")
	}
}

// checkAllocatorReuse gives memory back that is written to, by the way that the
// engine takes, and takes other memory: the writer must not reach that.
func checkAllocatorReuse(s *stage) { s.reuse(false) }

// checkAllocatorFrozen does it while the writer stands still in mid-copy, which
// must hold nothing up.
func checkAllocatorFrozen(s *stage) { s.reuse(true) }

func (s *stage) reuse(frozen bool) {
	s.Helper()
	n := uint64(big)
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	l := s.far.own(n)
	l.paint(s.seed())
	for round := range 4 {
		r := s.home.own(n)
		s.attack(driver.Write, back, l, r)
		s.landed(r)
		time.Sleep(time.Duration(round*211) * time.Microsecond)
		if frozen {
			s.ok(s.proc.freeze())
		}
		s.giveBack(r)
		fresh := s.home.own(n)
		if frozen {
			s.ok(s.proc.thaw())
		}
		ok := fresh.watch("new memory, when other memory was given back under a writer",
			20*time.Millisecond)
		s.revoked()
		if !ok || !fresh.expect("new memory, when the writer had ended") {
			return
		}
	}
}

// giveBack ends all that there is of memory: its epoch, its registration, itself.
func (s *stage) giveBack(r *memory) {
	s.Helper()
	s.ok(s.inTime("fence", r.fence), "fence")
	s.ok(r.unregister(), "close the registration")
	s.ok(s.inTime("close memory of Alloc", s.near.region(r.id).space.Free), "close memory of Alloc")
}
