// SPDX-License-Identifier: Apache-2.0

package sparse

import (
	"container/list"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/sparse"
)

// misses are those of a series with MTP 2, by step, a layer, in a pool of so many slots; exact are
// those of a list in the order of use.
func misses(t *testing.T, slots, layers, steps, warmed int) (ours, exact []float64) {
	t.Helper()
	const context, k, queries = 32 << 10, 2048, 2
	table, err := sparse.New(layers, slots)
	require.NoError(t, err)
	s := NewSeries(1, layers, k)
	var lists []*lru
	for range layers {
		lists = append(lists, &lru{slots, list.New(), map[uint32]*list.Element{}})
	}
	var m Misses
	for step := -warmed; step < steps; step++ {
		n := k
		if step >= 0 {
			n *= queries
		}
		b := Batch{Shift: 6, Blocks: make([]uint32, (context+steps)>>6+1), Counts: []uint32{0},
			Entries: make([]uint32, n), Slots: make([]uint32, n)}
		b.Starts = []uint32{0, uint32(len(b.Blocks))}
		var missed, missedExact int
		for layer := range layers {
			s.Step(layer, context+step, b.Entries)
			for query := range slices.Chunk(b.Entries, k) {
				sorted := slices.Sorted(slices.Values(query))
				require.Len(t, slices.Compact(sorted), k)
			}
			b.Sets = []uint32{uint32(layer)}
			require.NoError(t, table.Lookup(&b, &m))
			missed += len(m.Slots)
			missedExact += lists[layer].use(b.Entries)
		}
		if step >= 0 {
			ours = append(ours, float64(missed)/float64(layers))
			exact = append(exact, float64(missedExact)/float64(layers))
		}
	}
	return ours, exact
}

type lru struct {
	slots int
	order *list.List // oldest first
	place map[uint32]*list.Element
}

func (l *lru) use(entries []uint32) (missed int) {
	for _, entry := range entries {
		if at := l.place[entry]; at != nil {
			l.order.MoveToBack(at)
			continue
		}
		missed++
		if l.order.Len() == l.slots {
			delete(l.place, l.order.Remove(l.order.Front()).(uint32))
		}
		l.place[entry] = l.order.PushBack(entry)
	}
	return missed
}

func mean(list []float64) (m float64) {
	for _, x := range list {
		m += x / float64(len(list))
	}
	return m
}

// The check of the generator: 6,400 slots keep the mean below 200, as in the ESS report, the first
// step is a spike without a warm-up and none with it. And groups of 16 miss hardly more than a list
// in the order of use.
func TestSeries(t *testing.T) {
	cold, _ := misses(t, 6400, 12, 20, 0)
	require.Greater(t, cold[0], 2000.0)
	warm, exact := misses(t, 6400, 12, 20, 32)
	t.Logf("cold %.0f", cold)
	t.Logf("warm %.0f", warm)
	t.Logf("list %.0f", exact)
	require.Less(t, mean(warm), 200.0)
	require.Less(t, warm[0], 1.5*mean(warm[1:]))
	require.Less(t, mean(warm), 1.1*mean(exact))
}
