// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/backends/tcp"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
)

// openWith opens an engine over tcp or shm.
func openWith(t *testing.T, name, backend string) *engine.Engine {
	t.Helper()
	var b driver.Backend
	var err error
	if backend == "shm" {
		b, err = shm.New(shm.Config{})
	} else {
		b, err = tcp.New(tcp.Config{Plaintext: true, Listen: "127.0.0.1:0"})
	}
	require.NoError(t, err)
	e, err := engine.Open(engine.Config{Name: name, Backends: []driver.Backend{b}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	return e
}

// awaitInbound waits until an engine knows of n connections.
func awaitInbound(t *testing.T, e *engine.Engine, n int) []engine.InboundStats {
	t.Helper()
	var got []engine.InboundStats
	require.Eventually(t, func() bool {
		got = e.Stats().Inbound
		return len(got) == n
	}, 20*time.Second, time.Millisecond)
	return got
}

// TestInbound: an owner sees who reaches its memory, and how many bytes came and went where the
// backend can know, of each of two peers of one name.
func TestInbound(t *testing.T) {
	for _, backend := range []string{"tcp", "shm"} {
		t.Run(backend, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			owner := openWith(t, "owner", backend)
			m, err := owner.Alloc(4<<20, engine.AllocOptions{Purpose: "test"})
			require.NoError(t, err)
			defer m.Close()
			kv, err := owner.Register("kv", m.Segment())
			require.NoError(t, err)
			d, err := owner.Describe(kv)
			require.NoError(t, err)

			written := map[string]uint64{}
			var first *engine.Peer
			for i, n := range []uint64{1 << 20, 3 << 20} {
				twin := openWith(t, "twin", backend)
				p, err := twin.Connect(ctx, d)
				require.NoError(t, err)
				r, err := p.Remote("kv")
				require.NoError(t, err)
				_, err = r.WriteAt(make([]byte, n), 0)
				require.NoError(t, err)
				_, err = r.ReadAt(make([]byte, n/4), 0)
				require.NoError(t, err)
				for _, in := range awaitInbound(t, owner, i+1) {
					if _, known := written[in.Engine]; !known {
						written[in.Engine] = n
					}
				}
				if first == nil {
					first = p
					require.Equal(t, "owner", twin.Stats().Routes[0].Peer)
				}
			}
			require.Len(t, written, 2, "two engines of one name are one")
			for _, in := range awaitInbound(t, owner, 2) {
				want := engine.InboundStats{Peer: "twin", Backend: backend, Engine: in.Engine}
				if backend == "tcp" {
					want.Counted, want.Written, want.Read = true, written[in.Engine],
						written[in.Engine]/4
				}
				require.Equal(t, want, in)
			}
			require.Zero(t, owner.Stats().Peers, "the owner has connected to none")
			require.NoError(t, first.Close())
			awaitInbound(t, owner, 1)
		})
	}
}

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
	e := openWith(t, "alone", "tcp")
	m, err := e.Alloc(1<<16, engine.AllocOptions{Purpose: "test"})
	require.NoError(t, err)
	defer m.Close()
	kv, err := e.Register("kv", m.Segment())
	require.NoError(t, err)
	d, err := e.Describe(kv)
	require.NoError(t, err)
	other := openWith(t, "other", "tcp")
	p, err := other.Connect(t.Context(), d)
	require.NoError(t, err)
	r, err := p.Remote("kv")
	require.NoError(t, err)
	var took []time.Duration
	for range 101 {
		start := time.Now()
		_, err := r.WriteAt(make([]byte, 1000), 0)
		require.NoError(t, err)
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	latency := other.Stats().Routes[0].Latency
	require.LessOrEqual(t, latency.Quantile(0.5), took[50]*9/8, "longer than the calls took")
	require.LessOrEqual(t, latency.Quantile(0), latency.Quantile(0.5))
	require.LessOrEqual(t, latency.Quantile(0.5), latency.Quantile(1))
}
