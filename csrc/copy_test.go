// SPDX-License-Identifier: Apache-2.0

package csrc

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/sluicehq/sluice/driver"
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

func TestCopyDescsEqualsTheObviousWay(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	for round := range 200 {
		local, remote := filled(8192, uint64(round)), filled(8192, uint64(round)+1000)
		wantLocal, wantRemote := bytes.Clone(local), bytes.Clone(remote)
		op := driver.Op(1 + round%2)
		var descs []driver.Desc
		for range 1 + rng.IntN(20) {
			n := uint64(1 + rng.IntN(700))
			d := driver.Desc{Local: rng.Uint64N(8192 - n + 1), Remote: rng.Uint64N(8192 - n + 1), Len: n}
			if len(descs) > 0 && rng.IntN(3) == 0 { // an adjacent one, to be merged
				last := descs[len(descs)-1]
				if last.Local+last.Len+n <= 8192 && last.Remote+last.Len+n <= 8192 {
					d.Local, d.Remote = last.Local+last.Len, last.Remote+last.Len
				}
			}
			descs = append(descs, d)
		}
		want(op, wantLocal, wantRemote, descs)
		if err := CopyDescs(op, local, remote, descs); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(local, wantLocal) || !bytes.Equal(remote, wantRemote) {
			t.Fatalf("round %d: %v differs from the plain copy", round, op)
		}
	}
}

func TestCopyPatternEqualsTheObviousWay(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 9))
	for round := range 200 {
		local, remote := filled(16384, uint64(round)), filled(16384, uint64(round)+1000)
		wantLocal, wantRemote := bytes.Clone(local), bytes.Clone(remote)
		op := driver.Op(1 + round%2)
		p := driver.Pattern{Count: 1 + rng.IntN(12), Run: uint64(1 + rng.IntN(500)),
			Local: driver.Side{Base: 100}, Remote: driver.Side{Base: 7}}
		p.Local.Stride, p.Remote.Stride = p.Run+uint64(rng.IntN(2)*300), p.Run
		if round%3 > 0 {
			p.Local.List = permutation(rng, p.Count)
		}
		if round%3 > 1 {
			p.Remote.List = permutation(rng, p.Count)
		}
		if err := p.Check(16384, 16384); err != nil {
			t.Fatal(err)
		}
		first := rng.IntN(p.Count)
		var descs []driver.Desc
		for i := first; i < p.Count; i++ {
			descs = append(descs, p.Desc(i))
		}
		want(op, wantLocal, wantRemote, descs)
		if err := CopyPattern(op, local, remote, &p, first, p.Count-first); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(local, wantLocal) || !bytes.Equal(remote, wantRemote) {
			t.Fatalf("round %d: %v differs from the plain copy", round, op)
		}
	}
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
		if err := CopyDescs(driver.Write, local, remote, []driver.Desc{good, d}); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%+v: %v, want ErrBounds", d, err)
		}
	}
	p := driver.Pattern{Count: 1, Run: 100, Local: driver.Side{Stride: 100},
		Remote: driver.Side{Stride: 100, List: []uint32{1}}}
	if err := CopyPattern(driver.Write, local, remote, &p, 0, 1); !errors.Is(err, driver.ErrBounds) {
		t.Errorf("page past the end: %v, want ErrBounds", err)
	}
	if err := CopyPattern(driver.Write, local, remote, &p, 0, 2); !errors.Is(err, driver.ErrBounds) {
		t.Errorf("list shorter than the range: %v, want ErrBounds", err)
	}
	if !bytes.Equal(whole, bytes.Repeat([]byte{pattern}, 256)) {
		t.Error("a refused batch moved bytes")
	}
}

func TestCopyDoesNotAllocate(t *testing.T) {
	local, remote := make([]byte, 4096), make([]byte, 4096)
	descs := []driver.Desc{{Local: 0, Remote: 0, Len: 100}, {Local: 300, Remote: 200, Len: 100}}
	p := driver.Pages{Count: 2, EntryLen: 64, LocalStride: 64, RemoteStride: 128, Local: []uint32{1, 0}}
	if n := testing.AllocsPerRun(100, func() {
		_ = CopyDescs(driver.Write, local, remote, descs)
		_ = CopyPattern(driver.Read, local, remote, &p, 0, 2)
	}); n != 0 {
		t.Errorf("%v allocations a copy, want 0", n)
	}
}
