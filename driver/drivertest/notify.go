// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/promise"
)

var notifyChecks = []check{
	{name: "NotifyAfterData", wirings: everywhere, needs: driver.CanNotify,
		meets: true, run: checkNotifyAfterData},
	{name: "NotifyOrder", wirings: everywhere, needs: driver.CanNotify,
		meets: true, run: checkNotifyOrder},
	{name: "NotifySizes", wirings: everywhere, needs: driver.CanNotify, run: checkNotifySizes},
	{name: "NotifyNotKept", wirings: here, needs: driver.CanNotify,
		meets: true, run: checkNotifyNotKept},
	{name: "NotifyBackPressure", wirings: everywhere, needs: driver.CanNotify,
		meets: true, run: checkNotifyBackPressure},
	{name: "NotifyOfFailedBatch", wirings: everywhere, needs: driver.CanNotify,
		meets: true, run: checkNotifyOfFailedBatch},
	{name: "NotifyBothWays", wirings: Pair | Processes, needs: driver.CanNotify,
		meets: true, run: checkNotifyBothWays},
}

// verifying lets the far side wait for vouchers meanwhile. The function that it
// returns waits until it has seen them all.
func (s *stage) verifying(count int) func() {
	type result struct {
		r   reply
		err error
	}
	done := make(chan result, 1)
	errands.run(func() {
		r, err := s.far.try(request{Do: "verify", Count: count})
		done <- result{r, err}
	})
	return func() {
		s.Helper()
		got := <-done
		if got.err != nil {
			s.Fatalf("far side: %d of %d messages: %v", got.r.Count, count, got.err)
		}
		for _, fault := range got.r.Faults {
			s.Error(fault)
		}
		if len(got.r.Faults) > 0 {
			s.FailNow()
		}
	}
}

// checkNotifyAfterData sends many ranges of many lengths, each with a voucher
// that the receiver checks before it does anything else.
func checkNotifyAfterData(s *stage) {
	const slots, rounds = 32, 24
	slot := uint64(100 << 10)
	l, r := s.local(slot*slots), s.remote(slot*slots)
	lens := []uint64{1, 64, 656, 4097, 30000, 70000, 100 << 10}
	for round := range rounds {
		l.paint(s.seed())
		seen := s.verifying(slots)
		var tags []uint64
		for i := range uint64(slots) {
			n := lens[(i+uint64(round))%uint64(len(lens))]
			d := desc(l, i*slot, r, i*slot, n)
			s.apply(driver.Write, d)
			v := voucher{region: r.id, off: d.Remote, len: n,
				sum: digest(l.want[d.Local : d.Local+n])}
			descs := s.pieces(d)
			tags = append(tags, s.submitNotify(v.encode(),
				descs[:min(len(descs), s.caps.DescsMax)]...))
		}
		for _, tag := range tags {
			s.ok(s.await(tag), "write with a message")
		}
		seen()
	}
	r.expect("after all messages")
}

// checkNotifyOrder numbers messages that follow long, short and no data.
func checkNotifyOrder(s *stage) {
	const count = 600
	long := uint64(200 << 10)
	l, r := s.local(long), s.remote(long)
	type result struct {
		msgs []message
		err  error
	}
	received := make(chan result, 1)
	errands.run(func() {
		got, err := s.far.try(request{Do: "receive", Count: count})
		received <- result{got.Messages, err}
	})
	var tags []uint64
	for i := range uint64(count) {
		msg := binary.LittleEndian.AppendUint64(nil, i)
		switch i % 4 {
		case 0:
			tags = append(tags, s.submitNotify(msg, s.pieces(desc(l, 0, r, 0, long))[0]))
		case 1:
			tags = append(tags, s.submitNotify(msg, desc(l, 0, r, 0, 64)))
		default:
			tags = append(tags, s.submitNotify(msg))
		}
	}
	for _, tag := range tags {
		s.ok(s.await(tag), "write with a message")
	}
	got := <-received
	if got.err != nil {
		s.Fatalf("far side: %v", got.err)
	}
	for i, m := range got.msgs {
		if m.Err != nil || !bytes.Equal(m.Data, binary.LittleEndian.AppendUint64(nil, uint64(i))) {
			s.Fatalf("message %d arrived as %x (%v)", i, m.Data, m.Err.orNil())
		}
		if m.Conn != got.msgs[0].Conn {
			s.Fatalf("message %d came by connection %d, the first by %d", i, m.Conn,
				got.msgs[0].Conn)
		}
	}
}

// checkNotifySizes sends messages from nothing to MessageMax, and one too long.
func checkNotifySizes(s *stage) {
	most := s.caps.MessageMax
	if most < 1 {
		s.Fatalf("Caps.MessageMax is %d although the Peer has CanNotify", most)
	}
	l, r := s.local(8), s.remote(8)
	for _, n := range []int{0, 1, 7, 8, 9, min(most, 1000), most - 1, most} {
		for _, descs := range [][]driver.Desc{nil, {desc(l, 0, r, 0, 8)}} {
			msg := painted(uint64(n), s.seed())
			s.notify(msg, descs...)
			got := s.far.must(request{Do: "receive", Count: 1}).Messages[0]
			if got.Err != nil || !bytes.Equal(got.Data, msg) {
				s.Errorf("a message of %d bytes arrived as %d others (%v)", n, len(got.Data),
					got.Err.orNil())
			}
		}
	}
	s.refused("a message longer than MessageMax", nil, s.notifying(make([]byte, most+1)))
	s.settle(r) // finds a message that should not have arrived
}

