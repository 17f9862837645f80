// SPDX-License-Identifier: Apache-2.0

package copy

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// BenchmarkScattered copies random entries between two pools that no cache
// holds, in huge pages where the kernel has them, beside a plain loop of copy.
// x-memcpy over 1: faster than the loop.
func BenchmarkScattered(b *testing.B) {
	const size = 128 << 20
	local, remote := pool(b, size), pool(b, size)
	for _, shape := range []struct{ entry, count int }{{656, 2048}, {656, 64}, {4096, 512},
		{128, 2048}} {
		b.Run(fmt.Sprintf("%dx%dB", shape.count, shape.entry), func(b *testing.B) {
			n := uint64(shape.entry)
			p := driver.Pattern{Count: shape.count, Run: n,
				Local:  driver.Side{Stride: n, List: make([]uint32, shape.count)},
				Remote: driver.Side{Stride: n, List: make([]uint32, shape.count)}}
			rng := rand.New(rand.NewPCG(1, 2))
			var ours, loop []float64
			for range b.N {
				shuffle(rng, &p, size/n)
				begin := time.Now()
				_ = Runs(driver.Write, local, remote, &p, 0, p.Count, plain)
				ours = append(ours, float64(time.Since(begin)))
				shuffle(rng, &p, size/n)
				begin = time.Now()
				for i := range p.Count {
					l, r := p.Local.At(i), p.Remote.At(i)
					copy(remote[r:r+n], local[l:l+n])
				}
				loop = append(loop, float64(time.Since(begin)))
			}
			slices.Sort(ours)
			slices.Sort(loop)
			mine, theirs := ours[len(ours)/2], loop[len(loop)/2]
			b.ReportMetric(mine/float64(p.Count), "entry-ns")
			b.ReportMetric(theirs/float64(p.Count), "memcpy-entry-ns")
			b.ReportMetric(theirs/mine, "x-memcpy")
		})
	}
}

func shuffle(rng *rand.Rand, p *driver.Pattern, places uint64) {
	for i := range p.Count {
		p.Local.List[i], p.Remote.List[i] = uint32(rng.Uint64N(places)), uint32(rng.Uint64N(places))
	}
}

func pool(b *testing.B, n uint64) []byte {
	b.Helper()
	buf, err := hostmem.Alloc(n, hostmem.Options{Purpose: "bench", Populate: true})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = buf.Close() })
	mem := buf.Bytes()
	for i := range mem {
		mem[i] = byte(i)
	}
	return mem
}
