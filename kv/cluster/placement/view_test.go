// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// snapshotOf returns the digests that tell a new View all blocks of a node.
func snapshotOf(node, generation uint64, blocks ...uint64) []*Digest {
	return slices.Collect(NewJournal(node, generation).Snapshot(0, nil, func(yield func(Key) bool) {
		for _, id := range blocks {
			if !yield(keyOf(id)) {
				return
			}
		}
	}))
}

func apply(t testing.TB, v *View, digests ...*Digest) {
	t.Helper()
	for _, d := range digests {
		require.NoError(t, v.Apply(d))
	}
}

// TestViewAgreesWithItsDigests runs nodes that add, remove, restart and leave at random: the View
// finds all that they have, and next to nothing else.
func TestViewAgreesWithItsDigests(t *testing.T) {
	const nodes, blocks, most = 12, 20000, 1000
	random := rand.New(rand.NewPCG(4, 4))
	v := NewView(nodes * most)
	journals := make([]*Journal, nodes)
	has := make([]map[uint64]bool, nodes)
	generation := uint64(0)
	restart := func(i int) {
		generation++
		journals[i], has[i] = NewJournal(uint64(i+1), generation), map[uint64]bool{}
		for range random.IntN(most) {
			has[i][random.Uint64N(blocks)] = true
		}
		apply(t, v, slices.Collect(journals[i].Snapshot(0, nil, func(yield func(Key) bool) {
			for id := range has[i] {
				if !yield(keyOf(id)) {
					return
				}
			}
		}))...)
	}
	for i := range nodes {
		restart(i)
	}
	for step := range 3000 {
		i := random.IntN(nodes)
		switch {
		case step%10 == 0:
			restart(i)
		case step%97 == 0:
			v.Forget(uint64(i + 1))
			restart(i)
		default:
			for range random.IntN(20) {
				id := random.Uint64N(blocks)
				if random.IntN(5) < 2 || len(has[i]) == most {
					delete(has[i], id)
					journals[i].Remove(keyOf(id))
				} else {
					has[i][id] = true
					journals[i].Add(keyOf(id))
				}
			}
			apply(t, v, journals[i].Cut(0, nil))
		}
	}
	entries, dropped := v.Entries()
	want, wrong, missing := 0, 0, 0
	for id := range uint64(blocks) {
		holders := v.Holders(nil, keyOf(id))
		known := 0
		for i := range nodes {
			if has[i][id] {
				want++
				known++
			}
		}
		for _, node := range holders {
			if !has[node-1][id] {
				wrong++
			}
		}
		require.LessOrEqual(t, len(holders), holdersMax)
		missing += min(known, holdersMax) - len(holders)
	}
	t.Logf("%d of %d entries, %d dropped, %d missing, %d wrong", entries, want, dropped, missing,
		wrong)
	require.Zero(t, wrong)
	require.Less(t, missing, want/200, "all but those of which four others were known")
	require.LessOrEqual(t, entries, want)
}

func TestDigestsComeInOrder(t *testing.T) {
	v, j := NewView(1000), NewJournal(7, 3)
	j.Add(keyOf(1))
	require.ErrorIs(t, v.Apply(j.Cut(0, nil)), ErrGap, "a change of an unknown node")
	snapshot := slices.Collect(j.Snapshot(0, nil, slices.Values([]Key{keyOf(1)})))
	require.Len(t, snapshot, 1)
	apply(t, v, snapshot...)
	require.Equal(t, []uint64{7}, v.Holders(nil, keyOf(1)))

	j.Add(keyOf(2))
	second := j.Cut(0, nil)
	j.Remove(keyOf(2))
	third := j.Cut(0, nil)
	require.ErrorIs(t, v.Apply(third), ErrGap)
	apply(t, v, second)
	require.Equal(t, []uint64{7}, v.Holders(nil, keyOf(2)))
	require.ErrorIs(t, v.Apply(second), ErrStale, "twice")
	apply(t, v, third)
	require.Empty(t, v.Holders(nil, keyOf(2)))

	next := NewJournal(7, 4)
	next.Add(keyOf(3))
	require.ErrorIs(t, v.Apply(next.Cut(0, nil)), ErrGap, "the first change of a new process")
	require.Equal(t, []uint64{7}, v.Holders(nil, keyOf(1)), "what was known stays until then")
	apply(t, v, slices.Collect(next.Snapshot(0, nil, slices.Values([]Key{keyOf(3)})))...)
	require.Empty(t, v.Holders(nil, keyOf(1)))
	require.Equal(t, []uint64{7}, v.Holders(nil, keyOf(3)))
	require.ErrorIs(t, v.Apply(j.Cut(0, nil)), ErrStale, "of the process before")

	old := slices.Collect(next.Snapshot(0, nil, slices.Values([]Key{keyOf(3)})))
	next.Add(keyOf(4))
	apply(t, v, next.Cut(0, nil))
	require.ErrorIs(t, v.Apply(old[0]), ErrStale, "a snapshot of before the last change")
	require.Equal(t, []uint64{7}, v.Holders(nil, keyOf(4)))

	v.Forget(7)
	require.Empty(t, v.Holders(nil, keyOf(3)))
}

