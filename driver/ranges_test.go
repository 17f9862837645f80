// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRangesEqualTheObviousWay compares sets with one bool a byte.
func TestRangesEqualTheObviousWay(t *testing.T) {
	const size = 60
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var list []Range
		var in [size]bool
		for range 1 + rng.IntN(6) {
			r := Range{Off: rng.Uint64N(size), Len: 1}
			r.Len += rng.Uint64N(min(9, size-r.Off))
			list = append(list, r)
			for i := range r.Len {
				in[r.Off+i] = true
			}
		}
		set, err := NewRanges(list, size)
		require.NoError(t, err)
		require.NoError(t, set.Check(size))
		has := func(off, n uint64) bool {
			for i := range n {
				if off+i >= size || !in[off+i] {
					return false
				}
			}
			return true
		}
		at := rng.IntN(8) // of a set before, say
		for range 40 {
			off, n := rng.Uint64N(size+2), 1+rng.Uint64N(6)
			require.Equal(t, has(off, n), set.Has(off, n, &at), "%d+%d of %v", off, n, set)
		}
		p := Pattern{Count: 1 + rng.IntN(3), Run: 1 + rng.Uint64N(2),
			Remote: Side{Base: rng.Uint64N(8), Stride: rng.Uint64N(9)}}
		for range rng.IntN(3) {
			p.Loops = append(p.Loops, Loop{N: 1 + rng.Uint32N(3), Remote: rng.Uint64N(8)})
		}
		if p.Check(math.MaxUint64, size) != nil {
			continue
		}
		all := true
		for i := range p.Count {
			for _, d := range p.AppendDescs(nil, i) {
				all = all && has(d.Remote, d.Len)
			}
		}
		require.Equal(t, all, set.HasRemote(&p), "%+v in %v", p, set)
	}
}

func TestRangesOfNone(t *testing.T) {
	const top = math.MaxUint64
	at := 0
	require.True(t, Ranges(nil).Has(3, 4, &at), "no set is all bytes")
	set := Ranges{{Off: 4, Len: 4}}
	for _, r := range []Range{{top, 1}, {top, top}, {4, top}, {5, top - 4}, {0, top}, {8, 1}} {
		require.False(t, set.Has(r.Off, r.Len, &at), "%v", r)
	}
	for _, list := range [][]Range{nil, {{0, 0}}, {{9, 2}}, {{top, 2}}, {{2, top}}} {
		_, err := NewRanges(list, 10)
		require.ErrorIs(t, err, ErrBounds, "%v", list)
	}
	require.NoError(t, Ranges(nil).Check(0))
	for _, bad := range []Ranges{{}, {{4, 0}}, {{4, 7}}, {{4, 1}, {4, 1}}, {{4, 1}, {5, 1}},
		{{6, 1}, {4, 1}}, {{top, 2}}} {
		require.ErrorIs(t, bad.Check(10), ErrBounds, "%v", bad)
	}
}

func BenchmarkRangesHas(b *testing.B) {
	var set Ranges
	for i := range uint64(20480) {
		set = append(set, Range{Off: i * 16384, Len: 8192})
	}
	at := 0
	for i := uint64(0); b.Loop(); i++ {
		if !set.Has(i*7919%20480*16384, 8192, &at) {
			b.Fatal("not there")
		}
	}
}
