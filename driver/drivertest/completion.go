// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

var completionChecks = []check{
	{name: "Load", wirings: everywhere, meets: true, run: checkLoad},
	{name: "Full", wirings: everywhere, meets: true, run: checkFull},
	{name: "DropInFlight", wirings: everywhere, meets: true, run: checkDropInFlight},
	{name: "PeerClose", wirings: everywhere, meets: true, run: checkPeerClose},
	{name: "BackendClose", wirings: everywhere, meets: true, run: checkBackendClose},
	{name: "PeerKilled", wirings: Processes, run: checkPeerKilled},
	{name: "PeerFrozen", wirings: Processes, run: checkPeerFrozen},
	{name: "PeerSilent", wirings: Processes, run: checkPeerSilent},
}

// big is a batch that takes long enough to be met in the middle.
const big = 4 << 20

// checkLoad keeps many batches of all sizes in flight, both ways, and then
// looks at every byte.
func checkLoad(s *stage) {
	const slots, rounds = 64, 6
	slot := uint64(100 << 10)
	l, r := s.local(2*slot*slots), s.remote(2*slot*slots)
	lens := []uint64{8, 64, 656, 4096, 20000, 65537, 100 << 10}
	for round := range uint64(rounds) {
		var tags []uint64
		for i := range uint64(slots) {
			n := lens[(i+round)%uint64(len(lens))]
			n = min(n, s.pieces(driver.Desc{Len: n})[0].Len)
			write := desc(l, i*slot, r, i*slot, n)
			read := desc(l, (slots+i)*slot, r, (slots+i)*slot, n)
			tags = append(tags, s.submit(driver.Write, write), s.submit(driver.Read, read))
			s.apply(driver.Write, write)
			s.apply(driver.Read, read)
		}
		for i, tag := range tags {
			s.ok(s.await(tag), "batch %d of round %d", i, round)
		}
		s.compare(l, r, "under load")
		l.paint(s.seed())
	}
}

// checkFull submits without polling until the backend is full, twice.
func checkFull(s *stage) {
	for _, c := range []struct {
		n    uint64
		most int
	}{{64, 20000}, {(256 << 10), 600}} {
		l, r := s.local(c.n), s.remote(c.n)
		d := s.pieces(desc(l, 0, r, 0, c.n))[:1]
		for range 2 {
			count := 0
			for count < c.most && s.tryOnce(s.submitting(driver.Write, d...)) {
				count++
			}
			if count == c.most {
				s.Logf("%d batches of %d bytes in flight and not full", count, c.n)
			}
			if count == 0 {
				s.Fatal("full although nothing is in flight")
			}
			s.allDone("batches after ErrFull")
		}
		s.move(driver.Write, d...)
		s.compare(l, r, "after the backend was full")
	}
}

func checkDropInFlight(s *stage) {
	n := uint64(big)
	l := s.local(n)
	for range 5 {
		r := s.remote(n)
		descs := s.batch(l, r, n)
		tag := s.submit(driver.Write, descs...)
		s.peer.Drop(r.as)
		s.ok(s.await(tag), "write whose key was dropped in flight")
		s.apply(driver.Write, descs...)
		s.imports(r)
		s.compare(l, r, "key dropped in flight")
		l.paint(s.seed())
	}
}

// batch is one batch of up to n bytes from the start of both memories.
func (s *stage) batch(l, r *memory, n uint64) []driver.Desc {
	descs := s.pieces(desc(l, 0, r, 0, n))
	return descs[:min(len(descs), s.caps.DescsMax)]
}

// burst puts count big batches in flight, each a write to a range of its own.
// It stops early if the backend is full.
func (s *stage) burst(l, r *memory, count int) (tags []uint64) {
	s.Helper()
	n := l.size / uint64(count)
	for i := range uint64(count) {
		tag := s.near.ledger.tag()
		d := s.pieces(desc(l, i*n, r, i*n, n))
		err := s.submitting(driver.Write, d[:min(len(d), s.caps.DescsMax)]...)(tag)
		if err == nil {
			tags = append(tags, tag)
			continue
		}
		s.near.ledger.refuse(tag)
		if !errors.Is(err, driver.ErrFull) {
			s.Fatalf("submit: %v", err)
		}
		return tags
	}
	return tags
}

// checkPeerClose closes a peer with work in flight: all of it is complete when
// Close returns, and nothing lands afterwards.
func checkPeerClose(s *stage) {
	const count = 16
	size := uint64(1<<20) * count
	l, r := s.local(size), s.far.share(size)
	for round := range 4 {
		s.imports(r)
		tags := s.burst(l, r, count)
		stop := func() {}
		if round%2 == 1 {
			stop = s.helping(tags)
		}
		time.Sleep(time.Duration(round/2*200) * time.Microsecond)
		if err := s.inTime("close peer", s.peer.Close); err != nil {
			s.Errorf("close peer: %v", err)
		}
		stop()
		for n := 1; n > 0; { // what is complete is there now, without waiting
			n, _ = s.near.ledger.poll()
		}
		for _, tag := range tags {
			if done, err := s.near.ledger.outcome(tag); !done {
				s.Errorf("a tag was in flight after Peer.Close")
			} else if err != nil && !errors.Is(err, driver.ErrClosed) {
				s.Errorf("a tag in flight at Peer.Close: %v, want nil or %v", err, driver.ErrClosed)
			}
		}
		r.paint(s.seed())
		r.watch("after Peer.Close", 30*time.Millisecond)
		s.closedPeer(l, r)
		s.connect()
	}
}

