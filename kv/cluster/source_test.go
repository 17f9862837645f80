// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cluster/placement"
	"github.com/sluicehq/sluice/kv/directory"
	"github.com/sluicehq/sluice/kv/schedule"
	"github.com/sluicehq/sluice/kv/trace"
)

// TestHedge: a node stands still, or a load of it does; the other copy is read long before the
// limit, and nothing of the late load reaches the memory once the Load has returned.
func TestHedge(t *testing.T) {
	for name, env := range map[string]string{
		"stands still":                     "",
		"stands still in the middle":       "cache: pinned",
		"answers, and its load never ends": stuck + "cache: pinned",
	} {
		t.Run(name, func(t *testing.T) {
			children, nodes := startNodes(t, "a", "b")
			d, err := directory.List(nodes, map[string]directory.Namespace{"model": {Copies: 2}})
			require.NoError(t, err)
			u := openUser(t, d)
			u.store(t)
			b := children["b"]
			load := func() {
				clear(u.mem)
				outcomes, err := u.From("b").Load(t.Context(), u.keys, place(u, 0, chainKeys))
				require.NoError(t, err)
				for k, o := range outcomes {
					require.Equal(t, cache.Done, o, "block %d", k)
					require.Equal(t, content(u.keys[k]), u.block(k))
				}
			}
			u.hedges.set(math.MaxInt32) // none, also on a machine that stands still
			for range lateMin {
				load()
			}
			b.kill()
			u.await(t, "b", Unreachable)
			b.start(t, pointVariable+"="+env)
			u.await(t, "b", Serving)
			_, err = u.From("b").Match(t.Context(), u.keys)
			require.NoError(t, err)
			if env == "" {
				require.NoError(t, b.cmd.Process.Signal(unix.SIGSTOP))
				b.awaitStop(t)
			}
			u.hedges.set(0)
			before := u.nodes["b"].hedged.Load()
			load()
			require.Greater(t, u.nodes["b"].hedged.Load(), before)
			mine := bytes.Repeat([]byte{0xaa}, len(u.mem))
			copy(u.mem, mine)
			require.NoError(t, b.cmd.Process.Signal(unix.SIGCONT))
			u.await(t, "b", Serving)
			if env == "cache: pinned" {
				require.Eventually(t, func() bool { // what went on there has ended
					r, err := u.Report(t.Context(), "b")
					return err == nil && r.Running == 1
				}, time.Minute, time.Millisecond)
			}
			require.Equal(t, mine, u.mem)
		})
	}
}

func (b *budget) set(used float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used = used
}

// TestHedgesAreFew: a budget bounds them, however late all nodes are.
func TestHedgesAreFew(t *testing.T) {
	var b budget
	hedges := 0
	for range 1000 {
		b.earn()
		if b.take() {
			hedges++
		}
	}
	require.InDelta(t, 1000*hedgeShare+hedgeBurst, hedges, 1)
}

// TestSpread: loads of two copies are of both nodes; From names the one that is asked.
func TestSpread(t *testing.T) {
	_, nodes := startNodes(t, "a", "b")
	d, err := directory.List(nodes, map[string]directory.Namespace{"model": {Copies: 2}})
	require.NoError(t, err)
	u := openUser(t, d)
	u.store(t)
	asked := func(s *Space) (n [2]uint64) {
		before := u.Stats().Nodes
		_, err := s.Load(t.Context(), u.keys, place(u, 0, chainKeys))
		require.NoError(t, err)
		for k, node := range u.Stats().Nodes {
			n[k] = node.Requests - before[k].Requests
		}
		return n
	}
	var seen [2]uint64
	require.Eventually(t, func() bool {
		for k, n := range asked(u.Space) {
			seen[k] += n
		}
		return seen[0] > 0 && seen[1] > 0
	}, time.Minute, time.Millisecond)
	require.NotZero(t, asked(u.From("b"))[1])
	require.NotZero(t, asked(u.From("a"))[0])
	asked(u.From("none"))
}

