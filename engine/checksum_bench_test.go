// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"slices"
	"testing"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testing/allocs"
)

// BenchmarkChecksum posts the same writes with and without, in turn, and reports medians and
// how fast the checked ones are beside the others.
func BenchmarkChecksum(b *testing.B) {
	for _, carrier := range []string{"shm", "tcp"} {
		for name, list := range map[string]func(x *engine.Transfer, r *engine.Region,
			m *engine.Remote) error{
			"1MiBx16": func(x *engine.Transfer, r *engine.Region, m *engine.Remote) error {
				for i := range uint64(16) {
					if err := x.Add(r, i<<20, m, (15-i)<<20, 1<<20); err != nil {
						return err
					}
				}
				return nil
			},
			"656Bx2048": func(x *engine.Transfer, r *engine.Region, m *engine.Remote) error {
				indices := make([]uint32, 2048)
				for i := range indices {
					indices[i] = uint32(i*37) % 2048
				}
				return x.AddPages(r, m, engine.Pages{EntryLen: 656, Count: len(indices),
					LocalStride: 1024, RemoteStride: 2048, Local: indices, Remote: indices})
			},
		} {
			b.Run(carrier+"/"+name, func(b *testing.B) { benchChecksum(b, carrier, list) })
		}
	}
}

func benchChecksum(b *testing.B, carrier string, list func(x *engine.Transfer, r *engine.Region,
	m *engine.Remote) error) {
	near, far := newSumEnd(b, "near", carrier, nil, 16<<20), newSumEnd(b, "farther", carrier, nil,
		16<<20)
	p, m := near.connect(b, far)
	plain, err := near.NewTransfer(p, engine.Write, engine.Route{})
	must(b, err)
	both := []*engine.Transfer{plain, checked(b, near, p, engine.Write)}
	took := make([][]time.Duration, len(both))
	for _, x := range both {
		must(b, list(x, near.r, m))
	}
	post := func(i int) {
		start := time.Now()
		must(b, both[i].Post())
		must(b, wait(b, both[i]))
		took[i] = append(took[i], time.Since(start))
	}
	post(0)
	post(1)
	took = make([][]time.Duration, len(both))
	for b.Loop() {
		post(0)
		post(1)
	}
	var medians [2]float64
	for i := range took {
		slices.Sort(took[i])
		medians[i] = took[i][len(took[i])/2].Seconds() * 1e6
	}
	b.ReportMetric(medians[0], "µs-without")
	b.ReportMetric(medians[1], "µs-with")
	b.ReportMetric(medians[0]/medians[1], "ratio")
}

// What a checked transfer allocates does not grow with its ranges.
func TestChecksumAllocatesLittle(t *testing.T) {
	near, far := newSumEnd(t, "near", "mem", nil, 8<<20), newSumEnd(t, "farther", "mem", nil, 8<<20)
	p, m := near.connect(t, far)
	most := 0.0
	for _, n := range []uint64{1, 1000} {
		x := checked(t, near, p, engine.Write)
		for i := range n {
			must(t, x.Add(near.r, i*100, m, i*200, 90))
		}
		allocs := allocs.PerRun(20, func() {
			must(t, x.Post())
			must(t, wait(t, x))
		})
		if most = max(most, allocs); allocs > 40 {
			t.Errorf("%d ranges: %.0f allocations a post", n, allocs)
		}
		must(t, x.Close())
	}
	t.Logf("at most %.0f allocations a post, of both sides", most)
}
