// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/fault"
	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// hungDisk is posix over a disk that does not answer from hang to answer, and then does what it was
// asked for.
type hungDisk struct {
	driver.Backend
	mu    sync.Mutex
	hangs bool
	held  []func()
}

type hungPeer struct {
	driver.Peer
	b *hungDisk
}

func (h *hungDisk) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p, err := h.Backend.Connect(ctx, addr)
	return &hungPeer{p, h}, err
}

func (p *hungPeer) Submit(tag uint64, b *driver.Batch) error {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	if !p.b.hangs {
		return p.Peer.Submit(tag, b)
	}
	kept := *b
	kept.Descs = slices.Clone(b.Descs)
	if b.Pattern != nil {
		g := *b.Pattern
		kept.Pattern = &g
	}
	p.b.held = append(p.b.held, func() { _ = p.Peer.Submit(tag, &kept) })
	return nil
}

func (p *hungPeer) Cancel(tag uint64) {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	if !p.b.hangs {
		p.Peer.Cancel(tag)
	}
}

// Close breaks what it promises while the disk hangs: it would wait for that, and the engine for
// it, a minute.
func (p *hungPeer) Close() error {
	p.b.mu.Lock()
	defer p.b.mu.Unlock()
	if p.b.hangs {
		return nil
	}
	return p.Peer.Close()
}

func (h *hungDisk) hang() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hangs = true
}

func (h *hungDisk) answer() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hangs = false
	for _, f := range h.held {
		f()
	}
	h.held = nil
}

// openHung opens a node whose engine gives transfers up after a while, over disks that may hang.
// 24 blocks are stored, of which keys are on the disks alone.
func openHung(t *testing.T, timeout time.Duration, disks int) (n *node, h *hungDisk, keys []Key) {
	m, err := mem.New(mem.Config{})
	require.NoError(t, err)
	p, err := posix.New(posix.Config{Threads: 4})
	require.NoError(t, err)
	h = &hungDisk{Backend: p}
	n = openOver(t, memoryFile(t), 8*disks, engine.Config{Backends: []driver.Backend{m, h},
		Schedule:   &engine.Schedule{BytesInFlight: blockBytes}, // a block at a time
		AbortGrace: 50 * time.Millisecond, TransferTimeout: timeout},
		func(c *Config) {
			withDisk(filepath.Join(t.TempDir(), "disk"), 64)(c)
			for len(c.Disks) < disks {
				more := c.Disks[0]
				more.Path += "s"
				c.Disks = append(c.Disks, more)
			}
			c.Policy = LRU
		})
	for from := uint64(0); from < 24; from += 4 {
		n.put(t, ids(from, 4))
	}
	n.drained(t)
	for k, f := range n.ns.Match(ids(0, 24)).Blocks {
		if f == OnDisk {
			keys = append(keys, ids(uint64(k), 1)...)
		}
	}
	require.GreaterOrEqual(t, len(keys), 8)
	return n, h, keys
}

// TestTimedDiskThatHangs: a read of a disk is given up, and lands later. It lands where nothing
// else is by then; its block is not lost; Close ends once the disk has answered, and not before.
func TestTimedDiskThatHangs(t *testing.T) {
	for _, within := range []time.Duration{50 * time.Millisecond, time.Hour} {
		n, h, keys := openHung(t, 200*time.Millisecond, 1)
		h.hang()
		n.hung = true
		ctx, cancel := context.WithTimeout(t.Context(), within)
		op := n.ns.Load(ctx, keys[:2], n.at(128, 2))
		require.Error(t, op.Wait(t.Context()))
		cancel()
		require.NotContains(t, op.Outcomes(), Done)
		require.Positive(t, n.Stats().Unproven)
		n.index.each(n.ns.id, keys[:2], false, func(_ *shard, _ int, i uint32, _ uint64) {
			require.Zero(t, n.index.entry(i).pins)
			require.Zero(t, n.index.entry(i).flags&reading)
		})
		// others use what room there is, and none of what the disk may still write to
		fresh := ids(7000, 6)
		for k, key := range fresh {
			content(key, n.mem[k*blockBytes:][:blockBytes])
		}
		store := n.ns.Store(t.Context(), fresh, n.at(0, 6))
		require.NoError(t, store.Wait(t.Context()))
		require.Equal(t, all(Done, 6), store.Outcomes())
		h.answer()
		require.Equal(t, all(Done, 6), n.get(t, fresh))
		require.NoError(t, n.Drain(t.Context()))
		n.disks[0].mu.Lock()
		n.disks[0].health = health{}
		n.disks[0].mu.Unlock()
		require.Equal(t, all(Done, 2), n.get(t, keys[:2]))
	}
}

