// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluicehq/sluice/driver"
)

var parkedChecks = []check{
	{name: "FenceParked", wirings: Processes, run: checkFenceParked},
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
// owner fences, gives the memory another use, and another goroutine of the mover's process
// imports it anew. When the mover goes on, nothing of it may land.
func checkFenceParked(s *stage) {
	if s.h.Park == nil {
		s.Log("not run: the harness has no spots to park a mover at")
		return
	}
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	l := s.far.local(2 * leaseLen)
	for i, spot := range slices.Concat(s.h.Spots, s.h.Halts) {
		for _, own := range []bool{false, true} {
			l.paint(s.seed())
			s.fenceParked(spot, own, i >= len(s.h.Spots), back, l)
			if s.Failed() {
				return
			}
		}
	}
}

// fenceParked is the check at one spot. With own the memory is given back behind the fence,
// and other memory comes in its place. With halted no other goroutine of the mover's process
// can write meanwhile.
func (s *stage) fenceParked(spot string, own, halted bool, back int, l *memory) {
	s.Helper()
	r := s.home.share(2 * leaseLen)
	s.far.must(request{Do: "park", Spot: spot})
	s.attack(driver.Write, back, l, r)
	s.far.must(request{Do: "stands"})
	what := "fence while a mover stands at " + spot
	if err := s.inTime(what, r.fence); err != nil {
		s.Fatalf("%s: %v", what, err)
	}
	if own {
		s.home.must(request{Do: "give back", Region: r.id})
		r = s.home.share(2 * leaseLen)
	}
	r.paint(s.seed())
	if !halted {
		s.writeBeside(back, l, r)
	}
	s.far.must(request{Do: "go on"})
	s.revoked()
	if err := r.fence(); err != nil { // makes the other goroutine's write visible
		s.Fatalf("fence: %v", err)
	}
	r.expect(fmt.Sprintf("when a mover that stood at %s went on (memory given back: %v)", spot, own))
}

// writeBeside has another goroutine of the mover's process import the memory anew, and write.
func (s *stage) writeBeside(back int, l, r *memory) {
	s.Helper()
	key := s.far.must(request{Do: "import", Peer: back, Data: r.renew()}).Key
	d := driver.Desc{Local: leaseLen, Remote: leaseLen, Len: 64, LocalKey: l.key, RemoteKey: key}
	q := request{Do: "submit", Peer: back, Op: driver.Write, Descs: []driver.Desc{d}}
	tag := s.far.must(q).Tag
	s.far.must(request{Do: "await", Tag: tag})
	copy(r.want[leaseLen:][:64], l.want[leaseLen:])
}