// TestSnapshotOfParts: changes may come between the parts of a snapshot.
func TestSnapshotOfParts(t *testing.T) {
	const blocks = DigestMax + 1000
	v, j := NewView(3*blocks), NewJournal(1, 1)
	parts := 0
	for d := range j.Snapshot(0, nil, func(yield func(Key) bool) {
		for id := range uint64(blocks) {
			if !yield(keyOf(id)) {
				return
			}
		}
	}) {
		apply(t, v, d)
		parts++
		j.Remove(keyOf(uint64(parts)))
		apply(t, v, j.Cut(0, nil))
	}
	require.Equal(t, 2, parts)
	for id := range uint64(blocks) {
		require.Equal(t, id != 1 && id != 2, len(v.Holders(nil, keyOf(id))) == 1, "block %d", id)
	}

	all := make([]uint64, blocks)
	for id := range all {
		all[id] = uint64(id)
	}
	snapshot := snapshotOf(2, 1, all...)
	require.ErrorIs(t, v.Apply(snapshot[1]), ErrGap, "a part without the first")
	apply(t, v, snapshot...)
	require.ErrorIs(t, v.Apply(snapshot[1]), ErrGap, "a part twice")
	for id := range uint64(blocks) {
		require.Contains(t, v.Holders(nil, keyOf(id)), uint64(2), "block %d", id)
	}
}

// TestTooManyChanges: a journal that overflows makes the others ask for a snapshot.
func TestTooManyChanges(t *testing.T) {
	v, j := NewView(4*DigestMax), NewJournal(1, 1)
	apply(t, v, slices.Collect(j.Snapshot(0, nil, slices.Values([]Key(nil))))...)
	for id := range uint64(DigestMax - 1) {
		require.True(t, j.Add(keyOf(id)))
	}
	require.False(t, j.Add(keyOf(DigestMax)), "full")
	apply(t, v, j.Cut(0, nil))
	for id := range uint64(DigestMax + 1) {
		j.Remove(keyOf(id + 1))
	}
	d := j.Cut(0, nil)
	require.LessOrEqual(t, len(d.Append(nil)), DigestBytesMax)
	require.ErrorIs(t, v.Apply(d), ErrGap)
	apply(t, v, slices.Collect(j.Snapshot(0, nil, slices.Values([]Key{keyOf(0)})))...)
	require.Len(t, v.Holders(nil, keyOf(0)), 1)
	require.Empty(t, v.Holders(nil, keyOf(1)))
	apply(t, v, j.Cut(0, nil))
}

