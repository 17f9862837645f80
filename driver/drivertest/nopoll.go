// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

var noPollChecks = []check{
	{name: "NoPoll", wirings: everywhere, run: checkNoPoll},
	{name: "NoPollNotify", wirings: everywhere, needs: driver.CanNotify, run: checkNoPollNotify},
	{name: "NoPollFence", wirings: everywhere, run: checkNoPollFence},
}

// checkNoPoll has transfers go on to their end although neither side polls: only
// the completions wait for that.
func checkNoPoll(s *stage) {
	const count = 4
	size := uint64(1<<20) * count
	l, r := s.local(size), s.remote(size)
	for range 3 {
		tags := s.burst(l, r, count)
		for i := range tags {
			n := size / count
			s.applyFirst(driver.Write, desc(l, uint64(i)*n, r, uint64(i)*n, n))
		}
		for wait := newPatience(s.h.Limit); !r.same(); {
			if !wait.more() {
				s.hang("writes without a call of Poll")
			}
		}
		for i, tag := range tags {
			s.ok(s.await(tag), "write %d without a call of Poll", i)
		}
		l.paint(s.seed())
	}
}

// applyFirst is apply for what fits in one batch of a large copy.
func (s *stage) applyFirst(op driver.Op, d driver.Desc) {
	list := s.pieces(d)
	s.apply(op, list[:min(len(list), s.caps.DescsMax)]...)
}

// checkNoPollNotify has messages arrive at a program that receives and does not
// poll, from one that does nothing at all.
func checkNoPollNotify(s *stage) {
	n := uint64(300 << 10)
	l, r := s.local(n), s.remote(n)
	var tags []uint64
	for round := range 6 {
		d := s.batch(l, r, []uint64{64, 300 << 10}[round%2])
		msg := []byte{byte(round)}
		tags = append(tags, s.submitNotifyOnce(msg, d))
		s.apply(driver.Write, d...)
		got := s.far.must(request{Do: "listen", Count: 1}).Messages[0]
		if got.Err != nil || len(got.Data) != 1 || got.Data[0] != msg[0] {
			s.Fatalf("message %d without a call of Poll: %x (%v)", round, got.Data, got.Err.orNil())
		}
		if !r.expect("message without a call of Poll") {
			return
		}
	}
	for _, tag := range tags {
		if err := s.await(tag); err != nil {
			s.Errorf("write with a message without a call of Poll: %v", err)
		}
	}
}

// submitNotifyOnce submits without polling; the backend has room.
func (s *stage) submitNotifyOnce(msg []byte, d []driver.Desc) uint64 {
	s.Helper()
	tag := s.near.ledger.tag()
	if err := s.notifying(msg, d...)(tag); err != nil {
		s.near.ledger.refuse(tag)
		s.Fatalf("submit a message: %v", err)
	}
	return tag
}

// listen receives without polling.
func (h *host) listen(count int, limit time.Duration) (got []message, err error) {
	for wait := newPatience(limit); len(got) < count; {
		var msgs [1]driver.Message
		n, err := h.look(msgs[:])
		switch {
		case err != nil:
			return got, err
		case n == 1:
			got = append(got, message{Conn: msgs[0].Conn, Data: msgs[0].Data,
				Err: relay(msgs[0].Err)})
		case !wait.more():
			return got, fmt.Errorf("%d of %d messages without a call of Poll: %w", len(got), count,
				errLate)
		}
	}
	return got, nil
}

// checkNoPollFence silences memory whose writer has work in flight and does not
// poll.
func checkNoPollFence(s *stage) {
	const count = 8
	size := uint64(1<<20) * count
	l := s.local(size)
	for round := range 4 {
		r := s.remote(size)
		tags := s.burst(l, r, count)
		stop := func() {}
		if round%2 == 1 {
			stop = s.helping(tags) // its hand obeys the revoke as well
		}
		time.Sleep(time.Duration(round*97) * time.Microsecond)
		s.ok(s.inTime("revoke memory whose writer does not poll", r.revoke),
			"revoke memory whose writer does not poll")
		r.paint(s.seed())
		ok := r.watch("after the revoke returned", 10*time.Millisecond)
		stop()
		if !ok {
			return
		}
		for _, tag := range tags {
			err := s.await(tag)
			if err != nil && !errors.Is(err, driver.ErrRevoked) {
				s.Errorf("a write that was cut off: %v, want nil or %v", err, driver.ErrRevoked)
			}
		}
		if !r.expect("after the writer had ended") {
			return
		}
	}
}