// TestCost: what is expected of loads that were measured, of others, and of blocks on disks.
func TestCost(t *testing.T) {
	_, nodes := startNodes(t, "a", "b")
	d, err := directory.List(nodes, nil)
	require.NoError(t, err)
	u := openUser(t, d)
	c, sources := u.Cost(nil, u.keys)
	require.Zero(t, c.Bytes, "how large its blocks are is not known")
	require.False(t, c.Measured)
	u.store(t)
	u.load(t, all)
	room := make([]Source, 0, chainKeys)
	c, sources = u.Cost(room, u.keys)
	require.EqualValues(t, chainKeys*blockBytes, c.Bytes)
	require.True(t, c.Measured)
	at := 0
	for _, s := range sources {
		require.Equal(t, u.ownerOf(at), s.Node)
		require.Positive(t, s.Time)
		require.LessOrEqual(t, s.Time, 2*c.Time+time.Microsecond)
		at += s.Blocks
	}
	require.Equal(t, chainKeys, at)
	e, err := u.Estimate(t.Context(), u.keys)
	require.NoError(t, err)
	require.Equal(t, [2]int{chainKeys, 0}, e.Blocks)
	require.EqualValues(t, chainKeys*blockBytes, e.Bytes[cache.Memory])
	require.Positive(t, e.Time)

	for k := range u.keys { // as Match would
		u.known.note(&u.keys[k], cache.OnDisk)
	}
	c, _ = u.Cost(room, u.keys)
	require.EqualValues(t, chainKeys*blockBytes, c.Bytes)
	require.False(t, c.Measured, "no load from a disk was")
	u.load(t, all) // from memory, as it finds
	c, _ = u.Cost(room, u.keys)
	require.True(t, c.Measured)

	// Three instances: what one lacks would come from the cluster.
	placed, err := (&schedule.Conductor{}).Place(&fleet{space: u.Space, keys: u.keys}, one{})
	require.NoError(t, err)
	require.Equal(t, 1, placed.Prefill)
	require.Equal(t, chainKeys, placed.Copied)
	require.Positive(t, placed.Transfer)
}

// fleet is three prefill instances, of which the first has the blocks of a chain in its own memory,
// and is busy.
type fleet struct {
	space *Space
	keys  []cache.Key
}

func (f *fleet) Len() int { return 3 }

func (f *fleet) Cached(i int) int {
	if i == 0 {
		return len(f.keys)
	}
	return 0
}

func (f *fleet) Queue(i int) time.Duration {
	return []time.Duration{2 * time.Hour, 0, time.Hour}[i]
}

func (f *fleet) Compute(_, cached int) time.Duration {
	return time.Duration(len(f.keys)-cached) * time.Hour
}

func (f *fleet) Transfer(_, _, blocks int) time.Duration {
	before := f.keys[:len(f.keys)-blocks]
	c, _ := f.space.Behind(before).Cost(nil, f.keys[len(before):])
	return c.Time
}

// one is a decode instance.
type one struct{}

func (one) Len() int               { return 1 }
func (one) Step(int) time.Duration { return time.Millisecond }

// TestCurve: medians of about each size, and lines between them.
func TestCurve(t *testing.T) {
	var c curve
	_, _, known := c.at(1)
	require.False(t, known)
	us := func(n int) time.Duration { return time.Duration(n) * time.Microsecond }
	c.add(0, us(50))
	took, _, known := c.at(1 << 20)
	require.False(t, known, "questions alone")
	require.Equal(t, us(50), time.Duration(took))
	for k := range 2 * recentMax {
		c.add(1<<20, us(1050+k%3)) // one of three is the median
		if k%8 == 0 {
			c.add(1<<20, us(50_000))
		}
	}
	for bytes, want := range map[uint64]int{0: 50, 1 << 19: 550, 1 << 20: 1050, 1 << 22: 4050} {
		took, late, known := c.at(float64(bytes))
		require.True(t, known)
		require.InDelta(t, want, took/1e3, float64(want)/50, bytes)
		require.Greater(t, late, took)
	}
	for range recentMax {
		c.add(1<<24, us(500)) // faster than what is smaller
	}
	took, _, _ = c.at(1 << 25)
	require.Greater(t, took, 500e3)
}

