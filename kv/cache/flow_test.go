// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// handClock is the clock of a cache, which goes on as a test says.
type handClock struct{ now atomic.Uint32 }

func newHandClock() *handClock {
	h := &handClock{}
	h.now.Store(clockBase + 1000)
	return h
}

// with has a cache go by the clock.
func (h *handClock) with(change func(*Config)) func(*Config) {
	return func(c *Config) {
		if change != nil {
			change(c)
		}
		c.clock = h.now.Load
	}
}

// pass has seconds pass.
func (h *handClock) pass(n *node, seconds uint32) { n.second(h.now.Add(seconds)) }

// until waits for what the cache does in the background.
func until(is func() bool) {
	for !is() {
		runtime.Gosched()
	}
}

// TestTTL: a block that was not used for longer than its namespace's TTL is not found any more, in
// any tier, and goes; its age counts on over a restart, also one behind a boot.
func TestTTL(t *testing.T) {
	h := newHandClock()
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	ttl := NamespaceOptions{TTL: 10 * time.Second}
	open := func() *node {
		n := openNode(t, path, 32, h.with(withDisk(file, 64)))
		require.NoError(t, n.ns.Set(ttl))
		return n
	}
	n := open()
	require.Equal(t, all(Done, 4), n.put(t, ids(0, 4)))
	h.pass(n, 6)
	require.Equal(t, all(Done, 1), n.get(t, ids(0, 1)))
	require.Equal(t, all(Known, 1), n.put(t, ids(1, 1)))
	n.now.Store(h.now.Add(5)) // as before the keeper has looked at the table
	require.Equal(t, []Found{InMemory | OnDisk, InMemory | OnDisk, Nowhere, Nowhere},
		n.ns.Match(ids(0, 4)).Blocks)
	require.Equal(t, []Outcome{Missing, Missing}, n.get(t, ids(2, 2)))
	h.pass(n, 0)
	require.Equal(t, PerTier[int64]{2, 2}, n.Stats().Namespaces["model"].Blocks)
	require.EqualValues(t, 2, n.Stats().Expired)
	n.drained(t)

	n.close(t)
	h.now.Add(4) // both are 9 s old, then
	n = open()
	require.Equal(t, 2, n.ns.Match(ids(0, 2)).Prefix)
	h.pass(n, 2)
	require.Equal(t, 0, n.ns.Match(ids(0, 2)).Prefix)
	require.Zero(t, n.Stats().Namespaces["model"].Blocks)

	// of a disk alone the wall clock tells
	n.put(t, ids(0, 4))
	old := uint32(time.Now().Unix()) - 8
	d := n.disks[0]
	for k, at := range []uint32{0, old, old + 1e6} {
		n.index.each(n.ns.id, ids(uint64(k), 1), false, func(_ *shard, _ int, i uint32, _ uint64) {
			e := n.index.entry(i)
			var is [4]byte // of its use
			_, err := d.f.ReadAt(is[:], headerBytes+int64(e.record)*recordBytes+44)
			require.NoError(t, err)
			require.InDelta(t, time.Now().Unix(), binary.LittleEndian.Uint32(is[:]), 3600)
			require.NoError(t, d.write(e.record, &record{key: e.key, crc: e.crc, size: e.size,
				space: n.spaces.digest(e.space), place: d.placeOf(e.record), at: at}))
		})
	}
	n.close(t)
	require.NoError(t, os.Remove(path))
	n = open()
	require.Equal(t, 4, n.ns.Match(ids(0, 4)).Prefix)
	h.pass(n, 4)
	require.Equal(t, []Found{OnDisk, Nowhere, OnDisk, OnDisk}, n.ns.Match(ids(0, 4)).Blocks)
	n.drained(t)
}

// TestStoreAndTTL: a Store of a key whose block has expired stores it anew, also before the keeper
// has looked at it; what is committed has the age of its Store, and not that of the block which had
// its entry before.
func TestStoreAndTTL(t *testing.T) {
	h := newHandClock()
	path := memoryFile(t)
	n := openNode(t, path, 24, h.with(nil))
	require.NoError(t, n.ns.Set(NamespaceOptions{TTL: 10 * time.Second}))
	n.put(t, ids(0, 3))
	p, err := n.ns.Pin(t.Context(), ids(2, 1), 0)
	require.NoError(t, err)
	n.now.Store(h.now.Add(100))
	events := n.Events(t.Context())
	standing := testpoint.Stand(t, "cache: committed")[0]
	shorter := n.at(0, 1)
	shorter.Run = 4096
	op := n.ns.Store(t.Context(), ids(0, 1), shorter)
	<-standing.Came
	left, err := os.ReadFile(path) // as a kill leaves it
	require.NoError(t, err)
	standing.GoOn()
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(Done, 1), op.Outcomes())
	require.Equal(t, []EventKind{Removed, Stored}, []EventKind{(<-events).Kind, (<-events).Kind})
	require.Equal(t, all(Done, 1), n.put(t, ids(1, 1)))
	require.Equal(t, all(InMemory, 2), n.ns.Match(ids(0, 2)).Blocks)
	require.Equal(t, all(Pending, 1), n.put(t, ids(2, 1)), "its bytes are pinned")
	p.Close()
	require.Equal(t, all(Done, 1), n.put(t, ids(2, 1)))
	require.EqualValues(t, 3, n.Stats().Expired)
	n.check(t)

	path = memoryFile(t)
	require.NoError(t, os.WriteFile(path, left, 0o600))
	killed := openNode(t, path, 24, h.with(nil))
	require.NoError(t, killed.ns.Set(NamespaceOptions{TTL: 10 * time.Second}))
	require.Equal(t, InMemory, killed.ns.Match(ids(0, 1)).Blocks[0])
}

