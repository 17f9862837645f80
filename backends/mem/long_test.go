// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestLongBatches moves long runs at odd places both ways, by memcpy and past the caches, with
// bytes around them that stay.
func TestLongBatches(t *testing.T) {
	const size, margin, most = 18 << 20, 101, 17<<20 + 77
	owner, holder := testBackend(t), testBackend(t)
	far, near := make([]byte, size), make([]byte, size)
	theirs, err := owner.Register(driver.Segment{Kind: driver.DRAM, Mem: far, Len: size})
	require.NoError(t, err)
	mine, err := holder.Register(driver.Segment{Kind: driver.DRAM, Mem: near, Len: size})
	require.NoError(t, err)
	p, err := holder.Connect(t.Context(), owner.Addr())
	require.NoError(t, err)
	token, err := theirs.AppendToken(nil)
	require.NoError(t, err)
	key, _, err := p.Import(token)
	require.NoError(t, err)
	descs := func(n uint64) driver.Batch {
		return driver.Batch{Descs: []driver.Desc{{Local: margin, Remote: margin + 2, Len: n,
			LocalKey: mine.Key(), RemoteKey: key}}}
	}
	nest := driver.Batch{Pattern: &driver.Pattern{Run: most / 300, Count: 100,
		Loops:    []driver.Loop{{N: 3, Local: most / 300, Remote: most / 300}},
		Local:    driver.Side{Base: margin, Stride: most / 300 * 3},
		Remote:   driver.Side{Base: margin + 2, Stride: most / 300 * 3},
		LocalKey: mine.Key(), RemoteKey: key}}
	part := descs(1<<20 + 77)
	part.Total = most
	for tag, b := range []driver.Batch{descs(3<<20 + 77), descs(most), nest, part} {
		for _, b.Op = range []driver.Op{driver.Write, driver.Read} {
			src, dst, from, to := near, far, margin, margin+2
			if b.Op == driver.Read {
				src, dst, from, to = dst, src, to, from
			}
			for i := range src {
				src[i], dst[i] = byte((i*(tag+7))>>3), 0xEE
			}
			n := most / 300 * 300
			if b.Descs != nil {
				n = int(b.Descs[0].Len)
			}
			want := bytes.Repeat([]byte{0xEE}, size)
			copy(want[to:], src[from:][:n])
			require.NoError(t, p.Submit(uint64(tag), &b))
			var done [1]driver.Completion
			for n := 0; n == 0; {
				n, err = holder.Poll(done[:])
				require.NoError(t, err)
			}
			require.NoError(t, done[0].Err)
			require.True(t, bytes.Equal(want, dst), "batch %d, %v", tag, b.Op)
		}
	}
}