// fake is a cluster of nodes that are reached, of which each Load of n bytes took n ns and a µs.
func fake(t testing.TB, nodes, copies int) *Space {
	t.Helper()
	c := &Cluster{}
	l := &layout{View: &directory.View{
		Namespaces: map[string]directory.Namespace{"model": {Copies: copies}}},
		at: map[uint64]int{}}
	for k := range nodes {
		n := &node{c: c, name: fmt.Sprintf("n%02d", k), id: uint64(k), at: &conn{}}
		for size := range 30 {
			n.learn([2]uint64{1 << size}, time.Microsecond+1<<size, 0)
		}
		n.learn([2]uint64{}, time.Microsecond, 0)
		l.at[n.id] = k
		l.Nodes = append(l.Nodes, directory.Node{Name: n.name, Weight: 1})
		l.nodes = append(l.nodes, n)
		l.bids = append(l.bids, placement.Node{ID: n.id, Weight: 1})
	}
	c.layout.Store(l)
	return &Space{c: c, name: spaceName{name: "model"}, closed: new(atomic.Bool),
		known: new(known)}
}

// TestLargeRead: what several nodes have is asked of as few as will do, and a large read of all of
// them, of each as fast as it is.
func TestLargeRead(t *testing.T) {
	s := fake(t, 4, 4)
	lay := s.c.layout.Load()
	slow := lay.nodes[0]
	for k := range 30 * recentMax {
		slow.learn([2]uint64{1 << (k % 30)}, 3<<(k%30), 0)
	}
	keys := make([]cache.Key, 1024)
	for k := range keys {
		binary.BigEndian.PutUint64(keys[k][8:], uint64(k))
	}
	s.known.size.Store(4 << 10)
	w := s.way(lay, keys)
	require.Len(t, w.asked, 1)
	w.free()
	s.known.size.Store(1 << 20)
	w = s.way(lay, keys)
	defer w.free()
	require.Len(t, w.asked, 4)
	for o, b := range w.bytes[:4] {
		if o > 0 {
			require.Greater(t, b[0], 2*w.bytes[0][0], "the slow node has less")
			require.InDelta(t, 300<<20, b[0], 70<<20)
		}
	}
}

// TestDoubted: a node that was late is asked for nothing that another one has.
func TestDoubted(t *testing.T) {
	s := fake(t, 2, 2)
	lay, keys := s.c.layout.Load(), []cache.Key{{1}}
	lay.nodes[1].doubts.Add(1)
	for range 100 {
		w := s.way(lay, keys)
		require.Zero(t, w.runs[0].source)
		w.free()
	}
	lay.nodes[0].at.silent = true
	w := s.way(lay, keys)
	defer w.free()
	require.Equal(t, 1, w.runs[0].source)
	require.True(t, w.runs[0].chosen)
}

// TestLiar: what a node says of its load makes it look twice as fast or slow at most, and nothing
// once it was measured.
func TestLiar(t *testing.T) {
	s := fake(t, 1, 1)
	n := s.c.layout.Load().nodes[0]
	honest, _, _ := n.expect([2]uint64{1 << 20})
	for _, told := range []int64{math.MaxInt64, math.MinInt64, 0, 1} {
		n.told.Store(told)
		took, _, _ := n.expect([2]uint64{1 << 20})
		require.LessOrEqual(t, took, 2*honest)
		require.GreaterOrEqual(t, 2*took, honest)
	}
	n.told.Store(64)
	for range 64 {
		n.learn([2]uint64{1 << 20}, honest, n.busy(0))
	}
	took, _, _ := n.expect([2]uint64{1 << 20})
	require.InEpsilon(t, honest, took, 0.05)
}