// TestCloseBesideADiskThatHangs: loads that wait for each other's read end with the cache.
func TestCloseBesideADiskThatHangs(t *testing.T) {
	n, h, keys := openHung(t, time.Hour, 1)
	h.hang()
	n.hung = true
	first := n.ns.Load(t.Context(), keys[:1], n.at(128, 1))
	second := n.ns.Load(t.Context(), keys[:1], n.at(130, 1))
	for pins := uint32(0); pins < 2; { // one reads, one waits for it
		n.index.each(n.ns.id, keys[:1], false, func(_ *shard, _ int, i uint32, _ uint64) {
			pins = n.index.entry(i).pins
		})
		runtime.Gosched()
	}
	until(func() bool { // the read has come to the disk
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.held) > 0
	})
	go func() { _ = n.Cache.Close() }()
	<-first.Done()
	<-second.Done()
	require.NotContains(t, append(first.Outcomes(), second.Outcomes()...), Done)
	h.answer()
}

// TestLoadWaitsForRoom: all of the memory waits for a disk. A Load waits until that has written it,
// its own ctx ends, or the cache is closed.
func TestLoadWaitsForRoom(t *testing.T) {
	n, h, keys := openHung(t, time.Hour, 1)
	h.hang()
	stored := n.ns.Store(t.Context(), ids(100, 8), n.at(0, 8))
	require.NoError(t, stored.Wait(t.Context()))
	load := func(ctx context.Context) *Op {
		op := n.ns.Load(ctx, keys[:2], n.at(128, 2))
		until(func() bool { return n.wanting.Load() > 0 })
		return op
	}
	ctx, cancel := context.WithCancel(t.Context())
	op := load(ctx)
	cancel()
	require.ErrorIs(t, op.Wait(t.Context()), context.Canceled)
	require.Equal(t, all(Late, 2), op.Outcomes())
	until(func() bool { return n.wanting.Load() == 0 })

	op = load(t.Context())
	h.answer()
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(Done, 2), op.Outcomes())

	h.hang()
	stored = n.ns.Store(t.Context(), ids(200, 8), n.at(0, 8))
	require.NoError(t, stored.Wait(t.Context()))
	op = load(t.Context())
	closed := make(chan error)
	go func() { closed <- n.Cache.Close() }()
	require.ErrorIs(t, op.Wait(t.Context()), engine.ErrClosed)
	require.Equal(t, all(Late, 2), op.Outcomes())
	h.answer()
	require.NoError(t, <-closed)
}

// openBesideDisk opens a node with room for 16 blocks, of which n.ns has what is in memory alone.
// Namespace onDisk has blocks on a disk, too.
func openBesideDisk(t *testing.T, blocks uint64) (n *node, onDisk *Namespace) {
	n = openNode(t, memoryFile(t), 16, func(c *Config) {
		withDisk(filepath.Join(t.TempDir(), "disk"), 64)(c)
		c.HoldMax = 16 * blockBytes
	})
	n.put(t, ids(0, blocks))
	n.drained(t)
	onDisk = n.ns
	var err error
	n.ns, err = n.Namespace("in memory", NamespaceOptions{Flow: MemoryOnly,
		HoldMax: 16 * blockBytes})
	require.NoError(t, err)
	return n, onDisk
}

// retain stores blocks, and has them keep their room.
func (n *node) retain(t *testing.T, keys []Key) {
	n.put(t, keys)
	n.hint(t, keys, HintRetain, time.Hour)
}

