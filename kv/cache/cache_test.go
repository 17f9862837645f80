// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/posix"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// node is an engine with a cache and the memory of a program that is served by it.
type node struct {
	*Cache
	ns     *Namespace
	engine *engine.Engine
	mem    []byte
	place  Place // slots of blockBytes; its Run is the length of a block
	hung   bool  // a transfer was given up: Close says so
}

const blockBytes = 12 << 10

// memoryFile is a path on /dev/shm that goes with the test.
func memoryFile(tb testing.TB) string { return filepath.Join(tb.TempDir(), "memory") }

func openNode(tb testing.TB, path string, blocks int, change func(*Config)) *node {
	tb.Helper()
	return openBy(tb, path, blocks, posix.Config{Threads: 4}, change)
}

// openBy is openNode with a way to the disks of one's own.
func openBy(tb testing.TB, path string, blocks int, way posix.Config,
	change func(*Config)) *node {
	tb.Helper()
	b, err := mem.New(mem.Config{})
	require.NoError(tb, err)
	f, err := posix.New(way)
	require.NoError(tb, err)
	// a disk of a machine that also builds may answer nothing for longer than the default
	return openOver(tb, path, blocks, engine.Config{Backends: []driver.Backend{b, f},
		TransferTimeout: 5 * time.Minute}, change)
}

func openOver(tb testing.TB, path string, blocks int, ec engine.Config,
	change func(*Config)) *node {
	tb.Helper()
	ec.Name, ec.Schedule = "node", cmp.Or(ec.Schedule, &engine.Schedule{})
	e, err := engine.Open(ec)
	require.NoError(tb, err)
	n := &node{engine: e, mem: make([]byte, 256*blockBytes)}
	cfg := Config{Engine: e, Memory: MemoryConfig{Path: path, Bytes: uint64(blocks) * blockBytes,
		Extent: 8 * blockBytes}, Blocks: uint64(2 * blocks)}
	if change != nil {
		change(&cfg)
	}
	n.Cache, err = Open(tb.Context(), cfg)
	require.NoError(tb, err)
	_, err = e.Register("kv", driver.Segment{Kind: driver.DRAM, Len: uint64(len(n.mem)),
		Mem: n.mem})
	require.NoError(tb, err)
	self, err := e.Self()
	require.NoError(tb, err)
	remote, err := self.Remote("kv")
	require.NoError(tb, err)
	n.place = Place{Peer: self, Remote: remote, Stride: blockBytes, Run: blockBytes}
	n.ns, err = n.Namespace("model", NamespaceOptions{})
	require.NoError(tb, err)
	tb.Cleanup(func() { n.close(tb) })
	return n
}

// close is called by the end of the test, too.
func (n *node) close(tb testing.TB) {
	if n.hung {
		require.ErrorIs(tb, n.Cache.Close(), engine.ErrUnproven)
		_ = n.engine.Close() // as well
		return
	}
	require.NoError(tb, n.Cache.Close())
	require.NoError(tb, n.engine.Close())
}

// keysOf are the keys of some numbers.
func keysOf(ids ...uint64) []Key {
	keys := make([]Key, len(ids))
	for k, id := range ids {
		binary.BigEndian.PutUint64(keys[k][8:], id)
		keys[k][0] = 1
	}
	return keys
}

// content fills a block as its key says.
func content(key Key, p []byte) {
	r := rand.New(rand.NewPCG(binary.BigEndian.Uint64(key[:]), binary.BigEndian.Uint64(key[8:])))
	for k := 0; k+8 <= len(p); k += 8 {
		binary.NativeEndian.PutUint64(p[k:], r.Uint64())
	}
}

// at is the place of a call whose block k lies in slot from+k.
func (n *node) at(from, count int) Place {
	p := n.place
	for k := range count {
		p.Slots = append(p.Slots, uint32(from+k))
	}
	return p
}

