// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/fakeverbs"
)

// TestUnmapWaitsForEachMemory unmaps the ninth memory of a batch that reads into nine: a batch
// holds eight.
func TestUnmapWaitsForEachMemory(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	fill(l.remote, 2)
	mem := pages(t, 10*4096)
	whole := pin(t, l.near, 0, mem, 0)
	var descs []driver.Desc
	for i := range 9 {
		key := uint32(100 + i)
		require.NoError(t, l.near.Map(key, mem[i*4096:(i+1)*4096], []*Pin{whole}, 0))
		descs = append(descs, driver.Desc{LocalKey: key, RemoteKey: l.slot,
			Remote: uint64(i) * 8192, Len: 4096})
	}
	near := d.fake.Device(0)
	near.Set(fakeverbs.Frozen, 1)
	l.tag++
	require.NoError(t, l.conn.Submit(l.tag, batchOf(driver.Read, descs, nil)))
	unmapped := make(chan error, 1)
	go func() { unmapped <- l.near.Unmap(108) }()
	select {
	case err := <-unmapped:
		t.Errorf("unmapped while it is read into: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	near.Set(fakeverbs.Frozen, 0)
	require.NoError(t, l.outcome(t, l.tag))
	require.NoError(t, <-unmapped)
	require.Equal(t, l.remote[8*8192:8*8192+4096], mem[8*4096:9*4096])
}

// TestTroubleIsNoProof revokes memory of a device that says that a queue has failed, stops nothing,
// and answers EIO. It is there, and peers can write: only one that was taken away proves an end.
func TestTroubleIsNoProof(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	far := d.fake.Device(1)
	regions := far.Get(fakeverbs.Regions)
	far.Set(fakeverbs.ModifyBusy, math.MaxUint32)
	far.Set(fakeverbs.DeregisterEIO, 1)
	for range 20 {
		require.Error(t, l.far.Revoke(testKey))
		time.Sleep(time.Millisecond) // the event is looked at meanwhile
	}
	far.Set(fakeverbs.ModifyBusy, 0)
	far.Set(fakeverbs.DeregisterEIO, 0)
	require.NoError(t, l.far.Revoke(testKey))
	require.Less(t, far.Get(fakeverbs.Regions), regions)
}

// TestReceivesComeBack has a device take no receive for a while: those are posted later, so that
// messages have places again.
func TestReceivesComeBack(t *testing.T) {
	d := fakeDevices(t, 1)
	l := openLink(t, d, testShape{})
	far := d.fake.Device(1)
	far.Set(fakeverbs.ReceiveBusy, math.MaxUint32)
	for i := range 20 {
		require.NoError(t, l.outcome(t, l.submit(t, driver.Write, numbered(i))))
		require.Equal(t, numbered(i), l.notif(t).Data)
	}
	far.Set(fakeverbs.ReceiveBusy, 0)
	for i := range 500 { // more than all places
		require.NoError(t, l.outcome(t, l.submit(t, driver.Write, numbered(i))))
		require.Equal(t, numbered(i), l.notif(t).Data)
	}
	require.Zero(t, far.Get(fakeverbs.Unready))
}