// TestFullView: what has no room is not found, and room comes back.
func TestFullView(t *testing.T) {
	const room = 10000
	v := NewView(room)
	for node := range uint64(8) {
		ids := make([]uint64, room/4)
		for i := range ids {
			ids[i] = node*1e6 + uint64(i)
		}
		apply(t, v, snapshotOf(node+1, 1, ids...)...)
	}
	entries, dropped := v.Entries()
	require.GreaterOrEqual(t, entries, room)
	require.LessOrEqual(t, entries, room*101/100)
	require.Equal(t, uint64(2*room-entries), dropped)
	for id := range uint64(room / 4) { // of node 1, which came first
		require.Equal(t, []uint64{1}, v.Holders(nil, keyOf(id)))
		require.Empty(t, v.Holders(nil, keyOf(7e6+id)))
	}
	v.Forget(1)
	apply(t, v, snapshotOf(9, 1, 7e6, 7e6+1)...)
	require.Equal(t, []uint64{9}, v.Holders(nil, keyOf(7e6)))
}

// TestSeveralHolders: where every block has four holders a full View knows fewer, but nearly always
// one.
func TestSeveralHolders(t *testing.T) {
	const blocks = 25000
	v := NewView(4 * blocks)
	ids := make([]uint64, blocks)
	for i := range ids {
		ids[i] = uint64(i)
	}
	for node := range uint64(4) {
		apply(t, v, snapshotOf(node+1, 1, ids...)...)
	}
	known, unknown := 0, 0
	for _, id := range ids {
		n := len(v.Holders(nil, keyOf(id)))
		known += n
		if n == 0 {
			unknown++
		}
	}
	t.Logf("%d of %d holders, %d blocks without one", known, 4*blocks, unknown)
	require.Greater(t, known, 4*blocks*85/100)
	require.Less(t, unknown, blocks/500)

	// What was dropped is of the node whose entry it was.
	entries := map[uint32]int{}
	for _, bucket := range v.buckets {
		for _, entry := range bucket {
			entries[entry>>fingerBits]++
		}
	}
	for _, p := range v.peers {
		require.Equal(t, entries[p.number], p.entries)
	}
}

// TestManyGenerations: nodes restart more often than a table has numbers for.
func TestManyGenerations(t *testing.T) {
	v := NewView(1000)
	for generation := range uint64(3 * numbersMax) {
		node := 1 + generation%3
		apply(t, v, snapshotOf(node, generation+1, generation, 1e9+node)...)
		require.Equal(t, []uint64{node}, v.Holders(nil, keyOf(generation)))
		if generation >= 3 {
			require.Empty(t, v.Holders(nil, keyOf(generation-3)))
		}
	}
	entries, dropped := v.Entries()
	require.Equal(t, 6, entries)
	require.Zero(t, dropped)
	for node := range uint64(NodesMax + 1) {
		err := v.Apply(snapshotOf(node+1, 1<<40, 5)[0])
		if node < NodesMax {
			require.NoError(t, err)
		} else {
			require.ErrorIs(t, err, ErrNodes)
		}
	}
	require.Len(t, v.Holders(nil, keyOf(5)), holdersMax)
	require.Len(t, v.peers, NodesMax)
}

func TestHotSegmentsAndLoads(t *testing.T) {
	v := NewView(1000)
	one, two := NewJournal(1, 1), NewJournal(2, 1)
	none := slices.Values([]Key(nil))
	apply(t, v, slices.Collect(one.Snapshot(100, []Hot{{keyOf(1), 4}, {keyOf(2), 2}}, none))...)
	apply(t, v, slices.Collect(two.Snapshot(300, []Hot{{keyOf(1), 7}}, none))...)
	require.Equal(t, 7, v.Owners(keyOf(1)), "the greater number counts")
	require.Equal(t, 2, v.Owners(keyOf(2)))
	require.Equal(t, 0, v.Owners(keyOf(3)))
	require.Equal(t, uint64(200), v.MeanLoad(200))
	apply(t, v, one.Cut(0, []Hot{{keyOf(1), 3}}))
	require.Equal(t, 0, v.Owners(keyOf(2)))
	v.Forget(2)
	require.Equal(t, 3, v.Owners(keyOf(1)))
	v.Forget(1)
	require.Empty(t, v.hot)
	require.Equal(t, uint64(200), v.MeanLoad(200))

	// Loads that nobody can have do not overflow.
	for node := range uint64(3) {
		apply(t, v, slices.Collect(NewJournal(node, 1).Snapshot(math.MaxUint64, nil, none))...)
	}
	require.Equal(t, uint64(3*loadMax/4), v.MeanLoad(0))
}

