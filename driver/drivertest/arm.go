// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

var armChecks = []check{
	{name: "ArmCompletion", wirings: everywhere, meets: true, run: checkArmCompletion},
	{name: "ArmMessage", wirings: everywhere, needs: driver.CanNotify,
		meets: true, run: checkArmMessage},
	{name: "ArmIdle", wirings: everywhere, meets: true, run: checkArmIdle},
	{name: "ArmStays", wirings: everywhere, needs: driver.CanNotify,
		meets: true, run: checkArmStays},
	{name: "ArmReady", wirings: everywhere, needs: driver.CanNotify,
		meets: true, run: checkArmReady},
	{name: "ArmBeforeConnect", wirings: Pair | Processes, needs: driver.CanNotify,
		meets: true, run: checkArmBeforeConnect},
	{name: "ArmFull", wirings: everywhere, needs: driver.CanNotify, meets: true, run: checkArmFull},
	{name: "ArmPingPong", wirings: Pair | Processes, needs: driver.CanNotify,
		meets: true, run: checkArmPingPong},
	{name: "ArmLost", wirings: Processes, needs: driver.CanNotify, meets: true, run: checkArmLost},
}

// sleepUntil polls and parks in turn, as the engine does, until the condition
// holds. If nothing wakes it although the condition holds by then, a wake-up was
// lost.
func (s *stage) sleepUntil(what string, condition func() bool) {
	s.Helper()
	for !condition() {
		n, err := s.near.ledger.poll()
		s.ok(err, "%s: poll", what)
		if n > 0 {
			continue
		}
		if condition() {
			return
		}
		switch err := s.near.park(s.h.Limit / 2); {
		case errors.Is(err, errLate):
			if n, _ := s.near.ledger.poll(); n > 0 || condition() {
				s.Fatalf("%s: a wake-up was lost: nothing came for %v, but there was something",
					what, s.h.Limit/2)
			}
			s.hang(what)
		case err != nil:
			s.Fatalf("%s: arm: %v", what, err)
		}
	}
}

func (s *stage) isDone(tag uint64) func() bool {
	return func() bool {
		done, err := s.near.ledger.outcome(tag)
		s.ok(err, "transfer")
		return done
	}
}

// checkArmCompletion sleeps for completions of short and long batches, one at a
// time and several.
func checkArmCompletion(s *stage) {
	n := uint64(1 << 20)
	l, r := s.local(n), s.remote(n)
	a := s.near.b
	if fd := a.FD(); fd < 0 || fd != a.FD() {
		s.Fatalf("FD returned %d, then %d: it must be a descriptor, and constant", fd, a.FD())
	}
	for i := range 400 {
		size := []uint64{1, 4096, 70000, 300000, 1 << 20}[i%5]
		d := s.batch(l, r, size)
		var tags []uint64
		for range 1 + i%3 {
			tags = append(tags, s.submit(driver.Write, d...))
		}
		for _, tag := range tags {
			s.sleepUntil(fmt.Sprintf("completion %d of %d bytes", i, size), s.isDone(tag))
		}
		s.apply(driver.Write, d...)
	}
	s.compare(l, r, "after sleeps")
}

// checkArmMessage sleeps for messages that come at odd moments.
func checkArmMessage(s *stage) {
	const count = 300
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	sent := make(chan error, 1)
	errands.run(func() {
		var err error
		for i := 0; i < count && err == nil; i++ {
			msg := binary.LittleEndian.AppendUint64(nil, uint64(i))
			time.Sleep(time.Duration(i%7*20) * time.Microsecond)
			_, err = s.far.try(request{Do: "submit", Peer: back, Op: driver.Write, Notify: true,
				Data: msg})
		}
		sent <- err
	})
	var got int
	s.sleepUntil("messages", func() bool {
		msgs, _ := s.near.receive(count-got, 0)
		got += len(msgs)
		return got == count
	})
	if err := <-sent; err != nil {
		s.Errorf("far side: send: %v", err)
	}
}

// checkArmIdle has nothing to do: the backend must let its user sleep.
func checkArmIdle(s *stage) {
	s.move(driver.Write, desc(s.local(64), 0, s.remote(64), 0, 64))
	_, _ = s.near.receive(1, 0)
	for wait := newPatience(s.h.Limit); ; {
		err := s.near.park(20 * time.Millisecond)
		if errors.Is(err, errLate) {
			return
		}
		s.ok(err, "arm")
		if _, err := s.near.ledger.poll(); err != nil {
			s.Fatalf("poll: %v", err)
		}
		if !wait.more() {
			s.Fatal("an idle backend never lets its user sleep")
		}
	}
}

// checkArmStays sleeps after an Arm that said ready, without another: the
// wake-up stays asked for.
func checkArmStays(s *stage) {
	a := s.near.b
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	send := request{Do: "submit", Peer: back, Op: driver.Write, Notify: true, Data: []byte("here")}
	for range 20 {
		s.far.must(send)
		if s.wiring == Self {
			// the completion of the message must not be what is ready, nor what wakes
			s.allDone("messages")
		}
		s.armUntilReady(a)
		if msgs, err := s.near.receive(1, s.h.Limit); len(msgs) != 1 {
			s.Fatalf("Arm said ready, but no message came: %v", err)
		}
		if sleepOn(a.FD(), 2*time.Millisecond) == nil {
			continue // the message came while we armed, and used the wake-up
		}
		s.far.must(send)
		for got := 0; got == 0; {
			err := sleepOn(a.FD(), s.h.Limit/2)
			msgs, _ := s.near.receive(1, 0)
			if got = len(msgs); got == 0 && err == nil && s.wiring == Self {
				// the message's completion came first, and woke us
				msgs, _ = s.near.receive(1, s.h.Limit)
				got = len(msgs)
			}
			if got == 0 && err != nil {
				s.hang("a message after an Arm that said ready")
			} else if err != nil {
				s.Fatal("an Arm that said ready was forgotten: a message came without a wake-up")
			}
		}
	}
}

