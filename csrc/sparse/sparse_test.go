// SPDX-License-Identifier: Apache-2.0

package sparse

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// one is a batch of one set whose entry i lies at i.
func one(set uint32, entries ...uint32) *Batch {
	b := &Batch{Sets: []uint32{set}, Entries: entries, Starts: []uint32{0, 1 << 10}, Shift: 6,
		Slots: make([]uint32, len(entries)), Counts: make([]uint32, 1)}
	for i := range uint32(1 << 10) {
		b.Blocks = append(b.Blocks, i)
	}
	return b
}

func TestLookup(t *testing.T) {
	table, err := New(3, 33)
	require.NoError(t, err)
	require.Equal(t, 48, table.Slots())
	var m Misses
	b := one(1, 7, None, 9, 7)
	b.Blocks[0] = 5
	require.NoError(t, table.Lookup(b, &m))
	require.Equal(t, []uint32{2}, b.Counts)
	require.Equal(t, []uint32{5<<6 + 7, 5<<6 + 9}, m.From)
	require.Equal(t, []uint32{0, 2}, m.Place)
	require.Equal(t, []uint32{b.Slots[0], b.Slots[2]}, m.Slots)
	require.Equal(t, None, b.Slots[1])
	require.Equal(t, b.Slots[0], b.Slots[3])
	for _, slot := range m.Slots {
		require.EqualValues(t, 1, slot/48)
	}
	before := slices.Clone(b.Slots)
	require.NoError(t, table.Lookup(b, &m))
	require.Empty(t, m.Slots)
	require.Equal(t, before, b.Slots)

	table.Forget([]uint32{b.Slots[2]})
	table.Forget([]uint32{b.Slots[2]})
	require.NoError(t, table.Lookup(b, &m))
	require.Equal(t, []uint32{2}, m.Place)
	table.Reset(1)
	require.NoError(t, table.Lookup(b, &m))
	require.Len(t, m.Slots, 2)
}

func TestRefused(t *testing.T) {
	for _, size := range [][2]int{{0, 1}, {1, 0}, {1 << 30, 16}, {1, 1 << 31}, {-1, 1}} {
		_, err := New(size[0], size[1])
		require.ErrorIs(t, err, driver.ErrBounds)
	}
	table, err := New(2, 32)
	require.NoError(t, err)
	var m Misses
	require.NoError(t, table.Lookup(one(0, 1, 2, 3), &m))
	tags := slices.Clone(table.tags)
	for name, change := range map[string]func(b *Batch){
		"no set":      func(b *Batch) { b.Sets = nil },
		"such a set":  func(b *Batch) { b.Sets[0] = 2 },
		"twice":       func(b *Batch) { b.Sets = []uint32{1, 1}; b.Counts = make([]uint32, 2) },
		"uneven":      func(b *Batch) { b.Sets = []uint32{0, 1} },
		"slots":       func(b *Batch) { b.Slots = b.Slots[1:] },
		"counts":      func(b *Batch) { b.Counts = nil },
		"starts":      func(b *Batch) { b.Starts = b.Starts[1:] },
		"backwards":   func(b *Batch) { b.Starts[0] = 2000 },
		"past blocks": func(b *Batch) { b.Starts[1] = 1<<10 + 1 },
		"shift":       func(b *Batch) { b.Shift = 32 },
		"behind":      func(b *Batch) { b.Entries[3] = 64 << 10 },
		"far behind":  func(b *Batch) { b.Entries[3] = None - 1 },
		"too many":    func(b *Batch) { *b = *one(0, make([]uint32, 33)...) },
		"no blocks":   func(b *Batch) { b.Starts[1] = 0 },
	} {
		b := one(1, 5, 6, 7, 8)
		change(b)
		require.ErrorIs(t, table.Lookup(b, &m), driver.ErrBounds, name)
		require.Equal(t, tags, table.tags, name)
		require.Empty(t, m.Slots, name)
	}
}

