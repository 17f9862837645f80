// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/trace"
)

// BenchmarkMatch looks for 4,096 keys of 64 Ki that are there.
func BenchmarkMatch(b *testing.B) {
	const blocks = 64 << 10
	n := openNode(b, shmFile(b), blocks/2, func(c *Config) { c.Blocks = blocks })
	var ids []uint64
	for id := range uint64(blocks) {
		ids = append(ids, id)
	}
	keys := keysOf(ids...)
	small := n.at(0, 128)
	small.Run, small.Stride = 64, 64
	for k := 0; k < blocks; k += 128 {
		op := n.ns.Store(b.Context(), keys[k:k+128], small)
		require.NoError(b, op.Wait(b.Context()))
		require.Equal(b, all(Done, 128), op.Outcomes())
	}
	b.ReportAllocs()
	at := 0
	for b.Loop() {
		if n.ns.Match(keys[at:at+4096]).Prefix != 4096 {
			b.Fatal("not there")
		}
		at = (at + 4096) % blocks
	}
}

// BenchmarkHits runs the trace that SLUICE_TRACE names, or requests of its statistics, through a
// cache of a share of its blocks, and has the share of blocks found.
func BenchmarkHits(b *testing.B) {
	requests, unique := requestsOf(b)
	for _, share := range []int{1, 3, 10, 30} {
		for _, p := range []Policy{S3FIFO, ARC, LRU} {
			b.Run(string(p)+"/"+strconv.Itoa(share),
				func(b *testing.B) {
					for b.Loop() {
						blocks := unique * share / 100
						n := openNode(b, shmFile(b), blocks/2, func(c *Config) {
							c.Memory.Extent, c.Memory.Bytes = granule, uint64(blocks)*granule
							c.Blocks = uint64(blocks) + 4096
							c.Policy = p
						})
						hits, refs := 0, 0
						for _, r := range requests {
							keys := keysOf(r...)
							refs += len(keys)
							prefix := n.ns.Match(keys).Prefix
							hits += prefix
							small := n.at(0, len(keys))
							small.Run, small.Stride = 8, 8
							if prefix > 0 {
								to := small
								to.Slots = small.Slots[:prefix]
								require.NoError(b, n.ns.Load(b.Context(), keys[:prefix],
									to).Wait(b.Context()))
							}
							if prefix < len(keys) {
								to := small
								to.Slots = small.Slots[prefix:]
								require.NoError(b, n.ns.Store(b.Context(), keys[prefix:],
									to).Wait(b.Context()))
							}
						}
						b.ReportMetric(float64(hits)/float64(refs), "hits")
						n.close(b)
					}
				})
		}
	}
}

// requestsOf returns the blocks of requests, and how many different ones there are.
func requestsOf(tb testing.TB) (requests [][]uint64, unique int) {
	seen := map[uint64]bool{}
	add := func(r trace.Request) {
		requests = append(requests, r.HashIDs)
		for _, id := range r.HashIDs {
			seen[id] = true
		}
	}
	if path := os.Getenv("SLUICE_TRACE"); path != "" {
		f, err := os.Open(path)
		require.NoError(tb, err)
		defer f.Close()
		for in := trace.NewReader(f); ; {
			r, err := in.Next()
			if err == io.EOF {
				break
			}
			require.NoError(tb, err)
			add(r)
		}
	} else {
		for g := trace.NewGenerator(1); len(requests) < 12000; {
			add(g.Next())
		}
	}
	return requests, len(seen)
}

