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
