// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// check looks whether all that the cache knows fits together. Nothing may run.
func (c *Cache) check(t testing.TB) {
	t.Helper()
	x := c.index
	blocks, byExtent := 0, 0
	var inUse uint64
	onDisk := map[*disk]int{}
	for k := range x.shards {
		s := &x.shards[k]
		live, diskOnly, queuedHere, listed := 0, 0, 0, 0
		for i := s.first; i < s.first+s.n; i++ {
			e := x.entry(i)
			if e.state == vacant {
				require.Zero(t, e.sum)
				continue
			}
			live++
			require.Equal(t, present, e.state)
			require.Zero(t, e.pins, "entry %d", i)
			require.Equal(t, i, x.find(s, x.hash(&e.key, e.space), &e.key, e.space))
			if e.record != none {
				d := c.disks[e.disk]
				onDisk[d]++
				at, n := d.places.find(d.where[e.record])
				require.Equal(t, i, at.owners[n])
			}
			if e.slot == none {
				require.Zero(t, e.sum)
				require.NotEqual(t, uint32(none), e.record)
				require.Zero(t, e.flags&queued)
				diskOnly++
				continue
			}
			require.Equal(t, c.memory.sumOf(i, e), e.sum)
			require.NotZero(t, e.flags&queued)
			queuedHere++
			at, n := c.places.find(e.slot)
			require.Equal(t, i, at.owners[n])
			inUse += uint64(granules(uint64(e.size))) * granule
		}
		require.Equal(t, s.live, live)
		free := 0
		for i := s.free; i != none; i = x.entry(i).links[Memory].next {
			free++
		}
		require.Equal(t, int(s.n), live+free)
		for _, lane := range s.lanes {
			if lane[Memory] != nil {
				listed += lane[Memory].len()
			}
		}
		require.Equal(t, queuedHere, listed)
		blocks += live - diskOnly
	}
	recorded := 0
	for _, d := range c.disks {
		require.Equal(t, onDisk[d], d.places.used)
		require.Len(t, d.where, onDisk[d]+len(d.free))
		recorded += onDisk[d]
	}
	for k := range x.shards {
		for _, lane := range x.shards[k].lanes {
			if lane[Disk] != nil {
				recorded -= lane[Disk].len()
			}
		}
	}
	require.Zero(t, recorded)
	require.Equal(t, c.places.used, blocks)
	require.Equal(t, c.places.bytesInUse(), inUse)
	for k := range c.places.extents {
		e := &c.places.extents[k]
		require.False(t, e.closed)
		require.Equal(t, e.length == 0, e.used == 0)
		require.Len(t, e.owners, e.used+len(e.next))
		byExtent += e.used
	}
	require.Equal(t, blocks, byExtent)
	var bytes, lanes int64
	for k := range c.spaces.list {
		bytes += c.spaces.list[k].bytes[Memory].Load()
	}
	for _, l := range *c.spaces.lanes.Load() {
		lanes += l.bytes[Memory].Load()
		for t2 := range tiers {
			require.LessOrEqual(t, l.over(t2), int64(0))
			require.Zero(t, l.claimed[t2].Load())
		}
	}
	require.Equal(t, bytes, lanes)
}

// drained is check once nothing goes to the disks any more.
func (n *node) drained(t testing.TB) {
	t.Helper()
	require.NoError(t, n.Drain(t.Context()))
	n.check(t)
}

// lengths are those of the blocks of the model, by their key.
var lengths = []uint64{blockBytes, 4 << 10, 4<<10 + 1, 700}

// modelKey is the key of a number, and the length of its block.
func modelKey(id int) (Key, uint64) { return keysOf(uint64(id))[0], lengths[id%len(lengths)] }

// TestModel does random things to a cache and to a map: what the cache gives is what was stored and
// not removed since, and what it says it has, it gives.
func TestModel(t *testing.T) { runModel(t, 1, time.Hour, 600) }

// TestSoakModel is TestModel for long, with seeds by the clock.
func TestSoakModel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	runModel(t, seed, 30*time.Second, 1<<30)
}