// checkNotifyNotKept changes messages after their Submit and keeps what arrived.
func checkNotifyNotKept(s *stage) {
	long := uint64(200 << 10)
	l, r := s.local(long), s.remote(long)
	var tags []uint64
	const count = 50
	msg := make([]byte, min(100, s.caps.MessageMax))
	for i := range uint64(count) {
		paint(msg, i)
		tags = append(tags, s.submitNotify(msg, s.pieces(desc(l, 0, r, 0, long))[0]))
	}
	paint(msg, count)
	got := s.far.must(request{Do: "receive", Count: count}).Messages
	s.settle(r) // one more message must not write over the ones before
	for i, m := range got {
		if want := painted(uint64(len(msg)), uint64(i)); !bytes.Equal(m.Data, want) {
			promise.Broken(s, "message %d after others came: %s", i, difference(m.Data, want))
		}
	}
	for _, tag := range tags {
		if err := s.await(tag); err != nil {
			s.Errorf("write with a message: %v", err)
		}
	}
}

// checkNotifyBackPressure sends to a receiver that does not look, until the
// backend says that it is full, and goes on when it looks again.
func checkNotifyBackPressure(s *stage) {
	const enough = 64 << 20 // bytes: a backend that takes more has no back-pressure to speak of
	size := min(4096, s.caps.MessageMax)
	var sent int
	full := s.fillUp(enough/size, func(tag uint64) error {
		msg := painted(uint64(size), uint64(sent))
		binary.LittleEndian.PutUint32(msg, uint32(sent))
		err := s.notifying(msg)(tag)
		if err == nil {
			sent++
		}
		return err
	})
	if !full {
		s.Errorf("%d MiB of unreceived messages were taken: no back-pressure", enough>>20)
	}
	received := 0
	for received < sent {
		for _, m := range s.far.must(request{Do: "receive", Count: min(16, sent-received)}).
			Messages {
			want := painted(uint64(size), uint64(received))
			binary.LittleEndian.PutUint32(want, uint32(received))
			if m.Err != nil || !bytes.Equal(m.Data, want) {
				s.Fatalf("message %d of %d is another, or damaged (%v)", received, sent,
					m.Err.orNil())
			}
			received++
		}
		_, _ = s.near.ledger.poll()
	}
	s.allDone("messages that had to wait")
	s.notify([]byte("settle"))
	if m := s.far.must(request{Do: "receive", Count: 1}).Messages[0]; string(m.Data) != "settle" {
		s.Errorf("after back-pressure %q arrived, want one new message", m.Data)
	}
}

// fillUp submits until there is no room for good: room for completions is made
// by polling, so what is left is room at the receiver.
func (s *stage) fillUp(most int, submit func(tag uint64) error) (full bool) {
	s.Helper()
	refusals := 0
	for n := 0; n < most; {
		if s.tryOnce(submit) {
			n, refusals = n+1, 0
			continue
		}
		if refusals++; refusals > 20 {
			return true
		}
		time.Sleep(time.Millisecond)
		_, _ = s.near.ledger.poll()
	}
	return false
}

// allDone polls until nothing is in flight.
func (s *stage) allDone(what string) {
	s.Helper()
	err := s.near.ledger.until(s.h.Limit, func() bool { return s.near.ledger.outstanding() == 0 })
	if err != nil {
		s.hang(fmt.Sprintf("%s: %d in flight: %v", what, s.near.ledger.outstanding(), err))
	}
}

// checkNotifyOfFailedBatch has batches fail because their memory is gone.
func checkNotifyOfFailedBatch(s *stage) {
	n := uint64(100 << 10)
	l, r := s.local(n), s.remote(n)
	s.ok(r.revoke(), "revoke")
	for _, d := range []driver.Desc{desc(l, 0, r, 0, 64), desc(l, 0, r, 0, n)} {
		s.fails("a write to revoked memory", driver.ErrRevoked,
			s.notifying([]byte("must not arrive"), d))
	}
	fresh := s.remote(n)
	s.move(driver.Write, desc(l, 0, fresh, 0, n))
	s.settle(fresh) // finds a message that should not have arrived
	fresh.expect("after batches that failed")
}

// checkNotifyBothWays has both sides send at once.
func checkNotifyBothWays(s *stage) {
	const count = 300
	back := s.far.must(request{Do: "connect", Data: s.near.b.Addr()}).ID
	s.far.must(request{Do: "echo", Peer: back})
	for i := range uint64(count) {
		msg := binary.LittleEndian.AppendUint64(nil, i)
		s.notify(msg)
		got, err := s.near.receive(1, s.h.Limit)
		if err != nil {
			s.hang(fmt.Sprintf("echo %d: %v", i, err))
		}
		if !bytes.Equal(got[0].Data, msg) {
			s.Fatalf("echo %d reads %x", i, got[0].Data)
		}
	}
	for _, fault := range s.far.must(request{Do: "calm"}).Faults {
		s.Errorf("far side: %s", fault)
	}
}