// put stores blocks, from the first slots of the program's memory.
func (n *node) put(tb testing.TB, keys []Key) []Outcome {
	tb.Helper()
	for k, key := range keys {
		content(key, n.mem[k*blockBytes:][:n.place.Run])
	}
	op := n.ns.Store(tb.Context(), keys, n.at(0, len(keys)))
	require.NoError(tb, op.Wait(tb.Context()))
	<-op.Durable()
	return op.Outcomes()
}

// get loads blocks to the slots from 128 on, and checks the bytes of those that are Done.
func (n *node) get(tb testing.TB, keys []Key) []Outcome {
	tb.Helper()
	clear(n.mem[128*blockBytes:])
	op := n.ns.Load(tb.Context(), keys, n.at(128, len(keys)))
	require.NoError(tb, op.Wait(tb.Context()))
	want := make([]byte, blockBytes)
	for k, key := range keys {
		if op.Outcomes()[k] == Done {
			content(key, want[:n.place.Run])
			if !bytes.Equal(want, n.mem[(128+k)*blockBytes:][:blockBytes]) {
				tb.Fatalf("block %d of %x has other bytes", k, key)
			}
		}
	}
	return op.Outcomes()
}

func all[T any](as T, n int) []T {
	list := make([]T, n)
	for k := range list {
		list[k] = as
	}
	return list
}

func TestStoreAndLoad(t *testing.T) {
	n := openNode(t, memoryFile(t), 32, nil)
	keys := keysOf(1, 2, 3, 4, 5)
	require.Equal(t, 0, n.ns.Match(keys).Prefix)
	require.Equal(t, all(Missing, 5), n.get(t, keys))
	require.Equal(t, all(Done, 4), n.put(t, keys[:4]))
	require.Equal(t, 4, n.ns.Match(keys).Prefix)
	require.Equal(t, []Outcome{Done, Done, Done, Done, Missing}, n.get(t, keys))
	require.Equal(t, []Outcome{Known, Known, Known, Known, Done}, n.put(t, keys))
	n.ns.Remove(keys[1:2])
	require.Equal(t, 1, n.ns.Match(keys).Prefix)
	require.Equal(t, []Outcome{Done, Missing, Done, Done, Done}, n.get(t, keys))
	other, err := n.Namespace("other", NamespaceOptions{})
	require.NoError(t, err)
	require.Equal(t, 0, other.Match(keys).Prefix)
}

// TestRestart: what was committed is there when the file is opened again.
func TestRestart(t *testing.T) {
	path := memoryFile(t)
	keys := keysOf(1, 2, 3, 4, 5, 6, 7, 8, 9)
	n := openNode(t, path, 32, nil)
	require.Equal(t, all(Done, 9), n.put(t, keys))
	n.close(t)
	n = openNode(t, path, 32, nil)
	require.Equal(t, 9, n.Attached().Blocks, n.Attached())
	require.Equal(t, all(Done, 9), n.get(t, keys))
}

// TestDiskIsAdded: the memory file is of use with other disks than before, unless Blocks says
// otherwise.
func TestDiskIsAdded(t *testing.T) {
	path, file, keys := memoryFile(t), filepath.Join(t.TempDir(), "disk"), ids(0, 9)
	n := openNode(t, path, 32, func(c *Config) { c.Blocks = 0 })
	entries := n.Attached().Room
	n.put(t, keys)
	n.close(t)
	for _, blocks := range []int{1 << 10, 2 << 10, 0} { // of the disk; 0: there is none any more
		n = openNode(t, path, 32, func(c *Config) {
			if blocks > 0 {
				withDisk(file+strconv.Itoa(blocks), blocks)(c)
			}
			c.Blocks = 0
		})
		require.Equal(t, 9, n.Attached().Blocks, n.Attached().Fresh)
		require.Equal(t, entries, n.Attached().Room)
		require.Equal(t, all(Done, 9), n.get(t, keys))
		n.close(t)
	}
	n = openNode(t, path, 32, func(c *Config) { c.Blocks = uint64(2 * entries) })
	require.Contains(t, n.Attached().Fresh, "its shape stays as it was: entries for blocks, ")
	for blocks := uint64(1); blocks < 8*shardEntries*shardsMax; blocks += 1 + blocks/10 {
		entries, shards := tableOf(blocks)
		require.Equal(t, shards, shardsOf(entries), blocks)
	}
}

