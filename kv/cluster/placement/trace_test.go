// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/kv/trace"
)

// spread is what a trace's reads made of a cluster.
type spread struct {
	read, stored float64 // of the node that has most, over the mean
	asked        float64 // other nodes a request with a hit
	copied       float64 // blocks that were copied to further owners
	ofStored     float64 // the same over blocks stored
	hot          int     // segments that ever had more than one owner
}

// simulated is a node of a simulated cluster of unlimited memory.
type simulated struct {
	heat         *Heat
	journal      *Journal
	view         *View
	read, stored int
}

// simulate runs requests from random nodes of a cluster. At every tick the nodes decide on copies,
// unless tick is 0, and send each other their digests.
func simulate(tb testing.TB, requests []trace.Request, n int, tick time.Duration) (s spread) {
	nodes, cluster := nodesOf(n), make([]simulated, n)
	for i, node := range nodes {
		cluster[i] = simulated{heat: NewHeat(), journal: NewJournal(node.ID, 1), view: NewView(0)}
	}
	deliver := func(from int, d *Digest) {
		b := d.Append(nil)
		for to := range cluster {
			if to != from {
				got, err := DecodeDigest(b)
				require.NoError(tb, err)
				require.NoError(tb, cluster[to].view.Apply(got))
			}
		}
	}
	for i := range cluster {
		for d := range cluster[i].journal.Snapshot(0, nil, slices.Values([]Key(nil))) {
			deliver(i, d)
		}
	}
	random := rand.New(rand.NewPCG(1, 1))
	stored := map[uint64]bool{} // blocks
	segments := map[Key]int{}   // blocks of each
	hot := map[Key]int{}        // owners
	hits, asks := 0, 0
	decide := func() {
		digests := make([]*Digest, n)
		for i := range cluster {
			c := &cluster[i]
			for _, change := range c.heat.Tick(nodes, nodes[i].ID, c.view.MeanLoad(c.heat.Load()),
				c.view.Owners) {
				all := Owners(nil, nodes, change.Segment, max(change.From, change.To))
				for _, owner := range all[min(change.From, change.To):] {
					if change.To > change.From {
						cluster[owner].stored += segments[change.Segment]
						s.copied += float64(segments[change.Segment])
					} else {
						cluster[owner].stored -= segments[change.Segment]
					}
				}
				if hot[change.Segment] == 0 {
					s.hot++
				}
				hot[change.Segment] = change.To
			}
			digests[i] = c.journal.Cut(c.heat.Load(), c.heat.Hot())
		}
		for i, d := range digests {
			deliver(i, d)
		}
	}
	var owners, asked []int
	next := tick
	for _, request := range requests {
		for tick > 0 && request.Arrival() >= next {
			next += tick
			decide()
		}
		chain, reader := request.HashIDs, random.IntN(n)
		asked = asked[:0]
		hit := true
		for first := 0; first < len(chain); {
			segment, _ := SegmentOf(first)
			end := min(FirstOf(segment+1), len(chain))
			key := keyOf(chain[first])
			k := max(cluster[reader].view.Owners(key), cluster[reader].heat.Owners(key), 1)
			owners = Owners(owners[:0], nodes, key, k)
			blocks := 0
			for _, id := range chain[first:end] {
				if hit = hit && stored[id]; hit {
					blocks++
				} else if !stored[id] {
					stored[id] = true
					segments[key]++
					for _, owner := range Owners(nil, nodes, key, max(hot[key], 1)) {
						cluster[owner].stored++
					}
					s.copied += float64(max(hot[key], 1) - 1)
				}
			}
			if blocks > 0 {
				from := Choose(owners, reader, asked, random.Uint64())
				cluster[from].read += blocks
				cluster[from].heat.Read(key, blocks)
				if from != reader && !slices.Contains(asked, from) {
					asked = append(asked, from)
				}
			}
			if first == 0 && blocks > 0 {
				hits++
			}
			first = end
		}
		asks += len(asked)
	}
	read, most, all, fullest := 0, 0, 0, 0
	for _, c := range cluster {
		read, most = read+c.read, max(most, c.read)
		all, fullest = all+c.stored, max(fullest, c.stored)
	}
	s.read = float64(most) / float64(read) * float64(n)
	s.stored = float64(fullest) / float64(all) * float64(n)
	s.asked = float64(asks) / float64(hits)
	s.ofStored = s.copied / float64(len(stored))
	return s
}

