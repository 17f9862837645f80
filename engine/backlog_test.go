// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
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
func TestOnePeerHoldsUpNoOther(t *testing.T) {
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
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := tr.Wait(ctx); err != nil {
		t.Errorf("a transfer to another peer: %v", err)
	}
	check(t, stuck.Close())
}

// TestRoomIsShared has room for one batch at a time, which two peers want: both
// move on.
func TestRoomIsShared(t *testing.T) {
	f := &fake{room: 1, manual: true}
	turns := map[int]int{}
	f.onSubmit = func(peer int, _ driver.Op, _ uint64, _ bool) error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if len(f.tags) == 0 {
			turns[peer]++
		}
		return nil
	}
	a, b, local := twoPeers(t, f)
	first, second := transfer(t, a, Write), transfer(t, b, Write)
	scattered(t, first, local, remote(t, a, "r"), 100)
	scattered(t, second, local, remote(t, b, "r"), 100)
	check(t, first.Post())
	check(t, second.Post())
	for end := time.Now().Add(limit); !(first.Done() || second.Done()) && time.Now().Before(end); {
		f.finishOne(nil)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if turns[0] < 30 || turns[1] < 30 {
		t.Errorf("when the first had all its turns they had %v", turns)
	}
	f.room, f.manual = 0, false
	for len(f.tags) > 0 {
		f.finish(nil)
	}
}

// TestLostPeerEndsWhoWaits has transfers wait for room at a peer that dies
// meanwhile.
func TestLostPeerEndsWhoWaits(t *testing.T) {
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
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if err := tr.Wait(ctx); !errors.Is(err, ErrPeerLost) {
		t.Errorf("got %v, want ErrPeerLost", err)
	}
}
