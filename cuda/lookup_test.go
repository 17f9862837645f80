// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/sparse"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// looker has a table in a card's memory, and a table of package csrc/sparse that is to be the same.
type looker struct {
	d     *gpu.Device
	table *sparse.Table
	args  lookupArgs
	most  uint32 // thread blocks of a launch
}

// device opens a card, or the stand-in as one of compute capability 8.0.
func device(t *testing.T) *gpu.Device {
	t.Helper()
	t.Setenv("STANDIN_COMPUTE", "80")
	require.NoError(t, gpu.Load(library(t)))
	d, err := gpu.Open(0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return d
}

// newLooker makes one whose sets have all seen so many ticks; its batches have up to n entries of a
// set, and so many blocks.
func newLooker(t *testing.T, d *gpu.Device, sets, slots, n, blocks, ticks int) *looker {
	t.Helper()
	f := d.Facts()
	require.NoError(t, (&Card{f.Compute, f.Driver, f.SMs, f.Shared}).check(&lookups))
	require.NoError(t, d.Load(lookups.PTX, lookups.Kernels))
	table, err := sparse.New(sets, slots)
	require.NoError(t, err)
	idle := sparse.Batch{Entries: make([]uint32, sets), Starts: make([]uint32, sets+1),
		Slots: make([]uint32, sets), Counts: make([]uint32, sets)}
	for set := range idle.Entries {
		idle.Sets = append(idle.Sets, uint32(set))
		idle.Entries[set] = sparse.None
	}
	for range ticks {
		require.NoError(t, table.Lookup(&idle, &sparse.Misses{}))
	}
	l := &looker{d: d, table: table, most: uint32(f.SMs) * 2}
	room := func(bytes int, fill byte) uint64 {
		at, err := d.Alloc(uint64(bytes))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, d.Free(at)) })
		require.NoError(t, d.Write(at, slices.Repeat([]byte{fill}, bytes)))
		return at
	}
	all, a := sets*table.Slots(), &l.args
	a.groups, a.all = uint32(table.Slots()/sparse.Ways), uint32(sets)
	a.tags, a.stamps = room(4*all, 0xff), room(2*all, 0)
	a.beyond, a.clocks = room(all/sparse.Ways, 0), room(2*sets, 0)
	l.write(t, a.clocks, slices.Repeat([]uint16{uint16(ticks)}, sets))
	a.sets, a.starts, a.counts = room(4*sets, 0), room(4*sets+4, 0), room(4*sets, 0)
	a.blocks, a.bad = room(4*blocks, 0), room(len(bytesOf(&lookupBad{})), 0)
	for _, list := range []*uint64{&a.entries, &a.slots, &a.missSlots, &a.missFrom, &a.missAt} {
		*list = room(4*sets*n, 0x5a)
	}
	return l
}

func (l *looker) write(t *testing.T, to uint64, list any) {
	t.Helper()
	bytes, err := binary.Append(nil, binary.NativeEndian, list)
	require.NoError(t, err)
	require.NoError(t, l.d.Write(to, bytes))
}

func (l *looker) read(t *testing.T, from uint64, list any) {
	t.Helper()
	bytes := make([]byte, binary.Size(list))
	require.NoError(t, l.d.Read(bytes, from))
	_, err := binary.Decode(bytes, binary.NativeEndian, list)
	require.NoError(t, err)
}

// lookUp has the card look a batch up, of whose lists it writes Slots and Counts, and returns its
// misses, what it refused, and how long both kernels took, with the launches and waits.
func (l *looker) lookUp(t *testing.T, b *sparse.Batch) (sparse.Misses, lookupBad, time.Duration) {
	t.Helper()
	a := &l.args
	a.count, a.n = uint32(len(b.Sets)), uint32(len(b.Entries)/len(b.Sets))
	a.shift, a.blocksN = b.Shift, uint32(len(b.Blocks))
	l.write(t, a.sets, b.Sets)
	l.write(t, a.starts, b.Starts)
	l.write(t, a.entries, b.Entries)
	l.write(t, a.blocks, b.Blocks)
	l.write(t, a.bad, []uint64{math.MaxUint64, math.MaxUint64})
	begin := time.Now()
	for kernel := range lookups.Kernels {
		require.NoError(t, l.d.Launch(&gpu.Launch{Kernel: kernel, Blocks: min(a.count, l.most),
			Threads: lookupThreads, Args: bytesOf(a)}, nil))
	}
	took := time.Since(begin)
	var bad [2]uint64
	l.read(t, a.bad, &bad)
	l.read(t, a.slots, b.Slots)
	l.read(t, a.counts, b.Counts)
	var m sparse.Misses
	for _, list := range []struct {
		at uint64
		to *[]uint32
	}{{a.missSlots, &m.Slots}, {a.missFrom, &m.From}, {a.missAt, &m.Place}} {
		all := make([]uint32, len(b.Entries))
		l.read(t, list.at, all)
		for i, count := range b.Counts {
			if bad[0]&bad[1] == math.MaxUint64 {
				*list.to = append(*list.to, all[i*int(a.n):][:count]...)
			}
		}
	}
	return m, lookupBad{bad[0], bad[1]}, took
}

