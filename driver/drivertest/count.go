// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

var countChecks = []check{
	{name: "CountAfterData", wirings: everywhere, needs: driver.CanCount,
		meets: true, run: checkCountAfterData},
	{name: "CountPattern", wirings: everywhere, needs: driver.CanCount | driver.CanPattern,
		meets: true, run: checkCountPattern},
	{name: "CountUnattended", wirings: everywhere, needs: driver.CanCount,
		meets: true, run: checkCountUnattended},
	{name: "CountWakes", wirings: Pair | Processes, needs: driver.CanCount,
		meets: true, run: checkCountWakes},
	{name: "CountAmongMessages", wirings: everywhere, needs: driver.CanCount,
		meets: true, run: checkCountAmongMessages},
	{name: "CountOfFailedBatch", wirings: everywhere, needs: driver.CanCount,
		meets: true, run: checkCountOfFailedBatch},
	{name: "CountBounds", wirings: here, needs: driver.CanCount, run: checkCountBounds},
}

// seen waits until a counter has reached n, as a program that looks all the time, and
// polls nothing.
func (h *host) seen(number uint32, n uint64, limit time.Duration) (value uint64, err error) {
	for wait := newPatience(limit); h.b.Count(number) < n; {
		if !wait.more() {
			return h.b.Count(number), errLate
		}
	}
	return h.b.Count(number), nil
}

// counting is a submission that counts.
func (s *stage) counting(number uint32, p *driver.Pattern, descs ...driver.Desc) func(
	tag uint64) error {
	return s.batching(&driver.Batch{
		Op: driver.Write, Tail: driver.CountTail, Counter: number, Descs: descs, Pattern: p,
	})
}

func (s *stage) submitCount(number uint32, descs ...driver.Desc) uint64 {
	s.Helper()
	tag, err := s.near.start(s.counting(number, nil, descs...))
	s.ok(err, "submit a count with %d descriptors", len(descs))
	return tag
}

// counts fails the check unless a counter of the far side comes to n and stays there.
func (s *stage) counts(number uint32, n uint64) {
	s.Helper()
	q := request{Do: "counted", Counter: number, Until: n}
	if _, err := s.far.try(q); err != nil {
		s.Fatalf("counter %d does not reach %d: %v", number, n, err)
	}
	if got := s.far.must(q).Size; got != n {
		s.Errorf("counter %d is at %d, want %d", number, got, n)
	}
}

// checkCountAfterData writes to many slots at once, each with a counter of its own: when
// that goes up the receiver looks at the bytes.
func checkCountAfterData(s *stage) {
	const slots, rounds = 16, 24
	slot := uint64(200 << 10)
	l, r := s.local(slot*slots), s.remote(slot*slots)
	lens := []uint64{8, 656, 4097, 70000, 200 << 10}
	for round := range uint64(rounds) {
		l.paint(s.seed())
		var tags []uint64
		looked := make(chan string, slots)
		for i := range uint64(slots) {
			d := desc(l, i*slot, r, i*slot, lens[(i+round)%uint64(len(lens))])
			s.apply(driver.Write, d)
			want := digest(r.want[i*slot:][:slot])
			errands.run(func() { looked <- s.look(r, i*slot, uint32(i), round+1, want) })
			tags = append(tags, s.submitCount(uint32(i), s.pieces(d)...))
		}
		for range slots {
			if fault := <-looked; fault != "" {
				s.Errorf("round %d: %s", round, fault)
			}
		}
		for _, tag := range tags {
			s.ok(s.await(tag), "write with a count")
		}
	}
	r.expect("after all counts")
}

// look waits for a count and compares the bytes that it stands for.
func (s *stage) look(r *memory, off uint64, number uint32, n uint64, want []byte) (fault string) {
	got, err := s.far.try(request{Do: "counted", Counter: number, Until: n, Region: r.id, Off: off,
		Len: (200 << 10)})
	switch {
	case err != nil:
		return fmt.Sprintf("counter %d does not reach %d: %v", number, n, err)
	case got.Size != n:
		return fmt.Sprintf("counter %d is at %d, want %d", number, got.Size, n)
	case string(got.Data) != string(want):
		return fmt.Sprintf(promise.Mark+"counter %d went up before its bytes were visible", number)
	}
	return ""
}