// TestMatchGroups has a model of three groups: one that needs all blocks, one with a window of two,
// and one of states.
func TestMatchGroups(t *testing.T) {
	n := openNode(t, memoryFile(t), 64, nil)
	full, window, state := ids(0, 8), ids(100, 8), ids(200, 8)
	groups := []Group{{Keys: full}, {Keys: window, Last: 2}, {Keys: state, Last: 1}}
	require.Equal(t, 0, n.ns.MatchGroups(groups...))
	n.put(t, full[:7])
	require.Equal(t, 7, n.ns.MatchGroups(groups[0]))
	require.Equal(t, 0, n.ns.MatchGroups(groups...))
	n.put(t, window[3:6])
	require.Equal(t, 6, n.ns.MatchGroups(groups[:2]...))
	n.put(t, state[4:5])
	require.Equal(t, 5, n.ns.MatchGroups(groups...))
	n.ns.Remove(full[2:3])
	require.Equal(t, 0, n.ns.MatchGroups(groups...))
	require.Equal(t, 5, n.ns.MatchGroups(groups[1:]...))
}

func explain(ns *Namespace, key Key) string {
	_, text := ns.Explain(key)
	return text
}

// TestStatsAndExplain: the counts and the words are those of what was done.
func TestStatsAndExplain(t *testing.T) {
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	n := openNode(t, path, 16, withDisk(file, 64))
	keys := ids(0, 8)
	require.Contains(t, explain(n.ns, keys[0]), "does not know")
	n.put(t, keys)
	n.put(t, keys[:2])
	n.get(t, ids(4, 8))
	s := n.Stats()
	require.Equal(t, map[Outcome]uint64{Done: 8, Known: 2}, s.Stores)
	require.Equal(t, map[Outcome]uint64{Done: 4, Missing: 4}, s.Loads)
	require.EqualValues(t, 8*blockBytes, s.StoredBytes)
	require.EqualValues(t, 4*blockBytes, s.LoadedBytes)
	require.EqualValues(t, 8, s.SwappedOut)
	require.Equal(t, TierStats{Blocks: 8, Bytes: 8 * blockBytes, Room: 16 * blockBytes},
		s.Tiers[Memory])
	require.Equal(t, 8, s.Disks[0].Blocks)
	require.Equal(t, map[string]NamespaceStats{"model": {Blocks: PerTier[int64]{8, 8},
		Bytes: PerTier[int64]{8 * blockBytes, 8 * blockBytes}}}, s.Namespaces)
	require.Contains(t, explain(n.ns, keys[0]), "in memory at ")
	require.Contains(t, explain(n.ns, keys[0]), "on disk "+file)
}

