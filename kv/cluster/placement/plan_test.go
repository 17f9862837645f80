// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// holdings are the segments of a cluster, by the nodes that have them.
type holdings map[uint64]map[Key]Held

// fillHoldings puts segments on their owners.
func fillHoldings(nodes []Node, segments, owners int) holdings {
	has, random := holdings{}, rand.New(rand.NewPCG(5, 5))
	for id := range uint64(segments) {
		i := int(id % 100)
		segment, first := SegmentOf(i)
		h := Held{Segment: keyOf(id), First: first, Owners: owners,
			Bytes: int64(FirstOf(segment+1)-first) << 20, Heat: random.Uint64N(1000)}
		for _, owner := range Owners(nil, nodes, h.Segment, owners) {
			has.put(nodes[owner].ID, h)
		}
	}
	return has
}

func (has holdings) put(node uint64, h Held) {
	if has[node] == nil {
		has[node] = map[Key]Held{}
	}
	has[node][h.Segment] = h
}

func (has holdings) of(node uint64) (segments []Held) {
	for _, h := range has[node] {
		segments = append(segments, h)
	}
	return segments
}

// bytes returns what a node has, and what all have on average.
func (has holdings) bytes(node uint64) (own, mean float64) {
	for id, segments := range has {
		for _, h := range segments {
			mean += float64(h.Bytes) / float64(len(has))
			if id == node {
				own += float64(h.Bytes)
			}
		}
	}
	return own, mean
}

// rebalanced is how a change of the cluster went.
type rebalanced struct {
	took       time.Duration
	moved      float64 // bytes
	busiestIn  float64 // bytes a second, the most that a node received in a tenth of took
	busiestOut float64 // the same of what a node sent
}

// rebalance lets all nodes carry out their plans, and puts what arrives.
func (has holdings) rebalance(before, after []Node, rate float64) (r rebalanced) {
	type event struct {
		at   time.Duration
		from uint64
		Move
	}
	var events []event
	for _, n := range after {
		moves := Plan(before, after, n.ID, slices.Values(has.of(n.ID)))
		h := NewHandover(moves, after, n.ID, rate, 0)
		for now := time.Duration(0); ; {
			move, wait, ok := h.Next(now)
			if !ok {
				break
			}
			if now += wait; wait == 0 {
				events = append(events, event{now, n.ID, move})
			}
		}
	}
	for _, e := range events {
		r.took = max(r.took, e.at)
	}
	type slot struct {
		node  uint64
		in    bool
		tenth int64
	}
	sums := map[slot]float64{}
	for _, e := range events {
		has.put(e.To, e.Held)
		r.moved += float64(e.Bytes)
		tenth := int64(e.at) * 10 / int64(r.took+1)
		sums[slot{e.To, true, tenth}] += float64(e.Bytes)
		sums[slot{e.from, false, tenth}] += float64(e.Bytes)
	}
	for s, bytes := range sums {
		if aSecond := bytes / (r.took.Seconds() / 10); s.in {
			r.busiestIn = max(r.busiestIn, aSecond)
		} else {
			r.busiestOut = max(r.busiestOut, aSecond)
		}
	}
	return r
}

// complete checks that each segment is on all its owners.
func (has holdings) complete(t *testing.T, nodes []Node, segments, owners int) {
	t.Helper()
	for id := range uint64(segments) {
		for _, owner := range Owners(nil, nodes, keyOf(id), owners) {
			if _, has := has[nodes[owner].ID][keyOf(id)]; !has {
				t.Fatalf("node %d lacks segment %d", nodes[owner].ID, id)
			}
		}
	}
}

const testRate = 1 << 30 // bytes a second