// checkCountPattern has a count follow scattered entries.
func checkCountPattern(s *stage) {
	const entry, n = 656, 300
	l, r := s.local(entry*n), s.remote(entry*n)
	l.paint(s.seed())
	p := geometry{count: n, localStride: entry, remoteStride: entry}.pattern(l, r, entry)
	for i := range uint32(n) {
		p.Local.List = append(p.Local.List, i*7%n)
		p.Remote.List = append(p.Remote.List, i)
	}
	tag, err := s.near.start(s.counting(5, p))
	s.ok(err, "submit a pattern with a count")
	s.applyPattern(driver.Write, p)
	s.counts(5, 1)
	r.expect("when the count of a pattern was seen")
	s.ok(s.await(tag), "a pattern with a count")
}

// checkCountUnattended counts far more often than messages would fit, at a program that
// receives nothing.
func checkCountUnattended(s *stage) {
	const n = 5000
	number := uint32(driver.CountersMax - 1)
	for range n {
		s.submitCount(number)
	}
	s.allDone("counts at a program that does not look")
	s.counts(number, n)
	s.counts(0, 0)
}

// checkCountWakes has the receiver sleep until the last of several. It sleeps for certain
// before the first, so what wakes it is the last, and not one before it.
func (s *stage) checkCountWakesRound(number uint32, until uint64) (early bool) {
	s.Helper()
	const n = 8
	asleep := request{Do: "drowse", Counter: number, Until: until}
	if s.far.must(asleep).Count != 0 {
		s.Fatalf("AwaitCount says that counter %d has reached %d already", number, until)
	}
	for i := range uint64(n) {
		if i == n-1 {
			s.counts(number, until-1)
			early = s.far.must(request{Do: "woken", Limit: 5 * time.Millisecond}).Count != 0
		}
		s.ok(s.await(s.submitCount(number)), "count")
	}
	s.counts(number, until)
	if s.far.must(request{Do: "woken", Limit: s.h.Limit / 2}).Count == 0 {
		s.Fatalf("the wake-up of count %d was lost", until)
	}
	return early
}

func checkCountWakes(s *stage) {
	const rounds = 12
	early := 0
	for i := range uint64(rounds) {
		if s.checkCountWakesRound(3, 8*(i+1)) {
			early++
		}
	}
	if early > rounds/2 {
		s.Errorf("in %d of %d rounds a count before the one that was waited for ended the sleep",
			early, rounds)
	}
	if s.far.must(request{Do: "drowse", Counter: 3, Until: 8 * rounds}).Count != 1 {
		s.Error("AwaitCount does not say that the counter has reached what it stands at")
	}
}

// checkCountAmongMessages mixes both: neither takes the other's place or turn.
func checkCountAmongMessages(s *stage) {
	const n = 12 // messages that wait while all counts arrive
	l, r := s.local(64), s.remote(64)
	d := desc(l, 0, r, 0, 64)
	for i := range byte(n) {
		for range 30 {
			s.submitCount(9, d)
		}
		s.submitNotify([]byte{i}, d)
	}
	s.allDone("counts among messages")
	s.counts(9, 30*n)
	for i, m := range s.far.must(request{Do: "receive", Count: n}).Messages {
		if m.Err != nil || string(m.Data) != string([]byte{byte(i)}) {
			s.Errorf("message %d reads %x (%v)", i, m.Data, m.Err.orNil())
		}
	}
	s.settle(r) // finds a message too many
}

// checkCountOfFailedBatch has batches fail because their memory is gone.
func checkCountOfFailedBatch(s *stage) {
	n := uint64(100 << 10)
	l, r := s.local(n), s.remote(n)
	s.ok(r.fence(), "fence")
	for _, d := range []driver.Desc{desc(l, 0, r, 0, 64), desc(l, 0, r, 0, n)} {
		s.fails("a write to revoked memory", nil, s.counting(2, nil, d))
	}
	fresh := s.remote(n)
	s.ok(s.await(s.submitCount(2, desc(l, 0, fresh, 0, n))), "write with a count")
	s.apply(driver.Write, desc(l, 0, fresh, 0, n))
	s.counts(2, 1)
	fresh.expect("after batches that failed")
}

func checkCountBounds(s *stage) {
	s.refused("a counter out of bounds", driver.ErrBounds, s.counting(driver.CountersMax, nil))
	s.refused("a counter far out of bounds", driver.ErrBounds, s.counting(1<<31, nil))
	if s.near.b.AwaitCount(1, 1) {
		s.Error("AwaitCount: an unused counter is said to have reached 1")
	}
	if err := s.await(s.submitCount(0)); err != nil {
		s.Errorf("count on 0: %v", err)
	}
	s.counts(0, 1)
}
