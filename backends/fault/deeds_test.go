// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func TestDelayHoldsTheCompletionAndNotTheBytes(t *testing.T) {
	testkit.InVirtualTime(t, delayHoldsTheCompletionAndNotTheBytes)
}

func delayHoldsTheCompletionAndNotTheBytes(t *testing.T) {
	r := newRig(t, Rule{On: Write, Do: Delay(30*ms, 0)})
	begin := time.Now()
	tag := r.write(0, 1000)
	if !r.landed(0, 1000) {
		t.Error("the bytes are not there, though mem copies in Submit")
	}
	check(t, r.await(tag))
	if took := time.Since(begin); took < 30*time.Millisecond {
		t.Errorf("complete after %v", took)
	}
	r.once()
}

func TestLateHoldsTheBytes(t *testing.T) { testkit.InVirtualTime(t, lateHoldsTheBytes) }

func lateHoldsTheBytes(t *testing.T) {
	const late = 30 * time.Millisecond
	r := newRig(t, Rule{On: Write, Do: Late(late, 0)})
	begin := time.Now()
	tag := r.write(0, 1000)
	if r.landed(0, 1000) {
		t.Error("the bytes are there at once")
	}
	check(t, r.await(tag))
	if took := time.Since(begin); took < late || !r.landed(0, 1000) {
		t.Errorf("complete after %v, the bytes are there: %v", took, r.landed(0, 1000))
	}
	cancelled := r.write(1000, 1000)
	r.peer.Cancel(cancelled)
	if err := r.await(cancelled); !errors.Is(err, driver.ErrAborted) {
		t.Errorf("cancelled before it began: %v", err)
	}
	time.Sleep(late + 10*time.Millisecond)
	if r.landed(1000, 1000) {
		testkit.ErrorBroken(t, "it landed although it was cancelled")
	}
	r.once()
}

func TestLateMessagesKeepTheirOrder(t *testing.T) {
	testkit.InVirtualTime(t, lateMessagesKeepTheirOrder)
}

func lateMessagesKeepTheirOrder(t *testing.T) {
	r := newRig(t, Rule{On: Message, Chance: 0.5, Do: Late(3*ms, 3*ms)})
	for i := range byte(100) {
		r.tags++
		check(t, r.peer.Submit(r.tags, &driver.Batch{
			Op: driver.Write, Tail: driver.NotifyTail, Descs: r.desc(uint64(i)*8, 8),
			Notify: []byte{i}}))
	}
	var got []byte
	for len(got) < 100 {
		var msgs [8]driver.Message
		n, err := r.far.Receive(msgs[:])
		check(t, err)
		if n == 0 {
			time.Sleep(time.Millisecond)
		}
		for _, m := range msgs[:n] {
			if at := uint64(m.Data[0]) * 8; !r.landed(at, 8) {
				t.Errorf("message %d came before its bytes", m.Data[0])
			}
			got = append(got, m.Data[0])
		}
	}
	if !slices.IsSorted(got) {
		t.Errorf("order %v", got)
	}
	for tag := range r.tags {
		check(t, r.await(tag+1))
	}
	r.once()
}

func TestDroppedCompletionsComeAtTheEnd(t *testing.T) {
	testkit.InVirtualTime(t, droppedCompletionsComeAtTheEnd)
}

func droppedCompletionsComeAtTheEnd(t *testing.T) {
	r := newRig(t, Rule{On: Write, Do: Drop()})
	moved, aborted := r.write(0, 1000), r.write(1000, 1000)
	r.silent(moved)
	if !r.landed(0, 2000) {
		t.Error("the bytes have not moved")
	}
	r.peer.Cancel(aborted)
	check(t, r.await(aborted)) // the outcome that came first
	r.silent(moved)
	check(t, r.peer.Close())
	r.once()
}

func TestSwallowedBatchesEndAtTheEnd(t *testing.T) {
	testkit.InVirtualTime(t, swallowedBatchesEndAtTheEnd)
}