// TestLoadHasRoomOfWhatGoes: a Load that waits for room takes that of blocks which are removed, or
// no longer retained, or that a larger quota gives, while another operation goes on.
func TestLoadHasRoomOfWhatGoes(t *testing.T) {
	const removed, released, quota = 0, 1, 2
	for how := range 3 {
		n, onDisk := openBesideDisk(t, 8)
		most := NamespaceOptions{HoldMax: 16 * blockBytes, Quota: [2]uint64{blockBytes, 0}}
		inMemory := uint64(16)
		if how == quota {
			inMemory = 14
			require.NoError(t, onDisk.Set(most))
			pin, err := onDisk.Pin(t.Context(), ids(7, 1), time.Hour)
			require.NoError(t, err)
			defer pin.Close()
		}
		n.retain(t, ids(100, inMemory))

		standing := testpoint.Stand(t, "cache: pinned")[0]
		goesOn := n.ns.Load(t.Context(), ids(100, 1), n.at(64, 1))
		<-standing.Came
		op := onDisk.Load(t.Context(), ids(0, 1), n.at(65, 1))
		until(func() bool {
			n.mu.Lock()
			defer n.mu.Unlock()
			return n.asleep == 1
		})
		switch how {
		case removed:
			require.NoError(t, n.ns.Remove(ids(104, 1)))
		case released:
			n.hint(t, ids(104, 1), HintRelease, 0)
		case quota:
			most.Quota[Memory] = 2 * blockBytes
			require.NoError(t, onDisk.Set(most))
		}
		require.NoError(t, op.Wait(t.Context()))
		require.Equal(t, all(Done, 1), op.Outcomes())
		standing.GoOn()
		require.NoError(t, goesOn.Wait(t.Context()))
	}
}

// TestLoadBesideOneThatReleases: the end of what a Load has copied may take long, as the place that
// it copies to may. Meanwhile another Load reads the blocks that the first one has no room for.
func TestLoadBesideOneThatReleases(t *testing.T) {
	n, onDisk := openBesideDisk(t, 2)
	n.retain(t, ids(100, 16))

	op, held := newOp(2), make([]uint32, 2)
	onDisk.pin(op, ids(0, 2), held, 0, 2, blockBytes)
	released, goOn, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		n.swapIn(t.Context(), op, held, 0, 2, blockBytes, func() { close(released); <-goOn })
	}()
	<-released
	require.NoError(t, n.ns.Remove(ids(100, 4)))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	other := onDisk.Load(ctx, ids(0, 2), n.at(64, 2))
	assert.NoError(t, other.Wait(t.Context()))
	assert.Equal(t, all(Done, 2), other.Outcomes())
	close(goOn)
	<-ended
	require.NotContains(t, held, uint32(none))
	n.unpinAll(held, []uint32{0, 1})
}

// TestLoadThatWasShortForLong: a Load that has had too little room for as long as it may waits no
// more, while another operation goes on.
func TestLoadThatWasShortForLong(t *testing.T) {
	n, onDisk := openBesideDisk(t, 1)
	n.retain(t, ids(100, 16))

	standing := testpoint.Stand(t, "cache: pinned")[0]
	goesOn := n.ns.Load(t.Context(), ids(100, 1), n.at(64, 1))
	<-standing.Came
	op, to := newOp(1), n.at(65, 1)
	op.short = diskLimit
	ctx, cancel := context.WithTimeout(t.Context(), diskLimit/2)
	defer cancel()
	require.NoError(t, onDisk.c.run(ctx, "load", op, nil, func(ctx context.Context) {
		onDisk.load(ctx, op, ids(0, 1), &to, blockBytes)
		close(op.copied)
	}))
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(NoRoom, 1), op.Outcomes())
	standing.GoOn()
	require.NoError(t, goesOn.Wait(t.Context()))
}

// TestLoadOfAKeyTwice: a Load that names each block twice, a batch a block, says of all that there
// is no room, of the last batch as of the first. One batch alone has room.
func TestLoadOfAKeyTwice(t *testing.T) {
	n, onDisk := openBesideDisk(t, 3)
	n.retain(t, ids(100, 14))
	require.Equal(t, 2, n.batchOf(blockBytes))

	// A batch ends for the room of the next one.
	op := onDisk.Load(t.Context(), ids(0, 3), n.at(64, 3))
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(Done, 3), op.Outcomes())

	n.retain(t, ids(114, 2))
	var keys []Key
	for _, key := range ids(0, 3) {
		keys = append(keys, key, key)
	}
	op = onDisk.Load(t.Context(), keys, n.at(64, len(keys)))
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(NoRoom, len(keys)), op.Outcomes())
}

// TestLoadsThatWaitForEachOther: Loads whose blocks need more room than there is, and which hold a
// part of it each, end all the same: one by one they are refused.
func TestLoadsThatWaitForEachOther(t *testing.T) {
	n, _, keys := openHung(t, time.Hour, 1)
	var ops []*Op
	for k := range 16 {
		from := k % (len(keys) - 7)
		ops = append(ops, n.ns.Load(t.Context(), keys[from:from+8], n.at(8*k, 8)))
	}
	for _, op := range ops {
		<-op.Done()
		require.NoError(t, op.Err())
		require.NotContains(t, op.Outcomes(), Late)
	}
	require.Equal(t, all(Done, 8), n.get(t, keys[:8]))
}