// TestSet: a quota that is smaller than what is there has blocks go before Set returns; it may be
// for all namespaces of a name.
func TestSet(t *testing.T) {
	n := openNode(t, memoryFile(t), 32, withDisk(filepath.Join(t.TempDir(), "disk"), 64))
	n.put(t, ids(0, 24))
	require.NoError(t, n.ns.Set(NamespaceOptions{Quota: [2]uint64{8 * blockBytes,
		12 * blockBytes}}))
	require.Equal(t, PerTier[int64]{8, 12}, n.Stats().Namespaces["model"].Blocks)
	n.drained(t)

	// what one call lets go is bounded, and it says whether there is more
	n.timing.Lock()
	n.spaces.at(n.spaces.lane(n.ns.id)).set(0, [2]uint64{4 * blockBytes, 11 * blockBytes})
	require.True(t, n.trim(2))
	require.Equal(t, PerTier[int64]{6, 11}, n.Stats().Namespaces["model"].Blocks)
	require.True(t, n.trim(2))
	require.False(t, n.trim(2))
	require.Equal(t, PerTier[int64]{4, 11}, n.Stats().Namespaces["model"].Blocks)
	n.timing.Unlock()
	other, err := n.Namespace("model", NamespaceOptions{Geometry: [32]byte{1}})
	require.NoError(t, err)
	count, err := n.Cache.Set("model", NamespaceOptions{Flow: MemoryOnly, TTL: time.Hour})
	require.NoError(t, err)
	require.Equal(t, 2, count)
	require.Equal(t, MemoryOnly, n.space(other.id).flow())
	count, err = n.Cache.Set("none", NamespaceOptions{})
	require.NoError(t, err)
	require.Zero(t, count)
	for _, o := range []NamespaceOptions{{Priority: 8}, {Flow: 3}, {TTL: -1}, {TTL: 1 << 62}} {
		require.ErrorIs(t, n.ns.Set(o), engine.ErrBounds)
		_, err := n.Namespace("new", o)
		require.ErrorIs(t, err, engine.ErrBounds)
	}
	require.Equal(t, MemoryOnly, n.space(n.ns.id).flow())
}

// TestFlow: what is for the memory alone never gets to a disk, and leaves it; what is written back
// goes there before it would leave memory, and not earlier.
func TestFlow(t *testing.T) {
	h := newHandClock()
	n := openNode(t, memoryFile(t), 64, h.with(func(c *Config) {
		withDisk(filepath.Join(t.TempDir(), "disk"), 256)(c)
		c.Policy = LRU
	}))
	n.put(t, ids(0, 8))
	require.EqualValues(t, 8, n.Stats().SwappedOut)
	n.hint(t, ids(0, 2), HintDemote, 0)
	n.hint(t, ids(0, 1), HintRetain, time.Minute)
	require.NoError(t, n.ns.Set(NamespaceOptions{Flow: MemoryOnly}))
	h.pass(n, 1)
	require.Equal(t, []Found{OnDisk, Nowhere, InMemory}, n.ns.Match(ids(0, 3)).Blocks)
	n.hint(t, ids(0, 1), HintRelease, 0)
	n.get(t, ids(0, 1))
	require.NoError(t, n.Drain(t.Context()))
	n.put(t, ids(1, 1))
	n.put(t, ids(8, 8))
	n.get(t, ids(8, 8)) // a use offers what no disk has
	require.NoError(t, n.Drain(t.Context()))
	h.pass(n, 1)
	require.Equal(t, PerTier[int64]{16, 0}, n.Stats().Namespaces["model"].Blocks)
	require.EqualValues(t, 8, n.Stats().SwappedOut)
	n.drained(t)

	require.NoError(t, n.ns.Set(NamespaceOptions{Flow: WriteBack}))
	n.put(t, ids(16, 24))
	n.get(t, ids(16, 24))
	h.pass(n, 1)
	require.NoError(t, n.Drain(t.Context()))
	require.EqualValues(t, 8, n.Stats().SwappedOut, "there is room")
	for from := uint64(40); from < 200; from += 4 {
		n.put(t, ids(from, 4))
		h.pass(n, 1)
		require.NoError(t, n.Drain(t.Context()))
	}
	n.drained(t)
	require.Zero(t, n.Stats().Unwritten)
	require.Equal(t, 200, n.ns.Match(ids(0, 200)).Prefix)
	require.Less(t, n.Stats().SwappedOut, uint64(8+200))
	for f := range flows_ {
		parsed, err := ParseFlow(f.String())
		require.NoError(t, err)
		require.Equal(t, f, parsed)
	}
	_, err := ParseFlow("write")
	require.ErrorContains(t, err, "there are write-through, write-back and memory-only")
}