func swallowedBatchesEndAtTheEnd(t *testing.T) {
	r := newRig(t, Rule{On: Write, Do: Swallow()})
	kept, cancelled := r.write(0, 1000), r.write(1000, 1000)
	r.silent(kept)
	r.peer.Cancel(cancelled)
	if err := r.await(cancelled); !errors.Is(err, driver.ErrAborted) {
		t.Errorf("cancelled: %v", err)
	}
	check(t, r.peer.Close())
	if err := r.await(kept); !errors.Is(err, driver.ErrClosed) || r.landed(0, 1000) {
		t.Errorf("closed: %v, landed: %v", err, r.landed(0, 1000))
	}
	r.once()
}

func TestTheDeathOfAPeerEndsWhatWaits(t *testing.T) {
	testkit.InVirtualTime(t, theDeathOfAPeerEndsWhatWaits)
}

func theDeathOfAPeerEndsWhatWaits(t *testing.T) {
	r := newRig(t, Rule{On: Write, Size: AtLeast(2), Do: Swallow()},
		Rule{On: Write, Size: Exactly(1), Do: Drop()})
	swallowed, dropped := r.write(0, 1000), r.write(0, 1)
	r.silent(swallowed)
	check(t, r.far.Close())
	if err := r.await(swallowed); !errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("swallowed: %v", err)
	}
	check(t, r.await(dropped))
	r.once()
}

// stuck has each batch in flight until it is cancelled.
type stuck struct {
	driver.Peer
	submitted, cancelled func()
}

func (s stuck) Submit(uint64, *driver.Batch) error { s.submitted(); return nil }
func (s stuck) Cancel(uint64)                      { s.cancelled() }

// TestTheReasonOfAnEndIsTold ends a batch while it is being handed on: it can only be cancelled
// once the wrapped backend has it, and ends for the reason that came first all the same.
func TestTheReasonOfAnEndIsTold(t *testing.T) { testkit.InVirtualTime(t, theReasonOfAnEndIsTold) }

func theReasonOfAnEndIsTold(t *testing.T) {
	for _, why := range []error{driver.ErrClosed, driver.ErrPeerLost, driver.ErrAborted} {
		r := newRig(t, Rule{On: Write, Do: Late(us, 0)})
		b, p := r.near.(*Backend), r.peer.(*peer)
		release := func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			for _, f := range b.flightsOf(p) {
				f.release(why)
				f.release(driver.ErrClosed)
			}
		}
		abort := func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			for _, f := range b.flightsOf(p) {
				if f.observe(driver.ErrAborted) {
					f.finish(f.err)
				}
			}
		}
		p.Peer = stuck{p.Peer, release, abort}
		if err := r.await(r.write(0, 8)); !errors.Is(err, why) {
			t.Errorf("ended with %v, want %v", err, why)
		}
		r.once()
	}
}

func TestFailAndRefuse(t *testing.T) {
	r := newRig(t, Rule{On: Write, Size: Exactly(1), Do: Fail(driver.ErrRevoked)},
		Rule{On: Write, Size: Exactly(2), Do: Refuse(driver.ErrCorrupt)},
		Rule{On: Connect, Peer: Exactly(1), Do: Refuse(driver.ErrUnavailable)},
		Rule{On: Import, Skip: 1, Most: 1, Do: Refuse(driver.ErrBadToken)},
		Rule{On: Revoke, Most: 1, Do: Refuse(driver.ErrTimeout)},
		Rule{On: Register, Skip: 1, Do: Refuse(driver.ErrBusy)})
	if err := r.await(r.write(0, 1)); !errors.Is(err, driver.ErrRevoked) || r.landed(0, 1) &&
		r.from[0] != 0 {
		t.Errorf("fail: %v", err)
	}
	if err := r.peer.Submit(100, &driver.Batch{Op: driver.Write, Descs: r.desc(0, 2)}); !errors.Is(
		err, driver.ErrCorrupt) {
		t.Errorf("refuse: %v", err)
	}
	if _, err := r.near.Connect(context.Background(), r.far.Addr()); !errors.Is(err,
		driver.ErrUnavailable) {
		t.Errorf("connect: %v", err)
	}
	token, err := r.remote.AppendToken(nil)
	check(t, err)
	if _, _, err := r.peer.Import(token); !errors.Is(err, driver.ErrBadToken) {
		t.Errorf("import: %v", err)
	}
	r.imports()
	if err := r.local.Revoke(context.Background()); !errors.Is(err, driver.ErrTimeout) {
		t.Errorf("revoke: %v", err)
	}
	if _, err := r.near.Register(driver.Segment{Kind: driver.DRAM, Len: 1,
		Mem: r.from[:1]}); !errors.Is(err, driver.ErrBusy) {
		t.Errorf("register: %v", err)
	}
	r.once()
}

