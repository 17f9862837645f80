// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/cuda"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// pages moves a pattern and compares every byte of both sides with a loop of copies.
func (r *rig) pages(op driver.Op, p *driver.Pattern, l, d *place) {
	r.t.Helper()
	wantL, wantD := r.content(l), r.content(d)
	for i := range p.Count {
		for _, run := range p.AppendDescs(nil, i) {
			one, other := wantL[run.Local:][:run.Len], wantD[run.Remote:][:run.Len]
			if op == driver.Write {
				copy(other, one)
			} else {
				copy(one, other)
			}
		}
	}
	r.tag++
	if err := r.p.Submit(r.tag, &driver.Batch{Op: op, Pattern: p}); err != nil {
		r.t.Fatalf("%v of pages: %v", op, err)
	}
	if err := r.end(r.tag); err != nil {
		r.t.Fatalf("%v of pages: %v", op, err)
	}
	r.same("local memory", r.content(l), wantL)
	r.same("remote memory", r.content(d), wantD)
}

// shuffled is each of n places once.
func shuffled(n int, seed uint64) []uint32 {
	list := make([]uint32, n)
	for i, v := range rand.New(rand.NewPCG(seed, 3)).Perm(n) {
		list[i] = uint32(v)
	}
	return list
}

// TestPagesByEachWay moves patterns that suit the kernel, a processor, and neither: what did it
// shows in the stand-in's counts, and what moved is the same.
func TestPagesByEachWay(t *testing.T) {
	onStandIn(t)
	for _, budget := range []cuda.Budget{{SMs: 2}, {}} {
		t.Run(fmt.Sprintf("%+v", budget), func(t *testing.T) { pagesByEachWay(t, budget) })
	}
}

func pagesByEachWay(t *testing.T, budget cuda.Budget) {
	const count = 700
	cfg := testConfig()
	cfg.Budget = budget
	r := newRig(t, cfg)
	for _, c := range []struct {
		name                string
		entry, stride, base uint64
		local, remote       bool
		kernel, processor   bool
	}{
		{"gathered", 656, 656, 0, true, false, true, true},
		{"scattered", 656, 768, 16, false, true, true, false},
		{"both", 584, 592, 8, true, true, true, false},
		{"dense", 132, 132, 4, false, false, true, true},
		{"odd", 131, 131, 3, true, false, false, true},
		{"long", 20 << 10, 20 << 10, 0, true, false, false, true},
	} {
		l, d := r.memory(drivertest.HostMemory, count*c.stride+c.base),
			r.memory(hbm, count*c.stride+c.base)
		p := driver.Pattern{Count: count, Run: c.entry, Local: driver.Side{Base: c.base,
			Stride: c.stride}, Remote: driver.Side{Base: c.base, Stride: c.stride},
			LocalKey: l.m.key, RemoteKey: d.key}
		if c.local {
			p.Local.List = shuffled(count, 1)
		}
		if c.remote {
			p.Remote.List = shuffled(count, 2)
		}
		for _, op := range []driver.Op{driver.Write, driver.Read} {
			launches, copies := libcuda.Get("launches"), libcuda.Get("copies")
			r.pages(op, &p, l, d)
			launches, copies = libcuda.Get("launches")-launches,
				libcuda.Get("copies")-copies
			what := fmt.Sprintf("%+v: %v of %s entries: %d launches, %d copies", budget, op, c.name,
				launches, copies)
			switch kernel := c.kernel && budget != (cuda.Budget{}); {
			case kernel && launches != 1, !kernel && launches != 0:
				t.Error(what)
			case !kernel && c.processor && copies > 64+uint32(count*c.entry/stageHalf):
				t.Errorf("%s: want few", what)
			}
			r.fill(l)
		}
	}
}

// TestPagesThatNoKernelTakes: what a kernel would read in another way goes by copies.
func TestPagesThatNoKernelTakes(t *testing.T) {
	r := newRig(t, testConfig())
	l, d := r.memory(drivertest.HostMemory, 1<<20), r.memory(hbm, 1<<20)
	one := driver.Pattern{Count: 3, Run: 16, Local: driver.Side{List: []uint32{0, math.MaxUint32,
		7}}, Remote: driver.Side{Stride: 16}, LocalKey: l.m.key, RemoteKey: d.key}
	r.pages(driver.Write, &one, l, d) // all entries are one
	one.Local.List = []uint32{5, 0, 7}
	r.pages(driver.Write, &one, l, d)
	other := r.memory(hbm, 1<<20)
	within := driver.Pattern{Count: 40, Run: 656, Local: driver.Side{Stride: 656},
		Remote: driver.Side{Stride: 1312}, LocalKey: other.m.key, RemoteKey: d.key}
	r.pages(driver.Write, &within, other, d)
	r.pages(driver.Read, &within, other, d)
}