// conversations are generated requests that all begin with the same block.
func conversations(n int) (requests []trace.Request) {
	for g := trace.NewGenerator(1); len(requests) < n; {
		requests = append(requests, g.Next())
	}
	return requests
}

// TestConversationsSpread: what the first block of all prompts does to its node ends with its
// copies.
func TestConversationsSpread(t *testing.T) {
	requests := conversations(12000)
	for _, c := range []struct {
		n           int
		read, asked float64
	}{{8, 1.2, 2.1}, {64, 1.6, 2.1}} {
		without, with := simulate(t, requests, c.n, 0), simulate(t, requests, c.n, TickInterval)
		t.Logf("%d nodes: without copies %+v, with %+v", c.n, without, with)
		require.LessOrEqual(t, with.read, c.read)
		require.LessOrEqual(t, with.asked, c.asked)
		require.Greater(t, without.read, c.read)
		require.Less(t, with.ofStored, 0.05)
	}
}

// TestSessionsAreNotCopied: sessions that read their own blocks again and again load the nodes
// evenly, and no segment is worth a copy.
func TestSessionsAreNotCopied(t *testing.T) {
	requests := sessions(4000)
	for _, n := range []int{8, 64} {
		with := simulate(t, requests, n, TickInterval)
		t.Logf("%d nodes: %+v", n, with)
		require.Less(t, with.ofStored, 0.01)
	}
}

// sessions are requests of many agents at the same time, each of which adds to its own chain.
func sessions(n int) (requests []trace.Request) {
	random, next := rand.New(rand.NewPCG(3, 3)), uint64(0)
	chains := make([][]uint64, 200)
	for k := range n {
		i := random.IntN(len(chains))
		if len(chains[i]) > 400 {
			chains[i] = nil
		}
		for range 1 + random.IntN(20) {
			chains[i] = append(chains[i], next)
			next++
		}
		requests = append(requests, trace.Request{Timestamp: int64(k) * 100, // 20 s a session
			HashIDs: slices.Clone(chains[i])})
	}
	return requests
}

// BenchmarkTrace runs the trace that SLUICE_TRACE names, or generated conversations, through
// clusters, without copies and with those that Heat decides on:
//
//	SLUICE_TRACE=conversation_trace.jsonl go test ./kv/cluster/placement -run x -bench Trace \
//	    -benchtime 1x
func BenchmarkTrace(b *testing.B) {
	requests := conversations(12000)
	if path := os.Getenv("SLUICE_TRACE"); path != "" {
		requests = nil
		f, err := os.Open(path)
		require.NoError(b, err)
		defer f.Close()
		for in := trace.NewReader(f); ; {
			r, err := in.Next()
			if err == io.EOF {
				break
			}
			require.NoError(b, err)
			requests = append(requests, r)
		}
	}
	for _, n := range []int{8, 64} {
		for _, tick := range []time.Duration{0, time.Minute / 2, time.Minute,
			2 * time.Minute} {
			b.Run(fmt.Sprintf("nodes=%d/tick=%v", n, tick), func(b *testing.B) {
				var s spread
				for b.Loop() {
					s = simulate(b, requests, n, tick)
				}
				b.ReportMetric(0, "ns/op")
				b.ReportMetric(s.read, "read-max/mean")
				b.ReportMetric(s.stored, "stored-max/mean")
				b.ReportMetric(s.asked, "asked/hit")
				b.ReportMetric(s.copied, "copies")
				b.ReportMetric(s.ofStored, "copies/stored")
				b.ReportMetric(float64(s.hot), "hot-segments")
			})
		}
	}
}
