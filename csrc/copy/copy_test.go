// SPDX-License-Identifier: Apache-2.0

package copy

import (
	"bytes"
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

const pattern = 0xA5

func filled(n int, seed uint64) []byte {
	rng := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

// want applies descs byte by byte, the slow and obvious way.
func want(op driver.Op, local, remote []byte, descs []driver.Desc) {
	for _, d := range descs {
		for i := range d.Len {
			if op == driver.Write {
				remote[d.Remote+i] = local[d.Local+i]
			} else {
				local[d.Local+i] = remote[d.Remote+i]
			}
		}
	}
}

func TestDescsEqualTheObviousWay(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	for round := range 200 {
		local, remote := filled(8192, uint64(round)), filled(8192, uint64(round)+1000)
		wantLocal, wantRemote := bytes.Clone(local), bytes.Clone(remote)
		op := driver.Op(1 + round%2)
		var descs []driver.Desc
		for range 1 + rng.IntN(20) {
			n := uint64(1 + rng.IntN(700))
			d := driver.Desc{Local: rng.Uint64N(8192 - n + 1), Remote: rng.Uint64N(8192 - n + 1),
				Len: n}
			if len(descs) > 0 && rng.IntN(3) == 0 { // an adjacent one, to be merged
				last := descs[len(descs)-1]
				if last.Local+last.Len+n <= 8192 && last.Remote+last.Len+n <= 8192 {
					d.Local, d.Remote = last.Local+last.Len, last.Remote+last.Len
				}
			}
			descs = append(descs, d)
		}
		want(op, wantLocal, wantRemote, descs)
		require.NoError(t, Descs(op, local, remote, descs, Plain))
		if !bytes.Equal(local, wantLocal) || !bytes.Equal(remote, wantRemote) {
			t.Fatalf("round %d: %v differs from the plain copy", round, op)
		}
	}
}

// randomPattern is a plain one, or a nest of up to three loops with slots of several entries.
func randomPattern(rng *rand.Rand, nest bool) driver.Pattern {
	p := driver.Pattern{Count: 1 + rng.IntN(12), Run: uint64(1 + rng.IntN(500))}
	p.Local = driver.Side{Base: 100, Stride: p.Run + uint64(rng.IntN(2)*300)}
	p.Remote = driver.Side{Base: 7, Stride: p.Run}
	if nest {
		p.Run = uint64(1 + rng.IntN(40))
		p.Local.Stride, p.Remote.Stride = p.Run+uint64(rng.IntN(900)), p.Run
		for range rng.IntN(4) {
			step := [2]uint64{uint64(rng.IntN(300)), uint64(rng.IntN(300))}
			if rng.IntN(2) == 0 {
				step = [2]uint64{p.Run, p.Run} // adjoining runs
			}
			p.Loops = append(p.Loops,
				driver.Loop{N: uint32(1 + rng.IntN(5)), Local: step[0], Remote: step[1]})
		}
		for _, s := range []*driver.Side{&p.Local, &p.Remote} {
			if s.Per = uint32(rng.IntN(4)); s.Per > 1 {
				s.First, s.Step = rng.Uint32N(s.Per), uint64(rng.IntN(200))
			}
		}
	}
	for _, s := range []*driver.Side{&p.Local, &p.Remote} {
		if rng.IntN(3) > 0 {
			per := max(1, int(s.Per))
			s.List = permutation(rng, (int(s.First)+p.Count+per-1)/per)
		}
	}
	return p
}

func TestRunsEqualTheObviousWay(t *testing.T) {
	const size = 64 << 10
	rng := rand.New(rand.NewPCG(9, 9))
	for round := range 2000 {
		local, remote := filled(size, uint64(round)), filled(size, uint64(round)+1000)
		op := driver.Op(1 + round%2)
		p := randomPattern(rng, round%4 > 1)
		require.NoError(t, p.Check(size, size))
		var descs []driver.Desc
		for i := range p.Count {
			descs = p.AppendDescs(descs, i)
		}
		for i := range descs {
			require.Equal(t, descs[i], Run(&p, i), "run %d of %+v", i, p)
		}
		if overlapping(op, descs) {
			continue // the last of two values may be either
		}
		first := rng.IntN(len(descs))
		n := 1 + rng.IntN(len(descs)-first)
		wantLocal, wantRemote := bytes.Clone(local), bytes.Clone(remote)
		want(op, wantLocal, wantRemote, descs[first:first+n])
		require.NoError(t, Runs(op, local, remote, &p, first, n, Plain))
		if !bytes.Equal(local, wantLocal) || !bytes.Equal(remote, wantRemote) {
			t.Fatalf("round %d: %v of %+v differs from the plain copy", round, op, p)
		}
	}
}

func overlapping(op driver.Op, descs []driver.Desc) bool {
	at := func(d driver.Desc) uint64 {
		if op == driver.Write {
			return d.Remote
		}
		return d.Local
	}
	sorted := slices.SortedFunc(slices.Values(descs),
		func(a, b driver.Desc) int { return cmp.Compare(at(a), at(b)) })
	for i := range len(sorted) - 1 {
		if at(sorted[i])+sorted[i].Len > at(sorted[i+1]) {
			return true
		}
	}
	return false
}

// A list that changes while it is posted moves no byte outside the memories.
func TestRunsRefuseAListThatChanged(t *testing.T) {
	whole := bytes.Repeat([]byte{pattern}, 4096)
	local, remote := filled(1024, 1), whole[1024:2048]
	for _, loops := range [][]driver.Loop{nil, {{N: 2, Local: 8, Remote: 16}}} {
		for _, slot := range []uint32{16, 17, 1 << 31, ^uint32(0)} {
			p := driver.Pattern{Count: 2, Run: 8, Loops: loops, Local: driver.Side{Stride: 64},
				Remote: driver.Side{Stride: 64, List: []uint32{0, 1}}}
			require.NoError(t, p.Check(1024, 1024))
			p.Remote.List[0] = slot
			require.ErrorIs(t, Runs(driver.Write, local, remote, &p, 0, 2, Plain), driver.ErrBounds)
		}
	}
	require.Equal(t, bytes.Repeat([]byte{pattern}, 4096), whole)
}

func permutation(rng *rand.Rand, n int) []uint32 {
	list := make([]uint32, n)
	for i, v := range rng.Perm(n) {
		list[i] = uint32(v)
	}
	return list
}

func TestCopyRefusesWhatLeavesTheRange(t *testing.T) {
	whole := bytes.Repeat([]byte{pattern}, 256)
	local, remote := filled(128, 1), whole[64:192]
	bad := []driver.Desc{{Local: 0, Remote: 120, Len: 9}, {Local: 120, Remote: 0, Len: 9},
		{Local: 1 << 63, Remote: 0, Len: 1 << 63}, {Local: 0, Remote: ^uint64(0), Len: 2}}
	for _, d := range bad {
		good := driver.Desc{Local: 0, Remote: 0, Len: 8}
		require.ErrorIs(t, Descs(driver.Write, local, remote, []driver.Desc{good, d}, Plain),
			driver.ErrBounds, "%+v", d)
	}
	p := driver.Pattern{Count: 1, Run: 100, Local: driver.Side{Stride: 100},
		Remote: driver.Side{Stride: 100, List: []uint32{1}}}
	require.ErrorIs(t, Runs(driver.Write, local, remote, &p, 0, 1, Plain), driver.ErrBounds,
		"page past the end")
	require.ErrorIs(t, Runs(driver.Write, local, remote, &p, 0, 2, Plain), driver.ErrBounds,
		"list shorter than the range")
	require.True(t, bytes.Equal(whole, bytes.Repeat([]byte{pattern}, 256)),
		"a refused batch moved bytes")
}

func TestCopyDoesNotAllocate(t *testing.T) {
	local, remote := make([]byte, 4096), make([]byte, 4096)
	descs := []driver.Desc{{Local: 0, Remote: 0, Len: 100}, {Local: 300, Remote: 200, Len: 100}}
	p := driver.Pattern{Count: 2, Run: 64,
		Local:  driver.Side{Stride: 64, List: []uint32{1, 0}},
		Remote: driver.Side{Stride: 128}}
	nest := p
	nest.Loops = []driver.Loop{{N: 2, Local: 1000, Remote: 1000}}
	if n := testkit.AllocsPerRun(100, func() {
		_ = Descs(driver.Write, local, remote, descs, Plain)
		_ = Runs(driver.Read, local, remote, &p, 0, 2, Plain)
		_ = Runs(driver.Read, local, remote, &nest, 0, 4, Plain)
	}); n != 0 {
		t.Errorf("%v allocations a copy, want 0", n)
	}
}
