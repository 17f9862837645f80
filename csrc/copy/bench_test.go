// SPDX-License-Identifier: Apache-2.0

package copy

import (
	"bytes"
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
				_ = Runs(driver.Write, local, remote, &p, 0, p.Count, Plain)
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

// BenchmarkStream copies random runs between two pools that no cache holds, by memcpy and past the
// caches in turn. x-memcpy over 1: past the caches is faster. "and read": with reading what came.
func BenchmarkStream(b *testing.B) {
	const size = 512 << 20
	local, remote := pool(b, size), pool(b, size)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, shape := range []struct{ run, count int }{{1 << 20, 16}, {64 << 10, 64}} {
		for _, read := range []string{"", " and read"} {
			name := fmt.Sprintf("%dx%dKiB%s", shape.count, shape.run>>10, read)
			b.Run(name, func(b *testing.B) {
				var took [2][]float64
				descs := make([]driver.Desc, shape.count)
				for range b.N {
					for k, w := range []Way{Plain, 0} {
						for i := range descs {
							places := uint64(size / shape.run)
							descs[i] = driver.Desc{Local: rng.Uint64N(places) * uint64(shape.run),
								Remote: rng.Uint64N(places) * uint64(shape.run),
								Len:    uint64(shape.run)}
						}
						begin := time.Now()
						_ = Descs(driver.Write, local, remote, descs, w)
						for i := 0; read != "" && i < len(descs); i++ {
							_ = bytes.Count(remote[descs[i].Remote:][:shape.run], []byte{1})
						}
						took[k] = append(took[k], float64(time.Since(begin)))
					}
				}
				for k := range took {
					slices.Sort(took[k])
				}
				median, bytes := b.N/2, float64(shape.run*shape.count)
				b.ReportMetric(bytes/took[0][median], "memcpy-GB/s")
				b.ReportMetric(bytes/took[1][median], "stream-GB/s")
				b.ReportMetric(took[0][median]/took[1][median], "x-memcpy")
			})
		}
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
