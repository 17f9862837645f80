// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"bytes"
	"context"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// openOneRail connects two backends over one rail each of the stand-in, with memory at both.
func openOneRail(t *testing.T) (f *fakeverbs.Fabric, c *testClock, p *pair, l, r *memory,
	remote uint32) {
	t.Helper()
	f, open := standIn(t, 2)
	leak.Check(t, f.InUse)
	c, p = newTestClock(), &pair{outcomes: map[uint64]error{}}
	for i, end := range []**Backend{&p.near, &p.far} {
		cfg := brisk()
		cfg.Devices, cfg.Grace, cfg.clock = f.Device(i).Name(), graceMin, c
		b, err := open(cfg)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, c.during(t, b.Close)) })
		*end = b
	}
	p.peer = p.connect(t)
	l, r = register(t, p.near, 1<<20), register(t, p.far, 1<<20)
	return f, c, p, l, r, p.imports(t, r)
}

// keep has a device neither stop nor destroy queue pairs, or do so again.
func keep(d fakeverbs.Device, kept bool) {
	times := uint32(0)
	if kept {
		times = math.MaxUint32
	}
	d.Set(fakeverbs.ModifyBusy, times)
	d.Set(fakeverbs.DestroyBusy, times)
}

// TestKeptQueuePair closes a peer whose NIC keeps the queue pair of a read that is under way:
// Close is bounded and says that nothing is proved, the batch is not over, and the memory stays
// registered. Both end once the queue pair has.
func TestKeptQueuePair(t *testing.T) {
	f, c, p, l, r, remote := openOneRail(t)
	device := f.Device(0)
	for i := range r.bytes {
		r.bytes[i] = byte(i) | 1
	}
	device.Set(fakeverbs.Frozen, 1)
	d := driver.Desc{Len: l.size, LocalKey: l.key, RemoteKey: remote}
	require.NoError(t, p.peer.Submit(1, &driver.Batch{Op: driver.Read, Descs: []driver.Desc{d}}))
	keep(device, true)
	require.ErrorIs(t, c.during(t, p.peer.Close), driver.ErrUnproven)
	require.ErrorIs(t, c.during(t, p.peer.Close), driver.ErrUnproven)
	require.ErrorIs(t, l.Revoke(context.Background()), driver.ErrBusy)
	var done [1]driver.Completion
	n, err := p.near.Poll(done[:])
	require.NoError(t, err)
	require.Zero(t, n, "a batch is over whose queue pair lives")
	keep(device, false)
	require.NoError(t, c.during(t, p.peer.Close))
	require.Error(t, p.await(t, 1))
	want := bytes.Clone(l.bytes)
	device.Set(fakeverbs.Frozen, 0)
	require.NoError(t, l.Revoke(context.Background()))
	require.True(t, bytes.Equal(want, l.bytes), "bytes land after the batch")
}

// TestKeptQueuePairOfOwner has the NIC of an owner keep a queue pair that the peer wants remade:
// the owner does not say that it is over, and what the peer had under way over it is not done
// again.
func TestKeptQueuePairOfOwner(t *testing.T) {
	f, c, p, l, _, remote := openOneRail(t)
	near, far := f.Device(0), f.Device(1)
	keep(far, true)
	near.FailNext(1, 12) // retries exceeded
	d := driver.Desc{Len: l.size, LocalKey: l.key, RemoteKey: remote}
	require.NoError(t, p.peer.Submit(1, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{d}}))
	require.ErrorIs(t, c.await(t, p, 1), driver.ErrPeerLost)
	<-p.peer.Lost()
	require.False(t, p.peer.parted(), "the owner says that its queue pairs are gone")
	keep(far, false)
}

// TestFenceParkedOnStandIn is TestFenceParked with all of the host code.
func TestFenceParkedOnStandIn(t *testing.T) {
	_, _, p, _, _, _ := openOneRail(t)
	checkFenceParked(t, p)
}