// TestQuota: a namespace never has more than its quota, by tier, whoever stores at once; what goes
// for it are blocks of its own.
func TestQuota(t *testing.T) {
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	n := openNode(t, path, 32, withDisk(file, 64))
	require.Equal(t, all(Done, 6), n.put(t, ids(1000, 6)))
	small, err := n.Namespace("small", NamespaceOptions{Quota: [2]uint64{8 * blockBytes,
		16 * blockBytes}})
	require.NoError(t, err)
	var workers sync.WaitGroup
	for w := range uint64(4) {
		workers.Go(func() {
			for from := range uint64(10) {
				op := small.Store(t.Context(), ids(100*w+5*from, 5), n.at(int(16*w), 5))
				if err := op.Wait(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	workers.Wait()
	n.drained(t)
	s := n.Stats().Namespaces["small"]
	require.LessOrEqual(t, s.Bytes[Disk], int64(16*blockBytes))
	require.LessOrEqual(t, s.Bytes[Memory], int64(8*blockBytes))
	for from := uint64(2000); from < 2100; from += 5 {
		op := small.Store(t.Context(), ids(from, 5), n.at(0, 5))
		require.NoError(t, op.Wait(t.Context()))
		<-op.Durable()
		require.Equal(t, all(Done, 5), op.Outcomes())
	}
	n.drained(t)
	s = n.Stats().Namespaces["small"]
	require.Equal(t, PerTier[int64]{8 * blockBytes, 16 * blockBytes}, s.Bytes)
	require.Equal(t, 6, n.ns.Match(ids(1000, 6)).Prefix)

	// opened again, it has another one, and its blocks are where they were
	small, err = n.Namespace("small", NamespaceOptions{Priority: 3})
	require.NoError(t, err)
	op := small.Store(t.Context(), ids(5000, 12), n.at(0, 12))
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(Done, 12), op.Outcomes())
}

// TestNamesMakeWay: names without blocks that nobody has open make way for new ones; no block is
// found by another name than its own, also behind a kill.
func TestNamesMakeWay(t *testing.T) {
	path := memoryFile(t)
	n := openNode(t, path, 24, nil)
	n.put(t, ids(0, 2))
	open := func(k int) (*Namespace, error) {
		return n.Namespace(fmt.Sprint(k), NamespaceOptions{Quota: [2]uint64{8 * blockBytes}})
	}
	var used *Namespace
	for k := range spacesMax - 1 {
		s, err := open(k)
		require.NoError(t, err)
		if used = s; k > 0 {
			continue
		}
		op := s.Store(t.Context(), ids(0, 1), n.at(0, 1))
		require.NoError(t, op.Wait(t.Context()))
		s.Close() // its block stays
	}
	_, err := open(spacesMax)
	require.ErrorIs(t, err, ErrNoRoom)
	used.Close()
	used.Close()
	_, err = open(spacesMax)
	require.NoError(t, err)
	_, err = open(spacesMax + 1)
	require.ErrorIs(t, err, ErrNoRoom)
	lanes := len(*n.spaces.lanes.Load())
	require.Equal(t, priorities+spacesMax-1, lanes)
	n.check(t)

	n = copyOf(t, path)
	require.Equal(t, 3, n.Attached().Blocks)
	require.Equal(t, 2, n.ns.Match(ids(0, 2)).Prefix)
	for _, s := range n.Spaces() { // those of before are open to nobody
		require.NotEqual(t, fmt.Sprint(spacesMax-2), s.Name)
	}
	k, known := n.spaces.number([16]byte{7}) // as of a disk that has no name for it
	require.False(t, known)
	require.Zero(t, binary.LittleEndian.Uint32(n.spaces.record(k)[32:]), "it has no name of others")
	for k := spacesMax; k < 2*spacesMax-3; k++ {
		s, err := open(k)
		require.NoError(t, err)
		require.Zero(t, s.Match(ids(0, 2)).Prefix)
	}
	_, err = open(0)
	require.NoError(t, err)
	n.check(t)
}

// TestPriority: blocks of a lower priority go first, in both tiers, also after a restart.
func TestPriority(t *testing.T) {
	path, file := memoryFile(t), filepath.Join(t.TempDir(), "disk")
	n := openNode(t, path, 32, withDisk(file, 64))
	high, err := n.Namespace("high", NamespaceOptions{Priority: 5})
	require.NoError(t, err)
	op := high.Store(t.Context(), ids(0, 16), n.at(0, 16))
	require.NoError(t, op.Wait(t.Context()))
	for from := uint64(0); from < 80; from += 8 {
		n.put(t, ids(from, 8))
	}
	require.Equal(t, 16, high.Match(ids(0, 16)).Prefix)
	n.drained(t)
	n.close(t)
	require.NoError(t, os.Remove(path))
	n = openNode(t, path, 32, withDisk(file, 64))
	high, err = n.Namespace("high", NamespaceOptions{Priority: 5})
	require.NoError(t, err)
	for from := uint64(1000); from < 1200; from += 8 {
		n.put(t, ids(from, 8))
	}
	require.Equal(t, 16, high.Match(ids(0, 16)).Prefix)
	n.drained(t)
}

// TestTableIsFull: where the table has no entry left, blocks that are on the disk alone go, too.
func TestTableIsFull(t *testing.T) {
	n := openNode(t, memoryFile(t), 8, func(c *Config) {
		withDisk(filepath.Join(t.TempDir(), "disk"), 64)(c)
		c.Blocks = 24
	})
	for from := uint64(0); from < 80; from += 4 {
		require.Equal(t, all(Done, 4), n.put(t, ids(from, 4)))
	}
	n.drained(t)
}

// TestClosed: what is called after Close, or runs meanwhile, ends and touches nothing.
// TestTableIsFullOfPriorities: where the table is full before the memory is, blocks of the lowest
// priority go first, also those that leave memory and stay on the disk.
func TestTableIsFullOfPriorities(t *testing.T) {
	n := openNode(t, memoryFile(t), 32, func(c *Config) {
		withDisk(filepath.Join(t.TempDir(), "disk"), 64)(c)
		c.Blocks = 24
	})
	high, err := n.Namespace("high", NamespaceOptions{Priority: 7})
	require.NoError(t, err)
	op := high.Store(t.Context(), ids(0, 16), n.at(0, 16))
	require.NoError(t, op.Wait(t.Context()))
	for from := uint64(0); from < 80; from += 4 {
		require.Equal(t, all(Done, 4), n.put(t, ids(from, 4)))
		n.drained(t) // so that memory alone lets none go for good
	}
	require.Equal(t, 16, high.Match(ids(0, 16)).Prefix)
}

func TestClosed(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, nil)
	n.put(t, ids(0, 4))
	standing := testpoint.Stand(t, "cache: landed")[0]
	op := n.ns.Store(t.Context(), ids(10, 4), n.at(0, 4))
	<-standing.Came
	closed := make(chan error)
	go func() { closed <- n.Cache.Close() }()
	for n.life.Err() == nil {
		runtime.Gosched()
	}
	require.ErrorIs(t, n.ns.Load(t.Context(), ids(0, 4), n.at(0, 4)).Wait(t.Context()),
		engine.ErrClosed)
	standing.GoOn()
	require.NoError(t, <-closed)
	<-op.Done()
	require.NoError(t, n.Cache.Close())
	require.Equal(t, 0, n.ns.Match(ids(0, 4)).Prefix)
	n.ns.Remove(ids(0, 4))
	require.Empty(t, n.Stats().Namespaces)
	require.Contains(t, explain(n.ns, ids(0, 1)[0]), "closed")
	_, err := n.Namespace("another", NamespaceOptions{})
	require.ErrorIs(t, err, engine.ErrClosed)
	require.ErrorIs(t, n.ns.Store(t.Context(), ids(0, 4), n.at(0, 4)).Wait(t.Context()),
		engine.ErrClosed)
}

// TestBadCalls: what cannot be is an error that says why, and changes nothing.
func TestBadCalls(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, nil)
	good := n.at(0, 2)
	for what, change := range map[string]func(p *Place){
		"a peer and a region": func(p *Place) { p.Peer = nil },
		"1 slots for 2 keys":  func(p *Place) { p.Slots = p.Slots[:1] },
		"blocks of 0 bytes":   func(p *Place) { p.Run = 0 },
		"the extent":          func(p *Place) { p.Run = 9 * blockBytes },
		"4 loops":             func(p *Place) { p.Loops = make([]Axis, 4) },
		"blocks of":           func(p *Place) { p.Loops = []Axis{{N: 1 << 31}, {N: 1 << 31}} },
		"out of bounds":       func(p *Place) { p.Slots = []uint32{0, 1 << 30} },
	} {
		p := good
		change(&p)
		for _, op := range []*Op{n.ns.Store(t.Context(), ids(0, 2), p),
			n.ns.Load(t.Context(), ids(0, 2), p)} {
			err := op.Wait(t.Context())
			if err != nil { // a Load of what is not there has nothing to copy
				require.ErrorContains(t, err, what)
			}
			require.NotContains(t, op.Outcomes(), Done)
		}
	}
	require.Equal(t, 0, n.ns.Match(ids(0, 2)).Prefix)
	require.Empty(t, n.ns.Match(nil).Blocks)
	require.NoError(t, n.ns.Store(t.Context(), nil, n.at(0, 0)).Wait(t.Context()))
	over, cancel := context.WithCancel(t.Context())
	cancel()
	op := n.ns.Store(over, ids(0, 2), good)
	require.ErrorIs(t, op.Wait(t.Context()), context.Canceled)
	require.Equal(t, all(Late, 2), op.Outcomes())
	n.put(t, ids(0, 2))
	op = n.ns.Load(over, ids(0, 2), good)
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(Late, 2), op.Outcomes())
	n.check(t)
}

// TestVerifyFirst: what this process has verified once it does not sum again; what a process before
// has left it does.
func TestVerifyFirst(t *testing.T) {
	path := memoryFile(t)
	flip := func(n *node, key Key) {
		n.index.each(n.ns.id, []Key{key}, false, func(_ *shard, _ int, i uint32, _ uint64) {
			e := n.index.entry(i)
			n.memory.bytesOf(e.slot, e.size)[5] ^= 1
		})
	}
	outcome := func(n *node, key Key) Outcome {
		op := n.ns.Load(t.Context(), []Key{key}, n.at(128, 1))
		require.NoError(t, op.Wait(t.Context()))
		return op.Outcomes()[0]
	}
	keys := ids(0, 2)
	n := openNode(t, path, 16, func(c *Config) { c.VerifyFirst = true })
	n.put(t, keys)
	require.Equal(t, Done, outcome(n, keys[0]))
	flip(n, keys[0])
	require.Equal(t, Done, outcome(n, keys[0]), "it was summed again")
	flip(n, keys[1])
	require.Equal(t, Damaged, outcome(n, keys[1]), "it was never summed")
	n.close(t)
	n = openNode(t, path, 16, func(c *Config) { c.VerifyFirst = true })
	require.Equal(t, Damaged, outcome(n, keys[0]), "another process had summed it")
}

// TestRoomForAnotherLength: an extent in which one block is pinned is left as it is; one in which
// none is makes room for blocks of another length.
func TestRoomForAnotherLength(t *testing.T) {
	for _, p := range []Policy{S3FIFO, LRU, ARC} {
		n := openNode(t, memoryFile(t), 64, func(c *Config) { c.Policy = p })
		require.NoError(t, n.ns.Set(NamespaceOptions{HoldMax: 8 * blockBytes}))
		for from := uint64(0); from < 64; from += 8 {
			n.put(t, ids(from, 8))
		}
		inExtent := map[uint32][]Key{}
		n.index.each(n.ns.id, ids(0, 64), false, func(_ *shard, k int, i uint32, _ uint64) {
			at := n.index.entry(i).slot / n.places.each
			inExtent[at] = append(inExtent[at], ids(uint64(k), 1)...)
		})
		require.Len(t, inExtent, 8)
		var pins []*Pin
		for _, keys := range inExtent {
			pin, err := n.ns.Pin(t.Context(), keys[3:4], 0)
			require.NoError(t, err)
			pins = append(pins, pin)
		}
		place := n.at(0, 1)
		place.Run = 4 << 10
		op := n.ns.Store(t.Context(), ids(1000, 1), place)
		require.NoError(t, op.Wait(t.Context()))
		require.Equal(t, all(NoRoom, 1), op.Outcomes())
		require.Equal(t, 64-keptExtentsMax, n.Stats().Tiers[Memory].Blocks)
		require.Equal(t, all(Done, 4), n.put(t, ids(2000, 4)), "one of the same length has room")
		pins[0].Close()
		op = n.ns.Store(t.Context(), ids(1000, 1), place)
		require.NoError(t, op.Wait(t.Context()))
		require.Equal(t, all(Done, 1), op.Outcomes())
		require.GreaterOrEqual(t, n.Stats().Tiers[Memory].Blocks, 64-3*8)
		for _, pin := range pins {
			pin.Close()
		}
		n.check(t)
	}
}

// TestOtherLength: a key has one length. A Store of another one is told, a Load finds no such
// block, and the first bytes stay.
func TestOtherLength(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, nil)
	keys := ids(0, 1)
	n.put(t, keys)
	short := n.at(0, 1)
	short.Run = 4096
	op := n.ns.Store(t.Context(), keys, short)
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(Conflict, 1), op.Outcomes())
	op = n.ns.Load(t.Context(), keys, short)
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(Unlike, 1), op.Outcomes())
	require.Equal(t, all(Done, 1), n.get(t, keys))
}

