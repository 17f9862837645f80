// SPDX-License-Identifier: Apache-2.0

package digest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// BenchmarkSum digests blocks of 16 tokens at random places, beside a loop of copy that reads
// the same cells into one cell: from a pool that a cache holds, and from one that none holds.
// Cells lie side by side, or as one head of eight. Figures are medians.
func BenchmarkSum(b *testing.B) {
	for _, size := range []uint64{256 << 10, 512 << 20} {
		mem := pool(b, size)
		for _, every := range []uint64{1, 8} {
			for _, cell := range []uint64{1152, 656, 256, 128} {
				b.Run(fmt.Sprintf("%dKiB/1-of-%d/%dB", size>>10, every, cell),
					func(b *testing.B) { run(b, mem, cell, every) })
			}
		}
	}
}

func run(b *testing.B, mem []byte, cell, every uint64) {
	const tokens = 16
	block := tokens * cell * every
	places := uint64(len(mem)) / block
	list := make([]uint32, min(512, places))
	rng := rand.New(rand.NewPCG(1, 2))
	k, err := NewKey(Seed{1}, "latent", "bf16", cell)
	if err != nil {
		b.Fatal(err)
	}
	c := &Cells{At: driver.Side{Stride: block, List: list}, Count: len(list), Turn: tokens,
		Outer: Axis{N: 1}, Axis: Axis{tokens, cell * every, 1}}
	into := make([]byte, cell)
	var ours, plain []float64
	shuffle := func() {
		for i := range list {
			list[i] = uint32(rng.Uint64N(places))
		}
	}
	for range b.N {
		shuffle()
		begin := time.Now()
		_, err = Sum(mem, c, k)
		ours = append(ours, float64(time.Since(begin)))
		shuffle()
		begin = time.Now()
		for _, slot := range list {
			for i := range uint64(tokens) {
				copy(into, mem[uint64(slot)*block+i*cell*every:][:cell])
			}
		}
		plain = append(plain, float64(time.Since(begin)))
	}
	if err != nil {
		b.Fatal(err)
	}
	slices.Sort(ours)
	slices.Sort(plain)
	bytes := float64(uint64(len(list)) * tokens * cell)
	mine, theirs := bytes/ours[len(ours)/2], bytes/plain[len(plain)/2]
	b.ReportMetric(mine, "GB/s")
	b.ReportMetric(theirs, "memcpy-GB/s")
	b.ReportMetric(mine/theirs, "x-memcpy")
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
		mem[i] = byte(i * 7)
	}
	return mem
}
