// SPDX-License-Identifier: Apache-2.0

package member

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/cluster/placement"
	"github.com/sluicehq/sluice/kv/trace"
)

// slots is a place of a user for a whole chain.
func (u *user) slots(n int) serve.Place {
	p := serve.Place{Region: u.region, Stride: blockBytes, Run: blockBytes}
	for k := range n {
		p.Slots = append(p.Slots, uint32(k))
	}
	return p
}

// loads reports whether a client finds all of a chain, and checks the bytes.
func (u *user) loads(t *testing.T, keys []cache.Key) bool {
	t.Helper()
	clear(u.mem)
	outcomes, err := u.Load(t.Context(), keys, u.slots(len(keys)))
	require.NoError(t, err)
	for k, o := range outcomes {
		if o != cache.Done {
			return false
		}
		require.Equal(t, content(keys[k]), u.mem[k*blockBytes:][:blockBytes])
	}
	return true
}

// TestClients: what clients do is enough for the nodes to know what to send. Reads of what all read
// go to all nodes; after a join all is found, at the new node and by what the others tell.
func TestClients(t *testing.T) {
	folder, d := t.TempDir(), &changing{}
	d.set(folder, 1, "a", "b", "c")
	nodes := map[string]*node{}
	for _, name := range []string{"a", "b", "c"} {
		nodes[name] = startNode(t, folder, name, d)
	}
	u := openUser(t, d)
	const chains = 4
	for seed := range uint64(chains) {
		for k, key := range chainOf(seed) {
			copy(u.mem[k*blockBytes:], content(key))
		}
		outcomes, err := u.Store(t.Context(), chainOf(seed), u.slots(chainKeys))
		require.NoError(t, err)
		require.Equal(t, slices.Repeat([]cache.Outcome{cache.Done}, chainKeys), outcomes)
		require.True(t, u.loads(t, chainOf(seed)))
	}
	head := chainOf(0)[:1]
	for range 64 {
		require.True(t, u.loads(t, head))
	}
	for _, n := range nodes {
		known(t, n)
		n.tickNow(t)
	}
	eventually(t, func() bool { return u.Owners(head[0]) == 3 })
	read := func(n *node) uint64 { return n.cache.Stats().Loads[cache.Done] }
	for _, n := range nodes {
		before := read(n)
		eventually(t, func() bool { return u.loads(t, head) && read(n) > before })
	}

	nodes["d"] = startNode(t, folder, "d", d)
	d.set(folder, 1, "a", "b", "c", "d")
	for seed := range uint64(chains) {
		eventually(t, func() bool { return u.loads(t, chainOf(seed)) })
	}
	u.complete(t, d, chains, 1)
	for _, n := range nodes {
		idleNode(t, n)
	}
}

// BenchmarkSpread runs generated conversations, which all begin with the same block, through a
// client of 8 nodes, and tells the blocks read of the node that has most over the mean. They tick
// by the time of the trace, or never:
//
//	go test ./kv/cluster/member -run x -bench Spread -benchtime 1x
func BenchmarkSpread(b *testing.B) {
	for _, ticks := range []bool{false, true} {
		b.Run(fmt.Sprintf("ticks=%v", ticks), func(b *testing.B) {
			for b.Loop() {
				b.ReportMetric(spread(b, ticks), "read-max/mean")
			}
		})
	}
}

func spread(b *testing.B, ticks bool) float64 {
	folder, d := b.TempDir(), &changing{}
	var nodes []*node
	var names []string
	for k := range 8 {
		names = append(names, string(rune('a'+k)))
	}
	d.set(folder, 1, names...)
	for _, name := range names {
		nodes = append(nodes, startNode(b, folder, name, d))
	}
	u := openUser(b, d)
	next := placement.TickInterval
	g := trace.NewGenerator(1)
	for range 4000 {
		r := g.Next()
		for ; ticks && r.Arrival() >= next; next += placement.TickInterval {
			for _, n := range nodes {
				n.ask(b.Context(), n.tick)
			}
		}
		keys := make([]cache.Key, min(len(r.HashIDs), chainKeys))
		for k := range keys {
			binary.LittleEndian.PutUint64(keys[k][:], r.HashIDs[k])
		}
		outcomes, err := u.Load(b.Context(), keys, u.slots(len(keys)))
		require.NoError(b, err)
		if slices.ContainsFunc(outcomes, func(o cache.Outcome) bool { return o != cache.Done }) {
			_, err = u.Store(b.Context(), keys, u.slots(len(keys)))
			require.NoError(b, err)
		}
	}
	most, all := uint64(0), uint64(0)
	for _, n := range nodes {
		read := n.cache.Stats().Loads[cache.Done]
		most, all = max(most, read), all+read
	}
	return float64(most) / float64(all) * float64(len(nodes))
}