// announce has a node tell of segments that are hot, and of blocks.
func (s *Space) announce(t *testing.T, node uint64, hot []placement.Hot, blocks ...cache.Key) {
	t.Helper()
	for d := range placement.NewJournal(node, 1).Snapshot(0, hot, slices.Values(blocks)) {
		require.NoError(t, s.c.digests.apply(node, d.Append(nil)))
	}
}

// TestTold: blocks are asked of those, too, that have told of them; where that is no longer so, or
// the owner has not got them yet, of the other.
func TestTold(t *testing.T) {
	s := fake(t, 64, 2)
	lay := s.c.layout.Load()
	head, last := cache.Key{1}, cache.Key{2}
	keys := []cache.Key{{9}, {8}, head, last} // a segment of two at the end
	owners := placement.Owners(nil, lay.bids, head, 64)
	s.announce(t, uint64(owners[40]), []placement.Hot{{Segment: head, Owners: 4}}, last)
	asked := map[int]bool{}
	for range 1000 {
		w := s.way(lay, keys)
		r := &w.runs[2]
		asked[r.source] = true
		turns := []int{}
		for n := 0; w.nth(r, n) >= 0; n++ {
			turns = append(turns, w.nth(r, n))
		}
		require.Subset(t, turns, []int{owners[0], owners[1], owners[40]})
		require.LessOrEqual(t, len(turns), 4)
		require.Len(t, turns, r.tries)
		w.free()
	}
	for _, o := range []int{owners[0], owners[1], owners[2], owners[3], owners[40]} {
		require.True(t, asked[o], "node %d", o)
	}
	require.Len(t, asked, 5)

	// A router says the same of another node.
	lay.Nodes[owners[50]].Addresses = []string{"tcp:10.0.0.50:7000"}
	for _, f := range cache.Fetches(fmt.Appendf(nil, `{"actions": [{"action_type": "kv.fetch",
		"action_version": "1.0", "payload": {"block_hashes": ["%x"],
		"source_control_endpoint": "tcp://10.0.0.50:7000"}}, {"action_type": "kv.fetch",
		"action_version": "1.0", "payload": {"block_hashes": [1],
		"source_control_endpoint": "tcp://10.0.0.51:7000"}}]}`, last)) {
		s.noteFetch(&f)
	}
	w := s.way(lay, keys)
	defer w.free()
	require.Contains(t, w.found[w.runs[2].found[0]:w.runs[2].found[1]], owners[50])
}

// TestAsked: at most 2.1 nodes are asked for what a conversation hits, and no node for much more
// than others, once what all begin with has copies.
func TestAsked(t *testing.T) {
	for n, most := range map[int]float64{8: 1.2, 64: 1.6} {
		s := fake(t, n, 1)
		s.known.size.Store(8 << 10)
		var head cache.Key
		binary.LittleEndian.PutUint64(head[:], trace.NewGenerator(1).Next().HashIDs[0])
		s.announce(t, 0, []placement.Hot{{Segment: head, Owners: uint16(n)}})
		lay, stored := s.c.layout.Load(), map[uint64]bool{}
		asked, hits, read, all := 0, 0, make([]int, n), 0
		g := trace.NewGenerator(1)
		for range 12000 {
			var keys []cache.Key
			for _, id := range g.Next().HashIDs {
				if !stored[id] {
					stored[id] = true
					continue
				}
				var key cache.Key
				binary.LittleEndian.PutUint64(key[:], id)
				keys = append(keys, key)
			}
			if len(keys) > 0 {
				w := s.way(lay, keys)
				asked, hits = asked+len(w.asked), hits+1
				for k := range w.runs {
					blocks := w.runs[k].to - w.runs[k].from
					read[w.runs[k].source] += blocks
					all += blocks
				}
				w.free()
			}
		}
		share := float64(slices.Max(read)) / float64(all) * float64(n)
		t.Logf("%d nodes: %.2f asked a hit, the most read one %.2f of the mean", n,
			float64(asked)/float64(hits), share)
		require.LessOrEqual(t, float64(asked)/float64(hits), 2.1)
		require.LessOrEqual(t, share, most)
	}
}