// A block whose entries 32 bits cannot count is not taken for another one.
func TestFarBlock(t *testing.T) {
	list := ways()
	list["go"] = walk
	for name, way := range list {
		table, err := New(1, 32)
		require.NoError(t, err)
		var m Misses
		b := one(0, 1, 64, 128)
		b.Blocks[0], b.Blocks[1] = 1<<26, 1<<26-1
		require.NoError(t, table.lookup(b, &m, way))
		require.Equal(t, []uint32{None, None - 63, 128}, m.From, name)
	}
}

// An entry behind its home that a Lookup has go is counted there no more.
func TestGoesFromBehind(t *testing.T) {
	list := ways()
	list["go"] = walk
	for name, way := range list {
		table, err := New(1, 64)
		require.NoError(t, err)
		var crowd, first []uint32
		for entry := uint32(0); len(crowd) < 64 || len(first) < 1; entry++ {
			switch home := table.home(entry); {
			case home == 3 && len(crowd) < 64:
				crowd = append(crowd, entry)
			case home == 0 && len(first) < 1:
				first = append(first, entry)
			}
		}
		var m Misses
		require.NoError(t, table.lookup(one(0, crowd...), &m, way))
		require.Equal(t, []uint8{32, 16, 0, 48}, table.beyond, name)
		require.NoError(t, table.lookup(one(0, first...), &m, way))
		require.Equal(t, []uint8{32, 16, 0, 47}, table.beyond, name)
	}
}

// A set whose entries all have one home is slow, and right: what goes past a group is found behind
// it, until it leaves.
func TestOneHome(t *testing.T) {
	table, err := New(1, 64)
	require.NoError(t, err)
	var crowd []uint32
	for entry := uint32(0); len(crowd) < 80; entry++ {
		if table.home(entry) == 3 {
			crowd = append(crowd, entry)
		}
	}
	var m Misses
	b := one(0, crowd[:64]...)
	require.NoError(t, table.Lookup(b, &m))
	require.Len(t, m.Slots, 64)
	require.Equal(t, []uint8{32, 16, 0, 48}, table.beyond)
	require.NoError(t, table.Lookup(b, &m))
	require.Empty(t, m.Slots)
	b = one(0, crowd[64:]...)
	require.NoError(t, table.Lookup(b, &m))
	require.Len(t, m.Slots, 16)
	table.Forget(b.Slots)
	b = one(0, crowd[16:64]...)
	require.NoError(t, table.Lookup(b, &m))
	require.Empty(t, m.Slots, "they lie behind an empty group")
	table.Forget(b.Slots)
	require.Equal(t, make([]uint8, 4), table.beyond)
}

