// SPDX-License-Identifier: Apache-2.0

package copy

import (
	"bytes"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// guard is more than any turn of a loop, and blank is what stands where nothing was copied.
const guard = 512

var blank = bytes.Repeat([]byte{pattern}, 8192)

// checkVariant copies n bytes between those places of two memories, and looks at all around.
func checkVariant(t *testing.T, v Variant, from, to, want []byte, dst, src, n int) {
	t.Helper()
	copy(want[dst:], from[src:src+n])
	v.Copy(to[dst:dst+n], from[src:src+n], uint64(max(n, 1)))
	if !bytes.Equal(want, to) {
		t.Fatalf("%v of %d bytes from %d to %d mod 64 differs from the plain copy", v, n, src%64,
			dst%64)
	}
	for _, mem := range [][]byte{to, want} {
		copy(mem[dst:dst+n], blank)
	}
}

func TestVariantsEqualThePlainCopy(t *testing.T) {
	const most = 4096 + 600
	size := most + 2*guard + 64
	from, to, want := filled(size, 1), bytes.Clone(blank[:size]), bytes.Clone(blank[:size])
	for _, v := range Variants() {
		t.Run(v.String(), func(t *testing.T) {
			for n := range 601 {
				for at := range 64 {
					checkVariant(t, v, from, to, want, guard+at, guard+(at*n)%64, n)
				}
			}
			for _, n := range []int{4095, 4096, 4097, most} {
				for dst := range 64 {
					for src := range 64 {
						checkVariant(t, v, from, to, want, guard+dst, guard+src, n)
					}
				}
			}
		})
	}
}

// A batch may be cut into runs anywhere.
func TestVariantsCopyInRuns(t *testing.T) {
	src, dst := filled(100_000, 1), make([]byte, 100_000)
	for _, v := range Variants() {
		for _, run := range []uint64{0, 7000, 65536, 100_000, 1 << 40} {
			if clear(dst); run == 0 {
				v.Copy(dst[:300], src[:300], run)
				require.Equal(t, src[:300], dst[:300])
				continue
			}
			v.Copy(dst, src, run)
			require.True(t, bytes.Equal(src, dst), "%v in runs of %d", v, run)
		}
		v.Copy(nil, nil, 1)
	}
}

// Batches go by each variant as they go by libc.
func TestBatchesByEachVariant(t *testing.T) {
	const size = 256 << 10
	descs := []driver.Desc{{Local: 1, Remote: 77, Len: 20_000},
		{Local: 20_001, Remote: 20_077, Len: 10_000},
		{Local: 50_003, Remote: 60_000, Len: 8191}, {Local: 9, Remote: 80_000, Len: 6}}
	pages := driver.Pattern{Count: 3, Run: 12_001,
		Local:  driver.Side{Base: 70_000, Stride: 12_001},
		Remote: driver.Side{Base: 90_000, Stride: 13_000, List: []uint32{2, 0, 1}}}
	nest := driver.Pattern{Count: 2, Run: 5000,
		Local:  driver.Side{Base: 120_001, Stride: 40_000},
		Remote: driver.Side{Base: 140_003, Stride: 50_000},
		Loops:  []driver.Loop{{N: 3, Local: 5000, Remote: 9000}}}
	here, there := filled(size, 1), filled(size, 2)
	local, remote := make([]byte, size), make([]byte, size)
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		wantLocal, wantRemote := bytes.Clone(here), bytes.Clone(there)
		want(op, wantLocal, wantRemote, descs)
		for _, p := range []*driver.Pattern{&pages, &nest} {
			require.NoError(t, p.Check(size, size))
			for i := range p.Count * p.Runs() {
				want(op, wantLocal, wantRemote, []driver.Desc{Run(p, i)})
			}
		}
		for _, v := range Variants() {
			for _, w := range []Way{{v, 0}, {v, 8192}} {
				copy(local, here)
				copy(remote, there)
				require.NoError(t, Descs(op, local, remote, descs, w))
				for _, p := range []*driver.Pattern{&pages, &nest} {
					require.NoError(t, Runs(op, local, remote, p, 0, p.Count*p.Runs(), w))
				}
				require.True(t, bytes.Equal(wantLocal, local) && bytes.Equal(wantRemote, remote),
					"%v by %v", op, w)
			}
		}
	}
}

func TestWayCopiesOneRun(t *testing.T) {
	src := filled(10_000, 3)
	for _, v := range Variants() {
		dst := make([]byte, 10_000)
		Way{v, 5000}.Copy(dst, src)
		Way{v, 5000}.Copy(dst[:10], src[:10])
		require.True(t, bytes.Equal(src, dst), "%v", v)
	}
}

// third is the threshold of a machine that has such a cache.
func third(cache uint64) threshold {
	return func(Variant) (uint64, string) { return cache / 3, "a third of the last-level cache" }
}

