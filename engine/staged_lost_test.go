// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestAHopThatWasGivenUpIsNotOver when the peer is lost, or the chain closed: a local backend has
// it still.
func TestAHopThatWasGivenUpIsNotOver(t *testing.T) {
	testkit.InVirtualTime(t, aHopThatWasGivenUpIsNotOver)
}

func aHopThatWasGivenUpIsNotOver(t *testing.T) {
	wire := newMem(t)
	d := newDevice(t, "device", driver.HBM)
	d.hung, d.stuck = true, true
	a := open(t, "a", func(c *Config) {
		c.Backends, c.AbortGrace = []driver.Backend{wire, d}, 200*time.Millisecond
	})
	seg, local := d.alloc(t, 1<<20)
	r, err := a.Register("hbm", seg)
	require.NoError(t, err)
	b := newHost(t, "b")
	fill(b.mem, 7)
	p := connect(t, a, b.e)
	tr := transfer(t, p, Read)
	check(t, tr.Add(r, 0, remote(t, p, "hbm"), 0, 1<<20))
	run(t, tr)
	fill(b.mem, 99)
	d.keep()
	before := bytes.Clone(local)
	check(t, tr.Post())
	until(t, "the near hop is in hand", func() bool { return d.kept() > 0 })
	aborted := make(chan error, 1)
	go func() { aborted <- tr.Abort(within(t)) }()
	staged := p.chains()
	lost := make(chan struct{})
	var look func()
	look = func() { // always in the queue, so that no other task comes between
		if !slices.ContainsFunc(staged.slots, func(s *slot) bool { return s.lost }) {
			time.Sleep(time.Millisecond)
			staged.loop.push(look)
			return
		}
		staged.carrierLost(p.conns[0].lane)
		close(lost)
	}
	require.True(t, staged.loop.push(look))
	select {
	case <-lost:
	case <-within(t).Done():
		t.Fatal("the hop was not given up")
	}
	require.ErrorContains(t, <-aborted, "do not reuse the memory")
	require.True(t, tr.isUnproven())
	require.Equal(t, before, local)
	d.release()
	until(t, "the hop has ended after all", func() bool { return a.slots.proof() == nil })
}

// TestAChainHearsOfTheLossFirst: the connection is lost while the peer has a piece in hand, and
// this side has not heard yet that its own hop of that piece has ended.
func TestAChainHearsOfTheLossFirst(t *testing.T) {
	a, b := newHost(t, "a"), newHost(t, "b")
	p := connect(t, a.e, b.e)
	tr := transfer(t, p, Write)
	check(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1<<20))
	run(t, tr)
	b.dev.keep()
	t.Cleanup(b.dev.drop)
	check(t, tr.Post())
	sp := p.chains()
	tell := func(do func()) {
		done := make(chan struct{})
		require.True(t, sp.loop.push(func() { do(); close(done) }))
		<-done
	}
	var late *slot
	until(t, "the peer has it in hand", func() bool {
		tell(func() {
			for _, s := range sp.slots {
				if s.step == atHand {
					s.step, late = atBy, s
				}
			}
		})
		return late != nil
	})
	check(t, p.conns[0].p.Close())
	<-p.Lost()
	tell(func() { late.proceed() })
	err := tr.Wait(within(t))
	require.ErrorIs(t, err, ErrPeerLost)
	require.ErrorIs(t, err, ErrUnproven)
}

// TestAChainGoesByAnotherConnection when that is lost by which it had the peer's staging memory.
func TestAChainGoesByAnotherConnection(t *testing.T) {
	two := func(name string) *host {
		h := &host{dev: newDevice(t, "device", driver.HBM)}
		h.e = open(t, name, func(c *Config) {
			w := newMem(t)
			c.Backends = []driver.Backend{w, plainTCP(t), h.dev}
		})
		seg, b := h.dev.alloc(t, hostBytes)
		h.mem = b
		var err error
		h.hbm, err = h.e.Register("hbm", seg)
		require.NoError(t, err)
		return h
	}
	a, b := two("a"), two("b")
	p := connect(t, a.e, b.e)
	m := remote(t, p, "hbm")
	tr := transfer(t, p, Write)
	check(t, tr.Add(a.hbm, 0, m, 0, hostBytes))
	run(t, tr)
	check(t, tr.Reset())
	check(t, p.conns[0].p.Close())
	until(t, "the first connection is lost", func() bool { return p.conns[0].isLost() })
	fill(a.mem, 31)
	until(t, "the chain by it is forgotten", func() bool {
		return !p.chains().hasChain(a.hbm, m, false)
	})
	check(t, tr.Add(a.hbm, 0, m, 0, hostBytes))
	run(t, tr)
	require.Equal(t, a.mem, b.mem)
	x, err := a.e.Explain(p, a.hbm, m)
	require.NoError(t, err)
	require.Contains(t, x.String(), "hbm -device- dram -tcp- dram of the peer")
}

