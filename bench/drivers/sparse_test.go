// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
)

// Prepare proves the bytes of a read and a write; each operation moves all entries anew, and each
// match misses as many.
func TestSparse(t *testing.T) {
	r := bench.Request{Lane: string(bench.Process), Name: "a", Bytes: 1 << 20, FarBytes: 1 << 20}
	e, _ := opened(t, "sparse", nil, r)
	for _, op := range []string{bench.OpRead, bench.OpWrite} {
		posted, err := e.Prepare(op, 656, nil, []int32{5, 9, 2, 1000})
		require.NoError(t, err)
		p := posted.(*sparsePosting)
		for range 2 {
			require.NoError(t, p.Reset(t.Context()))
			require.NoError(t, p.Post(t.Context()))
			require.Equal(t, []uint32{4}, p.Batch.Counts)
		}
		require.NoError(t, p.Close())
	}
	posted, err := e.Prepare(bench.OpMatch, 16, nil, make([]int32, 2*sparseEntries))
	require.NoError(t, err)
	p := posted.(*sparsePosting)
	for range 2 {
		require.NoError(t, p.Reset(t.Context()))
		require.NoError(t, p.Post(t.Context()))
		require.InDelta(t, sparseEntries/10, int(p.Batch.Counts[1]), sparseEntries/50)
	}
	require.NoError(t, p.Close())
	_, err = e.Prepare(bench.OpRead, 655, nil, []int32{1})
	require.ErrorIs(t, err, bench.ErrUnsupported)
	_, err = e.Prepare(bench.OpDurable, 656, nil, []int32{1})
	require.ErrorIs(t, err, bench.ErrUnsupported)
	r.Lane = string(bench.Host)
	other, err := newSparse(nil)
	require.NoError(t, err)
	_, err = other.Open(&r)
	require.ErrorIs(t, err, bench.ErrUnsupported)
}