// TestBusy: a Store that needs room is refused, with the reason, where what waits for the disks
// holds the memory.
func TestBusy(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, withDisk(filepath.Join(t.TempDir(), "disk"), 64))
	n.put(t, ids(0, 12))
	n.offeredBytes.Add(13 * blockBytes)
	op := n.ns.Store(t.Context(), ids(8, 9), n.at(0, 9))
	require.ErrorIs(t, op.Wait(t.Context()), engine.ErrBusy)
	require.ErrorContains(t, op.Err(), "wait for the disks")
	require.Equal(t, append(all(Known, 4), all(Busy, 5)...), op.Outcomes())
	require.Equal(t, all(Done, 4), n.put(t, ids(20, 4)), "there is room")
	n.offeredBytes.Add(-13 * blockBytes)
	require.Equal(t, all(Done, 8), n.put(t, ids(30, 8)))
	n.drained(t)
}

// TestCatchUpLeavesRoom: what a process before has left takes half of what may wait for the disks.
// The rest goes there later.
func TestCatchUpLeavesRoom(t *testing.T) {
	// The writer has taken up to batchBytes that do not wait any more.
	const blocks = writesMax/2 + batchBytes/granule + 100
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	open := func(flow Flow) *node {
		n := openNode(t, path, blocks, func(c *Config) {
			withDisk(file, blocks)(c)
			c.Memory.Bytes, c.Disks[0].Bytes = blocks*granule, blocks*granule
		})
		require.NoError(t, n.ns.Set(NamespaceOptions{Flow: flow}))
		return n
	}
	n := open(MemoryOnly)
	place := n.at(0, 1)
	place.Run, place.Slots = granule, make([]uint32, blocks)
	op := n.ns.Store(t.Context(), ids(0, blocks), place)
	require.NoError(t, op.Wait(t.Context()))
	have := n.Stats().Tiers[Memory].Blocks
	n.close(t)

	n = open(WriteThrough)
	n.timing.Lock()
	n.disks[0].mu.Lock() // its writer waits
	n.catchUp()
	waiting := len(n.writes)
	n.disks[0].mu.Unlock()
	n.timing.Unlock()
	require.LessOrEqual(t, waiting, writesMax/2)
	until(func() bool {
		n.second(n.readClock())
		return n.Stats().Disks[0].Blocks == have
	})
	n.drained(t)
}

// TestCatchUp: what a process before has left in memory alone is written to the disks once its
// namespace is opened, where that writes through.
func TestCatchUp(t *testing.T) {
	h := newHandClock()
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	n := openNode(t, path, 32, h.with(withDisk(file, 64)))
	other, err := n.Namespace("other", NamespaceOptions{})
	require.NoError(t, err)
	rest := func(until time.Time) {
		n.disks[0].mu.Lock()
		n.disks[0].health.without = until
		n.disks[0].mu.Unlock()
	}
	rest(time.Now().Add(time.Hour))
	n.put(t, ids(0, 8))
	mine := n.ns
	n.ns = other
	n.put(t, ids(0, 8))
	n.ns = mine
	require.Zero(t, n.Stats().Disks[0].Blocks)
	n.close(t)

	n = openNode(t, path, 32, h.with(withDisk(file, 64))) // opens "model"
	h.pass(n, 1)
	n.drained(t)
	require.Equal(t, slices.Repeat([]Found{InMemory | OnDisk}, 8), n.ns.Match(ids(0, 8)).Blocks)
	require.Equal(t, 8, n.Stats().Disks[0].Blocks)
	other, err = n.Namespace("other", NamespaceOptions{Flow: MemoryOnly})
	require.NoError(t, err)
	h.pass(n, 1)
	n.drained(t)
	require.Equal(t, 8, n.Stats().Disks[0].Blocks)
	require.Equal(t, 8, other.Match(ids(0, 8)).Prefix)
	require.NoError(t, n.ns.Remove(ids(0, 8)))
	rest(time.Now().Add(time.Hour))
	n.put(t, ids(0, 8)) // as many that no disk has are stored now: they wait for their next use
	rest(time.Time{})
	h.pass(n, 1)
	n.drained(t)
	require.Zero(t, n.Stats().Disks[0].Blocks)
}