// TestCompareKnown: other bytes for a key that the cache has are refused and told, wherever its
// block is, and the block stays. Where there is no room to read them nothing is compared.
func TestCompareKnown(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, func(c *Config) {
		withDisk(filepath.Join(t.TempDir(), "disk"), 64)(c)
		c.CompareKnown, c.HoldMax = true, 16*blockBytes
	})
	require.NoError(t, n.ns.Set(NamespaceOptions{HoldMax: 16 * blockBytes}))
	n.put(t, ids(0, 16)) // there is no room left
	n.hint(t, ids(0, 2), HintDemote, 0)
	n.put(t, ids(16, 2))
	require.Equal(t, all(OnDisk, 2), n.ns.Match(ids(0, 2)).Blocks)
	require.Equal(t, all(Known, 8), n.put(t, ids(0, 8)))
	events := n.Events(t.Context())
	other := func(bad ...int) []Outcome {
		for k, key := range ids(0, 8) {
			content(key, n.mem[k*blockBytes:][:blockBytes])
		}
		for _, k := range bad {
			n.mem[k*blockBytes+77] ^= 4
		}
		op := n.ns.Store(t.Context(), ids(0, 8), n.at(0, 8))
		require.NoError(t, op.Wait(t.Context()))
		return op.Outcomes()
	}
	want := all(Known, 8)
	want[1], want[6] = Conflict, Conflict
	require.Equal(t, want, other(1, 6))
	for _, id := range []uint64{1, 6} {
		for {
			if e := <-events; e.Kind != Demoted {
				require.Equal(t, Event{Kind: Conflicted, Namespace: "model",
					Digest: n.ns.Digest(), Key: ids(id, 1)[0]}, e)
				break
			}
		}
	}
	require.EqualValues(t, 2, n.Stats().Stores[Conflict])
	require.Equal(t, all(Done, 8), n.get(t, ids(0, 8)))
	n.drained(t)

	var pinned []Key
	for k, f := range n.ns.Match(ids(0, 18)).Blocks {
		if f&InMemory != 0 {
			pinned = append(pinned, ids(uint64(k), 1)...)
		}
	}
	p, err := n.ns.Pin(t.Context(), pinned, 0)
	require.NoError(t, err)
	free := make([]uint32, 16)
	defer n.places.giveBackAll(free[:n.places.reserve(granules(blockBytes), free)])
	require.Equal(t, all(Known, 8), other(1, 6), "no slot may be used to compare them")
	p.Close()
}

