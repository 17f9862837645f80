// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// random returns a generator that a failure names.
func random(t *testing.T, seed int) *rand.Rand {
	t.Helper()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(uint64(seed), 1))
}

// orders returns all 120 orders of the axes.
func orders() []Order {
	var all []Order
	var add func(done, left string)
	add = func(done, left string) {
		if left == "" {
			all = append(all, Order(done))
		}
		for i := range left {
			add(done+left[i:i+1], left[:i]+left[i+1:])
		}
	}
	add("", "LPBTH")
	return all
}

// TestManyRanks: a plan is as large as its edges, and not as all pairs of ranks.
func TestManyRanks(t *testing.T) {
	sides := group(t, gqa(1, 1, 4), Placement{TP: 1 << 11})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	p, err := NewPlan(sides, sides)
	runtime.ReadMemStats(&after)
	require.NoError(t, err)
	require.Len(t, p.Edges(7), 1)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(16<<20))
}

func pick[T any](r *rand.Rand, from ...T) T { return from[r.IntN(len(from))] }

func span(r *rand.Rand, n int) Span {
	a, b := r.IntN(n+1), r.IntN(n+1)
	if r.IntN(3) == 0 {
		a = 0
	}
	return Span{uint64(min(a, b)), uint64(max(a, b))}
}

// TestRandomGeometries: TP in both directions with split and replicated heads, other block
// sizes, every order of the axes, prefix hits and ends in mid-block.
func TestRandomGeometries(t *testing.T) {
	all := orders()
	each(t, 600, func(t *testing.T, r *rand.Rand) {
		spec := gqa(1+r.IntN(3), pick(r, 1, 2, 4, 8), uint64(1+r.IntN(5)))
		place := func() Placement {
			return Placement{TP: pick(r, 1, 2, 4, 8, 16), BlockTokens: 1 + r.IntN(16),
				Blocks: 44, Order: all[r.IntN(len(all))]}
		}
		hand(t, r, group(t, spec, place()), group(t, spec, place()), span(r, 40))
	})
}