// TestUnchained: single blocks are where any other call looks for them.
func TestUnchained(t *testing.T) {
	_, nodes := startNodes(t, "a", "b", "c")
	d, err := directory.List(nodes, nil)
	require.NoError(t, err)
	u := openUser(t, d)
	s := u.Unchained()
	for k, key := range u.keys {
		copy(u.block(k), content(key))
	}
	outcomes, err := s.Store(t.Context(), u.keys, place(u, 0, chainKeys))
	require.NoError(t, err)
	require.Equal(t, slices.Repeat([]cache.Outcome{cache.Done}, chainKeys), outcomes)
	for k := chainKeys - 1; k >= 0; k -= 7 {
		found, err := s.Match(t.Context(), u.keys[k:k+1])
		require.NoError(t, err)
		require.Equal(t, 1, found.Prefix)
	}
}

// TestOtherCalls: those that stacks make beside Match, Load and Store.
func TestOtherCalls(t *testing.T) {
	children, nodes := startNodes(t, "a", "b")
	d, err := directory.List(nodes, nil)
	require.NoError(t, err)
	u := openUser(t, d)
	u.store(t)
	outcomes, err := u.Prefetch(t.Context(), append(slices.Clone(u.keys), cache.Key{1}))
	require.NoError(t, err)
	require.Equal(t, append(slices.Repeat([]cache.Outcome{cache.Done}, chainKeys), cache.Missing),
		outcomes)
	require.NoError(t, u.Drain(t.Context()))
	envelope := fmt.Sprintf(`{"actions": [{"action_id": "1", "action_type": "kv.release",
		"action_version": "1.0", "payload": {"block_hashes": ["%x", "%x", 7]}},
		{"action_id": "2", "action_type": "kv.dance"}]}`, u.keys[0], u.keys[chainKeys-1])
	heeded, err := u.HintEnvelope(t.Context(), []byte(envelope))
	require.NoError(t, err)
	require.Len(t, heeded, 2)
	require.Equal(t, cache.ActionApplied, heeded[0].Status)
	require.Equal(t, cache.HintResult{Applied: 2, Missing: 1}, heeded[0].HintResult)
	require.Equal(t, cache.ActionUnsupported, heeded[1].Status)
	_, err = u.HintEnvelope(t.Context(), []byte("{"))
	require.ErrorIs(t, err, engine.ErrCorrupt)
	_, err = u.Replace(t.Context(), u.keys[:1], place(u, 0, 1))
	require.ErrorIs(t, err, engine.ErrNotSupported)
	_, _, err = u.Blocks(t.Context(), 0)
	require.ErrorIs(t, err, engine.ErrNotSupported)

	e, err := openEngine("other")
	require.NoError(t, err)
	defer func() { require.NoError(t, e.Close()) }()
	m, err := e.Alloc(blockBytes, engine.AllocOptions{})
	require.NoError(t, err)
	gone, err := e.RegisterPrivate("gone", m.Segment())
	require.NoError(t, err)
	require.NoError(t, gone.Close())
	require.ErrorIs(t, u.Attach(t.Context(), gone), engine.ErrClosed)
	require.NoError(t, u.Detach(t.Context(), gone))

	for _, c := range children {
		c.kill()
	}
	u.await(t, "a", Unreachable)
	u.await(t, "b", Unreachable)
	_, err = u.HintEnvelope(t.Context(), []byte(envelope))
	require.ErrorIs(t, err, engine.ErrPeerLost)
	require.ErrorIs(t, u.Drain(t.Context()), engine.ErrPeerLost)
	outcomes, err = u.Prefetch(t.Context(), u.keys)
	require.NoError(t, err)
	require.Equal(t, slices.Repeat([]cache.Outcome{cache.Missing}, chainKeys), outcomes)
	estimate, err := u.Estimate(t.Context(), u.keys)
	require.NoError(t, err)
	require.Equal(t, chainKeys, estimate.Missing)
	c, _ := u.Cost(nil, u.keys)
	require.Zero(t, c.Blocks)
}

