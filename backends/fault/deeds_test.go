// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

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
	require.True(t, r.landed(0, 1000), "the bytes are not there, though mem copies in Submit")
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
	require.False(t, r.landed(0, 1000), "the bytes are there at once")
	check(t, r.await(tag))
	if took := time.Since(begin); took < late || !r.landed(0, 1000) {
		t.Errorf("complete after %v, the bytes are there: %v", took, r.landed(0, 1000))
	}
	cancelled := r.write(1000, 1000)
	r.peer.Cancel(cancelled)
	require.ErrorIs(t, r.await(cancelled), driver.ErrAborted, "cancelled before it began")
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
			require.True(t, r.landed(uint64(m.Data[0])*8, 8), "message %d came before its bytes",
				m.Data[0])
			got = append(got, m.Data[0])
		}
	}
	require.True(t, slices.IsSorted(got), "order %v", got)
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
	require.True(t, r.landed(0, 2000), "the bytes have not moved")
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
	require.ErrorIs(t, r.await(cancelled), driver.ErrAborted, "cancelled")
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
	r := newRig(t, Rule{On: Write, AtLeast: 2, Do: Swallow()},
		Rule{On: Write, Do: Drop()})
	swallowed, dropped := r.write(0, 1000), r.write(0, 1)
	r.silent(swallowed)
	check(t, r.far.Close())
	require.ErrorIs(t, r.await(swallowed), driver.ErrPeerLost, "swallowed")
	check(t, r.await(dropped))
	r.once()
}

// stuck has each batch in flight until it is cancelled.
type stuck struct {
	driver.Peer
	submitted, cancelled func(tag uint64)
}

func (s stuck) Submit(tag uint64, _ *driver.Batch) error { s.submitted(tag); return nil }
func (s stuck) Cancel(tag uint64)                        { s.cancelled(tag) }

// TestTheReasonOfAnEndIsTold ends a batch while it is being handed on: it can only be cancelled
// once the wrapped backend has it, and ends for the reason that came first all the same.
func TestTheReasonOfAnEndIsTold(t *testing.T) { testkit.InVirtualTime(t, theReasonOfAnEndIsTold) }

func theReasonOfAnEndIsTold(t *testing.T) {
	for _, why := range []error{driver.ErrClosed, driver.ErrPeerLost, driver.ErrAborted} {
		r := newRig(t, Rule{On: Write, Do: Late(us, 0)})
		b, p := r.near.(*Backend), r.peer.(*peer)
		with := func(f func(*flight)) func(uint64) {
			return func(tag uint64) {
				b.mu.Lock()
				defer b.mu.Unlock()
				f(b.flights[tag])
			}
		}
		p.Peer = stuck{p.Peer,
			with(func(f *flight) { f.release(why); f.release(driver.ErrClosed) }),
			with(func(f *flight) { f.setOutcome(driver.ErrAborted) })}
		require.ErrorIs(t, r.await(r.write(0, 8)), why, "ended with")
		r.once()
	}
}

// TestCloseWaitsForWhatIsHandedOn closes a connection, and the backend, in the middle of that: the
// batch has completed when Close returns, and Poll does not say ErrClosed before that was polled.
func TestCloseWaitsForWhatIsHandedOn(t *testing.T) {
	testkit.InVirtualTime(t, closeWaitsForWhatIsHandedOn)
}

func closeWaitsForWhatIsHandedOn(t *testing.T) {
	for _, closes := range []func(r *rig) error{
		func(r *rig) error { return r.peer.Close() },
		func(r *rig) error { return r.near.Close() },
	} {
		r := newRig(t, Rule{On: Write, Do: Late(us, 0)})
		p := r.peer.(*peer)
		came, leave, closed := make(chan bool), make(chan bool), make(chan error, 1)
		inner := p.Peer
		p.Peer = stuck{inner, func(uint64) { came <- true; <-leave }, func(tag uint64) {
			r.near.(*Backend).mu.Lock()
			defer r.near.(*Backend).mu.Unlock()
			r.near.(*Backend).flights[tag].setOutcome(driver.ErrAborted)
		}}
		tag := r.write(0, 8)
		<-came
		go func() { closed <- closes(r) }()
		r.silent(tag)
		require.Empty(t, closed)
		leave <- true
		check(t, <-closed)
		require.ErrorIs(t, r.await(tag), driver.ErrClosed)
	}
}

func TestFailAndRefuse(t *testing.T) {
	r := newRig(t, Rule{On: Write, AtLeast: 3, Do: Fail(driver.ErrRevoked)},
		Rule{On: Write, AtLeast: 2, Do: Refuse(driver.ErrCorrupt)})
	err := r.await(r.write(0, 3))
	require.ErrorIs(t, err, driver.ErrRevoked)
	require.Equal(t, make([]byte, 3), r.to[:3])
	require.ErrorIs(t, r.submit(0, 2), driver.ErrCorrupt)
	check(t, r.await(r.write(0, 1)))
	r.once()
}

// later lets time pass. It takes the backend's lock before and after, as whatever moves bytes
// meanwhile does.
func (r *rig) later(d time.Duration) {
	r.poll()
	time.Sleep(d)
	r.poll()
}

