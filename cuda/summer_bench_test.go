// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// BenchmarkSummer digests blocks of 16 tokens in random order, all of a pool that no cache of a
// card holds, on the card and in a copy of the pool by the CPU, which has the same sums. The
// stand-in's figures say nothing of a card. Figures are medians.
func BenchmarkSummer(b *testing.B) {
	const size, tokens = 128 << 20, 16
	s, err := OpenSummer(libraryOf(b), 0, Budget{})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, s.Close()) })
	buffer, err := hostmem.Alloc(size, hostmem.Options{Purpose: "bench", Populate: true})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, buffer.Close()) })
	host := buffer.Bytes()
	for i := range host {
		host[i] = byte(i * 7)
	}
	at, err := s.d.Alloc(size)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, s.d.Free(at)) })
	require.NoError(b, s.d.Write(at, host))
	for _, cell := range []uint64{656, 132, 128} {
		b.Run(fmt.Sprintf("%dB", cell), func(b *testing.B) {
			k, err := digest.NewKey(digest.Seed{1}, "k", "bf16", cell)
			require.NoError(b, err)
			list := make([]uint32, size/(tokens*cell))
			for i, slot := range rand.New(rand.NewPCG(1, 2)).Perm(len(list)) {
				list[i] = uint32(slot)
			}
			c := digest.DeviceCells{Key: k, Memory: digest.DeviceMemory{Addr: at, Len: size},
				Cells: digest.Cells{At: driver.Side{Stride: tokens * cell, List: list},
					Count: len(list), Turn: tokens, Outer: digest.Axis{N: 1},
					Axis: digest.Axis{N: tokens, By: cell, On: 1}}}
			besides(b, s, []digest.DeviceCells{c}, host)
		})
	}
}

// besides digests on the card and by the CPU in turn.
func besides(b *testing.B, s *Summer, list []digest.DeviceCells, host []byte) {
	b.Helper()
	var card, cpu []float64
	var bytes float64
	for range b.N {
		begin := time.Now()
		got, err := s.Sum(list)
		card = append(card, float64(time.Since(begin)))
		require.NoError(b, err)
		begin = time.Now()
		want, err := digest.Sum(host, &list[0].Cells, list[0].Key)
		cpu = append(cpu, float64(time.Since(begin)))
		require.NoError(b, err)
		require.Equal(b, want, got)
		bytes = float64(got.Cells * list[0].Key.Cell())
	}
	slices.Sort(card)
	slices.Sort(cpu)
	mine, theirs := bytes/card[len(card)/2], bytes/cpu[len(cpu)/2]
	b.ReportMetric(mine, "GB/s")
	b.ReportMetric(theirs, "cpu-GB/s")
	b.ReportMetric(mine/theirs, "x-cpu")
}
