// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestHistogram: quantiles are off by an eighth at most, and each duration is in its bucket.
func TestHistogram(t *testing.T) {
	var h Histogram
	require.Zero(t, h.Quantile(0.5))
	for i := range h.Buckets {
		low, high := h.Bounds(i)
		require.Less(t, low, high)
		require.LessOrEqual(t, high-low, max(low/8, 64))
		require.Equal(t, []int{i, i}, []int{bucketOf(low), bucketOf(high - 1)})
		if i > 0 {
			_, before := h.Bounds(i - 1)
			require.Equal(t, before, low)
		}
		h.Buckets[i] = 1
		require.InDelta(t, float64(high), float64(h.Quantile(0.5)), float64(high)/8)
		h.Buckets[i] = 0
	}
}