// TestEntryAndDigestSizes: 64 nodes with 100 M blocks, at a hundredth of the size.
func TestEntryAndDigestSizes(t *testing.T) {
	f := fillView(t, 1e6)
	t.Logf("%+v", f)
	require.Zero(t, f.dropped)
	require.Zero(t, f.missing)
	require.LessOrEqual(t, f.viewBytes, 5.12, "512 MB for 100 M blocks")
	require.LessOrEqual(t, f.wireBytes, 7.0)
	require.LessOrEqual(t, f.wrong, 5e-6)
}

type fill struct {
	viewBytes, wireBytes float64 // a block
	dropped              uint64
	missing              int
	wrong                float64 // share of absent blocks for which a holder is found
}

// fillView tells a View of so many blocks the snapshots of 63 nodes.
func fillView(tb testing.TB, blocks uint64) (f fill) {
	const nodes = 63
	v := NewView(int(blocks))
	sent, id := 0, uint64(0)
	for node := range uint64(nodes) {
		end := blocks * (node + 1) / nodes
		for d := range NewJournal(node+1, 1).Snapshot(0, nil, func(yield func(Key) bool) {
			for ; id < end; id++ {
				if !yield(keyOf(id)) {
					return
				}
			}
		}) {
			b := d.Append(nil)
			sent += len(b)
			got, err := DecodeDigest(b)
			require.NoError(tb, err)
			require.NoError(tb, v.Apply(got))
		}
	}
	f.viewBytes = float64(v.Bytes()) / float64(blocks)
	f.wireBytes = float64(sent) / float64(blocks)
	_, f.dropped = v.Entries()
	holders := []uint64(nil)
	for id := uint64(0); id < blocks; id += 97 {
		node := uint64(0)
		for blocks*(node+1)/nodes <= id {
			node++
		}
		if holders = v.Holders(holders[:0], keyOf(id)); !slices.Contains(holders, node+1) {
			f.missing++
		}
	}
	const absent = 4e6
	for id := range uint64(absent) {
		f.wrong += float64(len(v.Holders(holders[:0], keyOf(1<<40+id))))
	}
	f.wrong /= absent
	return f
}

// BenchmarkView measures what a View of 64 nodes costs:
//
//	go test ./kv/cluster/placement -run x -bench View -benchtime 1x
func BenchmarkView(b *testing.B) {
	for _, millions := range []uint64{1, 10, 100} {
		b.Run(fmt.Sprintf("blocks=%dM", millions), func(b *testing.B) {
			var f fill
			for b.Loop() {
				f = fillView(b, millions*1e6)
			}
			b.ReportMetric(f.viewBytes*float64(millions), "MB")
			b.ReportMetric(f.viewBytes, "B/block")
			b.ReportMetric(f.wireBytes, "B-sent/block")
			b.ReportMetric(float64(f.dropped), "dropped")
			b.ReportMetric(f.wrong*1e6, "wrong/M")
		})
	}
}

// BenchmarkHolders looks blocks up that are there, in a View of a million.
func BenchmarkHolders(b *testing.B) {
	v := NewView(1e6)
	ids := make([]uint64, 1e6)
	for i := range ids {
		ids[i] = uint64(i)
	}
	apply(b, v, snapshotOf(1, 1, ids...)...)
	holders, id := []uint64(nil), uint64(0)
	for b.Loop() {
		holders = v.Holders(holders[:0], keyOf(id))
		id = (id + 7919) % 1e6
	}
	require.Len(b, holders, 1)
}

// BenchmarkOwners finds the owner of a segment.
func BenchmarkOwners(b *testing.B) {
	for _, n := range []int{8, 64} {
		b.Run(fmt.Sprintf("nodes=%d", n), func(b *testing.B) {
			nodes, owners, id := nodesOf(n), []int(nil), uint64(0)
			for b.Loop() {
				owners = Owners(owners[:0], nodes, keyOf(id), 1)
				id++
			}
		})
	}
}