func runModel(t *testing.T, seed uint64, limit time.Duration, steps int) {
	for _, p := range []Policy{S3FIFO, LRU, ARC} {
		t.Run(string(p), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 0))
			path := memoryFile(t)
			file := filepath.Join(t.TempDir(), "disk")
			open := func() *node {
				return openNode(t, path, 24, func(c *Config) {
					withDisk(file, 32)(c)
					c.Policy = p
				})
			}
			n := open()
			stored := map[int]bool{} // and not removed; the cache may have let it go
			for step, begin := 0, time.Now(); step < steps && time.Since(begin) < limit; step++ {
				// some blocks of one length
				length := r.IntN(len(lengths))
				var ids []int
				var keys []Key
				for range 1 + r.IntN(12) {
					id := r.IntN(40)*len(lengths) + length
					key, _ := modelKey(id)
					ids, keys = append(ids, id), append(keys, key)
				}
				place := n.at(0, len(keys))
				place.Run = lengths[length]
				switch r.IntN(20) {
				case 0:
					n.drained(t)
					n.close(t)
					if r.IntN(3) == 0 {
						require.NoError(t, os.Remove(path))
					}
					n = open()
					n.drained(t)
				case 1:
					n.ns.Remove(keys)
					for _, id := range ids {
						delete(stored, id)
					}
				case 2: // a bit of a block flips
					flipped := false
					for _, key := range keys[:1] {
						n.index.each(n.ns.id, []Key{key}, false, func(_ *shard, _ int, i uint32,
							_ uint64) {
							if i != none && n.index.entry(i).slot != none {
								e := n.index.entry(i)
								flipped = true
								n.memory.bytesOf(e.slot,
									e.size)[r.IntN(int(e.size))] ^= 1 << r.IntN(8)
							}
						})
					}
					clear(n.mem)
					op := n.ns.Load(t.Context(), keys[:1], place.first(1))
					require.NoError(t, op.Wait(t.Context()))
					require.Equal(t, flipped, op.Outcomes()[0] == Damaged)
					if flipped {
						require.Equal(t, Nowhere, n.ns.Match(keys[:1]).Blocks[0])
					}
				case 3, 4, 5, 6, 7, 8, 9, 10:
					for k, key := range keys {
						content(key, n.mem[k*blockBytes:][:blockBytes])
					}
					op := n.ns.Store(t.Context(), keys, place)
					require.NoError(t, op.Wait(t.Context()))
					<-op.Durable()
					for k, outcome := range op.Outcomes() {
						require.Contains(t, []Outcome{Done, Known, Pending, NoRoom}, outcome)
						if outcome == Done || outcome == Known {
							stored[ids[k]] = true
						}
					}
				default:
					clear(n.mem)
					require.NoError(t, n.Drain(t.Context()))
					found := n.ns.Match(keys)
					// what is read from a disk may have others go, which are among the keys
					reads := slices.Contains(found.Blocks, OnDisk)
					op := n.ns.Load(t.Context(), keys, place)
					require.NoError(t, op.Wait(t.Context()))
					want := make([]byte, blockBytes)
					for k, outcome := range op.Outcomes() {
						if !reads || !found.Blocks[k].There() {
							require.Equal(t, found.Blocks[k].There(), outcome == Done, outcome)
						}
						require.Contains(t, []Outcome{Done, Missing}, outcome)
						if outcome != Done {
							continue
						}
						require.True(t, stored[ids[k]])
						content(keys[k], want)
						got := n.mem[k*blockBytes:][:lengths[length]]
						if !bytes.Equal(want[:len(got)], got) {
							t.Fatalf("block %d has other bytes", ids[k])
						}
					}
				}
			}
			n.drained(t)
		})
	}
}

// first is the place of the first blocks of a call.
func (p Place) first(n int) Place {
	p.Slots = p.Slots[:n]
	return p
}

// TestManyAtOnce has goroutines store, load and remove the same blocks.
func TestManyAtOnce(t *testing.T) {
	n := openNode(t, memoryFile(t), 24, withDisk(filepath.Join(t.TempDir(), "disk"), 32))
	var workers sync.WaitGroup
	for w := range 8 {
		workers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 1))
			own := n.at(16*w, 12)
			want := make([]byte, blockBytes)
			for range 150 {
				length := r.IntN(len(lengths))
				var keys []Key
				for range 1 + r.IntN(12) {
					key, _ := modelKey(r.IntN(20)*len(lengths) + length)
					keys = append(keys, key)
				}
				place := own.first(len(keys))
				place.Run = lengths[length]
				at := func(k int) []byte {
					return n.mem[int(place.Slots[k])*blockBytes:][:blockBytes]
				}
				switch r.IntN(8) {
				case 0:
					n.ns.Remove(keys)
				case 1, 2, 3:
					for k, key := range keys {
						content(key, at(k))
					}
					if err := n.ns.Store(t.Context(), keys, place).Wait(t.Context()); err != nil {
						t.Error(err)
					}
				default:
					op := n.ns.Load(t.Context(), keys, place)
					if err := op.Wait(t.Context()); err != nil {
						t.Error(err)
					}
					for k, outcome := range op.Outcomes() {
						content(keys[k], want)
						if outcome == Damaged || outcome == Done &&
							!bytes.Equal(want[:place.Run], at(k)[:place.Run]) {
							t.Errorf("%v: other bytes", outcome)
						}
					}
				}
			}
		})
	}
	workers.Wait()
	n.drained(t)
}
