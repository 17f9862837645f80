// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"testing"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// BenchmarkPostShm alternates a batch of 64 x 656 bytes over shm with the same
// copies in a loop, and reports what a request adds.
func BenchmarkPostShm(b *testing.B) {
	owner, dst := openShm(b, "owner", 1<<20, nil)
	from, src := openShm(b, "from", 1<<20, nil)
	p := join(b, from, owner)
	m, err := p.Remote("owner")
	if err != nil {
		b.Fatal(err)
	}
	t, err := from.NewTransfer(p, engine.Write, engine.Route{})
	if err != nil {
		b.Fatal(err)
	}
	for i := range uint64(64) {
		if err := t.Add(src, i*1312, m, i*1312, 656); err != nil {
			b.Fatal(err)
		}
	}
	var requests, copies time.Duration
	for b.Loop() {
		start := time.Now()
		if err := t.Post(); err != nil {
			b.Fatal(err)
		}
		for !t.Done() {
		}
		middle := time.Now()
		for i := range 64 {
			copy(dst.Bytes()[i*1312:][:656], src.Bytes()[i*1312:][:656])
		}
		requests += middle.Sub(start)
		copies += time.Since(middle)
	}
	b.ReportMetric(float64(requests-copies)/float64(b.N), "added-ns/op")
	b.ReportMetric(float64(copies)/float64(b.N), "copy-ns/op")
}
