// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/driver"
)

// stuck is a device whose operations do not end with the connection either.
type stuck struct{ *hung }

type stuckPeer struct{ *hungPeer }

func (d *stuck) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := d.hung.Connect(ctx, addr)
	if err != nil {
		return nil, err
	}
	return &stuckPeer{p.(*hungPeer)}, nil
}

func (p *stuckPeer) Close() error { return nil }

// TestAHopThatWasGivenUpIsNotOver when the peer is lost, or the chain closed: a local backend has
// it still.
func TestAHopThatWasGivenUpIsNotOver(t *testing.T) {
	wire, err := mem.New(mem.Config{})
	require.NoError(t, err)
	d := &stuck{&hung{newDevice(t, "device", driver.HBM)}}
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
	staged := p.staged().p.(*stagedPeer)
	until(t, "the hop was given up", func() bool {
		given := make(chan bool, 1)
		return staged.loop.push(asked(func() {
			for _, s := range staged.slots {
				if s.lost {
					given <- true
					return
				}
			}
			given <- false
		})) && <-given
	})
	p.conns[0].lose()
	require.ErrorContains(t, <-aborted, "do not reuse the memory")
	require.True(t, tr.isUnproven())
	require.Equal(t, before, local)
	d.release()
}

// asked is a look at what a loop alone touches.
type asked func()

func (f asked) happen() { f() }

// TestAChainGoesByAnotherConnection when that is lost by which it had the peer's staging memory.
func TestAChainGoesByAnotherConnection(t *testing.T) {
	two := func(name string) *host {
		h := &host{dev: newDevice(t, "device", driver.HBM)}
		h.e = open(t, name, func(c *Config) {
			w, err := mem.New(mem.Config{})
			require.NoError(t, err)
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
		return !p.staged().p.(*stagedPeer).knows(a.hbm, m, false)
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
