// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

func nobody(Key) int { return 0 }

// ownedBy returns a segment of which a node is the first owner.
func ownedBy(nodes []Node, node uint64) Key {
	for id := uint64(0); ; id++ {
		if Rank(nodes, node, keyOf(id), 1) == 0 {
			return keyOf(id)
		}
	}
}

func readTimes(h *Heat, segment Key, times, blocks int) {
	for range times {
		h.Read(segment, blocks)
	}
}

// TestOwnersComeAndGo: a segment that is a large part of a node's load gets owners, keeps them
// while it is read as often, and loses them one by one when it is not.
func TestOwnersComeAndGo(t *testing.T) {
	nodes, h := nodesOf(16), NewHeat()
	hot, cold := ownedBy(nodes, 3), keyOf(1<<40)
	const mean = 1600
	readTimes(h, hot, 1000, 1)
	require.Equal(t, []Change{{hot, 1, 10}}, h.Tick(nodes, 3, mean, nobody), "1000 of 1600 x 16")
	require.Equal(t, uint64(1000), h.Load())
	require.Equal(t, []Hot{{hot, 10}}, h.Hot())
	require.Equal(t, 10, h.Owners(hot))
	for range 10 { // its part of as many reads
		readTimes(h, hot, 50, 1)
		require.Empty(t, h.Tick(nodes, 3, mean, nobody))
	}
	owners := 10
	for range 20 {
		h.Read(cold, 1)
		for _, change := range h.Tick(nodes, 3, mean, nobody) {
			require.Equal(t, Change{hot, owners, owners - 1}, change)
			owners--
		}
	}
	require.Equal(t, 1, owners)
	require.Empty(t, h.Hot())
	require.Equal(t, 0, h.Owners(hot))
	require.NotContains(t, h.counts, hot)

	readTimes(h, hot, 1e6, 1)
	require.Equal(t, []Change{{hot, 1, 16}}, h.Tick(nodes, 3, mean, nobody), "no more than nodes")
}

// TestNoOwnersWithoutNeed: what is a small part of the load, is read seldom or is another node's
// gets none.
func TestNoOwnersWithoutNeed(t *testing.T) {
	nodes := nodesOf(16)
	own := ownedBy(nodes, 3)
	for what, c := range map[string]struct {
		segment       Key
		times, blocks int
		mean          uint64
		want          int
	}{
		"hot":             {own, 32, 32, 2047, 1},
		"little load":     {own, 32, 32, 2048, 0},
		"few reads":       {own, 31, 32, 100, 0},
		"of another node": {ownedBy(nodes, 4), 1000, 32, 100, 0},
	} {
		h := NewHeat()
		readTimes(h, c.segment, c.times, c.blocks)
		require.Len(t, h.Tick(nodes, 3, c.mean, nobody), c.want, what)
	}
	h := NewHeat()
	readTimes(h, own, 64, 32)
	require.Equal(t, []Change{{own, 1, 8}}, h.Tick(nodes, 3, 1, nobody), "each is to be read often")
}

// TestFirstOwnerChanges: the number of owners outlives a change of the first one.
func TestFirstOwnerChanges(t *testing.T) {
	before := nodesOf(16)
	segment := ownedBy(before, 3)
	h := NewHeat()
	readTimes(h, segment, 1000, 1)
	h.Tick(before, 3, 1600, nobody)
	require.Equal(t, 10, h.Owners(segment))

	// Node 3 is no longer the first one. It says less and less, until the next one has spoken.
	after := append(before[:2:2], before[3:]...)
	first := after[Owners(nil, after, segment, 1)[0]].ID
	require.Empty(t, h.Tick(after, 3, 1600, nobody))
	require.Equal(t, 9, h.Owners(segment))
	require.Empty(t, h.Tick(after, 3, 1600, nobody))
	require.Equal(t, 8, h.Owners(segment))

	// The next one goes on from the number that it hears of.
	next := NewHeat()
	readTimes(next, segment, 100, 1)
	require.Equal(t, []Change{{segment, 8, 10}}, next.Tick(after, first, 1280,
		func(Key) int { return 8 }))
	require.Empty(t, h.Tick(after, 3, 1600, func(Key) int { return 10 }))
	require.Equal(t, 0, h.Owners(segment))

	// A node that nobody told of owners and that owns nothing says nothing.
	h = NewHeat()
	readTimes(h, segment, 1000, 1)
	require.Empty(t, h.Tick(after, 3, 1600, nobody))
	require.Empty(t, h.Hot())
	require.Empty(t, h.Tick(nil, 3, 1600, nobody), "no nodes at all")
}

