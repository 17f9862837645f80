// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

var fenceChecks = []check{
	{name: "FenceRevokes", wirings: everywhere, meets: true, run: checkFenceRevokes},
	{name: "FenceIdle", wirings: everywhere, meets: true, run: checkFenceIdle},
	{name: "FenceNeighbour", wirings: everywhere, meets: true, run: checkFenceNeighbour},
	{name: "FenceOver", wirings: everywhere, meets: true, run: checkFenceOver},
	{name: "FenceOverFrozen", wirings: Processes, meets: true, run: checkFenceOverFrozen},
	{name: "RevokeTwice", wirings: here, run: checkRevokeTwice},
	{name: "SilenceUnderWrites", wirings: everywhere, meets: true, run: checkSilence},
	{name: "FenceFrozen", wirings: Processes, meets: true, run: checkFenceFrozen},
	{name: "FenceKilled", wirings: Processes, meets: true, run: checkFenceKilled},
}

// checkFenceRevokes revokes memory again and again, and registers its bytes anew: what came with a
// token of before is of no use, and the new one is.
func checkFenceRevokes(s *stage) {
	n := uint64(100 << 10)
	l, r := s.local(n), s.remote(n)
	var old [][]byte
	for round := range 5 {
		l.paint(s.seed())
		s.move(driver.Write, s.batch(l, r, n)...)
		s.ok(r.revoke(), "revoke")
		if !r.expect("after a revoke, which makes finished writes visible") {
			return
		}
		old = append(old, r.token)
		refused := func(when string) {
			for _, size := range []uint64{64, n} {
				for _, op := range bothOps {
					s.fails(fmt.Sprintf("%v %s", op, when), driver.ErrRevoked,
						s.submitting(op, s.batch(l, r, size)...))
				}
			}
			for i, token := range old {
				if _, _, err := s.peer.Import(token); !errors.Is(err, driver.ErrRevoked) {
					s.Errorf("round %d: import token %d %s: %v, want %v", round, i, when, err,
						driver.ErrRevoked)
				}
			}
		}
		refused("after the revoke")
		r.again()
		refused("when other memory may have the key")
		s.peer.Drop(r.as)
		s.imports(r)
		s.compare(l, r, "after writes to revoked memory")
	}
}

// checkFenceIdle revokes many times while nothing is in flight. A backend that
// waits out its grace each time would not be done within the limit.
func checkFenceIdle(s *stage) {
	r := s.remote(4096)
	begin := time.Now()
	for range 300 {
		s.ok(r.revoke(), "revoke")
		if time.Since(begin) > s.h.Limit {
			s.Fatalf("revokes of idle memory take too long: not 300 within %v", s.h.Limit)
		}
		r.again()
	}
	s.imports(r)
	r.expect("after revokes")
}

// checkFenceNeighbour revokes a part of memory: the whole and another part, which
// overlaps it, keep their tokens and their bytes.
func checkFenceNeighbour(s *stage) {
	n := uint64(10000)
	l, whole := s.local(8*n), s.remote(8*n)
	part, overlap := whole.slice(2*n, 3*n), whole.slice(4*n, 3*n)
	s.imports(part)
	s.imports(overlap)
	for range 5 {
		s.move(driver.Write, desc(l, 0, whole, 0, 8*n))
		s.ok(part.revoke(), "revoke")
		s.fails("write to revoked memory", driver.ErrRevoked, s.submitting(driver.Write,
			desc(l, n, part, 0, n)))
		l.paint(s.seed())
		s.move(driver.Write, desc(l, 0, whole, n, 6*n))
		s.move(driver.Write, desc(l, n, overlap, 0, 2*n))
		copy(whole.want[4*n:], overlap.want[:2*n])
		part.again()
		s.imports(part)
		s.move(driver.Write, desc(l, 5*n, part, n, n))
		copy(whole.want[3*n:], part.want[n:2*n])
		s.compare(l, whole, "after a revoke of a part")
		s.move(driver.Read, desc(l, 0, whole, 0, 8*n))
		if !l.expect("read of the whole after a revoke of a part") {
			return
		}
		copy(overlap.want, whole.want[4*n:])
		copy(part.want, whole.want[2*n:])
	}
}