// same has both look a batch up, and compares; it returns the times, and the number of misses.
func (l *looker) same(t *testing.T, b *sparse.Batch) (card, cpu time.Duration, missed int) {
	t.Helper()
	var want sparse.Misses
	begin := time.Now()
	require.NoError(t, l.table.Lookup(b, &want))
	cpu = time.Since(begin)
	other := *b
	other.Slots, other.Counts = make([]uint32, len(b.Slots)), make([]uint32, len(b.Counts))
	got, bad, card := l.lookUp(t, &other)
	require.Equal(t, lookupBad{math.MaxUint64, math.MaxUint64}, bad)
	for what, lists := range map[string][2][]uint32{"counts": {b.Counts, other.Counts},
		"slots": {b.Slots, other.Slots}, "slots of misses": {want.Slots, got.Slots},
		"from": {want.From, got.From}, "place": {want.Place, got.Place}} {
		require.True(t, slices.Equal(lists[0], lists[1]), what)
	}
	return card, cpu, len(want.Slots)
}

// batchOf draws a batch of the sets of a table, each with so many blocks of 16 entries.
func batchOf(r *rand.Rand, sets []uint32, n, blocks int) *sparse.Batch {
	b := &sparse.Batch{Sets: sets, Starts: []uint32{0}, Shift: 4,
		Slots: make([]uint32, len(sets)*n), Counts: make([]uint32, len(sets))}
	for range sets {
		for range blocks {
			b.Blocks = append(b.Blocks, r.Uint32N(1<<29))
		}
		b.Starts = append(b.Starts, uint32(len(b.Blocks)))
	}
	for range b.Slots {
		entry := r.Uint32N(uint32(blocks) * 16)
		if r.IntN(20) == 0 {
			entry = sparse.None
		}
		b.Entries = append(b.Entries, entry)
	}
	return b
}

// TestLookupOnDeviceLooksUpAsTheCPU: the same slots, misses, places and counts, step after step and
// past the last tick of the clocks; what csrc/sparse refuses is refused, and changes nothing.
func TestLookupOnDeviceLooksUpAsTheCPU(t *testing.T) {
	const sets, slots, n, blocks = 3, 80, 60, 15
	l := newLooker(t, device(t), sets, slots, n, sets*blocks, math.MaxUint16-10)
	r := rand.New(rand.NewPCG(71, 72))
	for step := range 30 {
		named := []uint32{0, 1, 2}
		if step%3 == 0 {
			named = slices.Delete(named, step%2, step%2+1)
		}
		b := batchOf(r, named, 1+r.IntN(n), blocks)
		l.same(t, b)
		for name, change := range map[string]func(b *sparse.Batch){
			"entry":  func(b *sparse.Batch) { b.Entries[len(b.Entries)-1] = blocks * 16 },
			"sets":   func(b *sparse.Batch) { b.Sets = []uint32{2, 1, 0}[:len(b.Sets)] },
			"a set":  func(b *sparse.Batch) { b.Sets = []uint32{0, sets, 2}[:len(b.Sets)] },
			"starts": func(b *sparse.Batch) { b.Starts = slices.Clone(b.Starts); b.Starts[1]++ },
		} {
			bad := batchOf(r, named, len(b.Entries)/len(named), blocks)
			change(bad)
			if name == "starts" { // a set's blocks behind all
				bad.Starts[len(bad.Starts)-1]++
			}
			_, refused, _ := l.lookUp(t, bad)
			if name == "entry" {
				require.Equal(t, lookupBad{math.MaxUint64, uint64(len(bad.Entries) - 1)}, refused)
			} else {
				require.NotEqual(t, uint64(math.MaxUint64), refused.set, name)
			}
			require.ErrorIs(t, l.table.Lookup(bad, &sparse.Misses{}), driver.ErrBounds, name)
		}
	}
}

// TestLookupOnCard looks up what a step of decode asks for, and says how long that takes beside the
// CPU: 2,048 entries of each of 160 sets of 6,400 slots, a tenth of them new in each step.
func TestLookupOnCard(t *testing.T) {
	if !onCard() {
		drivertest.SkipIfUnavailable(t, &driver.UnavailableError{Backend: "cuda",
			Reason: "SLUICE_LIBCUDA does not name the libcuda of a card",
			Fix:    "run hack/gpu-check on a machine with a card"})
	}
	const n, context, steps, warm = 2048, 32 << 10, 48, 24
	sets, d := 160, device(t)
	if strings.Contains(d.Facts().Name, "stand-in") {
		sets = 1 // whose time says nothing
	}
	l := newLooker(t, d, sets, 6400, n, sets*context/16, 0)
	r := rand.New(rand.NewPCG(73, 74))
	var named []uint32
	for set := range sets {
		named = append(named, uint32(set))
	}
	b := batchOf(r, named, n, context/16)
	var card, cpu []time.Duration
	missed := 0
	for step := range steps {
		for i := range b.Entries {
			if r.IntN(10) == 0 {
				b.Entries[i] = r.Uint32N(context)
			}
		}
		onCard, onCPU, misses := l.same(t, b)
		if step >= warm {
			card, cpu, missed = append(card, onCard), append(cpu, onCPU), missed+misses
		}
	}
	slices.Sort(card)
	slices.Sort(cpu)
	t.Logf("%d sets, %d entries each, %d misses a set: %v by two kernels with their launches and "+
		"waits, %v by the CPU (medians of %d)", sets, n, missed/len(card)/sets, card[len(card)/2],
		cpu[len(cpu)/2], len(card))
}