// TestHeatIsBounded: many cold segments hide no hot one, and take no memory.
func TestHeatIsBounded(t *testing.T) {
	nodes, h := nodesOf(16), NewHeat()
	random := rand.New(rand.NewPCG(6, 6))
	hot := make(map[Key]int)
	for id := uint64(0); len(hot) < 20; id++ {
		if Rank(nodes, 3, keyOf(id), 1) == 0 {
			hot[keyOf(id)] = 0
		}
	}
	keys := make([]Key, 0, len(hot))
	for key := range hot {
		keys = append(keys, key)
	}
	const reads = 300000
	for range reads {
		segment := keyOf(1<<40 + random.Uint64N(1<<30))
		if random.IntN(4) == 0 {
			segment = keys[random.IntN(len(keys))]
			hot[segment]++
		}
		h.Read(segment, 1)
		require.Less(t, len(h.counts), 2*heatSegments+HotMax)
	}
	for segment, n := range hot {
		c := h.counts[segment]
		require.LessOrEqual(t, int(c.blocks), n)
		require.GreaterOrEqual(t, int(c.blocks), n-reads/heatSegments)
		require.InDelta(t, c.blocks, c.reads, 16, "rounded down at each prune")
	}
	require.Len(t, h.Tick(nodes, 3, 6000, nobody), len(hot))
}

// TestColdSegmentsAreForgotten: what was read much long ago does not hide what is read now, however
// many others are read once in between.
func TestColdSegmentsAreForgotten(t *testing.T) {
	h, id, reads := NewHeat(), uint64(0), 0
	for range 2*heatSegments + HotMax - 1 { // they fill it
		h.Read(keyOf(id), 1000+int(id))
		reads += 1000 + int(id)
		id++
	}
	hot, times := keyOf(1<<40), 20000
	for range times {
		h.Read(hot, 1)
		for range 20 {
			h.Read(keyOf(id), 1)
			id++
		}
		reads += 21
	}
	require.LessOrEqual(t, int(h.counts[hot].blocks), times)
	require.Greater(t, times, 3*reads/2/heatSegments)
	require.GreaterOrEqual(t, int(h.counts[hot].blocks), times-reads/heatSegments)
}

// TestAnnouncedOwnersAreBounded: a number of owners that nobody can have is taken for all nodes.
func TestAnnouncedOwnersAreBounded(t *testing.T) {
	nodes, h := nodesOf(4), NewHeat()
	segment := ownedBy(nodes, 3)
	huge := func(Key) int { return 65535 }
	readTimes(h, segment, 100, 1)
	require.Empty(t, h.Tick(nodes, 3, 1600, huge), "400 of 1600 x 4")
	require.Equal(t, 4, h.Owners(segment))
	h.counts[segment] = count{blocks: 1, reads: 1, owners: 4}
	require.Equal(t, []Change{{segment, 4, 3}}, h.Tick(nodes, 3, 1600, huge))
}

// TestHotSegmentsAreBounded: the hottest get the owners.
func TestHotSegmentsAreBounded(t *testing.T) {
	nodes, h := nodesOf(2), NewHeat()
	want, id := map[Key]bool{}, uint64(0)
	for n := 0; n < HotMax+50; id++ {
		if key := keyOf(id); Rank(nodes, 1, key, 1) == 0 {
			readTimes(h, key, 50+n, 1)
			want[key] = n >= 50
			n++
		}
	}
	changes := h.Tick(nodes, 1, 1, nobody)
	require.Len(t, changes, HotMax)
	for _, c := range changes {
		require.True(t, want[c.Segment])
	}
	require.Len(t, h.Hot(), HotMax)
	d := &Digest{Hot: h.Hot()}
	_, err := DecodeDigest(d.Append(nil))
	require.NoError(t, err)
}

func TestChoose(t *testing.T) {
	owners := []int{4, 2, 9}
	require.Equal(t, 2, Choose(owners, 2, []int{9}, 0), "itself")
	require.Equal(t, 9, Choose(owners, 7, []int{1, 9}, 0), "one that it asks anyway")
	require.Equal(t, -1, Choose(nil, 7, []int{1}, 3), "none")
	drawn := map[int]int{}
	for draw := range uint64(3000) {
		drawn[Choose(owners, 7, nil, draw)]++
	}
	for _, owner := range owners {
		require.InDelta(t, 1000, drawn[owner], 100)
	}
}