// checkFenceOver revokes with a context that is over: the epoch ends all the same, and the
// next call completes the proof where this one did not.
func checkFenceOver(s *stage) {
	const n = 100 << 10
	l, r := s.local(n), s.remote(n)
	for range 5 {
		l.paint(s.seed())
		s.move(driver.Write, s.batch(l, r, n)...)
		tag := s.submit(driver.Read, s.batch(l, r, n)...)
		s.revokeOver(r)
		if err := s.await(tag); err != nil && !errors.Is(err, driver.ErrRevoked) {
			s.Errorf("a read that was cut off: %v, want nil or %v", err, driver.ErrRevoked)
		}
		for _, op := range bothOps {
			what := fmt.Sprintf("%v after a revoke with a context that is over", op)
			s.fails(what, driver.ErrRevoked, s.submitting(op, s.batch(l, r, 64)...))
		}
		if _, _, err := s.peer.Import(r.token); !errors.Is(err, driver.ErrRevoked) {
			s.Errorf("import after a revoke with a context that is over: %v, want %v", err,
				driver.ErrRevoked)
		}
		s.ok(r.revoke(), "revoke once more")
		s.peer.Drop(r.as)
		r.again()
		s.imports(r)
		l.paint(s.seed())
		s.move(driver.Write, s.batch(l, r, n)...)
		s.compare(l, r, "with the token of the memory registered anew")
	}
}

// revokeOver revokes with a context that is over.
func (s *stage) revokeOver(r *memory) {
	s.Helper()
	_, err := r.on.try(request{Do: "revoke over", Region: r.id})
	if err != nil && !errors.Is(err, context.Canceled) {
		s.Errorf("revoke with a context that is over: %v, want nil or %v", err, context.Canceled)
	}
}

// checkFenceOverFrozen does it while the writer stands still: it is refused when it goes on.
func checkFenceOverFrozen(s *stage) {
	const n = big
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	l := s.far.local(n)
	l.paint(s.seed())
	for range 3 {
		r := s.home.share(n)
		s.attack(driver.Write, back, l, r)
		s.landed(r)
		s.ok(s.proc.freeze())
		s.revokeOver(r)
		s.ok(s.proc.thaw())
		s.revoked()
		s.ok(s.inTime("revoke once more", r.revoke), "revoke once more")
		r.paint(s.seed())
		if !r.watch("after a revoke in two calls", 15*time.Millisecond) {
			return
		}
	}
}

// checkRevokeTwice: after an error Revoke looks for the proof again, and after nil it stays nil.
func checkRevokeTwice(s *stage) {
	m := s.home.share(4096)
	s.revokeOver(m)
	for range 2 {
		s.ok(s.inTime("revoke once more", m.revoke), "revoke once more")
	}
	if _, err := m.on.try(request{Do: "token", Region: m.id}); !errors.Is(err, driver.ErrClosed) {
		s.Errorf("a token of revoked memory: %v, want %v", err, driver.ErrClosed)
	}
}

// attack has the far side write to near memory, or read it, without pause and
// until an error ends it.
//
// The attackers of one check take turns in how: with help and without.
func (s *stage) attack(op driver.Op, back int, l, r *memory) {
	s.Helper()
	key := s.far.must(request{Do: "import", Peer: back, Data: r.token}).Key
	var descs []driver.Desc
	for _, d := range s.pieces(driver.Desc{Len: r.size, LocalKey: l.key, RemoteKey: key}) {
		if len(descs) < s.caps.DescsMax {
			descs = append(descs, d)
		}
	}
	s.far.must(request{Do: "flood", Peer: back, Op: op, Descs: descs, Count: 4,
		Help: s.attacks%2 == 1})
	s.attacks++
}

// revoked waits until the attacker was told that its token is of no use.
func (s *stage) revoked() {
	s.Helper()
	if failures := s.far.must(request{Do: "ended"}).Faults; len(failures) == 0 {
		s.Error("transfers with a token of a past epoch went on without an error")
	}
}

