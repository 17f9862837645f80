// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"
	"time"
)

// BenchmarkStaged moves memory of a stand-in for a device to that of another engine of this
// process, three copies by way of staging memory, beside one plain copy of the same shape in
// the same run. "of-memcpy" is the chain's rate over that copy's: a third is what three copies
// one after the other would reach.
func BenchmarkStaged(b *testing.B) {
	for _, shape := range []struct {
		name        string
		count, size int
	}{{"1x4MiB", 1, 4 << 20}, {"1x64KiB", 1, 64 << 10}, {"1x656B", 1, 656},
		{"2048x656B", 2048, 656}} {
		b.Run(shape.name, func(b *testing.B) { benchStaged(b, shape.count, uint64(shape.size)) })
	}
}

func benchStaged(b *testing.B, count int, size uint64) {
	from, to := newHost(b, "a"), newHost(b, "b")
	p := connect(b, from.e, to.e)
	pages := Pages{Count: count, EntryLen: size, LocalStride: size, RemoteStride: size}
	for i := range uint32(count) {
		pages.Local, pages.Remote = append(pages.Local, i), append(pages.Remote, uint32(count)-1-i)
	}
	tr := transfer(b, p, Write)
	if size > pieceBytes {
		check(b, tr.Add(from.hbm, 0, remote(b, p, "hbm"), 0, size))
	} else {
		check(b, tr.AddPages(from.hbm, remote(b, p, "hbm"), pages))
	}
	run(b, tr)
	var chain, plain time.Duration
	at := pages.Pattern()
	b.ResetTimer()
	for range b.N {
		start := time.Now()
		run(b, tr)
		middle := time.Now()
		for i := range count {
			copy(to.mem[at.Remote.At(i):][:size], from.mem[at.Local.At(i):][:size])
		}
		chain += middle.Sub(start)
		plain += time.Since(middle)
	}
	b.ReportMetric(float64(plain)/float64(chain), "of-memcpy")
	b.ReportMetric(float64(size)*float64(count)*float64(b.N)/chain.Seconds()/1e9, "GB/s")
	b.ReportMetric(float64(chain.Microseconds())/float64(b.N), "us/transfer")
}