// nest is a pattern of any form in units, whose places overlap on neither side.
func nest(random *rand.Rand, unit uint64) *driver.Pattern {
	p := &driver.Pattern{Run: unit * (1 + random.Uint64N(60)), Count: 1 + random.IntN(20)}
	local, remote := p.Run, p.Run
	for range random.IntN(driver.LoopsMax + 1) {
		l := driver.Loop{N: 1 + random.Uint32N(4),
			Local: local + unit*random.Uint64N(3), Remote: remote + unit*random.Uint64N(3)}
		local += uint64(l.N-1) * l.Local
		remote += uint64(l.N-1) * l.Remote
		p.Loops = append([]driver.Loop{l}, p.Loops...)
	}
	side := func(extent uint64) driver.Side {
		s := driver.Side{Base: unit * random.Uint64N(4), Per: random.Uint32N(4)}
		slots, per := p.Count, uint64(1)
		if s.Per > 1 {
			s.First, s.Step, per = random.Uint32N(s.Per), extent+unit*random.Uint64N(3),
				uint64(s.Per)
			slots = (int(s.First) + p.Count + int(s.Per) - 1) / int(s.Per)
		}
		s.Stride = extent + (per-1)*s.Step + unit*random.Uint64N(5)
		if random.IntN(2) == 0 {
			s.List = shuffled(slots, random.Uint64())
		}
		return s
	}
	p.Local, p.Remote = side(local), side(remote)
	return p
}

// TestNestsByEachWay moves random nests: those of whole words by the kernel, the others by copies.
func TestNestsByEachWay(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	r := newRig(t, testConfig())
	host, d, other := r.memory(drivertest.HostMemory, 4<<20), r.memory(hbm, 4<<20),
		r.memory(hbm, 4<<20)
	moved := 0
	for moved < 60 {
		unit := []uint64{1, 4, 8, 16}[random.IntN(4)]
		p := nest(random, unit)
		l := []*place{host, other}[random.IntN(2)]
		p.LocalKey, p.RemoteKey = l.m.key, d.key
		if p.Plain() || p.Check(4<<20, 4<<20) != nil {
			continue
		}
		var before uint32
		if libcuda != nil {
			before = libcuda.Get("launches")
		}
		r.pages([]driver.Op{driver.Read, driver.Write}[random.IntN(2)], p, l, d)
		moved++
		if libcuda != nil && unit > 1 {
			require.Equal(t, before+1, libcuda.Get("launches"), "a nest of whole words")
		}
	}
}

// TestListThatChanges: what a list holds when it is read counts, not what it held when it was
// checked.
func TestListThatChanges(t *testing.T) {
	cfg := testConfig()
	cfg.Budget = cuda.Budget{}
	r := newRig(t, cfg)
	l, d := r.memory(drivertest.HostMemory, 4096), r.memory(hbm, 4096)
	p := &driver.Pattern{Count: 2, Run: 13, LocalKey: l.m.key, RemoteKey: d.key,
		Local: driver.Side{Stride: 16}, Remote: driver.Side{Stride: 16, List: []uint32{0, 1}}}
	v := pair{local: l.m, remote: r.p.remote(d.key)}
	require.NoError(t, p.Check(4096, 4096))
	p.Remote.List[1] = 4096 / 16
	var piece *driver.PieceError
	err := v.eachRun(p, &scratch{}, func(i int, _ *driver.Desc) error {
		require.Zero(t, i)
		return nil
	})
	require.ErrorAs(t, err, &piece)
	require.ErrorIs(t, err, driver.ErrBounds)
}

// TestPlaces has more launches under way than there is room for indices: the rest is full, and then
// not.
func TestPlaces(t *testing.T) {
	onStandIn(t)
	r := newRig(t, testConfig())
	libcuda.Set(t, "delay_us", 3000)
	l, d := r.memory(drivertest.HostMemory, 1<<20), r.memory(hbm, 1<<20)
	p := driver.Pattern{Count: 64, Run: 656, Local: driver.Side{Stride: 656},
		Remote: driver.Side{Stride: 656, List: shuffled(64, 1)}, LocalKey: l.m.key,
		RemoteKey: d.key}
	full, done := 0, map[uint64]bool{}
	for tag := uint64(1); tag <= 40; {
		err := r.p.Submit(tag, &driver.Batch{Op: driver.Write, Pattern: &p})
		switch {
		case err == nil:
			tag++
			continue
		case err != driver.ErrFull:
			t.Fatal(err)
		}
		full++
		r.drain(done)
	}
	for len(done) < 40 {
		r.drain(done)
	}
	if full == 0 {
		t.Errorf("40 launches at a time, want at most %d", placesCount)
	}
}

// drain takes completions, which must be good and new.
func (r *rig) drain(done map[uint64]bool) {
	r.t.Helper()
	var list [16]driver.Completion
	n, err := r.b.Poll(list[:])
	require.NoError(r.t, err)
	for _, c := range list[:n] {
		if c.Err != nil || done[c.Tag] {
			r.t.Fatalf("tag %d: %v, or once more", c.Tag, c.Err)
		}
		done[c.Tag] = true
	}
}
