// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
)

// BenchmarkAlloc is what a populated pool costs, by page.
func BenchmarkAlloc(b *testing.B) {
	const n = 256 << 20
	for name, huge := range map[string]HugePolicy{"base": HugeNone, "huge": HugeAuto} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(n)
			for b.Loop() {
				buffer, err := Alloc(n, Options{Populate: true, Huge: huge})
				if err != nil {
					b.Fatal(err)
				}
				if err := buffer.Close(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkRenew is what it costs to cut a frozen peer off from a range.
func BenchmarkRenew(b *testing.B) {
	for _, n := range []uint64{64 << 10, 1 << 20, 64 << 20} {
		b.Run(fmt.Sprintf("%dKiB", n>>10), func(b *testing.B) {
			buffer := mustAlloc(b, n, Options{Populate: true})
			b.SetBytes(int64(n))
			for b.Loop() {
				if err := buffer.Renew(context.Background(), 0, n); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkGather copies 2,048 scattered entries of 656 bytes, which is bound by
// misses of the TLB unless the pages are huge.
func BenchmarkGather(b *testing.B) {
	const entry, stride, entries, pool = 656, 1024, 2048, 512 << 20
	for name, huge := range map[string]HugePolicy{"base": HugeNone, "huge": HugeAuto} {
		b.Run(name, func(b *testing.B) {
			from := mustAlloc(b, pool, Options{Populate: true, Huge: huge}).Bytes()
			to := mustAlloc(b, entries*entry, Options{Populate: true, Huge: huge}).Bytes()
			rng := rand.New(rand.NewPCG(1, 2))
			index := make([]uint32, 64*entries)
			for i := range index {
				index[i] = rng.Uint32N(pool / stride)
			}
			b.SetBytes(entries * entry)
			round := 0
			for b.Loop() {
				for i, at := range index[round%64*entries:][:entries] {
					copy(to[i*entry:][:entry], from[uint64(at)*stride:])
				}
				round++
			}
		})
	}
}
