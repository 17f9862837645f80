// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestLocalConnectionIsRenewed loses the owner's connection to its own device once, by an
// operation that had to be ended by force: other peers, and the owner, go on.
func TestLocalConnectionIsRenewed(t *testing.T) {
	testkit.InVirtualTime(t, localConnectionIsRenewed)
}

func localConnectionIsRenewed(t *testing.T) {
	wire := newMem(t)
	d := newDevice(t, "device", driver.HBM)
	d.hung = true
	b := open(t, "b", func(c *Config) {
		c.Backends, c.AbortGrace = []driver.Backend{wire, d}, 50*time.Millisecond
	})
	seg, _ := d.alloc(t, 1<<20)
	_, err := b.Register("hbm", seg)
	require.NoError(t, err)
	a, c := newHost(t, "a"), newHost(t, "c")
	first, second := transfer(t, connect(t, a.e, b), Write), transfer(t, connect(t, c.e, b), Write)
	check(t, first.Add(a.hbm, 0, remote(t, first.p, "hbm"), 0, 1<<20))
	check(t, second.Add(c.hbm, 0, remote(t, second.p, "hbm"), 0, 1<<20))
	run(t, first)
	run(t, second)
	for range 3 {
		d.keep()
		check(t, first.Post())
		until(t, "the device has it in hand", func() bool { return d.kept() > 0 })
		require.NoError(t, first.Abort(within(t)))
		d.release()
		run(t, second)
		run(t, first)
	}
	self, err := b.Self()
	require.NoError(t, err)
	local := transfer(t, self, Write)
	check(t, local.Add(register(t, b, "local", 1<<20), 0, remote(t, self, "hbm"), 0, 1<<20))
	run(t, local)
	require.Equal(t, 3, b.Stats().Peers+2, "private Peers are shown")
}

// TestLocalConnectionIsLostInAChain has a chain of the engine's own lose the connection of its
// hops: its transfers end, new ones go on, and Close returns.
func TestLocalConnectionIsLostInAChain(t *testing.T) {
	testkit.InVirtualTime(t, localConnectionIsLostInAChain)
}

func localConnectionIsLostInAChain(t *testing.T) {
	d := newDevice(t, "disk", driver.File)
	d.alone, d.hung = true, true
	e := open(t, "e", func(c *Config) {
		c.Backends = []driver.Backend{d}
	})
	seg, _ := d.alloc(t, 16<<20)
	from, err := e.Register("from", seg)
	require.NoError(t, err)
	seg, _ = d.alloc(t, 16<<20)
	_, err = e.Register("to", seg)
	require.NoError(t, err)
	p, err := e.Self()
	require.NoError(t, err)
	var list []*Transfer
	for i := range uint64(12) {
		tr := transfer(t, p, Write)
		check(t, tr.Add(from, i<<20, remote(t, p, "to"), i<<20, 1<<20))
		list = append(list, tr)
	}
	d.keep()
	for _, tr := range list {
		check(t, tr.Post())
	}
	until(t, "the disk has pieces in hand", func() bool { return d.kept() > 0 })
	e.mu.Lock()
	local := e.localSelf
	e.mu.Unlock()
	local.conns[0].sever(func() {}) // as the sweeper does
	<-local.conns[0].closed
	d.release()
	for _, tr := range list {
		_ = tr.Wait(within(t))
		require.True(t, tr.Done())
		require.False(t, tr.isUnproven())
	}
	for _, tr := range list {
		run(t, tr)
	}
	ended := make(chan error, 1)
	go func() { ended <- e.Close() }()
	select {
	case <-ended:
	case <-time.After(limit):
		t.Fatal("Engine.Close does not return")
	}
}

// TestWindowWithoutAToken asks an owner for staging memory whose backend has no key left for it:
// the answer is an error, at both ends of a list of backends.
func TestWindowWithoutAToken(t *testing.T) {
	host := func(name string, keys int) *host {
		h := &host{dev: newDevice(t, "device", driver.HBM)}
		h.e = open(t, name, func(c *Config) {
			b, err := tcp.New(tcp.Config{Listen: "127.0.0.1:0", Plaintext: true, KeysMax: keys})
			require.NoError(t, err)
			c.Backends = []driver.Backend{h.dev, b}
		})
		seg, b := h.dev.alloc(t, hostBytes)
		h.mem = b
		var err error
		h.hbm, err = h.e.Register("hbm", seg)
		require.NoError(t, err)
		return h
	}
	a, b := host("a", 0), host("b", 1)
	register(t, b.e, "full", 4096) // b's one key is taken
	p := connect(t, a.e, b.e)
	tr := transfer(t, p, Write)
	require.Error(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, hostBytes))
	until(t, "b has its memory back", func() bool { return b.e.stager.used.Load() == 0 })
}

// TestAnswersNeedNoWayBack has an owner that cannot connect to the peer: chains work
// all the same, with one place for peers.
func TestAnswersNeedNoWayBack(t *testing.T) {
	a := newHost(t, "a")
	wire := rigged(t, mem.Config{}, rig{})
	wire.onConnect = func(addr []byte) error {
		if string(addr) != string(wire.Addr()) {
			return driver.ErrPeerLost
		}
		return nil
	}
	b := newHostOver(t, wire, "b", func(c *Config) { c.PeersMax = 1 })
	p := connect(t, a.e, b.e)
	chain := transfer(t, p, Write)
	check(t, chain.Add(a.hbm, 0, remote(t, p, "hbm"), 0, hostBytes))
	fill(a.mem, 9)
	run(t, chain)
	require.Equal(t, a.mem, b.mem)
	require.Zero(t, b.e.Stats().Peers)
}

// TestWindowsAreGivenBack has peers come, take staging memory and go, with a hop under way.
func TestWindowsAreGivenBack(t *testing.T) { testkit.InVirtualTime(t, windowsAreGivenBack) }

func windowsAreGivenBack(t *testing.T) {
	b := newHost(t, "b")
	for range 2 * windowsMin {
		a := newHost(t, "a")
		p := connect(t, a.e, b.e)
		tr := transfer(t, p, Write)
		check(t, tr.Add(a.hbm, 0, remote(t, p, "hbm"), 0, 1<<20))
		b.dev.keep()
		check(t, tr.Post())
		until(t, "b has it in hand", func() bool { return b.dev.kept() > 0 })
		hurry(t, a.e, 20*time.Millisecond)
		_ = p.conns[0].p.Close() // its connection ends
		b.dev.drop()
	}
	until(t, "b has all its memory back", func() bool { return b.e.stager.used.Load() == 0 })
	require.Zero(t, slotsInUse(b.e))
	b.e.stager.mu.Lock()
	defer b.e.stager.mu.Unlock()
	require.Empty(t, b.e.stager.origins)
	require.Empty(t, b.e.stager.windows)
}