// TestLoadOfWhatAPrefetchReads: a Load that waits for a block which a Prefetch reads has it read as
// what it would read itself: before all that is queued for the disk.
func TestLoadOfWhatAPrefetchReads(t *testing.T) {
	n, h, keys := openHung(t, time.Hour, 1)
	asked := func() int {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.held)
	}
	h.hang()
	content(ids(100, 1)[0], n.mem)
	n.ns.Store(t.Context(), ids(100, 1), n.at(0, 1))
	until(func() bool { return asked() == 1 }) // its write has all the room that there is
	fetch := n.ns.Prefetch(t.Context(), keys[:1])
	until(func() bool { return n.engine.Stats().Classes[engine.Prefetch].Queued == 1 })
	require.Equal(t, 1, asked())
	load := n.ns.Load(t.Context(), keys[:1], n.at(128, 1))
	until(func() bool { return asked() == 2 })
	h.answer()
	require.NoError(t, load.Wait(t.Context()))
	require.NoError(t, fetch.Wait(t.Context()))
	require.Equal(t, append(fetch.Outcomes(), load.Outcomes()...), all(Done, 2))
	n.drained(t)
}

// TestLoadOfWhatAPrefetchReadsLater is the same for a block on another disk, which the Prefetch
// reads behind the first.
func TestLoadOfWhatAPrefetchReadsLater(t *testing.T) {
	n, h, keys := openHung(t, time.Hour, 2)
	on := map[uint16]Key{}
	n.index.each(n.ns.id, keys, false, func(_ *shard, k int, i uint32, _ uint64) {
		on[n.index.entry(i).disk] = keys[k]
	})
	require.Len(t, on, 2)
	asked := func() int {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.held)
	}
	h.hang()
	content(ids(100, 1)[0], n.mem)
	n.ns.Store(t.Context(), ids(100, 1), n.at(0, 1))
	until(func() bool { return asked() == 1 }) // its write has all the room of one disk
	busy := uint16(slices.IndexFunc(n.disks, func(d *disk) bool {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.health.running > 0
	}))
	fetch := n.ns.Prefetch(t.Context(), []Key{on[busy], on[1-busy]})
	until(func() bool { return n.engine.Stats().Classes[engine.Prefetch].Queued == 1 })
	load := n.ns.Load(t.Context(), []Key{on[1-busy]}, n.at(128, 1))
	until(func() bool { return asked() == 2 })
	h.answer()
	require.NoError(t, load.Wait(t.Context()))
	require.NoError(t, fetch.Wait(t.Context()))
	require.Equal(t, append(fetch.Outcomes(), load.Outcomes()...), all(Done, 3))
	n.drained(t)
}

// TestLoadThatEndsItself: a Load whose ctx ends, and so its read, says nothing of the disk.
func TestLoadThatEndsItself(t *testing.T) {
	m, err := mem.New(mem.Config{})
	require.NoError(t, err)
	p, err := posix.New(posix.Config{Threads: 4})
	require.NoError(t, err)
	b, err := fault.Wrap(p, 1, fault.Rule{On: fault.Read, Do: fault.Swallow()})
	require.NoError(t, err)
	n := openOver(t, memoryFile(t), 16, engine.Config{Backends: []driver.Backend{m, b}},
		withDisk(filepath.Join(t.TempDir(), "disk"), 64))
	n.put(t, ids(0, 1))
	n.hint(t, ids(0, 1), HintDemote, 0)
	for k := range uint64(failuresMax) {
		ctx, cancel := context.WithCancel(t.Context())
		op := n.ns.Load(ctx, ids(0, 1), n.at(128, 1))
		until(func() bool { return b.Fired()[0] > k })
		cancel()
		require.ErrorIs(t, op.Wait(t.Context()), context.Canceled)
		require.Equal(t, all(Late, 1), op.Outcomes())
	}
	require.Zero(t, n.disks[0].health.failed)
	require.Empty(t, n.Stats().Disks[0].Unused)
	n.drained(t)
}