// All ways do the same, and what they do is right by a model: an entry has the slot that it got, no
// two have one, and what a group loses was not used for longest.
func TestWays(t *testing.T) {
	list := ways()
	list["go"] = walk
	for name := range list {
		t.Logf("way %s", name)
	}
	for _, slots := range []int{32, 48, 512, 6400} {
		t.Run(fmt.Sprint(slots), func(t *testing.T) {
			tables := map[string]*Table{}
			for name := range list {
				table, err := New(4, slots)
				require.NoError(t, err)
				for set := range table.clocks {
					table.clocks[set] = 65530 // the last tick is near
				}
				tables[name] = table
			}
			random := rand.New(rand.NewPCG(1, uint64(slots)))
			where := newModel(4)
			for range 60 {
				b := &Batch{Shift: 4}
				for set := range uint32(4) {
					if random.IntN(3) > 0 {
						b.Sets = append(b.Sets, set)
					}
				}
				if len(b.Sets) == 0 {
					continue
				}
				n := 1 + random.IntN(slots/2)
				for range b.Sets {
					b.Starts = append(b.Starts, uint32(len(b.Blocks)))
					for range slots {
						b.Blocks = append(b.Blocks, random.Uint32N(1<<27))
					}
					for range n {
						entry := random.Uint32N(uint32(slots * 3))
						if random.IntN(20) == 0 {
							entry = None
						}
						b.Entries = append(b.Entries, entry)
					}
				}
				b.Starts = append(b.Starts, uint32(len(b.Blocks)))
				b.Slots, b.Counts = make([]uint32, len(b.Entries)), make([]uint32, len(b.Sets))
				var want Misses
				require.NoError(t, tables["go"].lookup(b, &want, walk))
				where.check(t, tables["go"], b, &want)
				slotsWant, countsWant := slices.Clone(b.Slots), slices.Clone(b.Counts)
				forget := want.Slots[:random.IntN(len(want.Slots)+1)]
				for name, way := range list {
					if name == "go" {
						continue
					}
					var m Misses
					require.NoError(t, tables[name].lookup(b, &m, way), name)
					require.Equal(t, want, m, name)
					require.Equal(t, slotsWant, b.Slots, name)
					require.Equal(t, countsWant, b.Counts, name)
					tables[name].Forget(forget)
				}
				tables["go"].Forget(forget)
				for name := range list {
					require.Equal(t, tables["go"], tables[name], name)
				}
				for _, slot := range forget {
					where.empty(slot/uint32(tables["go"].Slots()), slot)
				}
			}
		})
	}
}

// model has by set what lies where.
type model struct {
	slots   []map[uint32]uint32 // by entry
	entries []map[uint32]uint32 // by slot
}

func newModel(sets int) *model {
	m := &model{}
	for range sets {
		m.slots = append(m.slots, map[uint32]uint32{})
		m.entries = append(m.entries, map[uint32]uint32{})
	}
	return m
}

func (w *model) empty(set, slot uint32) {
	if entry, full := w.entries[set][slot]; full {
		delete(w.slots[set], entry)
		delete(w.entries[set], slot)
	}
}

func (w *model) check(t *testing.T, table *Table, b *Batch, m *Misses) {
	t.Helper()
	n, next := len(b.Entries)/len(b.Sets), 0
	for at, set := range b.Sets {
		before := next
		entries := b.Entries[at*n : (at+1)*n]
		for k, entry := range entries {
			i := at*n + k
			if entry == None {
				require.Equal(t, None, b.Slots[i])
				continue
			}
			if slot, known := w.slots[set][entry]; known {
				require.Equal(t, slot, b.Slots[i])
				continue
			}
			require.EqualValues(t, i, m.Place[next])
			require.Equal(t, b.Slots[i], m.Slots[next])
			require.Equal(t, b.Blocks[b.Starts[at]+entry>>4]<<4|entry&15, m.From[next])
			next++
			w.empty(set, b.Slots[i])
			w.slots[set][entry], w.entries[set][b.Slots[i]] = b.Slots[i], entry
		}
		require.EqualValues(t, next-before, b.Counts[at])
		for k, entry := range entries { // nothing was used, and gone in one Lookup
			if entry != None {
				require.Equal(t, w.slots[set][entry], b.Slots[at*n+k])
				require.Equal(t, entry, table.tags[b.Slots[at*n+k]])
			}
		}
	}
	require.Len(t, m.Slots, next)
}

// sameHome returns one entry more than a group has ways, all of the same home.
func sameHome(table *Table) (group []uint32) {
	for entry := uint32(0); len(group) <= Ways; entry++ {
		if table.home(entry) == 0 {
			group = append(group, entry)
		}
	}
	return group
}

// The oldest of a group goes.
func TestOldestGoes(t *testing.T) {
	table, err := New(1, 32)
	require.NoError(t, err)
	group := sameHome(table)
	var m Misses
	for _, entry := range group[:16] {
		require.NoError(t, table.Lookup(one(0, entry), &m))
	}
	require.NoError(t, table.Lookup(one(0, group[0]), &m))
	b := one(0, group[16])
	require.NoError(t, table.Lookup(b, &m))
	require.NoError(t, table.Lookup(one(0, group[0]), &m))
	require.Empty(t, m.Slots)
	require.NoError(t, table.Lookup(one(0, group[1]), &m))
	require.Len(t, m.Slots, 1, "it was the oldest")
}