// BenchmarkCost: the time of a call for a chain of 64 blocks (7 segments) and one of 512 (21).
func BenchmarkCost(b *testing.B) {
	for _, nodes := range []int{8, 64} {
		for _, blocks := range []int{64, 512} {
			b.Run(fmt.Sprintf("nodes=%d/blocks=%d", nodes, blocks), func(b *testing.B) {
				s := fake(b, nodes, 2)
				s.known.size.Store(1 << 20)
				keys, room := make([]cache.Key, blocks), make([]Source, 0, blocks)
				for k := range keys {
					binary.BigEndian.PutUint64(keys[k][8:], uint64(k))
				}
				b.ReportAllocs()
				for b.Loop() {
					s.Cost(room, keys)
				}
			})
		}
	}
}

// BenchmarkCostError: how far Cost is from the median of the Loads that follow, of several sizes.
// A machine that does other things at the same time makes it meaningless.
func BenchmarkCostError(b *testing.B) {
	_, nodes := startNodes(b, "a", "b", "c")
	d, err := directory.List(nodes, nil)
	require.NoError(b, err)
	u := openUser(b, d)
	for k, key := range u.keys {
		copy(u.block(k), content(key))
	}
	_, err = u.Store(context.Background(), u.keys, place(u, 0, chainKeys))
	require.NoError(b, err)
	sizes := []int{1, 2, 4, 8, 16, 24, 32, 48, chainKeys}
	const each = 31
	var offs []float64
	for b.Loop() {
		for range recentMax { // learn
			for _, n := range sizes {
				_, err := u.Load(context.Background(), u.keys[:n], place(u, 0, n))
				require.NoError(b, err)
			}
		}
		for _, n := range sizes {
			expected, _ := u.Cost(nil, u.keys[:n])
			var took []time.Duration
			for range each {
				began := time.Now()
				_, err := u.Load(context.Background(), u.keys[:n], place(u, 0, n))
				require.NoError(b, err)
				took = append(took, time.Since(began))
			}
			slices.Sort(took)
			off := math.Abs(float64(expected.Time)/float64(took[each/2]) - 1)
			b.Logf("%2d blocks: expected %v, median %v: off by %.0f %%", n, expected.Time,
				took[each/2], 100*off)
			offs = append(offs, 100*off)
		}
	}
	slices.Sort(offs)
	b.ReportMetric(offs[len(offs)/2], "%-off-p50")
	b.ReportMetric(offs[len(offs)-1], "%-off-most")
}