// BenchmarkAttach attaches to a file of a million blocks.
func BenchmarkAttach(b *testing.B) {
	const blocks = 1 << 20
	path := shmFile(b)
	entries, _ := tableOf(blocks)
	s := shape{entries: entries, extent: 2 << 20, bytes: blocks * granule}
	m, err := openMemory(b.Context(), path, s)
	require.NoError(b, err)
	x := newIndex(m)
	places := newSlots(s.bytes, s.extent)
	x.attach(places, func(uint16) bool { return true }, func(*shard, uint32) {})
	slot := make([]uint32, 1)
	for k := range uint64(blocks) {
		key := keysOf(k)[0]
		hash := x.hash(&key, 0)
		i := x.add(x.shardOf(hash), hash, &key, 0)
		require.NotEqual(b, uint32(none), i)
		require.Equal(b, 1, places.reserve(1, slot))
		e := x.entry(i)
		e.size, e.slot, e.state = granule, slot[0], present
		x.commit(i)
	}
	sp := openSpaces(m)
	sp.write(0, "model", [16]byte{})
	require.NoError(b, m.close(false))
	e := openNode(b, shmFile(b), 24, nil).engine
	b.ResetTimer()
	for b.Loop() {
		c, err := Open(b.Context(), Config{Engine: e, Blocks: blocks,
			Memory: MemoryConfig{Path: path, Bytes: s.bytes, Extent: s.extent}})
		require.NoError(b, err)
		require.Equal(b, blocks, c.Attached().Blocks, c.Attached())
		b.ReportMetric(float64(c.Attached().Took.Microseconds())/1e3, "ms/attach")
		b.StopTimer()
		require.NoError(b, c.Close())
		b.StartTimer()
	}
}

// BenchmarkLoad copies 64 MiB of blocks out of the cache, by backend shm, beside copy of the same.
func BenchmarkLoad(b *testing.B) {
	for _, size := range []int{64 << 10, 1 << 20, 4 << 20} {
		const all = 256 << 20
		sh, err := shm.New(shm.Config{})
		require.NoError(b, err)
		e, err := engine.Open(engine.Config{Name: "node", Backends: []driver.Backend{sh}})
		require.NoError(b, err)
		memory, err := e.Alloc(all, engine.AllocOptions{Populate: true})
		require.NoError(b, err)
		_, err = e.Register("kv", memory.Segment())
		require.NoError(b, err)
		self, err := e.Self()
		require.NoError(b, err)
		remote, err := self.Remote("kv")
		require.NoError(b, err)
		for _, first := range []bool{false, true} {
			c, err := Open(b.Context(), Config{Engine: e, Memory: MemoryConfig{
				Path: filepath.Join("/dev/shm", "sluice-bench"), Bytes: 2 * all,
				Extent: 4 << 20}, VerifyFirst: first})
			require.NoError(b, err)
			ns, err := c.Namespace("model", NamespaceOptions{})
			require.NoError(b, err)
			var ids []uint64
			var slots []uint32
			for k := range all / size {
				ids, slots = append(ids, uint64(k)), append(slots, uint32(k))
			}
			keys := keysOf(ids...)
			place := Place{Peer: self, Remote: remote, Stride: uint64(size), Run: uint64(size),
				Slots: slots}
			require.NoError(b, ns.Store(b.Context(), keys, place).Wait(b.Context()))
			b.Run(fmt.Sprintf("%dKiB/first=%v", size>>10, first), func(b *testing.B) {
				b.SetBytes(all)
				var plain, ours time.Duration
				for b.Loop() {
					begin := time.Now()
					copy(memory.Bytes(), c.memory.data[:all])
					middle := time.Now()
					op := ns.Load(b.Context(), keys, place)
					if op.Wait(b.Context()) != nil || op.Outcomes()[0] != Done {
						b.Fatal(op.Err(), op.Outcomes()[0])
					}
					plain, ours = plain+middle.Sub(begin), ours+time.Since(middle)
				}
				b.ReportMetric(float64(plain)/float64(ours), "of-memcpy")
			})
			ns.Remove(keys)
			require.NoError(b, c.Close())
			require.NoError(b, os.Remove("/dev/shm/sluice-bench"))
		}
		require.NoError(b, e.Close())
		require.NoError(b, memory.Close())
	}
}

// shmFile is a memory file where one belongs: in memory.
func shmFile(b *testing.B) string {
	dir, err := os.MkdirTemp("/dev/shm", "sluice-bench")
	require.NoError(b, err)
	b.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "memory")
}
