// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// keyOf is a key for tests: placement must not need keys that are hashes.
func keyOf(id uint64) (k Key) {
	binary.LittleEndian.PutUint64(k[:], id)
	return k
}

// nodesOf returns nodes of equal weight.
func nodesOf(n int) (nodes []Node) {
	for i := range n {
		nodes = append(nodes, Node{ID: uint64(i + 1), Weight: 100})
	}
	return nodes
}

func TestSegmentsGrow(t *testing.T) {
	segment, end := -1, 0
	for i := range 1000 {
		if i == end {
			segment++
			length := []int{1, 1, 2, 4, 8, 16, 32}[min(segment, 6)]
			require.Equal(t, end, FirstOf(segment))
			end += length
		}
		s, first := SegmentOf(i)
		require.Equal(t, segment, s, "block %d", i)
		require.Equal(t, FirstOf(segment), first, "block %d", i)
	}
}

func TestNegLog2(t *testing.T) {
	require.Equal(t, uint64(64)<<56, negLog2(0))
	random, last := rand.New(rand.NewPCG(1, 1)), uint64(0)
	for range 10000 {
		h := random.Uint64() >> random.IntN(64)
		want := 64 - math.Log2(float64(h|1))
		require.InDelta(t, want, math.Ldexp(float64(negLog2(h)), -56), 3e-6, "of %#x", h)
		if h > last {
			require.LessOrEqual(t, negLog2(h), negLog2(last))
		} else {
			require.GreaterOrEqual(t, negLog2(h), negLog2(last))
		}
		last = h
	}
	for h := uint64(math.MaxUint64); h > math.MaxUint64-1000; h-- {
		require.LessOrEqual(t, negLog2(h), negLog2(h-1))
	}
}

// TestShares: a node owns segments by its weight, be it first or second.
func TestShares(t *testing.T) {
	nodes := []Node{{1, 100}, {2, 100}, {3, 200}, {4, 400}, {5, 0}, {6, 100}, {7, 100}}
	var first, second [7]float64
	const segments = 200000
	for id := range uint64(segments) {
		owners := Owners(nil, nodes, keyOf(id), 2)
		require.Len(t, owners, 2)
		first[owners[0]]++
		second[owners[1]]++
	}
	for i, n := range nodes {
		share := float64(n.Weight) / 1000
		require.InDelta(t, share, first[i]/segments, 0.004, "node %d", i)
		var want float64 // the chance to be the best of those that another first owner leaves
		for j, other := range nodes {
			if j != i {
				want += float64(other.Weight) / 1000 * float64(n.Weight) /
					float64(1000-other.Weight)
			}
		}
		require.InDelta(t, want, second[i]/segments, 0.004, "node %d", i)
	}
}

// TestOnlyItsShareMoves: one node leaves, joins, loses weight, or gains it.
func TestOnlyItsShareMoves(t *testing.T) {
	nodes := nodesOf(16)
	nodes[3].Weight, nodes[9].Weight = 50, 300
	for _, change := range []struct {
		what   string
		change func([]Node) []Node
	}{
		{"leaves", func(n []Node) []Node { return append(n[:9:9], n[10:]...) }},
		{"drains", func(n []Node) []Node { n[9].Weight = 0; return n }},
		{"loses weight", func(n []Node) []Node { n[9].Weight = 150; return n }},
	} {
		after := change.change(append([]Node(nil), nodes...))
		moved := 0
		for id := range uint64(20000) {
			with := owners(nodes, id, 3)
			without := owners(after, id, 3)
			if with[0] != without[0] {
				moved++
				require.Equal(t, nodes[9].ID, with[0], change.what)
				require.Equal(t, with[1], without[0], "%s: not the next owner", change.what)
			}
			rest := make([]uint64, 0, 3)
			for _, owner := range with {
				if owner != nodes[9].ID {
					rest = append(rest, owner)
				}
			}
			kept := make([]uint64, 0, 3)
			for _, owner := range without {
				if owner != nodes[9].ID {
					kept = append(kept, owner)
				}
			}
			n := min(len(rest), len(kept))
			require.Equal(t, rest[:n], kept[:n], "%s: the others' order", change.what)
		}
		require.NotZero(t, moved, change.what)
	}
}

// TestOwnersOrder: fewer owners are the first of more, in whatever order the nodes stand.
func TestOwnersOrder(t *testing.T) {
	nodes := nodesOf(40)
	random := rand.New(rand.NewPCG(2, 2))
	for i := range nodes {
		nodes[i].Weight = uint32(random.IntN(4)) * 1000
	}
	shuffled := append([]Node(nil), nodes...)
	random.Shuffle(len(nodes), func(i, j int) {
		shuffled[i], shuffled[j] = shuffled[j], shuffled[i]
	})
	for id := range uint64(1000) {
		all := owners(nodes, id, 100)
		require.Equal(t, all, owners(shuffled, id, 100))
		for _, n := range Owners(nil, nodes, keyOf(id), 100) {
			require.NotZero(t, nodes[n].Weight, "a node that drains owns nothing")
		}
		for _, n := range []int{0, 1, 2, 9, len(all)} {
			require.Equal(t, all[:n], owners(nodes, id, n))
		}
	}
	require.Equal(t, []int{7}, Owners([]int{7}, nil, Key{}, 3), "of no nodes, appended")
}

// TestOwnersStay: nodes of different versions must agree, or no node finds what another one stored.
func TestOwnersStay(t *testing.T) {
	nodes := nodesOf(8)
	nodes[2].Weight = 300
	var got []int
	for id := range uint64(12) {
		got = Owners(got, nodes, keyOf(id), 1)
	}
	require.Equal(t, []int{3, 6, 2, 1, 5, 7, 3, 2, 1, 0, 1, 2}, got)
}

func owners(nodes []Node, id uint64, n int) []uint64 {
	ids := make([]uint64, 0, n)
	for _, i := range Owners(nil, nodes, keyOf(id), n) {
		ids = append(ids, nodes[i].ID)
	}
	return ids
}