// TestAlone: of two segments another node has one. What no other node has is asked of a late node
// again, told where nobody has it, and given all the time.
func TestAlone(t *testing.T) {
	s := fake(t, 2, 1)
	lay, keys := s.c.layout.Load(), []cache.Key{{1}, {0, 1}}
	own := placement.Owners(nil, lay.bids, keys[0], 1)[0]
	ownedBy := func(o int) {
		for placement.Owners(nil, lay.bids, keys[1], 1)[0] != o {
			keys[1][0]++
		}
	}
	s.known.noteHolder(keys[0], lay.nodes[1-own].id)
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	var asked [2][][]int
	var least [2]time.Duration
	load := func(s *Space, ask func(l limits, o int, p *part) []int) []int {
		asked = [2][][]int{}
		w := s.way(lay, keys)
		defer w.free()
		w.moves = func([]cache.Key) [2]uint64 { return [2]uint64{} }
		var mu sync.Mutex
		lacks, err := s.inTurn(limits{nodes: ctx}, w, upTo(2), 0,
			func(l limits, p *part) ([]int, error) {
				mu.Lock()
				defer mu.Unlock()
				o, end := lay.at[p.n.id], time.Now()
				if d, is := l.nodes.Deadline(); is {
					least[o] = d.Sub(end)
				}
				asked[o] = append(asked[o], p.at)
				return ask(l, o, p), nil
			})
		require.NoError(t, err)
		return lacks
	}
	ownedBy(own)
	lacks := load(s.From(lay.nodes[own].name), func(l limits, o int, p *part) []int {
		if o == own && len(asked[o]) == 1 {
			<-l.nodes.Done()
			return p.at
		}
		return nil
	})
	require.Empty(t, lacks)
	require.Equal(t, [][]int{{0, 1}, {1}}, asked[own])
	require.Equal(t, [][]int{{0}}, asked[1-own])

	lacks = load(s.From(lay.nodes[own].name), func(_ limits, _ int, p *part) []int { return p.at })
	require.Equal(t, []int{0, 1}, lacks)

	ownedBy(1 - own)
	lay.nodes[1-own].doubts.Add(1) // so that it is not asked for the first segment
	load(s, func(limits, int, *part) []int { return nil })
	require.Equal(t, [][]int{{1}}, asked[1-own])
	require.Greater(t, least[1-own], 50*time.Minute)
	require.Less(t, least[own], 40*time.Minute)
}

// TestCostAllocates: nothing, of any chain that it was called for before.
func TestCostAllocates(t *testing.T) {
	s := fake(t, 8, 2)
	s.known.size.Store(1 << 20)
	random := rand.New(rand.NewPCG(1, 1))
	for range 50 {
		keys := make([]cache.Key, 512)
		for k := range keys {
			binary.LittleEndian.PutUint64(keys[k][:], random.Uint64())
		}
		room := make([]Source, 0, len(keys))
		s.Cost(room, keys)
		if !testkit.RaceEnabled { // which has a sync.Pool lose some
			require.Zero(t, testkit.AllocsPerRun(20, func() { s.Cost(room, keys) }))
		}
	}
}

// TestOneRefuses: where one node of two may not be asked that is an error, and what the other one
// has is there. Where it tells nonsense its blocks count as missing.
func TestOneRefuses(t *testing.T) {
	_, nodes := startNodes(t, "a")
	node := startLiar(t, "b", func(what byte, keys int) (code byte, body []byte, answers bool) {
		switch what {
		case sentMatch, sentLoad, sentPrefetch:
			return codeDenied, nil, true
		}
		return 0, []byte("1"), true
	})
	d, err := directory.List(append(nodes, node), nil)
	require.NoError(t, err)
	u := openUser(t, d)
	for k, key := range u.keys {
		copy(u.block(k), content(key))
	}
	_, err = u.Store(t.Context(), u.keys, place(u, 0, chainKeys))
	require.NoError(t, err)
	copy(u.mem, bytes.Repeat([]byte{0xaa}, len(u.mem)))
	found, err := u.Match(t.Context(), u.keys)
	require.ErrorIs(t, err, os.ErrPermission)
	require.ErrorContains(t, err, "node b")
	loaded, err := u.Load(t.Context(), u.keys, place(u, 0, chainKeys))
	require.ErrorIs(t, err, os.ErrPermission)
	fetched, err := u.Prefetch(t.Context(), u.keys)
	require.ErrorIs(t, err, os.ErrPermission)
	for k, key := range u.keys {
		mine := u.ownerOf(k) == "a"
		require.Equal(t, mine, found.Blocks[k].There(), k)
		require.Equal(t, mine, loaded[k] == cache.Done, k)
		require.Equal(t, mine, fetched[k] == cache.Done, k)
		require.Equal(t, mine, bytes.Equal(content(key), u.block(k)), k)
	}
	_, err = u.Estimate(t.Context(), u.keys)
	require.ErrorIs(t, err, os.ErrPermission)
	_, err = u.MatchPinned(t.Context(), time.Minute, u.keys)
	require.ErrorIs(t, err, os.ErrPermission)
}

