// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
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
			require.Equal(t, e.record != none, e.flags&(queued<<Disk) != 0)
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
		require.Empty(t, d.emptying)
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
	require.Equal(t, c.places.stats().Bytes, inUse)
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
			if c.heldBytes.Load() == 0 {
				require.LessOrEqual(t, l.over(t2), int64(0))
			}
			require.Zero(t, l.claimed[t2].Load())
		}
	}
	require.Equal(t, bytes, lanes)

	var held int64
	var useless [tiers]int64
	for k := range x.shards {
		for i, r := range c.retention[k] {
			require.NotZero(t, x.entry(i).flags&retained)
			held += r.bytes
		}
		for _, lane := range x.shards[k].lanes {
			for t2 := range tiers {
				if lane[t2] != nil {
					useless[t2] += int64(lane[t2].useless.n)
				}
			}
		}
	}
	for i := range x.memory.entries {
		if x.entry(uint32(i)).flags&retained != 0 {
			held -= int64(granules(uint64(x.entry(uint32(i)).size))) * granule
		}
	}
	require.Zero(t, held)
	for t2 := range tiers {
		require.Equal(t, c.useless[t2].Load(), useless[t2])
	}
	require.Zero(t, c.offeredBytes.Load())
}

// drained is check once nothing goes to the disks any more.
func (n *node) drained(t testing.TB) {
	t.Helper()
	until(func() bool { return len(n.room) == 0 }) // a hint may prefetch
	n.timing.Lock()
	defer n.timing.Unlock()
	require.NoError(t, n.Drain(t.Context()))
	for n.trim(trimMax) { // what a pin or a hint has kept over its quota goes within a second
	}
	n.emptied()
	n.check(t)
}

// still calls f while neither the keeper, a hint nor a disk moves blocks.
func (n *node) still(t testing.TB, f func()) {
	until(func() bool { return len(n.room) == 0 })
	n.timing.Lock()
	defer n.timing.Unlock()
	require.NoError(t, n.Drain(t.Context()))
	f()
}

// emptied waits until no restart finds a block on the disks that is not there.
func (n *node) emptied() {
	for _, d := range n.disks {
		until(func() bool {
			d.mu.Lock()
			defer d.mu.Unlock()
			return len(d.emptying) == 0
		})
	}
}

// lengths are those of the blocks of the model, by their key.
var lengths = []uint64{blockBytes, 4 << 10, 4<<10 + 1, 700}

// modelKey is the key of a number, and the length of its block.
func modelKey(id int) (Key, uint64) { return keysOf(uint64(id))[0], lengths[id%len(lengths)] }

// TestModel does random things to a cache and to a map: what the cache gives is what was stored and
// not removed since, and what it says it has, it gives.
func TestModel(t *testing.T) { runModel(t, 1, time.Hour, 600) }

// TestSoakModel is TestModel for ten minutes, with a seed by the clock.
func TestSoakModel(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Log("seed", seed)
	runModel(t, seed, 200*time.Second, 1<<30)
}