// TestTimedDamagedAndUnproven: a Load whose transfer has no proof tells which of its blocks are
// damaged. All keep their slots, as they may still be read.
func TestTimedDamagedAndUnproven(t *testing.T) {
	m, err := mem.New(mem.Config{})
	require.NoError(t, err)
	h := &hungDisk{Backend: m}
	n := openOver(t, memoryFile(t), 16, engine.Config{Backends: []driver.Backend{h},
		AbortGrace: 50 * time.Millisecond, TransferTimeout: 200 * time.Millisecond}, nil)
	n.put(t, ids(0, 2))
	n.index.each(n.ns.id, ids(0, 1), false, func(_ *shard, _ int, i uint32, _ uint64) {
		n.memory.bytesOf(n.index.entry(i).slot, 1)[0] ^= 1
	})
	h.hang()
	n.hung = true
	op := n.ns.Load(t.Context(), ids(0, 2), n.at(128, 2))
	require.Error(t, op.Wait(t.Context()))
	require.Equal(t, []Outcome{Damaged, Failed}, op.Outcomes())
	require.Equal(t, []Found{Nowhere, InMemory}, n.ns.Match(ids(0, 2)).Blocks)
	require.Positive(t, n.Stats().Unproven)
	n.index.each(n.ns.id, ids(0, 2), false, func(_ *shard, _ int, i uint32, _ uint64) {
		require.EqualValues(t, 1, n.index.entry(i).pins)
		require.NotEqual(t, uint32(none), n.index.entry(i).slot)
	})
	h.answer()
}

// TestPeerThatDoesNotAnswer: over rdma a transfer may end without a proof on the other side. Memory
// here is free then, and is used again.
func TestPeerThatDoesNotAnswer(t *testing.T) {
	m, err := mem.New(mem.Config{})
	require.NoError(t, err)
	b, err := fault.Wrap(m, 1, fault.Rule{On: fault.Write, Do: fault.Fail(driver.ErrUnproven)})
	require.NoError(t, err)
	n := openOver(t, memoryFile(t), 16, engine.Config{Backends: []driver.Backend{b}}, nil)
	require.Equal(t, all(Done, 16), n.put(t, ids(0, 16)))
	op := n.ns.Load(t.Context(), ids(0, 16), n.at(128, 16))
	require.ErrorIs(t, op.Wait(t.Context()), engine.ErrUnproven)
	require.Equal(t, all(Failed, 16), op.Outcomes())
	require.Zero(t, n.Stats().Unproven)
	require.Equal(t, all(Done, 4), n.put(t, ids(100, 4)))
	n.check(t)
}

// TestRemovedIsRemoved: what was removed no restart finds, also where its record was about to be
// written to the disk, or a Load held it.
func TestRemovedIsRemoved(t *testing.T) {
	for _, point := range []string{"cache: on disk", "cache: recorded", "cache: pinned"} {
		t.Run(point, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "disk")
			n := openNode(t, memoryFile(t), 16, withDisk(file, 64))
			if point == "cache: pinned" {
				n.put(t, ids(1, 1))
			}
			standing := testpoint.Stand(t, point)[0]
			content(ids(1, 1)[0], n.mem)
			var op *Op
			if point == "cache: pinned" {
				op = n.ns.Load(t.Context(), ids(1, 1), n.at(128, 1))
			} else {
				op = n.ns.Store(t.Context(), ids(1, 1), n.at(0, 1))
			}
			<-standing.Came
			removed := make(chan struct{})
			go func() {
				assert.NoError(t, n.ns.Remove(ids(1, 1)))
				close(removed)
			}()
			if point == "cache: recorded" { // Remove waits for who writes the record
				for n.ns.Match(ids(1, 1)).Blocks[0] != Nowhere {
					time.Sleep(time.Millisecond)
				}
				standing.GoOn()
			}
			<-removed
			p, err := os.ReadFile(file) // what a kill at this moment leaves
			require.NoError(t, err)
			standing.GoOn()
			require.NoError(t, op.Wait(t.Context()))
			n.drained(t)
			later, err := os.ReadFile(file)
			require.NoError(t, err)
			for _, p := range [][]byte{p, later} {
				other := filepath.Join(t.TempDir(), "disk")
				require.NoError(t, os.WriteFile(other, p, 0o600))
				require.Equal(t, Nowhere, openNode(t, memoryFile(t), 16,
					withDisk(other, 64)).ns.Match(ids(1, 1)).Blocks[0])
			}
		})
	}
}