// TestEmptyNodeJoins: it draws its share, from all others, at its rate, and what it now owns is
// surplus elsewhere.
func TestEmptyNodeJoins(t *testing.T) {
	const segments = 20000
	before, after := nodesOf(16), nodesOf(17)
	has := fillHoldings(before, segments, 1)
	_, mean := has.bytes(0)
	r := has.rebalance(before, after, testRate)
	has.complete(t, after, segments, 1)
	drawn, _ := has.bytes(17)
	t.Logf("%+v, drawn %.3f of its share", r, drawn/(mean*16/17))
	require.InDelta(t, 1, drawn/(mean*16/17), 0.1)
	require.Equal(t, r.moved, drawn, "only the new node gets anything")
	require.InDelta(t, drawn/testRate, r.took.Seconds(), drawn/testRate*0.25)
	require.LessOrEqual(t, r.busiestIn, testRate*1.1)
	require.LessOrEqual(t, r.busiestOut, testRate/16*1.5)

	surplus := 0
	for _, n := range before {
		for segment := range has[n.ID] {
			if Rank(after, n.ID, segment, 1) < 0 {
				delete(has[n.ID], segment)
				surplus++
			}
		}
	}
	require.Equal(t, len(has[17]), surplus)
	has.complete(t, after, segments, 1)

	// Until it has a segment, the next owner in the order is the one that had it.
	for id := range uint64(segments) {
		owners := Owners(nil, after, keyOf(id), 2)
		if after[owners[0]].ID == 17 {
			require.Equal(t, Owners(nil, before, keyOf(id), 1), owners[1:])
		}
	}
}

// TestNodeIsLost: the others make its copies good together, in bounded time.
func TestNodeIsLost(t *testing.T) {
	const segments = 40000
	before := nodesOf(16)
	after := append(before[:4:4], before[5:]...)
	has := fillHoldings(before, segments, 2)
	lost, _ := has.bytes(5)
	delete(has, 5)
	r := has.rebalance(before, after, testRate)
	has.complete(t, after, segments, 2)
	t.Logf("%+v", r)
	require.Equal(t, lost, r.moved, "what was lost, and no more")
	require.Less(t, r.took.Seconds(), 3*lost/testRate/15, "15 nodes work on it")
	require.LessOrEqual(t, r.busiestIn, testRate*1.5)
	require.LessOrEqual(t, r.busiestOut, testRate*1.5)

	// Of segments with one owner nothing is left to be sent.
	has = fillHoldings(before, 1000, 1)
	delete(has, 5)
	require.Zero(t, has.rebalance(before, after, testRate).moved)
}

// TestNodeDrains: a node of weight 0 hands over all it has, and nothing else moves.
func TestNodeDrains(t *testing.T) {
	const segments = 20000
	before, after := nodesOf(16), nodesOf(16)
	after[4].Weight = 0
	has := fillHoldings(before, segments, 1)
	own, _ := has.bytes(5)
	r := has.rebalance(before, after, testRate)
	t.Logf("%+v", r)
	require.Equal(t, own, r.moved)
	delete(has, 5)
	has.complete(t, after, segments, 1)
	require.InDelta(t, own/testRate, r.took.Seconds(), own/testRate*0.25)
	require.LessOrEqual(t, r.busiestOut, testRate*1.1)
}

// TestPlanOrder: hot segments first, then those near the head of a chain; one node sends.
func TestPlanOrder(t *testing.T) {
	before, after := nodesOf(4), nodesOf(5)
	has := fillHoldings(before, 3000, 2)
	sent := map[Key]int{}
	for _, n := range after {
		moves := Plan(before, after, n.ID, slices.Values(has.of(n.ID)))
		for i, m := range moves {
			sent[m.Segment]++
			require.Equal(t, uint64(5), m.To)
			if i > 0 {
				last := moves[i-1]
				require.True(t, last.Heat > m.Heat || last.Heat == m.Heat && last.First <= m.First)
			}
		}
		shuffled := has.of(n.ID)
		slices.Reverse(shuffled)
		require.Equal(t, moves, Plan(before, after, n.ID, slices.Values(shuffled)))
	}
	for id := range uint64(3000) {
		want := 0
		if Rank(after, 5, keyOf(id), 2) >= 0 {
			want = 1
		}
		require.Equal(t, want, sent[keyOf(id)])
	}
	require.Empty(t, Plan(before, before, 1, slices.Values(has.of(1))))
}