// armUntilReady arms until something is there, without looking at it.
func (s *stage) armUntilReady(a driver.Backend) {
	s.Helper()
	for wait := newPatience(s.h.Limit); ; {
		ready, err := a.Arm()
		s.ok(err, "arm")
		if ready {
			return
		}
		if !wait.more() {
			s.hang("Arm while a message is there")
		}
	}
}

// checkArmReady asks for a wake-up when there is something already. Without
// anybody looking, the answer must turn to ready, each time anew.
func checkArmReady(s *stage) {
	a := s.near.b
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	for range 20 {
		s.far.must(request{Do: "submit", Peer: back, Op: driver.Write, Notify: true,
			Data: []byte("here")})
		s.armUntilReady(a)
		if msgs, err := s.near.receive(1, s.h.Limit); len(msgs) != 1 {
			s.Fatalf("Arm said ready, but no message came: %v", err)
		}
	}
}

// checkArmBeforeConnect sleeps before a peer connects: that peer's first message
// must wake the sleeper, though there was nothing of this peer to arm.
func checkArmBeforeConnect(s *stage) {
	a := s.near.b
	for i := range 8 {
		s.ok(s.near.drowse(s.h.Limit))
		back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
		send := request{Do: "submit", Peer: back, Op: driver.Write, Notify: true,
			Data: []byte("first")}
		s.far.must(request{Do: "await", Tag: s.far.must(send).Tag})
		if err := sleepOn(a.FD(), s.h.Limit/2); errors.Is(err, errLate) {
			s.Fatalf("peer %d connected and sent a message while this side slept: no wake-up", i+1)
		} else if err != nil {
			s.Fatal(err)
		}
		s.sleepUntil("the first message of a new peer", func() bool {
			msgs, _ := s.near.receive(1, 0)
			return len(msgs) == 1
		})
	}
}

// drowse arms and leaves nothing that would end the sleep: what is there, and a
// wake-up that is late, are taken away.
func (h *host) drowse(limit time.Duration) error {
	for wait := newPatience(limit); ; {
		ready, err := h.b.Arm()
		if err != nil {
			return fmt.Errorf("arm: %w", err)
		}
		woken, err := readable(h.b.FD(), time.Millisecond)
		if err != nil || !ready && !woken {
			return err
		}
		if woken {
			_ = sleepOn(h.b.FD(), 0)
		}
		if _, err := h.ledger.poll(); err != nil {
			return fmt.Errorf("poll: %w", err)
		}
		_, _ = h.look(make([]driver.Message, 1))
		if !wait.more() {
			return errors.New("an idle backend never lets its user sleep")
		}
	}
}

// checkArmFull sleeps for room: the far side makes it by receiving.
func checkArmFull(s *stage) {
	msg := make([]byte, min(4096, s.caps.MessageMax))
	count := 0
	send := func(tag uint64) error {
		err := s.notifying(msg)(tag)
		if err == nil {
			count++
		}
		return err
	}
	if !s.fillUp(64<<20/len(msg), send) {
		s.Log("never full")
	}
	for range 3 {
		waiting, freed := count, make(chan struct{})
		errands.run(func() {
			defer close(freed)
			time.Sleep(2 * time.Millisecond)
			if _, err := s.far.try(request{Do: "receive", Count: waiting}); err != nil {
				s.Errorf("far side: receive: %v", err)
			}
		})
		s.sleepUntil("room after ErrFull", func() bool { return s.tryOnce(send) })
		<-freed
		count -= waiting
		s.fillUp(64<<20/len(msg), send)
	}
	s.far.must(request{Do: "receive", Count: count})
	s.allDone("messages")
}

// tryOnce submits, and reports whether there was room.
func (s *stage) tryOnce(submit func(tag uint64) error) bool {
	s.Helper()
	err := s.refusal(submit)
	if err != nil && !errors.Is(err, driver.ErrFull) {
		s.Fatalf("submit: %v", err)
	}
	return err == nil
}

// checkArmPingPong has both sides sleep for each other.
func checkArmPingPong(s *stage) {
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	s.far.must(request{Do: "echo", Peer: back, Parked: true})
	for i := range uint64(500) {
		msg := binary.LittleEndian.AppendUint64(nil, i)
		tag := s.submitNotify(msg)
		got := 0
		s.sleepUntil(fmt.Sprintf("echo %d", i), func() bool {
			msgs, _ := s.near.receive(1-got, 0)
			got += len(msgs)
			return got == 1
		})
		s.sleepUntil("the completion of a message", s.isDone(tag))
	}
	for _, fault := range s.far.must(request{Do: "calm"}).Faults {
		s.Errorf("far side: %s", fault)
	}
}

// checkArmLost sleeps until a sender is killed.
func checkArmLost(s *stage) {
	s.far.must(request{Do: "connect", Data: s.near.b.Addr()})
	killed := make(chan error, 1)
	errands.run(func() {
		time.Sleep(5 * time.Millisecond)
		killed <- s.proc.kill()
	})
	s.sleepUntil("the last message of a killed peer", func() bool {
		msgs, _ := s.near.receive(1, 0)
		return len(msgs) == 1 && errors.Is(msgs[0].Err.orNil(), driver.ErrPeerLost)
	})
	if err := <-killed; err != nil {
		s.Error(err)
	}
}