// TestRemovedBesideOthers: Remove waits also for what leaves a disk by eviction, or by another
// Remove.
func TestRemovedBesideOthers(t *testing.T) {
	for _, other := range []func(n *node){
		func(n *node) { n.evictOwn(Disk, n.spaces.lane(n.ns.id)) },
		func(n *node) { _ = n.ns.Remove(ids(0, 4)) },
	} {
		file := filepath.Join(t.TempDir(), "disk")
		n := openNode(t, memoryFile(t), 8, func(c *Config) {
			withDisk(file, 16)(c)
			c.Policy = LRU
		})
		for from := uint64(0); from < 16; from += 4 {
			n.put(t, ids(from, 4))
		}
		n.drained(t)
		standing := testpoint.Stand(t, "cache: leaves its disk")[0]
		go other(n)
		<-standing.Came
		removed := make(chan error, 1)
		go func() { removed <- n.ns.Remove(ids(0, 16)) }()
		until(func() bool { return n.ns.Match(ids(15, 1)).Blocks[0] == Nowhere })
		require.Empty(t, removed)
		standing.GoOn()
		require.NoError(t, <-removed)
		p, err := os.ReadFile(file)
		require.NoError(t, err)
		copied := filepath.Join(t.TempDir(), "disk")
		require.NoError(t, os.WriteFile(copied, p, 0o600))
		m := openNode(t, memoryFile(t), 8, withDisk(copied, 16))
		require.Equal(t, all(Nowhere, 16), m.ns.Match(ids(0, 16)).Blocks)
	}
}

// TestRemoveBesideAWrite: Remove does not wait for the blocks that are written to the disk: these
// go behind all loads. It waits for their records, which it must not empty.
func TestRemoveBesideAWrite(t *testing.T) {
	file := filepath.Join(t.TempDir(), "disk")
	n := openNode(t, memoryFile(t), 16, withDisk(file, 64))
	n.put(t, ids(1, 2))
	n.drained(t)
	standing := testpoint.Stand(t, "cache: on disk", "cache: recorded")
	content(ids(3, 1)[0], n.mem)
	op := n.ns.Store(t.Context(), ids(3, 1), n.at(0, 1))
	<-standing[0].Came
	require.NoError(t, n.ns.Remove(ids(1, 1)))
	standing[0].GoOn()
	<-standing[1].Came
	removed := make(chan error, 1)
	go func() { removed <- n.ns.Remove(ids(2, 1)) }()
	for tries := 0; tries < 1000 && len(removed) == 0; tries++ {
		runtime.Gosched()
	}
	standing[1].GoOn()
	require.NoError(t, <-removed)
	<-op.Durable()
	n.drained(t)
	n.close(t)
	n = openNode(t, memoryFile(t), 16, withDisk(file, 64))
	require.Equal(t, []Found{Nowhere, Nowhere, OnDisk}, n.ns.Match(ids(1, 3)).Blocks)
}

// TestRemoveThatFails: where a record cannot be emptied Remove says so, nothing is written to the
// disk, or counted as such, and the cache tries again until it can.
func TestRemoveThatFails(t *testing.T) {
	for _, day := range []uint64{0, 1 << 20} {
		n := openNode(t, memoryFile(t), 16, func(c *Config) {
			withDisk(filepath.Join(t.TempDir(), "disk"), 64)(c)
			c.Disks[0].BytesADay = day
		})
		n.put(t, ids(1, 2))
		n.drained(t)
		d := n.disks[0]
		before, budget := readFile(t, d.cfg.Path), n.Stats().Disks[0].Left
		readOnly, err := os.Open(d.cfg.Path)
		require.NoError(t, err)
		was := d.f
		d.f = readOnly
		require.ErrorContains(t, n.ns.Remove(ids(1, 1)), "a restart may find 1 blocks on disk")
		require.Equal(t, []Found{Nowhere, InMemory | OnDisk}, n.ns.Match(ids(1, 2)).Blocks)
		require.Equal(t, 1, n.Stats().Disks[0].Leaving)
		n.put(t, ids(3, 1))
		require.Equal(t, InMemory, n.ns.Match(ids(3, 1)).Blocks[0])
		require.GreaterOrEqual(t, n.Stats().Disks[0].Left, budget)
		require.True(t, bytes.Equal(before, readFile(t, d.cfg.Path)))
		n.still(t, func() {
			d.recording.Lock()
			defer d.recording.Unlock()
			d.f = was
			d.mu.Lock()
			defer d.mu.Unlock()
			d.health = health{}
		})
		n.emptied()
		require.NoError(t, n.ns.Remove(ids(1, 1)))
		n.drained(t)
		n.put(t, ids(5, 1))
		require.Equal(t, InMemory|OnDisk, n.ns.Match(ids(5, 1)).Blocks[0])
	}
}

