// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// parked is a batch that Submit would start next: checked, and on no stream.
func (r *rig) parked(b *driver.Batch) (*job, []gpu.Piece) {
	r.t.Helper()
	r.tag++
	j := r.b.newJob(r.p, r.tag)
	require.NotNil(r.t, j)
	var s scratch
	require.NoError(r.t, j.check(b, &s))
	return j, s.pieces
}

// large is a batch of many chunks.
func (r *rig) large() (b *driver.Batch, chunks uint32, d *place) {
	r.t.Helper()
	const n = 200 << 20
	l, d := r.memory(sparse, n), r.memory(hbmUntouched, n)
	libcuda.Set(r.t, "delay_us", 1000)
	return &driver.Batch{Op: driver.Write, Descs: []driver.Desc{
		{Len: n, LocalKey: l.m.key, RemoteKey: d.key},
	}}, n / (8 << 20), d
}

// TestCancelBeforeBegin cancels a batch that others see already, and that C has not begun: it
// ends early all the same, and the next batch of its number does not.
func TestCancelBeforeBegin(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	b, chunks, _ := r.large()
	j := r.b.free[len(r.b.free)-1] // the next one
	testpoint.First("cuda: shown", func() { r.p.Cancel(1) })
	defer testpoint.First("cuda: shown", nil)
	before := libcuda.Get("copies")
	require.NoError(t, r.p.Submit(1, b))
	require.ErrorIs(t, r.end(1), driver.ErrAborted)
	require.Less(t, libcuda.Get("copies")-before, chunks)
	r.p.Cancel(1)
	j.dev.mover.Cancel(j.number, j.serial.Load()) // the end has overtaken it
	r.tag = 1
	for range r.b.jobs { // each number
		r.tag++
		require.NoError(t, r.p.Submit(r.tag, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{
			{Len: 1, LocalKey: b.Descs[0].LocalKey, RemoteKey: b.Descs[0].RemoteKey},
		}}))
		require.NoError(t, r.end(r.tag))
	}
}

// TestRevokeBeforeStart revokes memory that a batch has entered and does not use yet: Revoke
// cannot cancel the batch, which starts nothing.
func TestRevokeBeforeStart(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	b, _, d := r.large()
	j, pieces := r.parked(b)
	d.m.end() // what Revoke does before it waits
	require.False(t, d.m.remoteGrant.quiet())
	before := libcuda.Get("copies")
	require.ErrorIs(t, j.start(pieces), driver.ErrRevoked)
	j.undo()
	require.Equal(t, before, libcuda.Get("copies"))
	require.True(t, d.m.remoteGrant.quiet())
}

// TestStreamWaitBesideRefused has a stream wait while Submit is about to give up a batch for which
// there is no worker: the stream waits for the batch that is under way, and for no other.
func TestStreamWaitBesideRefused(t *testing.T) {
	onStandIn(t)
	cfg := testConfig()
	cfg.Gated = 1
	r := newRig(t, cfg)
	kv, host := r.memory(hbm, 8192), r.memory(drivertest.HostMemory, 4096)
	late, blocked, program := newProducer(t), newProducer(t), newProducer(t)
	r.hold(late)
	blocked.must(blocked.Await(late.event))
	blocked.must(blocked.Record(blocked.event))
	blocked.must(r.b.StartAfter(kv.space.Segment, blocked.event))
	first := r.submit(driver.Read, host, kv, driver.Desc{Len: 1024})
	j, pieces := r.parked(&driver.Batch{Op: driver.Read, Descs: []driver.Desc{
		{Len: 1024, LocalKey: host.m.key, RemoteKey: kv.key},
	}})
	require.ErrorIs(t, j.start(pieces), driver.ErrFull)
	n, err := r.b.StreamWait(program.Handle(), kv.space.Segment)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	j.undo()
	r.release()
	r.endAll([]uint64{first})
	blocked.must(r.b.StartAfter(kv.space.Segment, 0))
	for _, p := range []*producer{late, blocked, program} {
		p.close()
	}
}

// TestStreamWaitBesideRefusal does so where the driver refuses the batch.
func TestStreamWaitBesideRefusal(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	kv, host := r.memory(hbm, 8192), r.memory(drivertest.HostMemory, 4096)
	program := newProducer(t)
	j, pieces := r.parked(&driver.Batch{Op: driver.Read, Descs: []driver.Desc{
		{Len: 1024, LocalKey: host.m.key, RemoteKey: kv.key},
	}})
	j.events = append(j.events, 0) // which the driver knows not
	var said *gpu.Error
	require.ErrorAs(t, j.start(pieces), &said)
	n, err := r.b.StreamWait(program.Handle(), kv.space.Segment)
	require.NoError(t, err)
	require.Zero(t, n)
	j.undo()
	program.close()
}

// TestPollBesideClose has Close wait for a batch: Poll says that it is closed only behind the
// completion of that batch.
func TestPollBesideClose(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	l, d := r.memory(drivertest.HostMemory, 4096), r.memory(hbm, 4096)
	libcuda.Set(t, "hold", 1)
	tag := r.submit(driver.Write, l, d, driver.Desc{Len: 13})
	closed := make(chan error, 1)
	go func() { closed <- r.b.Close() }()
	for r.p.Submit(99, &driver.Batch{Op: driver.Write, Descs: []driver.Desc{
		{Len: 0, LocalKey: l.m.key, RemoteKey: d.key},
	}}) != driver.ErrClosed {
		time.Sleep(time.Millisecond) // until Close has begun
	}
	var done [1]driver.Completion
	n, err := r.b.Poll(done[:])
	require.NoError(t, err)
	require.Zero(t, n)
	r.release()
	require.NoError(t, <-closed)
	n, err = r.b.Poll(done[:])
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, tag, done[0].Tag)
	_, err = r.b.Poll(done[:])
	require.ErrorIs(t, err, driver.ErrClosed)
}

// TestNeighboursOfTwoRegistrations: one copy over both is one that a driver refuses.
func TestNeighboursOfTwoRegistrations(t *testing.T) {
	r := newRig(t, testConfig())
	space, err := hbm(8192)
	require.NoError(t, err)
	l := r.memory(drivertest.HostMemory, 8192)
	var keys [2]uint32
	for i := range keys {
		seg, err := space.Segment.Slice(uint64(i)*4096, 4096, [16]byte{})
		require.NoError(t, err)
		keys[i] = r.imported(r.register(seg))
	}
	b := &driver.Batch{Op: driver.Write}
	for i := range uint64(4) {
		b.Descs = append(b.Descs, driver.Desc{Local: i * 2048, Remote: i % 2 * 2048, Len: 2048,
			LocalKey: l.m.key, RemoteKey: keys[i/2]})
	}
	j, pieces := r.parked(b)
	j.undo()
	require.Len(t, pieces, 2, "within a registration they are one")
	require.NoError(t, r.b.Close())
	require.NoError(t, space.Free())
}
