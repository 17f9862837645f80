// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/sluicehq/sluice/internal/hostmem"
)

// BenchmarkGather moves random entries between a pool that no cache holds, in huge pages
// where the kernel has them, and a compact buffer: the twin and a plain loop of copy in
// turn, over the same memory, on one thread. x-memcpy over 1: faster than the loop.
func BenchmarkGather(b *testing.B) {
	const size = 2 << 30
	pool := alloc(b, size)
	for _, s := range []struct{ entry, count int }{{656, 2048}, {656, 200}, {584, 2048},
		{132, 2048}, {1152, 1024}} {
		compact := alloc(b, s.entry*s.count)
		list := make([]uint32, s.count)
		n := uint64(s.entry)
		gather := &Move{Count: s.count, Src: Index{U32: list},
			Parts: []Part{{Dst: compact, Src: pool, Entry: n}}}
		b.Run(fmt.Sprintf("gather/%dx%dB", s.count, s.entry), func(b *testing.B) {
			compete(b, gather, list, size/n, func(i int, place uint64) {
				copy(compact[uint64(i)*n:][:n], pool[place*n:][:n])
			})
		})
		scatter := &Move{Count: s.count, Dst: Index{U32: list},
			Parts: []Part{{Dst: pool, Src: compact, Entry: n}}}
		b.Run(fmt.Sprintf("scatter/%dx%dB", s.count, s.entry), func(b *testing.B) {
			compete(b, scatter, list, size/n, func(i int, place uint64) {
				copy(pool[place*n:][:n], compact[uint64(i)*n:][:n])
			})
		})
	}
}

// compete runs the twin and the loop in turn, each with places of its own.
func compete(b *testing.B, m *Move, list []uint32, places uint64, plain func(i int, place uint64)) {
	rng := rand.New(rand.NewPCG(1, 2))
	shuffle := func() {
		for i := range list {
			list[i] = uint32(rng.Uint64N(places))
		}
	}
	var ours, theirs []float64
	for range b.N {
		shuffle()
		begin := time.Now()
		if _, err := Run(m); err != nil {
			b.Fatal(err)
		}
		ours = append(ours, float64(time.Since(begin)))
		shuffle()
		begin = time.Now()
		for i, place := range list {
			plain(i, uint64(place))
		}
		theirs = append(theirs, float64(time.Since(begin)))
	}
	slices.Sort(ours)
	slices.Sort(theirs)
	mine, loop := ours[len(ours)/2], theirs[len(theirs)/2]
	b.ReportMetric(mine/float64(m.Count), "entry-ns")
	b.ReportMetric(loop/float64(m.Count), "memcpy-entry-ns")
	b.ReportMetric(loop/mine, "x-memcpy")
}

func alloc(b *testing.B, n int) []byte {
	b.Helper()
	buf, err := hostmem.Alloc(uint64(n), hostmem.Options{Purpose: "bench", Populate: true})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = buf.Close() })
	return buf.Bytes()
}