// TestOpsMax: more operations than Config says are refused, and room comes back.
func TestOpsMax(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, func(c *Config) { c.OpsMax = 1 })
	standing := testpoint.Stand(t, "cache: landed")[0]
	first := n.ns.Store(t.Context(), ids(0, 2), n.at(0, 2))
	<-standing.Came
	second := n.ns.Store(t.Context(), ids(10, 2), n.at(10, 2))
	require.ErrorIs(t, second.Wait(t.Context()), engine.ErrBusy)
	require.Equal(t, all(Failed, 2), second.Outcomes())
	standing.GoOn()
	require.NoError(t, first.Wait(t.Context()))
	for n.ns.Store(t.Context(), ids(10, 2), n.at(10, 2)).Wait(t.Context()) != nil {
		runtime.Gosched() // the first one gives its place back behind its end
	}
}

// TestSlotsThatOverlap: a place that was not filled in, or whose slots overlap, is refused.
func TestSlotsThatOverlap(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, nil)
	for _, stride := range []uint64{0, 1, blockBytes / 2, blockBytes - 1} {
		to := n.at(0, 2)
		to.Stride = stride
		require.ErrorIs(t, n.ns.Store(t.Context(), ids(0, 2), to).Wait(t.Context()),
			engine.ErrBounds)
		require.ErrorIs(t, n.ns.Load(t.Context(), ids(0, 2), to).Wait(t.Context()),
			engine.ErrBounds)
	}
	require.Zero(t, n.Stats().Tiers[Memory].Blocks)
}