// TestNonsense: an estimate of a node that is of other blocks than it was asked for says that they
// are missing; a size that nothing has, and an envelope that is refused, change nothing for good.
func TestNonsense(t *testing.T) {
	for _, lie := range []cache.Estimate{{}, {Missing: -1, Blocks: [2]int{0, chainKeys + 1}},
		{Blocks: [2]int{math.MaxInt, math.MaxInt}}} {
		node := startLiar(t, "a", func(what byte, keys int) (byte, []byte, bool) {
			switch what {
			case sentMatch:
				return 0, bytes.Repeat([]byte{byte(cache.InMemory)}, keys), true
			case sentEstimate:
				text, err := json.Marshal(lie)
				return 0, text, err == nil
			}
			return 0, []byte("1"), true
		})
		d, err := directory.List([]directory.Node{node}, nil)
		require.NoError(t, err)
		u := openUser(t, d)
		e, err := u.Estimate(t.Context(), u.keys)
		require.NoError(t, err)
		require.Equal(t, chainKeys, e.Missing)
		require.Zero(t, e.Blocks)
	}

	s := fake(t, 1, 1)
	n, keys := s.c.layout.Load().nodes[0], chainOf(1)
	s.c.wholes.add(1, 100*even)
	s.known.size.Store(math.MaxUint64 / chainKeys)
	c, _ := s.Cost(nil, keys)
	require.Positive(t, c.Time)

	// A Load counts by its own size, though another one has begun meanwhile; blocks of one that has
	// not ended are where they were.
	s.known.size.Store(1)
	before, _, _ := n.expect([2]uint64{1})
	s.known.note(&keys[0], cache.OnDisk)
	for range recentMax {
		p := &part{n: n, keys: keys[1:2]}
		s.loaded(p, []cache.Outcome{cache.Done}, 1<<20, time.Second, 0, true, false)
		s.loaded(&part{n: n, keys: keys[:1]}, nil, 1<<20, time.Second, 0, false, true)
	}
	after, _, _ := n.expect([2]uint64{1})
	require.Equal(t, before, after)
	require.Equal(t, [2]uint64{1: 1}, s.known.bytes(keys[:1], 1))

	require.Empty(t, cache.Fetches([]byte(`{"actions": [{"action_type": "kv.fetch",
		"action_version": "1.0", "payload": {"block_hashes": [1],
		"source_control_endpoint": "tcp://10.0.0.50:7000"}}, {"action_id": 1}]}`)))
}

// TestEnvelopes: what became of an action where nodes differ: it is applied where one has applied
// it, else the reason is that of the status.
func TestEnvelopes(t *testing.T) {
	says := map[string][]cache.ActionOutcome{
		"a": {{Status: cache.ActionRejected, Reason: "rejected", HintResult: cache.HintResult{
			Missing: 3}}, {Status: cache.ActionRejected, Reason: "rejected"}},
		"b": {{Status: cache.ActionApplied, HintResult: cache.HintResult{Applied: 1, Missing: 2}},
			{Status: cache.ActionUnsupported, Reason: "unsupported"}},
	}
	var nodes []directory.Node
	for name, say := range says {
		nodes = append(nodes, startLiar(t, name, func(what byte, _ int) (byte, []byte, bool) {
			if what == sentEnvelope {
				text, err := json.Marshal(say)
				return 0, text, err == nil
			}
			return 0, []byte("1"), true
		}))
	}
	d, err := directory.List(nodes, nil)
	require.NoError(t, err)
	u := openUser(t, d)
	for range 20 {
		sum, err := u.HintEnvelope(t.Context(), []byte("{}"))
		require.NoError(t, err)
		require.Len(t, sum, 2)
		require.Equal(t, cache.ActionApplied, sum[0].Status)
		require.Equal(t, cache.HintResult{Applied: 1, Missing: 2}, sum[0].HintResult)
		require.Equal(t, sum[1].Reason, string(sum[1].Status))
	}
}