// refusal submits and returns the error.
func (s *stage) refusal(submit func(tag uint64) error) error {
	tag := s.near.ledger.tag()
	err := submit(tag)
	if err != nil {
		s.near.ledger.refuse(tag)
	}
	return err
}

// checkBackendClose closes a backend with work in flight. The ledger audits the
// tags when the check ends, as it does after each check.
func checkBackendClose(s *stage) {
	const count = 16
	size := uint64(1<<20) * count
	l, r := s.local(size), s.far.share(size)
	s.imports(r)
	tags := s.burst(l, r, count)
	if err := s.inTime("close backend", s.near.b.Close); err != nil {
		s.Errorf("close backend: %v", err)
	}
	for _, fault := range s.near.ledger.drain(s.h.Limit) {
		s.Error(fault)
	}
	for _, tag := range tags {
		if _, err := s.near.ledger.outcome(tag); err != nil && !errors.Is(err, driver.ErrClosed) {
			s.Errorf("a tag in flight at Backend.Close: %v, want nil or %v", err, driver.ErrClosed)
		}
	}
	r.paint(s.seed())
	r.watch("after Backend.Close", 50*time.Millisecond)
	for range 3 {
		if n, err := s.near.ledger.poll(); n != 0 || !errors.Is(err, driver.ErrClosed) {
			s.Errorf("Poll of a closed and drained backend: %d, %v, want 0, %v", n, err,
				driver.ErrClosed)
		}
	}
	s.closedPeer(l, r)
}

// checkPeerKilled kills the far process with work in flight.
func checkPeerKilled(s *stage) {
	const count = 16
	size := uint64(1<<20) * count
	l, r := s.local(size), s.remote(size)
	tags := s.burst(l, r, count)
	s.peer.Cancel(tags[0]) // must not keep it from completing
	s.ok(s.proc.kill())
	for _, tag := range tags {
		err := s.await(tag)
		if err != nil && !errors.Is(err, driver.ErrPeerLost) && !errors.Is(err, driver.ErrAborted) {
			s.Errorf("a tag in flight when the peer was killed: %v, want nil or %v", err,
				driver.ErrPeerLost)
		}
	}
	select {
	case <-s.peer.Lost():
	case <-time.After(s.h.Limit):
		s.hang("Lost of a killed peer")
	}
	s.lost(l, r)
}

// lost waits until the backend knows that its peer is dead.
func (s *stage) lost(l, r *memory) {
	s.Helper()
	d := s.batch(l, r, 64)
	var err error
	for wait := newPatience(s.h.Limit); wait.more(); time.Sleep(time.Millisecond) {
		tag := s.near.ledger.tag()
		if err = s.submitting(driver.Write, d...)(tag); err != nil {
			s.near.ledger.refuse(tag)
		} else {
			err = s.await(tag)
		}
		if errors.Is(err, driver.ErrPeerLost) {
			return
		}
		_, _ = s.near.ledger.poll()
	}
	s.Errorf("writes to a killed peer end with %v, want %v", err, driver.ErrPeerLost)
}

// checkPeerSilent stops the far process while nothing waits for it: it is no loss, and the peer
// serves on.
func checkPeerSilent(s *stage) {
	l, r := s.local(1<<16), s.remote(1<<16)
	s.move(driver.Write, desc(l, 0, r, 0, l.size))
	s.ok(s.proc.freeze())
	var lost bool
	select {
	case <-s.peer.Lost():
		lost = true
	case <-time.After(2 * s.h.Grace):
	}
	s.ok(s.proc.thaw())
	if lost {
		s.Fatal("a peer for which nothing waited was given up since it was silent")
	}
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		s.move(op, desc(l, 0, r, 0, l.size))
	}
}

// checkPeerFrozen stops the far process with work in flight: Peer.Close is
// bounded, and what it completed with an error does not land later.
func checkPeerFrozen(s *stage) {
	const count = 8
	size := uint64(1<<20) * count
	l, r := s.local(size), s.remote(size)
	s.ok(s.proc.freeze())
	tags := s.burst(l, r, count)
	err := s.inTime("close a frozen peer", s.peer.Close)
	if err != nil {
		s.Errorf("close a frozen peer: %v", err)
	}
	for n := 1; n > 0; {
		n, _ = s.near.ledger.poll()
	}
	failed := 0
	for _, tag := range tags {
		done, err := s.near.ledger.outcome(tag)
		if !done {
			s.Error("a tag was in flight after Close of a frozen peer")
		} else if err != nil {
			failed++
		}
	}
	if err := s.inTime("close the backend of a frozen peer", s.near.b.Close); err != nil {
		s.Errorf("close the backend of a frozen peer: %v", err)
	}
	s.ok(s.proc.thaw())
	r.paint(s.seed()) // an order: obeyed only now
	what := fmt.Sprintf("the peer went on after Close, which %d of %d writes failed", failed,
		len(tags))
	r.watch(what, 100*time.Millisecond)
}
