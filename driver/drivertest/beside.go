// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

var besideChecks = []check{
	{name: "FenceFrozenReader", wirings: Processes, meets: true, run: checkFenceFrozenReader},
	{name: "FenceFrozenBeside", wirings: Processes, meets: true, run: checkFenceFrozenBeside},
}

// checkFenceFrozenReader stops a reader in mid-copy. It holds a revoke up no
// longer than a writer, and learns of it.
func checkFenceFrozenReader(s *stage) {
	n := uint64(big)
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	l := s.far.local(n)
	for range 3 {
		r := s.home.shareReadOnly(n)
		r.paint(s.seed())
		s.attack(driver.Read, back, l, r)
		time.Sleep(2 * time.Millisecond)
		s.ok(s.proc.freeze())
		s.ok(s.inTime("revoke against a frozen reader", r.revoke), "revoke against a frozen reader")
		s.ok(s.proc.thaw())
		s.revoked()
		r.expect("after reads")
	}
}

// checkFenceFrozenBeside revokes against a frozen writer while a third process,
// which is awake, writes right beside, in the same page: none of its writes may
// get lost by the strong means.
func checkFenceFrozenBeside(s *stage) {
	n := uint64(big/2 + 100)
	whole := s.home.share(2 * n)
	revoked, other := whole.slice(0, n), whole.slice(n, n)
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	l := s.far.local(n)
	l.paint(s.seed())
	third := s.thirdParty()
	for round := range 6 {
		s.attack(driver.Write, back, l, revoked)
		stop := third.scribble(other, s.seed())
		s.landed(revoked)
		time.Sleep(time.Duration(round*173) * time.Microsecond)
		s.ok(s.proc.freeze())
		s.ok(s.inTime("revoke against a frozen writer", revoked.revoke),
			"revoke against a frozen writer")
		revoked.paint(s.seed())
		time.Sleep(time.Millisecond)
		s.ok(s.proc.thaw())
		s.revoked()
		writes := stop()
		if err := other.revoke(); err != nil { // makes the writes visible
			s.Fatalf("revoke: %v", err)
		}
		what := fmt.Sprintf("after %d writes beside revoked memory", writes)
		if !other.expect(what) || !revoked.expect(what) {
			return
		}
		revoked.again()
		other.again()
	}
}

// scribbler is a further process that writes to near memory.
type scribbler struct {
	*side
	peer int
	unit uint64
	src  *memory
}

// A scribbler writes to scribbleSlots places in turn, each time with bytes from
// another of scribbleTexts.
const scribbleSlots, scribbleTexts = 128, 64

func (s *stage) thirdParty() *scribbler {
	s.Helper()
	third := &scribbler{side: s.side("third", startProcess(s.TB, s.h)), unit: 64}
	third.must(request{Do: "open"})
	third.peer = third.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	third.src = third.local(third.unit * scribbleSlots * scribbleTexts)
	return third
}

// scribble writes to the beginning of m until the function that it returns is
// called. That keeps m's model and returns how many writes there were.
func (t *scribbler) scribble(m *memory, seed uint64) (stop func() int) {
	t.Helper()
	t.src.paint(seed)
	key := t.must(request{Do: "import", Peer: t.peer, Data: m.token}).Key
	d := driver.Desc{Len: t.unit, LocalKey: t.src.key, RemoteKey: key}
	t.must(request{Do: "scribble", Peer: t.peer, Descs: []driver.Desc{d}})
	return func() int {
		t.Helper()
		r := t.must(request{Do: "calm"})
		for _, fault := range r.Faults {
			t.Fatalf("third side: write %d: %s", r.Count, fault)
		}
		for i := range uint64(r.Count) {
			from, to := scribbled(i, t.unit)
			copy(m.want[to:to+t.unit], t.src.want[from:])
		}
		return r.Count
	}
}

// scribbled returns where write i takes its bytes and puts them.
func scribbled(i, unit uint64) (from, to uint64) {
	return i % (scribbleSlots * scribbleTexts) * unit, i % scribbleSlots * unit
}

// scribble is the chore of a scribbler: one write after the other.
func (h *host) scribble(q request, stop <-chan struct{}) outcome {
	var o outcome
	for ; !stopped(stop); o.count++ {
		d := q.Descs[0]
		d.Local, d.Remote = scribbled(uint64(o.count), d.Len)
		tag, err := h.submit(q.Peer, driver.Write, []driver.Desc{d}, nil)
		if err == nil {
			err = h.ledger.await(tag, h.h.Limit)
		}
		if err != nil {
			o.faults = []string{err.Error()}
			return o
		}
	}
	return o
}