// TestSlotThatIsThereTwice: a Load to one slot twice is refused before anything moves; a Store may
// have one for several keys.
func TestSlotThatIsThereTwice(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, nil)
	from := n.at(0, 3)
	from.Slots = []uint32{1, 1, 0}
	op := n.ns.Store(t.Context(), ids(0, 3), from)
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(Done, 3), op.Outcomes())
	for _, slots := range [][]uint32{{1, 1, 2}, {7, 6, 7}, {64, 2, 64}, {9, 1 << 31, 9}} {
		want, to := bytes.Clone(n.mem), n.at(0, 3)
		to.Slots = slots
		op = n.ns.Load(t.Context(), ids(0, 3), to)
		require.ErrorIs(t, op.Wait(t.Context()), engine.ErrBounds)
		require.ErrorContains(t, op.Err(), "a slot of its own")
		require.Equal(t, all(Failed, 3), op.Outcomes())
		require.True(t, bytes.Equal(want, n.mem))
	}
	for _, slots := range [][]uint32{{65, 1, 64}, {9, 200, 8}} {
		to := n.at(0, 3)
		to.Slots = slots
		op = n.ns.Load(t.Context(), ids(0, 3), to)
		require.NoError(t, op.Wait(t.Context()))
		require.Equal(t, all(Done, 3), op.Outcomes())
	}
}

// TestSlotsOfUnits: blocks begin at any unit that is shorter than they are.
func TestSlotsOfUnits(t *testing.T) {
	const unit = blockBytes / 4
	n := openNode(t, memoryFile(t), 16, nil)
	keys := ids(0, 3)
	from, to := n.place, n.place
	from.Stride, from.Slots = unit, []uint32{9, 1, 5}
	to.Stride, to.Slots = unit, []uint32{20, 30, 25}
	want := bytes.Clone(n.mem)
	for k, key := range keys {
		content(key, n.mem[from.Slots[k]*unit:][:blockBytes])
		content(key, want[from.Slots[k]*unit:][:blockBytes])
		content(key, want[to.Slots[k]*unit:][:blockBytes])
	}
	require.NoError(t, n.ns.Store(t.Context(), keys, from).Wait(t.Context()))
	op := n.ns.Load(t.Context(), keys, to)
	require.NoError(t, op.Wait(t.Context()))
	require.Equal(t, all(Done, 3), op.Outcomes())
	require.True(t, bytes.Equal(want, n.mem), "other bytes have changed")
}
