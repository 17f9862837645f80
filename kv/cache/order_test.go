// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
)

// TestOrderIsThatOfACache: what an Order has, a cache with as much room has after the same calls.
func TestOrderIsThatOfACache(t *testing.T) {
	for _, p := range []Policy{S3FIFO, LRU, ARC} {
		n := openNode(t, memoryFile(t), 24, func(c *Config) { c.Policy = p })
		o, err := NewOrder(p, 24)
		require.NoError(t, err)
		require.Zero(t, n.ns.id)
		o.index.seed = n.index.seed // what has left is known by a hash, of which ghosts forget some
		r := rand.New(rand.NewPCG(9, 1))
		hits, evictions := 0, 0
		for step := range 1500 {
			key := ids(uint64(r.IntN(12)*r.IntN(12)), 1)
			op := n.ns.Load(t.Context(), key, n.at(0, 1))
			require.NoError(t, op.Wait(t.Context()))
			found := op.Outcomes()[0] == Done
			require.Equal(t, found, o.Use(key[0]), "%s: step %d", p, step)
			if found {
				hits++
				continue
			}
			require.Equal(t, []Outcome{Done}, n.put(t, key))
			gone, went := o.Add(key[0])
			if went {
				evictions++
				require.Zero(t, n.ns.Match([]Key{gone}).Prefix, "%s: step %d", p, step)
				require.False(t, o.Use(gone))
			}
		}
		require.Greater(t, hits, 300)
		require.Greater(t, evictions, 300)
		n.close(t)
	}
}

func TestOrderErrors(t *testing.T) {
	_, err := NewOrder("fifo", 1)
	require.ErrorContains(t, err, "s3fifo, lru and arc")
	require.ErrorIs(t, err, engine.ErrBounds)
	_, err = NewOrder(LRU, 0)
	require.ErrorIs(t, err, engine.ErrBounds)

	o, err := NewOrder(LRU, 1)
	require.NoError(t, err)
	require.False(t, o.Use(Key{1}))
	for range 2 { // what is there is not stored again
		_, went := o.Add(Key{1})
		require.False(t, went)
	}
	gone, went := o.Add(Key{2})
	require.True(t, went)
	require.Equal(t, Key{1}, gone)
}