func runModel(t *testing.T, seed uint64, limit time.Duration, steps int) {
	for _, p := range []Policy{S3FIFO, LRU, ARC} {
		t.Run(string(p), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 0))
			path := memoryFile(t)
			file := filepath.Join(t.TempDir(), "disk")
			h := newHandClock()
			options := NamespaceOptions{HoldMax: 8 * blockBytes}
			open := func() *node {
				n := openNode(t, path, 24, h.with(func(c *Config) {
					withDisk(file, 32)(c)
					if c.Policy = p; p == LRU {
						sealed(t, file, 1)(c)
					}
				}))
				require.NoError(t, n.ns.Set(options))
				return n
			}
			n := open()
			stored := map[int]uint32{}   // when it was used; the cache may have let it go
			retained := map[int]uint32{} // until when
			var pins []*Pin
			pinned := map[*Pin][]int{}
			// fresh says whether a block may be served, by its age
			fresh := func(id int) bool {
				used, ok := stored[id]
				return ok && (options.TTL == 0 || retained[id] >= h.now.Load() ||
					h.now.Load()-used <= uint32(options.TTL/time.Second))
			}
			use := func(id int) {
				if _, ok := stored[id]; ok {
					stored[id] = h.now.Load()
				}
			}
			shows := func(pin *Pin) {
				want := make([]byte, blockBytes)
				require.NoError(t, pin.View(func(blocks [][]byte) error {
					for k, b := range blocks {
						key, length := modelKey(pinned[pin][k])
						if content(key, want); b != nil && !bytes.Equal(want[:length], b) {
							t.Fatalf("pinned block %d has other bytes", pinned[pin][k])
						}
					}
					return nil
				}))
			}
			unpin := func(k int) {
				pins[k].Close()
				<-pins[k].Done()
				pins = slices.Delete(pins, k, k+1)
			}
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
				for _, pin := range pins {
					shows(pin)
				}
				for id, until := range retained {
					if key, _ := modelKey(id); until >= h.now.Load() {
						require.NotZero(t, n.ns.Match([]Key{key}).Prefix, "retained: %d", id)
					}
				}
				switch r.IntN(30) {
				case 20:
					h.pass(n, uint32(r.IntN(9)))
				case 21:
					options.Flow, options.Priority = Flow(r.IntN(int(flows_))), r.IntN(priorities)
					options.TTL = time.Duration(r.IntN(3)) * 15 * time.Second
					options.Quota = [2]uint64{}
					if r.IntN(2) == 0 {
						options.Quota = [2]uint64{uint64(12+r.IntN(12)) * blockBytes,
							uint64(12+r.IntN(20)) * blockBytes}
					}
					require.NoError(t, n.ns.Set(options))
				case 22, 23:
					if len(pins) == 3 {
						unpin(r.IntN(3))
					}
					found := n.ns.Match(keys).Blocks
					pin, err := n.ns.Pin(t.Context(), keys, 0)
					if err != nil {
						require.ErrorIs(t, err, ErrNoRoom)
						break
					}
					pins, pinned[pin] = append(pins, pin), ids
					for k, o := range pin.Outcomes() {
						require.Contains(t, []Outcome{Done, Missing, NoRoom}, o)
						require.True(t, o != Done || fresh(ids[k]))
					}
					for k, f := range found {
						if f.There() {
							use(ids[k])
						}
					}
				case 24, 25, 26:
					hint := Hint{HintKind(r.IntN(int(hintKinds))), time.Duration(1+r.IntN(20)) *
						time.Second}
					got, err := n.ns.Hint(keys[:1], hint)
					switch {
					case err != nil:
						require.Equal(t, 1, got.Refused)
					case got.Applied == 1 && hint.Kind == HintRetain:
						retained[ids[0]] = h.now.Load() + uint32(hint.For/time.Second)
					case hint.Kind == HintRelease:
						delete(retained, ids[0])
					}
				case 27:
					require.NoError(t, n.ns.Prefetch(t.Context(), keys).Wait(t.Context()))
				case 0:
					for len(pins) > 0 {
						unpin(0)
					}
					clear(retained)
					for id := range stored { // what is on the disk alone goes by another clock
						use(id)
					}
					_, err := n.ns.Hint(keys, Hint{Kind: HintRelease})
					require.NoError(t, err)
					n.drained(t)
					n.close(t)
					if r.IntN(3) == 0 {
						require.NoError(t, os.Remove(path))
					}
					n = open()
					n.drained(t)
				case 1:
					require.NoError(t, n.ns.Remove(keys))
					for _, id := range ids {
						delete(stored, id)
						delete(retained, id)
					}
				case 2: // a bit of a block flips, which nothing moves meanwhile
					n.still(t, func() {
						if slices.ContainsFunc(pins, func(p *Pin) bool {
							return slices.Contains(pinned[p], ids[0])
						}) || n.ns.Match(keys[:1]).Prefix == 0 {
							return
						}
						use(ids[0])
						flipped := false
						n.index.each(n.ns.id, keys[:1], false, func(_ *shard, _ int, i uint32,
							_ uint64) {
							if e := n.index.entry(i); e.slot != none {
								flipped = true
								n.memory.bytesOf(e.slot,
									e.size)[r.IntN(int(e.size))] ^= 1 << r.IntN(8)
							}
						})
						clear(n.mem)
						op := n.ns.Load(t.Context(), keys[:1], place.first(1))
						require.NoError(t, op.Wait(t.Context()))
						require.Equal(t, flipped, op.Outcomes()[0] == Damaged)
						if flipped {
							delete(retained, ids[0])
							require.Equal(t, Nowhere, n.ns.Match(keys[:1]).Blocks[0])
						}
					})
				case 3, 4, 5, 6, 7, 8, 9, 10:
					for k, key := range keys {
						content(key, n.mem[k*blockBytes:][:blockBytes])
					}
					store, replaces := n.ns.Store, r.IntN(4) == 0
					if replaces {
						store = n.ns.Replace
					}
					op := store(t.Context(), keys, place)
					if err := op.Wait(t.Context()); err != nil {
						require.ErrorIs(t, err, engine.ErrBusy)
					}
					<-op.Durable()
					for k, outcome := range op.Outcomes() {
						require.Contains(t, []Outcome{Done, Known, Pending, NoRoom, Busy}, outcome)
						if outcome == Done || outcome == Known {
							stored[ids[k]] = h.now.Load()
						}
						if replaces && outcome == Done {
							delete(retained, ids[k])
						}
					}
				default:
					clear(n.mem)
					var found Match
					var op *Op
					n.still(t, func() {
						found = n.ns.Match(keys)
						op = n.ns.Load(t.Context(), keys, place)
						require.NoError(t, op.Wait(t.Context()))
					})
					// what is read from a disk may have others go, which are among the keys
					reads := slices.Contains(found.Blocks, OnDisk)
					want := make([]byte, blockBytes)
					for k, outcome := range op.Outcomes() {
						served := fresh(ids[k])
						if !reads || !found.Blocks[k].There() {
							require.Equal(t, found.Blocks[k].There(), outcome == Done, outcome)
						}
						require.Contains(t, []Outcome{Done, Missing, NoRoom}, outcome)
						if outcome != Done {
							continue
						}
						if !served {
							t.Fatalf("block %d at %d: used %d, retained until %d, TTL %v: %s",
								ids[k], h.now.Load(), stored[ids[k]], retained[ids[k]], options.TTL,
								explain(n.ns, keys[k]))
						}
						content(keys[k], want)
						got := n.mem[k*blockBytes:][:lengths[length]]
						if !bytes.Equal(want[:len(got)], got) {
							t.Fatalf("block %d has other bytes", ids[k])
						}
					}
					for k, f := range found.Blocks {
						if f.There() {
							use(ids[k])
						}
					}
				}
			}
			for len(pins) > 0 {
				unpin(0)
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

// TestManyAtOnce has goroutines store, load, remove, pin and prefetch the same blocks, give hints,
// and change the options, while time passes.
func TestManyAtOnce(t *testing.T) {
	h := newHandClock()
	n := openNode(t, memoryFile(t), 24, h.with(func(c *Config) {
		withDisk(filepath.Join(t.TempDir(), "disk"), 32)(c)
		c.CompareKnown = true
	}))
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
				switch r.IntN(12) {
				case 0:
					if err := n.ns.Remove(keys); err != nil {
						t.Error(err)
					}
				case 8:
					pin, err := n.ns.Pin(t.Context(), keys[:1], 0)
					if errors.Is(err, ErrNoRoom) {
						continue
					}
					if err == nil {
						err = pin.View(func(blocks [][]byte) error {
							runtime.Gosched()
							content(keys[0], want)
							if blocks[0] != nil && !bytes.Equal(want[:place.Run], blocks[0]) {
								return errors.New("other bytes")
							}
							return nil
						})
						pin.Close()
					}
					if err != nil {
						t.Errorf("pin: %v", err)
					}
				case 9:
					hint := Hint{HintKind(r.IntN(int(hintKinds))), time.Second}
					_, _ = n.ns.Hint(keys, hint)
				case 10:
					n.ns.Prefetch(t.Context(), keys)
				case 11:
					err := n.ns.Set(NamespaceOptions{Flow: Flow(r.IntN(int(flows_))),
						Priority: r.IntN(priorities), TTL: time.Duration(r.IntN(3)) * time.Second,
						Quota: [2]uint64{uint64(r.IntN(2)) * 16 * blockBytes}})
					if err != nil {
						t.Error(err)
					}
					h.pass(n, uint32(r.IntN(2)))
				case 1, 2, 3:
					for k, key := range keys {
						content(key, at(k))
					}
					store := n.ns.Store
					if r.IntN(3) == 0 {
						store = n.ns.Replace
					}
					err := store(t.Context(), keys, place).Wait(t.Context())
					if err != nil && !errors.Is(err, engine.ErrBusy) {
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
	h.pass(n, 2) // what was retained is so no more
	n.drained(t)
	require.Zero(t, n.Stats().Held)
}
