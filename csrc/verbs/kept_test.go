// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
)

// keep has the NIC neither stop nor destroy the next queue pair, as often as said.
func keep(d fakeverbs.Device, times uint32) {
	d.Set(fakeverbs.ModifyBusy, times)
	d.Set(fakeverbs.DestroyBusy, times)
}

// TestKeptQueuePairOfOwner has the owner's NIC keep a queue pair that was to end: what is still on
// its way lands, so the end must not be told of.
func TestKeptQueuePairOfOwner(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	fill(l.local, 1)
	near, far := d.fake.Device(0), d.fake.Device(1)
	near.DelayNext(1, 20*time.Millisecond)
	l.submit(t, driver.Write, nil, driver.Desc{Len: 4096})
	l.awaitNews(t, PairFailed)
	keep(far, 1)
	require.ErrorIs(t, l.back.PairEnd(0), driver.ErrUnproven)
	near.Await(t, fakeverbs.LandedLate, 1)
	require.True(t, bytes.Equal(l.remote[:4096], l.local[:4096]), "the queue pair was kept, and "+
		"nothing lands")
	_, err := l.back.PairMake(0, 0)
	require.NoError(t, err, "a queue pair in place of one that is destroyed at the second try")
	require.NoError(t, l.back.PairEnd(0))
}

// TestKeptQueuePairOfInitiator has the initiator's NIC keep a queue pair over which a read is under
// way: the batch is over only when the queue pair is.
func TestKeptQueuePairOfInitiator(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	fill(l.remote, 2)
	near := d.fake.Device(0)
	near.Set(fakeverbs.Frozen, 1)
	tag := l.submit(t, driver.Read, nil, driver.Desc{Len: testBytes})
	keep(near, 1)
	require.ErrorIs(t, l.conn.End(Lost, true), driver.ErrUnproven)
	require.ErrorIs(t, l.near.Unmap(testKey), driver.ErrBusy, "a batch may still write "+
		"to the memory")
	var done [1]Done
	require.Zero(t, l.near.Poll(done[:]), "a batch is over whose queue pair lives")
	require.NoError(t, l.conn.End(Closed, false))
	require.ErrorIs(t, l.outcome(t, tag), driver.ErrPeerLost)
	want := bytes.Clone(l.local)
	near.Set(fakeverbs.Frozen, 0)
	require.NoError(t, l.near.Unmap(testKey))
	require.True(t, bytes.Equal(want, l.local))
}

// TestKeptQueuePairDies has the NIC destroy a queue pair only when it is asked once more, which
// nothing but the thread does: the queue pair is news then, and what it had under way is done over
// a new one.
func TestKeptQueuePairDies(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	fill(l.local, 3)
	near := d.fake.Device(0)
	near.Set(fakeverbs.Frozen, 1)
	tag := l.submit(t, driver.Write, nil, driver.Desc{Len: 4096})
	keep(near, 1)
	require.ErrorIs(t, l.conn.PairEnd(0), driver.ErrUnproven)
	require.ErrorIs(t, l.conn.PairSettle(0, 0), driver.ErrBusy, "what was posted is not over")
	l.awaitNews(t, PairFailed)
	near.Set(fakeverbs.Frozen, 0)
	l.make(t, 0)
	l.awaitNews(t, PairLive)
	require.NoError(t, l.outcome(t, tag))
	require.True(t, bytes.Equal(l.remote[:4096], l.local[:4096]))
}

// TestCloseWithKeptQueuePair closes a context whose NIC keeps a queue pair: the end is bounded, and
// says that nothing is proved.
func TestCloseWithKeptQueuePair(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	near := d.fake.Device(0)
	near.Set(fakeverbs.Frozen, 1)
	l.submit(t, driver.Read, nil, driver.Desc{Len: 4096})
	keep(near, 1)
	require.ErrorIs(t, l.conn.Close(), driver.ErrUnproven)
	require.NoError(t, l.conn.Close())
	l.conn = nil
}