// fakeProbe has a speed for each variant, in bytes a nanosecond, and that of Plain for short runs.
func fakeProbe(speed map[Variant]float64) probe {
	return func(v Variant, run uint64) time.Duration {
		if run < probeRuns[1] {
			v = Plain
		}
		return time.Duration(float64(probeBytes) / speed[v])
	}
}

func TestChoiceIsWhatWinsClearly(t *testing.T) {
	all := []Variant{Plain, Movsb, AVX2, AVX2Stream, AVX512, AVX512Stream}
	const cache = 30 << 20
	c := choose(fakeProbe(map[Variant]float64{Plain: 10, Movsb: 11, AVX2: 10, AVX2Stream: 20,
		AVX512: 11, AVX512Stream: 20.5}), all, third(cache))
	require.Equal(t, Way{AVX2Stream, 16 << 10}, c.Way, "AVX-512 is not likely faster")
	require.Equal(t, plain, c.For(cache/3-1))
	require.Equal(t, c.Way, c.For(cache/3))
	require.Equal(t, "avx2-stream for runs from 16 KiB on in batches from 10 MiB on, a third of "+
		"the last-level cache (20.0 GB/s beside 10.0 of "+plainName+"), else "+plainName, c.Why)

	for why, p := range map[string]probe{
		"by chance": fakeProbe(map[Variant]float64{Plain: 20, Movsb: 21, AVX2: 22,
			AVX2Stream: 22.9, AVX512: 22, AVX512Stream: 10}),
		"out of time": func(Variant, uint64) time.Duration { return 0 },
	} {
		c = choose(p, all, third(cache))
		require.Equal(t, plain, c.For(1<<40), why)
		require.Equal(t, plainName+": no other is clearly faster", c.Why)
	}
}

// Each variant is chosen where it is the fastest.
func TestChoiceMayBeAny(t *testing.T) {
	for _, v := range []Variant{Movsb, AVX2, AVX2Stream, AVX512, AVX512Stream, Pairs, PairsStream} {
		speed := map[Variant]float64{Plain: 10}
		var all []Variant
		for other := range Variant(len(names)) {
			speed[other] = 10
			all = append(all, other)
		}
		speed[v] = 13
		c := choose(fakeProbe(speed), all, third(1))
		require.Equal(t, v, c.Way.Variant)
	}
}

// The best of several tries counts: a machine that is busy disturbs some.
func TestChoiceSurvivesNoise(t *testing.T) {
	fake := fakeProbe(map[Variant]float64{Plain: 20, AVX2: 40})
	n := 0
	noisy := func(v Variant, run uint64) time.Duration {
		d := fake(v, run)
		if n++; n%4 < 2 {
			d *= 10
		}
		return d
	}
	require.Equal(t, AVX2, choose(noisy, []Variant{Plain, AVX2}, third(1)).Way.Variant)
}

func TestChoiceIsMadeOnce(t *testing.T) {
	var made atomic.Int32
	first := Choice{Way: Way{Plain, 1}, From: 5, Why: "the first"}
	p := newChoice(func() Choice { made.Add(1); return first })
	require.Equal(t, plain, p.way(undecided.From-1))
	require.False(t, p.begun.Load(), "a small batch starts nothing")
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			p.way(undecided.From) // whether it is made by now or not
			if got := p.chosen(); got != first {
				t.Errorf("chose %+v", got)
			}
		})
	}
	all.Wait()
	require.EqualValues(t, 1, made.Load())
	require.Equal(t, first.Way, p.way(undecided.From))
}

func TestLargeBatchStartsTheMeasurement(t *testing.T) {
	begun := make(chan struct{})
	p := newChoice(func() Choice { close(begun); return Choice{Why: "done"} })
	require.Equal(t, plain, p.way(undecided.From), "it does not wait")
	<-begun
	require.Equal(t, "done", p.chosen().Why)
}

func TestSetComesBeforeWhatIsMeasured(t *testing.T) {
	before := process.made.Load()
	defer process.made.Store(before)
	for _, v := range Variants() {
		require.NoError(t, Set(Only(v)))
		require.Equal(t, v, For(1).Variant)
		require.Equal(t, v, Chosen().Way.Variant)
		got, err := ParseVariant(v.String())
		require.NoError(t, err)
		require.Equal(t, v, got)
	}
	require.ErrorContains(t, Set(Only(99)), "this machine has "+plainName)
	_, err := ParseVariant("quick")
	require.ErrorContains(t, err, "quick")
}

// The real measurement ends in its time and chooses what there is.
func TestMeasure(t *testing.T) {
	c := measure()
	t.Log(c.Why)
	require.Contains(t, Variants(), c.Way.Variant)
	require.NotEmpty(t, c.Why)
}

func TestLastLevelCache(t *testing.T) {
	dir := t.TempDir()
	require.EqualValues(t, unknownCache, lastLevel(dir))
	for name, size := range map[string]string{"index0": "32K\n", "index3": "49152K\n",
		"index4": "many\n"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name, "size"), []byte(size), 0o644))
	}
	require.EqualValues(t, 48<<20, lastLevel(dir))
}