func readFile(t *testing.T, path string) []byte {
	p, err := os.ReadFile(path)
	require.NoError(t, err)
	return p
}

// TestEntryOfAnotherLane: a Store that finds no free entry lets blocks go that are on the disk, of
// one namespace and then of another. No record of them is left.
func TestEntryOfAnotherLane(t *testing.T) {
	n := openNode(t, memoryFile(t), 64, func(c *Config) {
		withDisk(filepath.Join(t.TempDir(), "disk"), 64)(c)
		c.Blocks, c.Policy = 16, LRU
	})
	a, err := n.Namespace("a", NamespaceOptions{Priority: 1})
	require.NoError(t, err)
	n.ns, err = n.Namespace("b", NamespaceOptions{Priority: 2})
	require.NoError(t, err)
	b := n.ns
	for k := range uint64(8) {
		n.ns = a
		n.put(t, ids(k, 1))
		n.ns = b
		n.put(t, ids(100+k, 1))
	}
	n.put(t, ids(108, 1))
	n.drained(t)
	require.Equal(t, uint32(none), n.index.shards[0].free)
	pin, err := a.Pin(t.Context(), ids(0, 1), 0)
	require.NoError(t, err)
	a.use(ids(1, 7))
	b.use(ids(100, 9))
	require.Equal(t, all(Done, 1), n.put(t, ids(200, 1)))
	require.Equal(t, InMemory, a.Match(ids(0, 1)).Blocks[0], "it left the disk, and is pinned")
	pin.Close()
	n.drained(t)
}

// TestTimedDiskThatDoesNotWrite: a disk that hangs in the write of a record or of its budget holds
// up no other disk, nothing in memory, no keeper, and Close for a while only.
func TestTimedDiskThatDoesNotWrite(t *testing.T) {
	was := closeLimit
	t.Cleanup(func() { closeLimit = was })
	for _, point := range []string{"cache: leaves its disk", "cache: counts"} {
		dir := t.TempDir()
		n := openNode(t, memoryFile(t), 16, func(c *Config) {
			for _, name := range []string{"a", "b"} {
				c.Disks = append(c.Disks, DiskConfig{Path: filepath.Join(dir, name),
					Bytes: 16 * blockBytes, Extent: 8 * blockBytes, Blocks: 24,
					BytesADay: 1 << 40, SlowAfter: 100 * time.Millisecond})
			}
			c.Blocks, c.Policy = 256, LRU
		})
		full := func() bool {
			disks := n.Stats().Disks
			return disks[0].Blocks == 16 && disks[1].Blocks == 16
		}
		stored := uint64(0)
		for ; !full(); stored += 4 { // a slow machine's disks may be silent for a while
			n.put(t, ids(stored, 4))
		}
		n.drained(t)
		standing := testpoint.Stand(t, point)[0]
		begin := stored + 100
		for came := false; !came; begin += 4 {
			n.ns.Store(t.Context(), ids(begin, 4), n.at(0, 4))
			select {
			case <-standing.Came:
				came = true
			case <-time.After(time.Second):
			}
		}
		out := n.Stats().SwappedOut
		for id := begin; n.Stats().SwappedOut < out+8; id++ {
			content(ids(id, 1)[0], n.mem)
			op := n.ns.Store(t.Context(), ids(id, 1), n.at(0, 1))
			if err := op.Wait(t.Context()); err != nil {
				require.ErrorIs(t, err, engine.ErrBusy) // until the disk counts as silent
				continue
			}
			require.Equal(t, all(Done, 1), n.get(t, ids(id, 1)))
			n.ns.Estimate(ids(id, 1))
			n.second(n.readClock())
		}
		var hung []Key
		var unused []DiskStats
		until(func() bool { // the other one answers
			unused = slices.DeleteFunc(n.Stats().Disks, func(s DiskStats) bool {
				return s.Unused == ""
			})
			return len(unused) == 1
		})
		for k := range n.disks {
			if n.disks[k].cfg.Path == unused[0].Path {
				n.index.each(n.ns.id, ids(0, stored), false, func(_ *shard, j int, i uint32,
					_ uint64) {
					if i != none && n.index.entry(i).record != none &&
						int(n.index.entry(i).disk) == k {
						hung = ids(uint64(j), 1)
					}
				})
			}
		}
		require.ErrorContains(t, n.ns.Remove(hung), "has not answered for")
		closeLimit = 300 * time.Millisecond
		require.ErrorIs(t, n.Cache.Close(), engine.ErrUnproven)
		closeLimit = was
		require.Empty(t, n.ns.Match(hung).Prefix)
		standing.GoOn()
		n.close(t)
	}
}

