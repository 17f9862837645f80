// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
)

// TestHistogram: quantiles are off by an eighth at most.
func TestHistogram(t *testing.T) {
	var h engine.Histogram
	require.Zero(t, h.Quantile(0.5))
	for i := range h.Buckets {
		low, high := h.Bounds(i)
		require.Less(t, low, high)
		require.LessOrEqual(t, high-low, max(low/8, 64))
		if i > 0 {
			_, before := h.Bounds(i - 1)
			require.Equal(t, before, low)
		}
		h.Buckets[i] = 1
		require.InDelta(t, float64(high), float64(h.Quantile(0.5)), float64(high)/8)
		h.Buckets[i] = 0
	}
	e, other := alone("alone"), alone("other")
	defer e.Close()
	defer other.Close()
	m, err := engine.Alloc(1<<16, engine.AllocOptions{Purpose: "test"})
	require.NoError(t, err)
	defer m.Close()
	kv, err := e.Register("kv", m.Segment())
	require.NoError(t, err)
	own, err := other.Register("own", m.Segment())
	require.NoError(t, err)
	d, err := e.Describe(kv)
	require.NoError(t, err)
	p, err := other.Connect(t.Context(), d)
	require.NoError(t, err)
	r, err := p.Remote("kv")
	require.NoError(t, err)
	var took []time.Duration
	for range 101 {
		start := time.Now()
		require.NoError(t, put(t.Context(), other, p, own, r, 1000))
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	route := other.Stats().Routes[0]
	require.Equal(t, "alone", route.Peer)
	latency := route.Latency
	require.LessOrEqual(t, latency.Quantile(0.5), took[50]*9/8, "longer than the calls took")
	require.LessOrEqual(t, latency.Quantile(0), latency.Quantile(0.5))
	require.LessOrEqual(t, latency.Quantile(0.5), latency.Quantile(1))
}