// TestAChainFillsNoReadOnlyRegion: it says so at once, and Explain does.
func TestAChainFillsNoReadOnlyRegion(t *testing.T) {
	a, b := newHost(t, "a"), newHost(t, "b")
	seg, _ := a.dev.alloc(t, 4096)
	seg.ReadOnly = true
	sealed, err := a.e.Register("sealed", seg)
	require.NoError(t, err)
	p := connect(t, a.e, b.e)
	far := remote(t, p, "hbm")
	tr := transfer(t, p, Read)
	check(t, tr.Add(sealed, 0, far, 0, 4096))
	check(t, tr.Post())
	err = tr.Wait(within(t))
	require.ErrorIs(t, err, ErrReadOnly)
	require.ErrorContains(t, err, "register it without")
	x, err := a.e.Explain(p, sealed, far)
	require.NoError(t, err)
	require.Contains(t, x.String(), "and writes alone")
	tr = transfer(t, p, Write)
	check(t, tr.Add(sealed, 0, far, 0, 4096))
	run(t, tr)
}

// TestCloseWithoutProofSaysSo: a copy into memory of ours is in a backend's hands, which no revoke
// asks for. Once it has ended after all, nothing is left to say.
func TestCloseWithoutProofSaysSo(t *testing.T) { testkit.InVirtualTime(t, closeWithoutProofSaysSo) }

func closeWithoutProofSaysSo(t *testing.T) {
	for _, ends := range []bool{false, true} {
		d := newDevice(t, "device", driver.HBM)
		d.hung, d.stuck = true, true
		a, err := Open(Config{Name: "a", Spin: testkit.Spin(), Backends: []driver.Backend{d},
			AbortGrace: 50 * time.Millisecond})
		require.NoError(t, err)
		seg, _ := d.alloc(t, 1<<20)
		_, err = a.Register("hbm", seg)
		require.NoError(t, err)
		p, err := a.Self()
		require.NoError(t, err)
		tr := transfer(t, p, Read)
		check(t, tr.Add(register(t, a, "dram", 1<<20), 0, remote(t, p, "hbm"), 0, 1<<20))
		d.keep()
		check(t, tr.Post())
		until(t, "it is in hand", func() bool { return d.kept() > 0 })
		require.ErrorContains(t, tr.Abort(within(t)), "do not reuse the memory")
		require.NoError(t, tr.Close())
		if !ends {
			err = a.Close()
			require.ErrorIs(t, err, ErrUnproven)
			require.ErrorContains(t, err, "1 batches in hand that were given up")
			d.release()
			continue
		}
		d.release()
		until(t, "the batch has ended", func() bool { return a.slots.proof() == nil })
		require.NoError(t, a.Close())
	}
}

// TestGuestsThatComeAndGoStopNoChain, though neither program reads notifications.
func TestGuestsThatComeAndGoStopNoChain(t *testing.T) {
	testkit.InVirtualTime(t, guestsThatComeAndGoStopNoChain)
}

func guestsThatComeAndGoStopNoChain(t *testing.T) {
	few := func(c *Config) { c.NotificationsMax, c.AbortGrace = 8, 100*time.Millisecond }
	a, b := newHost(t, "a", few), newHost(t, "b", few)
	p := connect(t, a.e, b.e)
	tr := transfer(t, p, Write)
	check(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1<<20))
	run(t, tr)
	before := map[*host]int{a: connections(a.e), b: connections(b.e)}
	for range 20 {
		for _, h := range []*host{a, b} {
			check(t, connect(t, open(t, "guest"), h.e).Close())
		}
	}
	for _, h := range []*host{a, b} {
		until(t, "the guests are gone", func() bool {
			return connections(h.e) <= before[h]
		})
		require.Equal(t, 4, len(h.e.inbox))
	}
	fill(a.mem, 55)
	run(t, tr)
	require.Equal(t, a.mem[:1<<20], b.mem[:1<<20])
}

// connections counts those that peers have opened.
func connections(e *Engine) (n int) {
	for _, l := range e.lanes {
		l.receiveMu.Lock()
		n += len(l.senders)
		l.receiveMu.Unlock()
	}
	return n
}

// TestAChainIsAbortedWithoutATransferLeft: the program has all that there may be.
func TestAChainIsAbortedWithoutATransferLeft(t *testing.T) {
	testkit.InVirtualTime(t, aChainIsAbortedWithoutATransferLeft)
}

func aChainIsAbortedWithoutATransferLeft(t *testing.T) {
	a := newHost(t, "a", func(c *Config) { c.TransfersMax = 64 })
	b := newHost(t, "b")
	p := connect(t, a.e, b.e)
	tr := transfer(t, p, Write)
	check(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1<<20))
	run(t, tr)
	for {
		x, err := a.e.NewTransfer(p, Write, Route{})
		if err != nil {
			require.ErrorIs(t, err, ErrFull)
			break
		}
		defer x.Close()
	}
	b.dev.keep()
	t.Cleanup(b.dev.drop)
	check(t, tr.Post())
	until(t, "the peer has it in hand", func() bool { return b.dev.kept() > 0 })
	require.NoError(t, tr.Abort(within(t)))
	require.False(t, p.staged().isLost())
}
