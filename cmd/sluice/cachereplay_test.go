// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/byname"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/cache"
)

// TestOptimum compares the optimum with the best of all ways to keep blocks, on small trees of
// prefixes.
func TestOptimum(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	for range 300 {
		// a tree of up to eight blocks, in which each one follows an earlier one, or none
		parent := make([]int, 1+r.IntN(8))
		for b := range parent {
			parent[b] = r.IntN(b+1) - 1
		}
		var chains [][]cache.Key
		var sets []uint
		for range 1 + r.IntN(9) {
			var chain []cache.Key
			set := uint(0)
			for b := r.IntN(len(parent)); b >= 0; b = parent[b] {
				chain = append([]cache.Key{{byte(b)}}, chain...)
				set |= 1 << b
			}
			chains, sets = append(chains, chain), append(sets, set)
		}
		for capacity := range 5 {
			require.Equal(t, bestHits(chains, sets, capacity), optimalHits(chains, capacity),
				"%v, %d blocks", chains, capacity)
		}
	}
}

// bestHits tries all contents that a cache may have after each chain. Hits are the blocks of a
// chain from its first on that are there.
func bestHits(chains [][]cache.Key, sets []uint, capacity int) (best int) {
	hits := map[uint]int{0: 0} // by content
	for n, chain := range chains {
		after := map[uint]int{}
		for content, h := range hits {
			for _, key := range chain {
				if content>>key[0]&1 == 0 {
					break
				}
				h++
			}
			all := content | sets[n]
			for keep := all; ; keep = (keep - 1) & all { // each part of it
				if count := bitsOf(keep); count <= capacity {
					if old, ok := after[keep]; !ok || h > old {
						after[keep] = h
					}
				}
				if keep == 0 {
					break
				}
			}
			best = max(best, h)
		}
		hits = after
	}
	return best
}

func bitsOf(set uint) (n int) {
	for ; set != 0; set &= set - 1 {
		n++
	}
	return n
}

// TestCacheUserChecks: one byte that is another one is noticed, wherever it is.
func TestCacheUserChecks(t *testing.T) {
	b, err := byname.Open("shm", nil)
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Backends: []driver.Backend{b}})
	require.NoError(t, err)
	m, err := e.Alloc(1<<16, engine.AllocOptions{})
	require.NoError(t, err)
	u := &cacheUser{engine: e, memory: m, block: 4096}
	keys := []cache.Key{{1}, {15: 1}}
	for at := 0; at < 4096; at += 97 {
		u.fill(keys)
		m.Bytes()[4096+at] ^= 1
		require.True(t, u.verify(0, &keys[0]))
		require.False(t, u.verify(1, &keys[1]), at)
	}
	require.False(t, u.verify(0, &keys[0]), "the bytes of the time before")
	u.fill(keys[:1])
	require.False(t, u.verify(0, &keys[1]), "those of another block")
	require.NoError(t, e.Close())
	require.NoError(t, m.Close())
}

// TestCacheReplay: every byte is right, from memory and from a disk, and no policy beats the
// optimum.
func TestCacheReplay(t *testing.T) {
	for _, more := range [][]string{{"--memory", "20", "--clients", "1"},
		{"--memory", "5", "--disk", "30", "--dir", t.TempDir(), "--clients", "3"}} {
		out := ok(t, sluice(t, append([]string{"cache", "replay", "--requests", "120", "--json"},
			more...)...)).stdout
		lines := strings.Split(strings.TrimSpace(out), "\n")
		require.Len(t, lines, 3)
		for _, line := range lines {
			row := decode(t, line)
			wantKeys(t, "a row", row, slices.Clone(replayColumns)...)
			r, isObject := row.(map[string]any)
			require.True(t, isObject)
			require.EqualValues(t, 0, r["mismatches"])
			if more[3] == "1" { // several may take the requests in a better order
				require.LessOrEqual(t, r["hits"], r["optimum"])
			}
			require.Positive(t, r["hits"])
		}
	}
	o := sluice(t, "cache", "replay", "--policy", "fifo")
	require.Equal(t, statusUsage, o.status)
	require.Contains(t, o.stderr, "s3fifo, lru and arc")
}