// What a Lookup asks for stays, also where it comes behind what is to be placed, and is the oldest.
func TestAskedForStays(t *testing.T) {
	list := ways()
	list["go"] = walk
	for name, way := range list {
		table, err := New(1, 32)
		require.NoError(t, err)
		group := sameHome(table)
		var m Misses
		for _, entry := range group[:16] {
			require.NoError(t, table.lookup(one(0, entry), &m, way))
		}
		b := one(0, group[16], group[0], group[16])
		require.NoError(t, table.lookup(b, &m, way))
		require.Equal(t, []uint32{0}, m.Place, name)
		require.Equal(t, []uint32{1, 0, 1}, b.Slots, name)
		require.Equal(t, []uint32{1}, b.Counts, name)
	}
}

// series makes batches as decode steps do: most entries of a step are those of the step before.
func series(sets, n, steps int) (list []*Batch) {
	random := rand.New(rand.NewPCG(3, 3))
	const context = 128 << 10
	top := make([]uint32, sets*n)
	for i := range top {
		top[i] = random.Uint32N(context)
	}
	slots, blocks := make([]uint32, sets*n), make([]uint32, sets*context>>6)
	for range steps {
		b := &Batch{Shift: 6, Blocks: blocks, Entries: slices.Clone(top), Slots: slots,
			Counts: make([]uint32, sets)}
		for set := range uint32(sets) {
			b.Sets, b.Starts = append(b.Sets, set), append(b.Starts, set*context>>6)
			for range n / 10 {
				top[int(set)*n+random.IntN(n)] = random.Uint32N(context)
			}
		}
		b.Starts = append(b.Starts, uint32(len(blocks)))
		list = append(list, b)
	}
	return list
}

func TestLookupDoesNotAllocate(t *testing.T) {
	table, err := New(4, 6400)
	require.NoError(t, err)
	steps := series(4, 2048, 2)
	var m Misses
	require.NoError(t, table.Lookup(steps[0], &m))
	require.Zero(t, testkit.AllocsPerRun(10, func() {
		if err := table.Lookup(steps[1], &m); err != nil {
			panic(err)
		}
	}))
}

func BenchmarkLookup(b *testing.B) {
	const sets, n = 160, 2048
	steps := series(sets, n, 48) // more entries than slots, so that some go in each step
	list := ways()
	list["go"] = walk
	for _, name := range slices.Sorted(maps.Keys(list)) {
		b.Run(name, func(b *testing.B) {
			runtime.LockOSThread() // for the time of the processor
			defer runtime.UnlockOSThread()
			table, err := New(sets, 6400)
			if err != nil {
				b.Fatal(err)
			}
			var m Misses
			misses := 0
			for _, step := range steps {
				if err := table.lookup(step, &m, list[name]); err != nil {
					b.Fatal(err)
				}
			}
			var before, after unix.Rusage
			_ = unix.Getrusage(unix.RUSAGE_THREAD, &before)
			for i := 0; b.Loop(); i++ {
				if err := table.lookup(steps[i%len(steps)], &m, list[name]); err != nil {
					b.Fatal(err)
				}
				misses += len(m.Slots)
			}
			_ = unix.Getrusage(unix.RUSAGE_THREAD, &after)
			cpu := after.Utime.Nano() - before.Utime.Nano()
			b.ReportMetric(float64(cpu)/float64(b.N), "cpu-ns/op")
			b.ReportMetric(float64(misses)/float64(b.N)/sets, "misses/set")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/sets/n, "ns/entry")
		})
	}
}