// TestHandoverStartsHot: the hottest segments reach a new node long before the last ones.
func TestHandoverStartsHot(t *testing.T) {
	before, after := nodesOf(16), nodesOf(17)
	has := fillHoldings(before, 20000, 1)
	var all, early float64
	for _, n := range before {
		moves := Plan(before, after, n.ID, slices.Values(has.of(n.ID)))
		for i, m := range moves {
			all += float64(m.Heat)
			if i < len(moves)/2 {
				early += float64(m.Heat)
			}
		}
	}
	require.Greater(t, early/all, 0.7, "heat of the first half")
}

// TestHandoverDoesNotCatchUp: a node that was away does not send all at once what it has missed.
func TestHandoverDoesNotCatchUp(t *testing.T) {
	var moves []Move
	for range 100 {
		moves = append(moves, Move{Held{Bytes: 1000}, 2})
	}
	h := NewHandover(moves, nodesOf(2), 1, 1000, 0) // a second each
	_, wait, ok := h.Next(time.Minute)
	require.True(t, ok)
	require.Zero(t, wait)
	_, wait, ok = h.Next(time.Minute)
	require.True(t, ok)
	require.Equal(t, time.Second-handoverBurst, wait)
}

// TestHandoverWithoutRate: no rate and no size has moves begin at once, and a rate without a bound
// has none wait.
func TestHandoverWithoutRate(t *testing.T) {
	nodes := nodesOf(1000)
	moves := func(bytes int64) (list []Move) {
		for range 3 {
			list = append(list, Move{Held{Bytes: bytes}, 2})
		}
		return list
	}
	for _, rate := range []float64{0, -1, math.NaN(), math.Inf(-1), 1} {
		h := NewHandover(moves(math.MaxInt64), nodes, 1, rate, 0)
		_, wait, ok := h.Next(0)
		require.True(t, ok)
		require.Positive(t, wait, rate)
		_, none, ok := h.Next(wait)
		require.True(t, ok)
		require.Zero(t, none)
		_, wait, ok = h.Next(wait)
		require.True(t, ok)
		require.Greater(t, wait, 30*365*24*time.Hour, rate)
	}
	for _, h := range []*Handover{NewHandover(moves(1<<40), nodes, 1, math.Inf(1), 0),
		NewHandover(moves(-1<<40), nodes, 1, 1, 0)} {
		for range 3 {
			_, wait, ok := h.Next(0)
			require.True(t, ok)
			require.Zero(t, wait)
		}
		_, _, ok := h.Next(0)
		require.False(t, ok)
	}
}

// BenchmarkRebalance simulates 64 nodes of which one joins, drains or is lost, and gives the time
// in units of what it takes to send all that a node has at the rate:
//
//	go test ./kv/cluster/placement -run x -bench Rebalance -benchtime 1x
func BenchmarkRebalance(b *testing.B) {
	const segments = 200000
	for _, c := range []struct {
		what          string
		owners        int
		before, after []Node
	}{
		{"joins", 1, nodesOf(64), nodesOf(65)},
		{"drains", 1, nodesOf(64), append(nodesOf(63), Node{ID: 64})},
		{"is-lost", 2, nodesOf(64), nodesOf(63)},
	} {
		b.Run(c.what, func(b *testing.B) {
			for b.Loop() {
				has := fillHoldings(c.before, segments, c.owners)
				_, mean := has.bytes(0)
				if c.what == "is-lost" {
					delete(has, 64)
				}
				r := has.rebalance(c.before, c.after, testRate)
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(r.took.Seconds()/(mean/testRate), "time/full-node")
				b.ReportMetric(r.moved/mean, "moved/full-node")
				b.ReportMetric(r.busiestIn/testRate, "busiest-in/rate")
				b.ReportMetric(r.busiestOut/testRate, "busiest-out/rate")
			}
		})
	}
}
