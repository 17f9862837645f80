// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// twoPeers opens an engine over a fake and another one that it connects to twice.
func twoPeers(t *testing.T, f *fake) (a, b *Peer, local *Region) {
	t.Helper()
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{f} })
	other := open(t, "other", func(c *Config) { c.Backends = []driver.Backend{&fake{}} })
	register(t, other, "r", 1<<16)
	return connect(t, e, other), connect(t, e, other), register(t, e, "local", 1<<16)
}

// TestOnePeerHoldsUpNoOther has a peer that never has room: a transfer to another
// one overtakes those that wait for it.
func TestOnePeerHoldsUpNoOther(t *testing.T) { testkit.InVirtualTime(t, onePeerHoldsUpNoOther) }

func onePeerHoldsUpNoOther(t *testing.T) {
	f := &fake{}
	f.onSubmit = func(peer int, _ driver.Op, _ uint64, _ bool) error {
		if peer == 0 {
			return ErrFull
		}
		return nil
	}
	stuck, lively, local := twoPeers(t, f)
	for range 3 {
		tr := transfer(t, stuck, Write)
		check(t, tr.Add(local, 0, remote(t, stuck, "r"), 0, 1))
		check(t, tr.Post())
	}
	tr := transfer(t, lively, Write)
	check(t, tr.Add(local, 0, remote(t, lively, "r"), 0, 1))
	check(t, tr.Post())
	if err := tr.Wait(within(t)); err != nil { // those that wait are given longer
		t.Errorf("a transfer to another peer: %v", err)
	}
	check(t, stuck.Close())
}

// TestRoomIsShared has room for one batch at a time, which two peers want: they have it in turns,
// however often they ask in vain.
func TestRoomIsShared(t *testing.T) {
	const batches = 100
	f := &fake{manual: true}
	var turns [2]int
	var refused [2]bool // since there was room
	f.onSubmit = func(peer int, _ driver.Op, _ uint64, _ bool) error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if len(f.tags) > 0 {
			refused[peer] = true
			return ErrFull
		}
		turns[peer]++
		refused[peer] = turns[peer] == batches // it wants no more
		return nil
	}
	a, b, local := twoPeers(t, f)
	first, second := transfer(t, a, Write), transfer(t, b, Write)
	scattered(t, first, local, remote(t, a, "r"), batches)
	scattered(t, second, local, remote(t, b, "r"), batches)
	check(t, first.Post())
	check(t, second.Post())
	for end := time.Now().Add(limit); !(first.Done() || second.Done()) && time.Now().Before(end); {
		f.mu.Lock()
		if len(f.tags) > 0 && refused[0] && refused[1] { // nobody is about to ask
			refused = [2]bool{turns[0] == batches, turns[1] == batches}
			f.finish(nil)
		}
		f.mu.Unlock()
		runtime.Gosched()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	require.GreaterOrEqual(t, min(turns[0], turns[1]), batches/2, "turns of %v", turns)
	f.manual = false
	for len(f.tags) > 0 {
		f.finish(nil)
	}
}

// TestLostPeerEndsWhoWaits has transfers wait for room at a peer that dies
// meanwhile.
func TestLostPeerEndsWhoWaits(t *testing.T) { testkit.InVirtualTime(t, lostPeerEndsWhoWaits) }

func lostPeerEndsWhoWaits(t *testing.T) {
	dead := make(chan struct{})
	var peer *fakePeer
	f := &fake{}
	f.onSubmit = func(int, driver.Op, uint64, bool) error {
		select {
		case <-dead:
			return ErrPeerLost
		default:
			return ErrFull
		}
	}
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{f} })
	local := register(t, e, "local", 1<<16)
	p, err := e.Self()
	check(t, err)
	peer = p.conns[0].p.(*fakePeer)
	tr := transfer(t, p, Write)
	check(t, tr.Add(local, 0, remote(t, p, "local"), 1<<15, 1))
	check(t, tr.Post())
	time.AfterFunc(20*time.Millisecond, func() { close(dead); peer.lose() })
	require.ErrorIs(t, tr.Wait(within(t)), ErrPeerLost)
}

