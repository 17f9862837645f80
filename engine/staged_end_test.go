// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/internal/wire"
)

// TestStagedRefusals are what the peer does not allow, or has no memory for.
func TestStagedRefusals(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	testkit.RunInVirtualTime(t, "read-only", func(t *testing.T) {
		a, b := newHost(t, "a"), newHost(t, "b")
		seg, _ := b.dev.alloc(t, 4096)
		seg.ReadOnly = true
		_, err := b.e.Register("sealed", seg)
		check(t, err)
		p := connect(t, a.e, b.e)
		m := remote(t, p, "sealed")
		tr := transfer(t, p, Read)
		check(t, tr.Add(a.hbm, 0, m, 0, 4096))
		run(t, tr)
		m.readOnly = false // a peer that does not care
		tr = transfer(t, p, Write)
		check(t, tr.Add(a.hbm, 0, m, 0, 4096))
		check(t, tr.Post())
		require.ErrorIs(t, tr.Wait(within(t)), driver.ErrReadOnly, "a write")
		m.size *= 2
		require.NoError(t, tr.Reset())
		check(t, tr.Add(a.hbm, 0, m, 4000, 4096))
		check(t, tr.Post())
		require.Error(t, tr.Wait(within(t)), "a write past the end of the memory")
	})
	testkit.RunInVirtualTime(t, "no memory here", func(t *testing.T) {
		a, b := newHost(t, "a", func(c *Config) { c.StagingBytes = -1 }), newHost(t, "b")
		p := connect(t, a.e, b.e)
		wantErr(t, transfer(t, p, Write).Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1), ErrNoRoute,
			"StagingBytes")
	})
	testkit.RunInVirtualTime(t, "none at the peer", func(t *testing.T) {
		a, b := newHost(t, "a"), newHost(t, "b", func(c *Config) { c.StagingBytes = -1 })
		p := connect(t, a.e, b.e)
		wantErr(t, transfer(t, p, Write).Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1), ErrNoRoute,
			"gives no staging memory")
	})
	testkit.RunInVirtualTime(t, "too little at the peer", func(t *testing.T) {
		b := newHost(t, "b", func(c *Config) { c.StagingBytes = slotBytes })
		one, two := newHost(t, "one"), newHost(t, "two")
		p := connect(t, one.e, b.e)
		tr := transfer(t, p, Write)
		check(t, tr.Add(one.hbm, 0, remote(t, p, "hbm"), 0, hostBytes)) // by one slot
		run(t, tr)
		q := connect(t, two.e, b.e)
		wantErr(t, transfer(t, q, Write).Add(two.hbm, 0, remote(t, q, "hbm"), 0, 1), ErrNoRoute,
			"raise Config.StagingBytes")
		check(t, tr.Close())
		check(t, p.Close())
		until(t, "room again", func() bool { return b.e.stager.used.Load() == 0 })
		tr = transfer(t, q, Write)
		check(t, tr.Add(two.hbm, 0, remote(t, q, "hbm"), 0, 1))
		run(t, tr)
	})
}

// TestStagedCrowd has many batches of several transfers share the slots.
func TestStagedCrowd(t *testing.T) {
	a, b := newHost(t, "a"), newHost(t, "b")
	p := connect(t, a.e, b.e)
	m := remote(t, p, "hbm")
	fill(a.mem, 9)
	const n = 40
	var all []*Transfer
	for i := range uint64(n) {
		tr := transfer(t, p, Write)
		for off := i * 100; off+100 <= hostBytes; off += 100 * n {
			// more batches than the peer takes at once
			check(t, tr.Add(a.hbm, off, m, off, 100))
		}
		check(t, tr.Post())
		all = append(all, tr)
	}
	for _, tr := range all {
		check(t, tr.Wait(within(t)))
	}
	require.True(t, bytes.Equal(a.mem[:hostBytes/100*100], b.mem[:hostBytes/100*100]),
		"other bytes have come")
	require.Zero(t, a.e.Stats().Stray+b.e.Stats().Stray, "completions for nobody")
}

// TestStagedPeerCloses ends the peer in the middle: the transfer ends soon.
func TestStagedPeerCloses(t *testing.T) { testkit.InVirtualTime(t, stagedPeerCloses) }

