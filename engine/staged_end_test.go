// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/internal/testing/testkit"
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
		if err := tr.Wait(within(t)); !errors.Is(err, driver.ErrReadOnly) {
			t.Errorf("a write: %v", err)
		}
		m.size *= 2
		require.NoError(t, tr.Reset())
		check(t, tr.Add(a.hbm, 0, m, 4000, 4096))
		check(t, tr.Post())
		if err := tr.Wait(within(t)); err == nil {
			t.Error("a write past the end of the memory")
		}
	})
	testkit.RunInVirtualTime(t, "no memory here", func(t *testing.T) {
		a, b := newHost(t, "a", func(c *Config) { c.StagingBytes = -1 }), newHost(t, "b")
		p := connect(t, a.e, b.e)
		if err := transfer(t, p, Write).Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1); !errors.Is(err,
			ErrNoRoute) || !strings.Contains(err.Error(), "StagingBytes") {
			t.Errorf("got %v", err)
		}
	})
	testkit.RunInVirtualTime(t, "none at the peer", func(t *testing.T) {
		a, b := newHost(t, "a"), newHost(t, "b", func(c *Config) { c.StagingBytes = -1 })
		p := connect(t, a.e, b.e)
		if err := transfer(t, p, Write).Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1); !errors.Is(err,
			ErrNoRoute) || !strings.Contains(err.Error(), "gives no staging memory") {
			t.Errorf("got %v", err)
		}
	})
	testkit.RunInVirtualTime(t, "too little at the peer", func(t *testing.T) {
		b := newHost(t, "b", func(c *Config) { c.StagingBytes = slotBytes })
		one, two := newHost(t, "one"), newHost(t, "two")
		p := connect(t, one.e, b.e)
		tr := transfer(t, p, Write)
		check(t, tr.Add(one.hbm, 0, remote(t, p, "hbm"), 0, hostBytes)) // by one slot
		run(t, tr)
		q := connect(t, two.e, b.e)
		if err := transfer(t, q, Write).Add(two.hbm, 0, remote(t, q, "hbm"), 0, 1); !errors.Is(err,
			ErrNoRoute) || !strings.Contains(err.Error(), "raise Config.StagingBytes") {
			t.Errorf("got %v", err)
		}
		check(t, tr.Close())
		check(t, p.Close())
		eventually(t, "room again", func() {
			for b.e.stager.used.Load() > 0 {
				time.Sleep(time.Millisecond)
			}
		})
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
	if whole := hostBytes / 100 * 100; !bytes.Equal(a.mem[:whole], b.mem[:whole]) {
		t.Error("other bytes have come")
	}
	if stray := a.e.Stats().Stray + b.e.Stats().Stray; stray != 0 {
		t.Errorf("%d completions for nobody", stray)
	}
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
	eventually(t, "a hop is held", func() {
		for b.dev.kept() == 0 {
			time.Sleep(time.Millisecond)
		}
	})
	check(t, b.e.Close())
	if err := tr.Wait(within(t)); err == nil {
		t.Error("the peer was closed, and the transfer succeeded")
	}
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
	eventually(t, "the revoke is asked more than once", func() {
		for asked.Load() < 3 {
			time.Sleep(time.Millisecond)
		}
	})
	if b.e.stager.used.Load() == 0 {
		t.Error("staging memory was given back without proof")
	}
	refuses.Store(false)
	eventually(t, "it is given back", func() {
		for b.e.stager.used.Load() > 0 {
			time.Sleep(time.Millisecond)
		}
	})
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
	*h = hop{w: w, req: exchange.Hop{Number: 7}, memory: &stagedMemory{active: 1}}
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
	s.request(from, exchange.IsWithdrawn, h.req.AppendName(nil))
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
	if len(ears.heard) != 1 {
		t.Errorf("%d answers, want that of the hop", len(ears.heard))
	}
}