// TestRoomThatComesWhileAnotherSubmits has room come while a goroutine that drains the backlog
// has been refused and does not know yet: the wake-up for that room found it busy, and no other
// one comes.
func TestRoomThatComesWhileAnotherSubmits(t *testing.T) {
	calls := 0
	var c *conn
	f := &fake{}
	f.onSubmit = func(int, driver.Op, uint64, bool) error {
		switch calls++; calls {
		case 1: // in Post
			return ErrFull
		case 2: // for the backlog
			c.drain() // as the goroutine does that the descriptor wakes
			return ErrFull
		}
		return nil
	}
	p, src, m := overFake(t, f, time.Minute)
	c = p.conns[0]
	tr := transfer(t, p, Write)
	check(t, tr.Add(src, 0, m, 0, 1))
	check(t, tr.Post())
	require.NoError(t, tr.Wait(within(t)))
	require.Equal(t, 3, calls)
}

// TestAbortOutOfTheBacklog ends a post that waits behind another one, for a peer that takes
// nothing: it is over at once, is never submitted, and the other one keeps its place.
func TestAbortOutOfTheBacklog(t *testing.T) {
	var room atomic.Bool
	var seen []int
	f := &fake{}
	f.onSubmit = func(_ int, _ driver.Op, tag uint64, _ bool) error {
		if !room.Load() {
			return ErrFull
		}
		slot, _, _ := untag(tag)
		seen = append(seen, slot)
		return nil
	}
	p, src, m := overFake(t, f, time.Minute)
	var list []*Transfer
	for range 3 {
		tr := transfer(t, p, Write)
		check(t, tr.Add(src, 0, m, 0, 1))
		check(t, tr.Post())
		list = append(list, tr)
	}
	require.NoError(t, list[1].Abort(within(t)))
	require.ErrorIs(t, list[1].Err(), ErrAborted)
	require.EqualValues(t, 2, p.conns[0].waiting.Load())
	room.Store(true)
	p.conns[0].lane.poll()
	require.NoError(t, list[0].Wait(within(t)))
	require.NoError(t, list[2].Wait(within(t)))
	require.Equal(t, []int{list[0].slot, list[2].slot}, seen)
	require.Zero(t, p.conns[0].waiting.Load())
}

// TestFailureEndsWhatWaitsElsewhere has a batch fail at one connection while the rest of its post
// waits for room at another one, which never has any: the post ends at once.
func TestFailureEndsWhatWaitsElsewhere(t *testing.T) {
	testkit.InVirtualTime(t, failureEndsWhatWaitsElsewhere)
}

func failureEndsWhatWaitsElsewhere(t *testing.T) {
	failing, full := &fake{name: "failing", manual: true,
		sleep: true}, &fake{name: "full", sleep: true}
	full.onSubmit = func(int, driver.Op, uint64, bool) error { return ErrFull }
	e := open(t, "e", func(c *Config) { c.Backends = []driver.Backend{failing, full} })
	r := register(t, e, "r", 1<<16)
	p, err := e.Self()
	require.NoError(t, err)
	tr := transfer(t, p, Write)
	scattered(t, tr, r, remote(t, p, "r"), 2)
	require.NoError(t, tr.prepare())
	require.Same(t, p.conns[0], tr.batches[0].conn)
	tr.batches[1].conn = p.conns[1]
	tr.conns.Store(&p.conns)
	require.NoError(t, tr.Post())
	require.EqualValues(t, 1, p.conns[1].waiting.Load())
	ended := make(chan error, 1)
	go func() { ended <- tr.Wait(within(t)) }()
	require.Eventually(t, func() bool { return tr.sleepers.count.Load() > 0 }, limit,
		time.Millisecond)
	failed := errors.New("this batch failed")
	failing.finishOne(failed)
	require.ErrorIs(t, <-ended, failed)
	require.Zero(t, p.conns[1].waiting.Load())
}
