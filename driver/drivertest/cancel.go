// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
)

var cancelChecks = []check{
	{name: "CancelWrite", wirings: everywhere, meets: true, run: cancelling(driver.Write)},
	{name: "CancelRead", wirings: everywhere, meets: true, run: cancelling(driver.Read)},
	{name: "CancelNothing", wirings: here, meets: true, run: checkCancelNothing},
	{name: "CancelNotify", wirings: everywhere, needs: driver.CanNotify,
		meets: true, run: checkCancelNotify},
}

func cancelling(op driver.Op) func(*stage) {
	return func(s *stage) { checkCancel(s, op) }
}

// checkCancel cancels batches at several moments. As soon as one has completed
// with an error its target is filled anew, and must stay so.
func checkCancel(s *stage, op driver.Op) {
	const count = 8
	n := uint64(1 << 20)
	l, r := s.local(n*count), s.remote(n*count)
	target := r
	if op == driver.Read {
		target = l
	}
	aborted := 0
	for round := range 6 {
		tags := make([]uint64, count)
		for i := range uint64(count) {
			d := s.pieces(desc(l, i*n, r, i*n, n))
			tags[i] = s.submit(op, d[:min(len(d), s.caps.DescsMax)]...)
		}
		// each moment without helpers and with
		time.Sleep(time.Duration(round/2*100) * time.Microsecond)
		stop := func() {}
		if round%2 == 1 {
			stop = s.helping(tags)
		}
		for i := range tags { // the last ones first: they have hardly begun
			s.cancel(tags[count-1-i])
		}
		for i, tag := range tags {
			switch err := s.await(tag); {
			case err == nil:
				d := s.pieces(desc(l, uint64(i)*n, r, uint64(i)*n, n))
				s.apply(op, d[:min(len(d), s.caps.DescsMax)]...)
			case errors.Is(err, driver.ErrAborted):
				aborted++
				target.paintAt(uint64(i)*n, n, s.seed())
			default:
				s.Errorf("cancelled %v: %v, want nil or %v", op, err, driver.ErrAborted)
			}
		}
		stop()
		s.settle(r)
		if !target.watch(fmt.Sprintf("%v, after the completion of what was cancelled", op),
			20*time.Millisecond) {
			return
		}
	}
	s.Logf("%d of %d batches were aborted, the others had finished", aborted, 6*count)
	s.compare(l, r, "after all cancelled batches")
}

// cancel must not block, for which within a limit is all a test can say.
func (s *stage) cancel(tag uint64) {
	s.Helper()
	begin := time.Now()
	s.peer.Cancel(tag)
	if took := time.Since(begin); took > s.h.Limit/2 {
		s.Errorf("Cancel took %v: it must not block", took)
	}
}

// checkCancelNothing cancels tags that are unknown, finished, or another peer's.
func checkCancelNothing(s *stage) {
	n := uint64(big)
	l, r := s.local(n), s.remote(n)
	for _, tag := range []uint64{0, 1, 1 << 63, firstTag + 1000, ^uint64(0)} {
		s.cancel(tag)
	}
	d := s.batch(l, r, 100)
	finished := s.submit(driver.Write, d...)
	s.ok(s.await(finished), "write")
	s.cancel(finished)
	other, err := s.near.connect(s.farAddr, s.h.Limit)
	s.ok(err, "connect again")
	d = s.batch(l, r, n)
	var tags []uint64
	for range 8 {
		tags = append(tags, s.submit(driver.Write, d...))
	}
	for _, tag := range tags {
		s.near.peer(other).Cancel(tag)
		s.cancel(finished)
	}
	for _, tag := range tags {
		if err := s.await(tag); err != nil {
			s.Errorf("a write ended with %v after another peer was asked to cancel its tag", err)
		}
	}
	s.apply(driver.Write, d...)
	s.compare(l, r, "after cancelling nothing")
}

// checkCancelNotify has messages arrive exactly for those batches that completed
// without error.
func checkCancelNotify(s *stage) {
	const count = 16
	n := uint64(512 << 10)
	l, r := s.local(n*count), s.remote(n*count)
	tags := make([]uint64, count)
	for i := range uint64(count) {
		d := s.pieces(desc(l, i*n, r, i*n, n))
		tags[i] = s.submitNotify([]byte{byte(i)}, d[:min(len(d), s.caps.DescsMax)]...)
	}
	for i := range tags {
		s.cancel(tags[count-1-i])
	}
	var want []byte
	for i, tag := range tags {
		switch err := s.await(tag); {
		case err == nil:
			want = append(want, byte(i))
		case !errors.Is(err, driver.ErrAborted):
			s.Fatalf("cancelled write with a message: %v, want nil or %v", err, driver.ErrAborted)
		}
	}
	var got []byte
	for _, m := range s.far.must(request{Do: "receive", Count: len(want)}).Messages {
		got = append(got, m.Data...)
	}
	if string(got) != string(want) {
		s.Errorf("messages %v arrived, want those of %v, whose batches succeeded", got, want)
	}
	s.settle(r) // finds a message that should not have arrived
}
