// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestEvents: a reader learns what happens to blocks, in order, and until its context ends.
func TestEvents(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, withDisk(filepath.Join(t.TempDir(), "disk"), 64))
	n.put(t, ids(0, 1))
	ctx, cancel := context.WithCancel(t.Context())
	events := n.Events(ctx)
	want := func(kind EventKind, id uint64) {
		t.Helper()
		require.Equal(t, Event{Kind: kind, Namespace: "model", Digest: n.ns.Digest(),
			Key: ids(id, 1)[0]}, <-events)
	}
	n.put(t, ids(1, 2))
	want(Stored, 1)
	want(Stored, 2)
	n.hint(t, ids(1, 1), HintDemote, 0)
	want(Demoted, 1)
	n.ns.Remove(ids(1, 2))
	want(Removed, 1)
	want(Removed, 2)
	short := n.at(0, 1)
	short.Run = 4096
	require.NoError(t, n.ns.Store(t.Context(), ids(0, 1), short).Wait(t.Context()))
	want(Conflicted, 0)
	n.index.each(n.ns.id, ids(0, 1), false, func(_ *shard, _ int, i uint32, _ uint64) {
		n.memory.bytesOf(n.index.entry(i).slot, 1)[0] ^= 1
	})
	n.get(t, keysOf(0, 0)) // found twice, and told once
	want(DamagedBlock, 0)
	want(Removed, 0)
	n.put(t, ids(3, 1))
	want(Stored, 3)
	cancel()
	_, open := <-events
	require.False(t, open)
	until(func() bool { return n.list.Load() == nil })

	for range listenersMax {
		n.Events(t.Context())
	}
	_, open = <-n.Events(t.Context())
	require.False(t, open, "there are too many")
}

// TestSlowReader: a reader that does not read holds nothing up, and learns how much it has missed.
func TestSlowReader(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, nil)
	events := n.Events(t.Context())
	for range eventsMax + 100 {
		n.emitKey(n.ns.id, Key{}, Stored)
	}
	got := 1
	<-events
	n.emitLost()
	for e := range events {
		if e.Kind == EventsLost {
			require.EqualValues(t, eventsMax+100, got+int(e.Lost))
			require.NotZero(t, e.Lost)
			break
		}
		got++
	}
}

// TestEstimate: it counts by tier, and goes by the rates that were measured and what waits.
func TestEstimate(t *testing.T) {
	n := openNode(t, memoryFile(t), 32, withDisk(filepath.Join(t.TempDir(), "disk"), 256))
	n.put(t, ids(0, 8))
	n.hint(t, ids(0, 6), HintDemote, 0)
	e := n.ns.Estimate(ids(0, 9))
	require.False(t, e.Measured)
	require.Equal(t, [2]int{2, 6}, e.Blocks)
	require.Equal(t, [2]uint64{2 * blockBytes, 6 * blockBytes}, e.Bytes)
	require.Equal(t, 1, e.Missing)
	n.get(t, ids(0, 1))
	require.NotZero(t, n.paces.paces[0].reads.get(), "a read is measured")
	n.hint(t, ids(0, 1), HintDemote, 0)
	n.paces.paces[0].reads.bits.Store(0)
	require.NoError(t, n.ns.Prefetch(t.Context(), ids(0, 1)).Wait(t.Context()))
	require.Zero(t, n.paces.paces[0].reads.get(), "one that waits for others is not")
	n.hint(t, ids(0, 1), HintDemote, 0)

	n.paces.paces[0].reads.bits.Store(0)
	n.paces.paces[0].reads.add(6*blockBytes, time.Second)
	n.copy.bits.Store(0)
	n.copy.add(2*blockBytes, time.Second)
	n.paces.paces[0].waiting.Add(12 * blockBytes)
	e = n.ns.Estimate(ids(0, 9))
	require.True(t, e.Measured)
	require.Equal(t, [2]time.Duration{time.Second, 6 * time.Second}, e.Times)
	require.Equal(t, 7*time.Second, e.Time)
	require.Equal(t, []DiskEstimate{{n.cfg.Disks[0].Path, 6 * blockBytes, 12 * blockBytes,
		3 * time.Second}}, e.Disks)
	require.Equal(t, [2]bool{false, false}, e.Slower(0.9))
	require.Equal(t, [2]bool{false, true}, e.Slower(1.5))
	n.paces.paces[0].reads.add(22*blockBytes, time.Second)
	require.InDelta(t, 8*blockBytes, n.paces.paces[0].reads.get(), 1, "a moving mean")
	n.disks[0].health.without = time.Now().Add(time.Hour)
	require.Equal(t, 7, n.ns.Estimate(ids(0, 9)).Missing)

	n.put(t, ids(20, 22))
	n.copy.bits.Store(0)
	for _, limit := range []uint64{1 << 40, 0} { // one with a rate measures none
		require.NoError(t, n.ns.Set(NamespaceOptions{BytesASecond: limit}))
		for range 16 {
			n.get(t, ids(20, 22))
		}
		require.Equal(t, limit == 0, n.copy.get() > 0)
	}
}