func TestStallIsFullForAWhile(t *testing.T) { testkit.InVirtualTime(t, stallIsFullForAWhile) }

func stallIsFullForAWhile(t *testing.T) {
	r := newRig(t, Rule{On: Write, Most: 1, Do: Stall(30 * ms)})
	begin := time.Now()
	if err := r.peer.Submit(100, &driver.Batch{Op: driver.Write, Descs: r.desc(0, 8)}); !errors.Is(
		err, driver.ErrFull) {
		t.Fatalf("stalled: %v", err)
	}
	ready := func() bool {
		ok, err := r.near.Arm()
		check(t, err)
		return ok
	}
	for !ready() { // which the end of the stall makes so
		if time.Since(begin) > patience {
			t.Fatal("nobody was told that there is room again")
		}
		time.Sleep(time.Millisecond)
	}
	check(t, r.await(r.write(0, 8)))
	if took := time.Since(begin); took < 30*time.Millisecond {
		t.Errorf("room after %v", took)
	}
}

func TestFlapLosesTheConnection(t *testing.T) { testkit.InVirtualTime(t, flapLosesTheConnection) }

func flapLosesTheConnection(t *testing.T) {
	r := newRig(t, Rule{On: Write, Every: 3, Most: 1, Do: Flap(50 * ms)},
		Rule{On: Write, Size: Exactly(7), Do: Swallow()})
	held := r.write(0, 7)
	check(t, r.await(r.write(8, 8)))
	begin := time.Now()
	if err := r.peer.Submit(100, &driver.Batch{Op: driver.Write, Descs: r.desc(0, 8)}); !errors.Is(
		err, driver.ErrPeerLost) {
		t.Errorf("submit: %v", err)
	}
	if err := r.await(held); !errors.Is(err, driver.ErrPeerLost) {
		t.Errorf("what was in flight: %v", err)
	}
	select {
	case <-r.peer.Lost():
	case <-time.After(patience):
		t.Error("Lost is not closed")
	}
	for {
		p, err := r.near.Connect(context.Background(), r.far.Addr())
		if err == nil {
			if took := time.Since(begin); took < 50*time.Millisecond {
				t.Errorf("connected after %v", took)
			}
			r.peer = p
			break
		}
		if !errors.Is(err, driver.ErrPeerLost) || time.Since(begin) > patience {
			t.Fatalf("connect: %v", err)
		}
		time.Sleep(time.Millisecond)
	}
	r.imports()
	check(t, r.await(r.write(0, 8)))
	r.once()
}

func TestLimitAndModelTakeTheirTime(t *testing.T) {
	for name, c := range map[string]struct {
		do    Deed
		least time.Duration
	}{
		"limit": {Limit(10e6, 0), 40 * ms}, // 4 x 100 kB
		"burst": {Limit(10e6, 1<<20), 0},
		"model": {Model(20*ms, ms, 1e9), 21 * ms},
	} {
		testkit.RunInVirtualTime(t, name, func(t *testing.T) {
			r := newRig(t, Rule{On: Write, Do: c.do})
			begin := time.Now()
			for range 4 {
				r.write(0, 100_000)
			}
			for tag := range r.tags {
				check(t, r.await(tag+1))
			}
			if took := time.Since(begin); took < c.least {
				t.Errorf("took %v, want at least %v", took, c.least)
			}
			r.once()
		})
	}
}