// landed waits until the attacker's bytes arrive.
func (s *stage) landed(r *memory) {
	s.Helper()
	for wait := newPatience(s.h.Limit); r.same(); {
		if !wait.more() {
			s.hang("writes of the far side")
		}
	}
}

// checkSilence silences memory that is being written to.
func checkSilence(s *stage) {
	n := uint64(big)
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	l := s.far.local(n)
	l.paint(s.seed())
	for round := range 8 {
		r := s.home.share(n)
		s.attack(driver.Write, back, l, r)
		s.landed(r)
		time.Sleep(time.Duration(round*37) * time.Microsecond)
		s.ok(r.revoke(), "revoke memory under writes")
		r.paint(s.seed())
		ok := r.watch("after the revoke returned", 15*time.Millisecond)
		s.revoked()
		if !ok || !r.expect("after the revoke, when the writer had ended") {
			return
		}
	}
}

// checkFenceFrozen stops the writer in mid-copy, revokes within the backend's
// grace, fills the memory anew, and lets the writer go on: nothing may land.
func checkFenceFrozen(s *stage) {
	n := uint64(big)
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	l := s.far.local(n)
	l.paint(s.seed())
	for round := range 8 {
		r := s.home.share(n)
		other := s.home.share(4096)
		other.paint(s.seed())
		s.attack(driver.Write, back, l, r)
		s.landed(r)
		time.Sleep(time.Duration(round*211) * time.Microsecond)
		s.ok(s.proc.freeze())
		s.impatientRevoke(r)
		s.ok(s.inTime("revoke against a frozen writer", r.revoke),
			"revoke against a frozen writer")
		r.paint(s.seed())
		s.ok(s.proc.thaw())
		ok := r.watch("after the writer went on", 30*time.Millisecond)
		s.revoked()
		if !ok || !r.expect("after the revoke, when the writer had ended") ||
			!other.expect("memory beside it") {
			return
		}
		r.again()
		s.writesAgain(back, l, r)
	}
}

// impatientRevoke gives a Revoke next to no time: an error is fine then, and the
// next Revoke must not mind.
func (s *stage) impatientRevoke(r *memory) {
	s.Helper()
	_, err := s.home.try(request{Do: "revoke", Region: r.id, Limit: time.Microsecond})
	if err != nil && !errors.Is(err, context.DeadlineExceeded) &&
		!errors.Is(err, driver.ErrTimeout) {
		s.Errorf("revoke within a microsecond: %v, want nil or %v", err, context.DeadlineExceeded)
	}
	if other := s.home.share(4096); err != nil && other.key == r.key {
		s.Errorf("other memory has key %d, whose memory has no proof", r.key)
	}
}

// writesAgain has the far side use the token of memory that was registered anew.
func (s *stage) writesAgain(back int, l, r *memory) {
	s.Helper()
	key := s.far.must(request{Do: "import", Peer: back, Data: r.token}).Key
	d := driver.Desc{Len: 4096, LocalKey: l.key, RemoteKey: key}
	tag := s.far.must(request{Do: "submit", Peer: back, Op: driver.Write, Descs: []driver.Desc{d}}).
		Tag
	s.far.must(request{Do: "await", Tag: tag})
	s.ok(r.revoke(), "revoke")
	copy(r.want[:d.Len], l.want[:d.Len])
	r.expect("after a write with the new token")
}

// checkFenceKilled kills the writer in mid-copy: a dead peer holds nothing up.
func checkFenceKilled(s *stage) {
	n := uint64(big)
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	l := s.far.local(n)
	l.paint(s.seed())
	r := s.home.share(n)
	s.attack(driver.Write, back, l, r)
	s.landed(r)
	s.ok(s.proc.kill())
	s.ok(s.inTime("revoke against a dead writer", r.revoke), "revoke against a dead writer")
	r.paint(s.seed())
	r.watch("after the writer was killed", 30*time.Millisecond)
}