// TestDiskAtRest: while a disk is left alone none of its blocks has to go.
func TestDiskAtRest(t *testing.T) {
	n := openNode(t, memoryFile(t), 8, withDisk(filepath.Join(t.TempDir(), "disk"), 64))
	for from := uint64(0); from < 60; from += 4 {
		n.put(t, ids(from, 4))
	}
	d := n.disks[0]
	d.mu.Lock()
	d.health.without = time.Now().Add(time.Hour)
	d.mu.Unlock()
	before := n.Stats().Disks[0]
	require.NotEmpty(t, before.Unused)
	n.put(t, ids(1000, 8))
	n.drained(t)
	require.Equal(t, before.Blocks, n.Stats().Disks[0].Blocks)
	d.mu.Lock()
	d.health = health{}
	d.mu.Unlock()
	n.put(t, ids(2000, 4))
	require.Equal(t, before.Blocks+4, n.Stats().Disks[0].Blocks)
}

// TestRecordsThatAreRefused: a smaller table does not take all records of a disk. Each that it
// refuses is free once.
func TestRecordsThatAreRefused(t *testing.T) {
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	n := openNode(t, path, 16, withDisk(file, 64))
	for from := uint64(0); from < 48; from += 8 {
		n.put(t, ids(from, 8))
	}
	n.close(t)
	n = openNode(t, path, 16, func(c *Config) { withDisk(file, 64)(c); c.Blocks = 24 })
	require.NotEmpty(t, n.Attached().Fresh)
	n.drained(t)
	free := slices.Sorted(slices.Values(n.disks[0].free))
	require.Equal(t, free, slices.Compact(slices.Clone(free)))
	for from := uint64(1000); from < 1200; from += 4 {
		n.put(t, ids(from, 4))
		require.NotContains(t, n.get(t, ids(from-8, 8)), Damaged)
	}
	n.drained(t)
}

// TestHeadGoesLast: of a chain the blocks at its end go first, of those that were stored and of
// those that were loaded.
func TestHeadGoesLast(t *testing.T) {
	for _, load := range []bool{false, true} {
		n := openNode(t, memoryFile(t), 16, func(c *Config) { c.Policy = LRU })
		n.put(t, ids(0, 8))
		n.put(t, ids(100, 8))
		if load {
			require.Equal(t, all(Done, 8), n.get(t, ids(0, 8)))
			n.put(t, ids(200, 8))
		}
		n.put(t, ids(300, 4))
		require.Equal(t, 4, n.ns.Match(ids(0, 8)).Prefix)
		require.Equal(t, slices.Repeat([]Found{Nowhere}, 4), n.ns.Match(ids(4, 4)).Blocks)
	}
}

// TestVictims: where all of the list whose turn it is are held, one of the other goes.
func TestVictims(t *testing.T) {
	for _, p := range []Policy{S3FIFO, LRU, ARC} {
		q := p.make(links{&index{memory: &memory{entries: make([]entry, 64)}}, Memory})
		for i := range uint32(8) {
			q.insert(i)
			q.touch(i)
		}
		for i := uint32(8); i < 40; i++ {
			q.insert(i)
		}
		gone := map[uint32]bool{}
		for range 8 {
			v := q.victim(func(i uint32) bool { return i >= 8 })
			require.Less(t, v, uint32(8), p)
			gone[v] = true
		}
		require.Len(t, gone, 8)
		require.Equal(t, uint32(none), q.victim(func(uint32) bool { return true }))
		for range 32 {
			gone[q.victim(func(uint32) bool { return false })] = true
		}
		require.Len(t, gone, 40)
		require.NotContains(t, gone, uint32(none))
	}
}

// TestDiskIsPrivate: no peer finds the blocks of a disk.
func TestDiskIsPrivate(t *testing.T) {
	n := openNode(t, memoryFile(t), 8, withDisk(filepath.Join(t.TempDir(), "disk"), 16))
	description, err := n.engine.Describe()
	require.NoError(t, err)
	require.False(t, bytes.Contains(description, []byte("cache disk")))
	require.True(t, bytes.Contains(description, []byte("kv")))
}