// TestBreaches has what breaks the contract do so.
func TestBreaches(t *testing.T) { testkit.InVirtualTime(t, breaches) }

func breaches(t *testing.T) {
	r := newRig(t, Rule{On: Write, Do: BreakCorrupt()})
	check(t, r.await(r.write(0, 1000)))
	require.True(t, r.landed(0, 500))
	require.Equal(t, make([]byte, 500), r.to[500:1000])

	r = newRig(t, Rule{On: Write, Do: BreakEarly(ms)})
	check(t, r.await(r.write(0, 1000)))
	require.False(t, r.landed(0, 1000))
	r.later(2 * ms)
	require.True(t, r.landed(0, 1000))

	r = newRig(t, Rule{On: Write, Do: Swallow()}, Rule{On: Write, Do: BreakLateWrite(ms)})
	tag := r.write(0, 1000)
	r.peer.Cancel(tag)
	require.ErrorIs(t, r.await(tag), driver.ErrAborted)
	require.False(t, r.landed(0, 1000))
	r.later(2 * ms)
	require.True(t, r.landed(0, 1000))
	r.once()

	r = newRig(t, Rule{On: Write, Do: BreakDuplicate()})
	tag = r.write(0, 8)
	check(t, r.await(tag))
	r.poll()
	require.Len(t, r.done[tag], 2)
}

// TestDropBehindLateBatches drops a key that a batch needs which has not begun.
func TestDropBehindLateBatches(t *testing.T) { testkit.InVirtualTime(t, dropBehindLateBatches) }

func dropBehindLateBatches(t *testing.T) {
	r := newRig(t, Rule{On: Write, Do: Late(ms, 0)})
	tag := r.write(0, 8)
	r.peer.Drop(r.key)
	check(t, r.await(tag))
	require.ErrorIs(t, r.await(r.write(0, 8)), driver.ErrBounds)
}

func TestStallIsFullForAWhile(t *testing.T) { testkit.InVirtualTime(t, stallIsFullForAWhile) }

func stallIsFullForAWhile(t *testing.T) {
	r := newRig(t, Rule{On: Write, Most: 1, Do: Stall(30 * ms)})
	begin := time.Now()
	require.ErrorIs(t, r.submit(0, 8), driver.ErrFull)
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
		Rule{On: Write, AtLeast: 9, Do: Swallow()})
	held := r.write(0, 9)
	check(t, r.await(r.write(16, 8)))
	begin := time.Now()
	require.ErrorIs(t, r.submit(0, 8), driver.ErrPeerLost)
	require.ErrorIs(t, r.await(held), driver.ErrPeerLost, "what was in flight")
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

// TestTheSeedDecides has the same calls meet the same faults, and others with another seed.
func TestTheSeedDecides(t *testing.T) { testkit.InVirtualTime(t, theSeedDecides) }

func theSeedDecides(t *testing.T) {
	pattern := func(seed uint64) (list []bool) {
		r := newRigOf(t, seed, Rule{On: Write, Chance: 0.3, Do: Fail(driver.ErrPeerLost)},
			Rule{On: Write, AtLeast: 16, Chance: 0.5, Do: Delay(100*us, 50*us)})
		for i := range uint64(200) {
			list = append(list, r.await(r.write(0, 8+i%16)) != nil)
		}
		if n := r.near.(*Backend).Fired()[0]; n < 30 || n > 90 {
			t.Errorf("%d of 200 hit", n)
		}
		return list
	}
	a, b, c := pattern(5), pattern(5), pattern(6)
	require.Equal(t, b, a)
	require.False(t, slices.Equal(a, c), "another seed, the same faults")
}

func TestConditions(t *testing.T) {
	r := newRig(t, Rule{On: Write, Skip: 2, Every: 3, Most: 2, Do: Fail(driver.ErrPeerLost)},
		Rule{On: Read, Do: Drop()})
	var failed []int
	for i := range 20 {
		if r.await(r.write(0, 8)) != nil {
			failed = append(failed, i+1)
		}
	}
	require.Equal(t, []int{5, 8}, failed)
	require.Equal(t, []uint64{2, 0}, r.near.(*Backend).Fired())
	for _, bad := range []Rule{{}, {On: Write}, {Do: Drop()}, {On: Write | Read, Do: Drop()},
		{On: 2 * Message, Do: Drop()}, {On: Write, Do: Drop(), Chance: 2},
		{On: Write, Do: Fail(nil)}, {On: Write, Do: Delay(-1, 0)},
		{On: Write, Do: Stall(TimeMax + 1)}} {
		_, err := Wrap(r.far, 0, bad)
		require.ErrorIs(t, err, driver.ErrBounds, "%+v", bad)
	}
}

// TestPlacesAreBounded fills them without a completion, and empties them.
func TestPlacesAreBounded(t *testing.T) {
	r := newRig(t, Rule{On: Write, Do: Swallow()})
	full := 0
	for range flightsMax + 50 {
		r.tags++
		if err := r.submit(0, 8); errors.Is(err, driver.ErrFull) {
			full++
			r.tags--
		} else {
			check(t, err)
		}
	}
	require.EqualValues(t, 50, full, "were refused of 50 too many")
	check(t, r.near.Close())
	r.once()
}
