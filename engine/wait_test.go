// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestEveryWaiterWakes has several goroutines wait for each of many posts, with
// a signal of the post before still about.
func TestEveryWaiterWakes(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	for range 300 {
		ctx := within(t) // a busy machine may take long for all of them
		check(t, tr.Post())
		var waiters sync.WaitGroup
		for range 4 {
			waiters.Go(func() {
				if err := tr.park(ctx, anyPost); err != nil {
					t.Error(err)
				}
			})
		}
		tr.sleepers.wake() // stale
		for !f.finishOne(nil) {
		}
		waiters.Wait()
		if t.Failed() {
			return
		}
	}
}

// TestWaitSpinsUnlessTheBackendAsks has a spin that would last longer than any test.
func TestWaitSpinsUnlessTheBackendAsks(t *testing.T) {
	for _, sleep := range []bool{false, true} {
		f := &fake{manual: true, sleep: sleep}
		p, r, m := overFake(t, f, limit)
		p.e.cfg.Spin = 2 * limit
		tr := transfer(t, p, Write)
		scattered(t, tr, r, m, 1)
		check(t, tr.Post())
		spun := make(chan bool, 1)
		go func() { spun <- tr.spin() }()
		if sleep && <-spun {
			t.Error("what is under way is found done")
		}
		for !f.finishOne(nil) {
		}
		if !sleep && !<-spun {
			t.Error("who spins does not find the end")
		}
		check(t, tr.Wait(within(t)))
	}
}

// TestAdvanceCopiesAPiece: each call has the backend copy for one batch, and Done for none.
func TestAdvanceCopiesAPiece(t *testing.T) {
	f, helps := &fake{manual: true}, 0
	f.onHelp = func(tag uint64) bool {
		if !f.drop(tag, nil) {
			return false // the engine's goroutine has its completion in hand
		}
		helps++
		return true
	}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 3)
	check(t, tr.Post())
	require.False(t, tr.Done())
	require.Zero(t, helps)
	for i := 1; i <= 3; i++ {
		done := tr.Advance()
		require.False(t, done && i < 3)
		require.Equal(t, i, helps)
	}
	require.Eventually(t, tr.Done, limit, time.Millisecond)
	require.True(t, tr.Advance())
	require.Equal(t, 3, helps)
	check(t, tr.Err())
}

// TestAdvancePollsForOthers: what a backend ends while it is lent a goroutine wakes nobody, and may
// be of another post, even where that of the goroutine is over.
func TestAdvancePollsForOthers(t *testing.T) {
	f := &reaper{fake: &fake{manual: true}}
	e := open(t, "helped", func(c *Config) { c.Backends = []driver.Backend{f} })
	r := register(t, e, "r", 1<<16)
	p, err := e.Self()
	check(t, err)
	m := remote(t, p, "r")
	list := []*Transfer{transfer(t, p, Write), transfer(t, p, Write)}
	require.Eventually(t, f.armed.Load, limit, time.Millisecond) // the engine's goroutine sleeps
	f.onHelp = func(uint64) bool {
		for _, tr := range list {
			require.ErrorIs(t, tr.Err(), ErrBusy)
			f.mu.Lock()
			f.ready = append(f.ready, driver.Completion{Tag: f.tags[0]})
			f.tags = f.tags[1:]
			f.mu.Unlock()
			if tr == list[0] {
				require.Eventually(t, tr.Done, limit, time.Millisecond) // another goroutine polls
			}
		}
		return true
	}
	for _, tr := range list {
		check(t, tr.Add(r, 0, m, 1<<15, 1))
		check(t, tr.Post())
	}
	require.True(t, list[0].Advance())
	require.Eventually(t, func() bool { return list[1].Err() == nil }, limit, time.Millisecond,
		"nobody polls for the other transfer")
}

// parkedContext has the first goroutine that is about to sleep until it ends stand there: it has
// looked at the state of the transfer already.
type parkedContext struct {
	context.Context
	came, goOn chan struct{}
	first      sync.Once
}

func (c *parkedContext) Done() <-chan struct{} {
	c.first.Do(func() {
		c.came <- struct{}{}
		<-c.goOn
	})
	return c.Context.Done()
}

func newParkedContext() *parkedContext {
	return &parkedContext{Context: context.Background(), came: make(chan struct{}),
		goOn: make(chan struct{})}
}

// awake fails the test if a goroutine that was woken sleeps on.
func awake(t *testing.T, ended <-chan error) {
	t.Helper()
	select {
	case err := <-ended:
		check(t, err)
	case <-time.After(limit):
		t.Fatal("it still sleeps, though its post is over")
	}
}

// endPost ends the post that is under way.
func endPost(t *testing.T, f *fake, tr *Transfer) {
	t.Helper()
	for !f.finishOne(nil) {
	}
	check(t, tr.Wait(within(t)))
}