func stagedPeerCloses(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	a, b := newHost(t, "a"), newHost(t, "b")
	p := connect(t, a.e, b.e)
	m := remote(t, p, "hbm")
	tr := transfer(t, p, Write)
	check(t, tr.Add(a.hbm, 0, m, 0, hostBytes))
	run(t, tr)
	b.dev.keep()
	check(t, tr.Post())
	until(t, "a hop is held", func() bool { return b.dev.kept() > 0 })
	check(t, b.e.Close())
	require.Error(t, tr.Wait(within(t)), "the peer was closed, and the transfer succeeded")
	check(t, p.Close())
}

// TestStagedClose closes this side in the middle.
func TestStagedClose(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	for _, op := range []Op{Write, Read} {
		a, b := newHost(t, "a"), newHost(t, "b")
		p := connect(t, a.e, b.e)
		tr := transfer(t, p, op)
		check(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, hostBytes))
		run(t, tr)
		check(t, tr.Post())
		check(t, p.Close())
		if err := tr.Wait(context.Background()); err != nil && !errors.Is(err, ErrClosed) {
			t.Errorf("%v: %v", op, err)
		}
	}
}

// TestStagedWindowWithoutProof keeps staging memory that a peer may still write into, and gives it
// back once that is proved to be over.
func TestStagedWindowWithoutProof(t *testing.T) {
	testkit.InVirtualTime(t, stagedWindowWithoutProof)
}

func stagedWindowWithoutProof(t *testing.T) {
	testkit.CheckLeaks(t, hostmem.InUse)
	var refuses atomic.Bool
	var asked atomic.Int32
	wire := rigged(t, mem.Config{}, rig{onRevoke: func(context.Context) error {
		if asked.Add(1); refuses.Load() {
			return ErrTimeout
		}
		return nil
	}})
	a := newHost(t, "a")
	b := newHostOver(t, wire, "b", func(c *Config) { c.AbortGrace = 20 * time.Millisecond })
	p := connect(t, a.e, b.e)
	tr := transfer(t, p, Write)
	check(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1))
	run(t, tr)
	check(t, tr.Close())
	refuses.Store(true)
	check(t, p.Close())
	until(t, "the revoke is asked more than once", func() bool { return asked.Load() >= 3 })
	if b.e.stager.used.Load() == 0 {
		t.Error("staging memory was given back without proof")
	}
	refuses.Store(false)
	until(t, "it is given back", func() bool { return b.e.stager.used.Load() == 0 })
}

// listener is the way back to a peer.
type listener struct {
	driver.Backend
	heard chan []byte
}

func (l *listener) Answer(_ uint64, b []byte) error {
	l.heard <- bytes.Clone(b)
	return nil
}

// TestStagedWithdrawnWhileClosing has an engine that closes say of no hop that it has ended
// while it is under way: the peer's Abort would return too early.
func TestStagedWithdrawnWhileClosing(t *testing.T) {
	testkit.InVirtualTime(t, stagedWithdrawnWhileClosing)
}

func stagedWithdrawnWhileClosing(t *testing.T) {
	s := newHost(t, "b").e.stager
	ears := &listener{heard: make(chan []byte, 9)}
	from := &sender{lane: &lane{e: s.e, b: ears}, gone: make(chan struct{})}
	w := &window{s: s, from: from, by: from.lane, loop: newLoop(), hops: make([]hop, 1), busy: 1}
	h := &w.hops[0]
	*h = hop{w: w, req: wire.Hop{Number: 7}, memory: &stagedMemory{active: 1}}
	from.window = w
	ended := make(chan struct{})
	go func() {
		w.end()
		close(ended)
	}()
	eventually(t, "the window ends", func() {
		for over := false; !over; time.Sleep(time.Millisecond) {
			asked := make(chan bool)
			w.loop.push(func() { asked <- w.over })
			over = <-asked
		}
	})
	s.request(from, wire.KindWithdrawn, h.req.AppendName(nil))
	done := make(chan struct{})
	w.loop.push(func() { close(done) })
	<-done
	select {
	case b := <-ears.heard:
		t.Errorf("while the hop is under way the peer is told %v", b)
	default:
	}
	w.loop.push(func() { h.finish(ErrAborted) })
	<-ended
	require.Len(t, ears.heard, 1, "answers, want that of the hop")
}
