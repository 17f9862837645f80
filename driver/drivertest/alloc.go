// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"runtime"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/allocs"
)

var allocChecks = []check{
	{name: "NoAllocation", wirings: everywhere, run: checkNoAllocation},
	{name: "NoAllocationPattern", wirings: everywhere, needs: driver.CanPattern,
		run: checkNoAllocationPattern},
}

// checkNoAllocation counts what Submit and Poll allocate, for batches that are
// copied at once and for such as are handed on.
func checkNoAllocation(s *stage) {
	l, r := s.local(1<<20), s.remote(1<<20)
	n := uint64(entryLen)
	scattered := make([]driver.Desc, min(64, s.caps.DescsMax))
	for i, at := range shuffled(len(scattered)) {
		scattered[i] = desc(l, uint64(at)*n, r, uint64(i)*n, n)
	}
	for name, descs := range map[string][]driver.Desc{
		"one short piece":  {desc(l, 0, r, 0, 1)},
		"scattered pieces": scattered,
		"one long piece":   s.batch(l, r, 1<<20),
	} {
		for _, op := range bothOps {
			s.noAllocation(op.String()+" of "+name, s.submitting(op, descs...))
		}
	}
}

func checkNoAllocationPattern(s *stage) {
	n := uint64(entryLen)
	count := min(2048, s.caps.RunsMax)
	l, r := s.local(n*2048), s.remote(n*2048)
	p := geometry{count: count, localStride: n, remoteStride: n}.pattern(l, r, n)
	p.Remote.List = falling(count)
	for _, op := range bothOps {
		s.noAllocation(op.String()+" of a pattern", s.scattering(op, p))
	}
}

// noAllocation runs one batch at a time, past the ledger, which allocates.
func (s *stage) noAllocation(what string, submit func(tag uint64) error) {
	s.Helper()
	s.near.ledger.turn.Lock()
	defer s.near.ledger.turn.Unlock()
	var failure error
	tag := uint64(1)
	once := func() {
		tag++
		if err := s.roundTrip(tag, submit, doze); err != nil {
			failure = err
		}
	}
	runs := 50
	if raceEnabled { // which makes sync.Pool forget: the count means nothing
		runs = 5
	}
	for range runs / 2 {
		once() // warm up what a backend makes on first use
	}
	allocs := allocs.PerRun(runs, once)
	if failure != nil {
		s.Fatalf("%s: %v", what, failure)
	}
	if allocs > 0 && !raceEnabled {
		s.Errorf("%s: %v allocations from Submit to Poll, want 0", what, allocs)
	}
}

// doze leaves the cores to the copies.
func doze() error {
	time.Sleep(20 * time.Microsecond)
	return nil
}

var errStrangeTag = errors.New("a completion of another tag")

// looks is how often roundTrip polls before it looks at the clock, which costs
// as much as a short batch.
const looks = 64

// roundTrip submits and polls until the tag is complete, without allocating. If
// idle is not nil it is called when polling has brought nothing for a while.
func (s *stage) roundTrip(tag uint64, submit func(tag uint64) error, idle func() error) error {
	if err := submit(tag); err != nil {
		return err
	}
	var end time.Time
	for i := 1; ; i++ {
		n, err := s.near.b.Poll(s.near.ledger.buf[:1])
		switch {
		case err != nil:
			return err
		case n == 1 && s.near.ledger.buf[0].Tag != tag:
			return errStrangeTag
		case n == 1:
			return s.near.ledger.buf[0].Err
		case i%looks != 0:
			runtime.Gosched()
		case end.IsZero():
			end = time.Now().Add(s.h.Limit)
		case time.Now().After(end):
			return errLate
		case idle != nil:
			if err := idle(); err != nil {
				return err
			}
		}
	}
}