// TestTheSeedDecides has the same calls meet the same faults, and others with another seed.
func TestTheSeedDecides(t *testing.T) { testkit.InVirtualTime(t, theSeedDecides) }

func theSeedDecides(t *testing.T) {
	pattern := func(seed uint64) (list []bool) {
		r := newRigOf(t, seed, Rule{On: Write, Chance: 0.3, Do: Fail(driver.ErrPeerLost)},
			Rule{On: Write, Size: AtLeast(16), Chance: 0.5, Do: Delay(100*us, 50*us)})
		for i := range uint64(200) {
			list = append(list, r.await(r.write(0, 8+i%16)) != nil)
		}
		if h := r.hits(); h[0].Matched != 200 || h[0].Fired < 30 || h[0].Fired > 90 {
			t.Errorf("hits %+v", h)
		}
		return list
	}
	a, b, c := pattern(5), pattern(5), pattern(6)
	if !slices.Equal(a, b) {
		t.Error("the same seed, other faults")
	}
	if slices.Equal(a, c) {
		t.Error("another seed, the same faults")
	}
}

func TestConditions(t *testing.T) {
	r := newRig(t, Rule{On: Write, Skip: 2, Every: 3, Most: 2, Do: Fail(driver.ErrPeerLost)},
		Rule{On: Read, Do: Drop()},
		Rule{On: Write, Peer: Exactly(1), Do: Fail(driver.ErrRevoked)})
	var failed []int
	for i := range 20 {
		if r.await(r.write(0, 8)) != nil {
			failed = append(failed, i+1)
		}
	}
	if !slices.Equal(failed, []int{5, 8}) {
		t.Errorf("failed %v, want the third and the sixth after two", failed)
	}
	r.dial()
	if err := r.await(r.write(0, 8)); !errors.Is(err, driver.ErrRevoked) {
		t.Errorf("the second connection: %v", err)
	}
	if h := r.hits(); h[1] != (Hit{}) {
		t.Errorf("hits %+v", h)
	}
}

// TestPlacesAreBounded fills them without a completion, and empties them.
func TestPlacesAreBounded(t *testing.T) {
	r := newRig(t, Rule{On: Write, Do: Swallow()})
	full := 0
	for range flightsMax + 50 {
		r.tags++
		if err := r.peer.Submit(r.tags, &driver.Batch{Op: driver.Write,
			Descs: r.desc(0, 8)}); errors.Is(err, driver.ErrFull) {
			full++
			r.tags--
		} else {
			check(t, err)
		}
	}
	if full != 50 {
		t.Errorf("%d were refused of 50 too many", full)
	}
	check(t, r.near.Close())
	r.once()
}

// TestNothingIsAllocated submits what rules delay, over and over.
func TestNothingIsAllocated(t *testing.T) {
	r := newRig(t, Rule{On: Write, Do: Delay(us, 0)},
		Rule{On: Write, Do: Late(us, 0)})
	b := driver.Batch{Op: driver.Write, Descs: r.desc(0, 8)}
	var done [1]driver.Completion
	allocs := testkit.AllocsPerRun(500, func() {
		r.tags++
		if err := r.peer.Submit(r.tags, &b); err != nil {
			t.Error(err)
		}
		for n := 0; n == 0; n, _ = r.near.Poll(done[:]) {
			time.Sleep(10 * time.Microsecond) // AllocsPerRun leaves one processor to all
		}
	})
	if allocs > 0 && !raceEnabled {
		t.Errorf("%v allocations for a batch that is late", allocs)
	}
}