// TestAbortOutlastsItsPost: the post of an Abort that is about to sleep ends, and the program posts
// the transfer anew. Abort returns, for its own post is over, and does not await the next one.
func TestAbortOutlastsItsPost(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	ctx := newParkedContext()
	check(t, tr.Post())
	aborted := make(chan error, 1)
	go func() { aborted <- tr.Abort(ctx) }()
	<-ctx.came
	endPost(t, f, tr)
	check(t, tr.Post())
	close(ctx.goOn)
	awake(t, aborted) // the fake has the next post until the line below
	endPost(t, f, tr)
}

// TestCompletedTakesNoWaitersSignal: a goroutine that receives from Completed leaves the one in
// Wait its own signal.
func TestCompletedTakesNoWaitersSignal(t *testing.T) {
	f := &fake{manual: true}
	p, r, m := overFake(t, f, limit)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, m, 1)
	ctx, completed := newParkedContext(), tr.Completed()
	check(t, tr.Post())
	waited := make(chan error, 1)
	go func() { waited <- tr.park(ctx, anyPost) }()
	<-ctx.came
	for !f.finishOne(nil) {
	}
	<-completed
	close(ctx.goOn)
	awake(t, waited)
}

// TestOnDone counts the calls, one for each post, also of one that fails.
func TestOnDone(t *testing.T) {
	p, src, m, _ := pair(t, 1<<20)
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, m, 0, 1<<20))
	told := make(chan bool, 16)
	check(t, tr.OnDone(func() { told <- tr.Done() }))
	for range 3 {
		check(t, tr.Post())
		check(t, tr.Wait(context.Background()))
		select {
		case done := <-told:
			require.True(t, done, "told of a transfer that is not done")
		case <-time.After(10 * time.Second):
			t.Fatal("nobody was told")
		}
	}
	check(t, tr.OnDone(nil))
	check(t, tr.Post())
	check(t, tr.Wait(context.Background()))
	require.Empty(t, told, "told once more than posted")
	require.Zero(t, testkit.AllocsPerRun(10, func() { _ = tr.OnDone(nil) }), "allocations")
}

// TestOnDoneWhilePosted: the hook belongs to the post that is under way.
func TestOnDoneWhilePosted(t *testing.T) {
	p, src, m, _ := pair(t, 1<<20)
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, m, 0, 1<<20))
	check(t, tr.OnDone(func() {}))
	tr.stateWord.Store(uint64(posted))
	err := tr.OnDone(nil)
	tr.stateWord.Store(uint64(idle))
	require.ErrorIs(t, err, ErrBusy, "changed the hook of a transfer that is posted")
}

// TestMessageByAnotherLane reads by one backend and tells the peer by another,
// which is not posted to before the first has finished. Nobody spins: the engine
// itself has to look for the completion.
func TestMessageByAnotherLane(t *testing.T) {
	data, talk := &fake{name: "data", manual: true, mute: true}, &fake{name: "talk"}
	var ops []driver.Op
	talk.onSubmit = func(_ int, op driver.Op, _ uint64, notify bool) error {
		ops = append(ops, op)
		return nil
	}
	e := open(t, "e", func(c *Config) {
		c.Backends = []driver.Backend{data, talk}
		c.Spin = -1
	})
	r := register(t, e, "r", 1<<16)
	p, err := e.Self()
	check(t, err)
	tr, err := e.NewTransfer(p, Read, Route{})
	check(t, err)
	scattered(t, tr, r, remote(t, p, "r"), 100)
	check(t, tr.Notify([]byte("done")))
	for round := range 5 {
		check(t, tr.Post())
		for range 100 {
			for !data.finishOne(nil) {
				e.lanes[0].poll()
			}
		}
		e.lanes[0].poll()
		check(t, tr.Wait(within(t)))
		if len(ops) != round+1 || ops[round] != Write {
			t.Fatalf("messages went as %v, want as writes", ops)
		}
	}
	check(t, tr.Close())
}

// TestSlots takes every slot that a configuration may have: each is taken once, finds its transfer
// by the tag of any batch, and is taken again once it is given back.
func TestSlots(t *testing.T) {
	var s slots
	s.init(transfersLimit)
	live := make([]Transfer, transfersLimit)
	for i := range live {
		if !s.acquire(&live[i]) {
			t.Fatalf("no slot after %d of %d", i, len(live))
		}
		slot, generation, bit := untag(tag(live[i].slot, s.renew(&live[i]), batchesInFlight-1))
		if slot != live[i].slot || generation != 1 || bit != batchesInFlight-1 {
			t.Fatalf("the tag of slot %d is for %d, %d, %d", live[i].slot, slot, generation, bit)
		}
		if s.get(slot) != &live[i] {
			t.Fatalf("slot %d has another transfer", slot)
		}
	}
	require.False(t, s.acquire(new(Transfer)), "one more than there are slots")
	s.free(&live[5])
	require.Nil(t, s.get(live[5].slot))
	require.True(t, s.acquire(&live[0]))
	require.Equal(t, live[5].slot, live[0].slot)
	require.EqualValues(t, 2, s.renew(&live[0]), "the generation of a slot only grows")
}
