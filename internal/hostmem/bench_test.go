// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"context"
	"fmt"
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
