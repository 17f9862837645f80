// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

var parkedChecks = []check{
	{name: "FenceParked", wirings: Processes, meets: true, run: checkFenceParked},
}

// standing is a mover that Harness.Park has stopped.
type standing struct {
	spot string
	came chan struct{}
	goOn chan struct{}
}

// parkMover has the next mover stand at a spot.
func (h *host) parkMover(spot string) error {
	if h.h.Park == nil {
		return driver.ErrNotSupported
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.standing != nil {
		return errors.New("a mover is parked already")
	}
	s := &standing{spot, make(chan struct{}), make(chan struct{})}
	h.standing = s
	h.h.Park(spot, func() {
		close(s.came)
		<-s.goOn
	})
	return nil
}

// stands waits until the mover has come to its spot.
func (h *host) stands(limit time.Duration) error {
	h.mu.Lock()
	s := h.standing
	h.mu.Unlock()
	select {
	case <-s.came:
		return nil
	case <-time.After(limit):
		return fmt.Errorf("no mover comes to %q: %w", s.spot, errLate)
	}
}

// goesOn lets the mover go on.
func (h *host) goesOn() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.standing != nil {
		h.h.Park(h.standing.spot, nil)
		close(h.standing.goOn)
		h.standing = nil
	}
}

// checkFenceParked has a mover stand between a check and the act that relies on it while the
// owner revokes, gives the memory another use, and another goroutine of the mover's process
// imports it anew. When the mover goes on, nothing of it may land.
func checkFenceParked(s *stage) {
	if s.h.Park == nil {
		s.Log("not run: the harness has no spots to park a mover at")
		return
	}
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	l := s.far.local(2 * leaseLen)
	each := func(spots []string, check func(spot string, own bool)) {
		for _, spot := range spots {
			for _, own := range []bool{false, true} {
				l.paint(s.seed())
				if check(spot, own); s.Failed() {
					return
				}
			}
		}
	}
	each(s.h.Spots, func(spot string, own bool) { s.fenceParked(s.far, spot, own, true, back, l) })
	each(s.h.Halts, func(spot string, own bool) { s.fenceParked(s.far, spot, own, false, back, l) })
	each(s.h.OwnerSpots, func(spot string, own bool) {
		s.fenceParked(s.home, spot, own, true, back, l)
	})
	each(s.h.HeldSpots, func(spot string, own bool) { s.fenceHeld(spot, own, back, l) })
}

// fenceParked is the check at one spot of the mover's side, or of the owner's. With own the
// memory is given back behind the revoke, and other memory comes in its place. With beside
// another goroutine of the mover's process writes meanwhile.
func (s *stage) fenceParked(on *side, spot string, own, beside bool, back int, l *memory) {
	s.Helper()
	r := s.parkedAttack(on, spot, back, l)
	what := "revoke while a mover stands at " + spot
	s.ok(s.inTime(what, r.revoke), "%s", what)
	if own {
		s.home.must(request{Do: "give back", Region: r.id})
		r = s.home.share(2 * leaseLen)
	} else {
		r.again()
	}
	r.paint(s.seed())
	var tag uint64
	if beside {
		tag = s.writeBeside(back, l, r)
	}
	if beside && on == s.far { // a mover that stands on the owner's side may hold this one up
		s.far.must(request{Do: "await", Tag: tag})
	}
	on.must(request{Do: "go on"})
	s.revoked()
	if beside && on != s.far {
		s.far.must(request{Do: "await", Tag: tag})
	}
	if err := r.revoke(); err != nil { // makes the other goroutine's write visible
		s.Fatalf("revoke: %v", err)
	}
	r.expect(fmt.Sprintf("when a mover that stood at %s went on (memory given back: %v)", spot,
		own))
}

// writeBeside has another goroutine of the mover's process import the memory anew, and write.
func (s *stage) writeBeside(back int, l, r *memory) (tag uint64) {
	s.Helper()
	key := s.far.must(request{Do: "import", Peer: back, Data: r.token}).Key
	d := driver.Desc{Local: leaseLen, Remote: leaseLen, Len: 64, LocalKey: l.key, RemoteKey: key}
	copy(r.want[leaseLen:][:64], l.want[leaseLen:])
	q := request{Do: "submit", Peer: back, Op: driver.Write, Descs: []driver.Desc{d}}
	return s.far.must(q).Tag
}

// parkedAttack has the far side write to new memory, until a mover stands at a spot.
func (s *stage) parkedAttack(on *side, spot string, back int, l *memory) *memory {
	s.Helper()
	r := s.home.share(2 * leaseLen)
	on.must(request{Do: "park", Spot: spot})
	s.attack(driver.Write, back, l, r)
	on.must(request{Do: "stands"})
	return r
}

// heldFor is for how long a revoke must have no proof while a piece is in hand.
const heldFor = 20 * time.Millisecond

// fenceHeld has the owner stand with a piece in hand. A revoke has no proof meanwhile, though it
// ends the epoch. The next one has it, and nothing of the piece, or of what came behind it,
// lands after that.
func (s *stage) fenceHeld(spot string, own bool, back int, l *memory) {
	s.Helper()
	r := s.parkedAttack(s.home, spot, back, l)
	_, err := s.home.try(request{Do: "revoke", Region: r.id, Limit: heldFor})
	if !errors.Is(err, driver.ErrTimeout) && !errors.Is(err, context.DeadlineExceeded) {
		s.Errorf("revoke while a piece is in hand at %s: %v, want no proof", spot, err)
	}
	s.home.must(request{Do: "go on"})
	what := "revoke when the piece in hand at " + spot + " goes on"
	s.ok(s.inTime(what, r.revoke), "%s", what)
	if own {
		s.home.must(request{Do: "give back", Region: r.id})
		r = s.home.share(2 * leaseLen)
	}
	r.paint(s.seed())
	s.revoked()
	r.expect(fmt.Sprintf("behind a piece that was in hand at %s (memory given back: %v)", spot,
		own))
}
