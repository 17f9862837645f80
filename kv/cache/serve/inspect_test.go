// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/testpoint"
	"github.com/sluicehq/sluice/kv/cache"
)

func TestInspect(t *testing.T) {
	ctx := t.Context()
	var may atomic.Bool
	may.Store(true)
	var options atomic.Pointer[cache.NamespaceOptions]
	options.Store(&cache.NamespaceOptions{Priority: 3})
	c, s, path := openWhole(t, func(cfg *Config) {
		cfg.Inspect = func(p *engine.Peer) bool { return may.Load() && OverUnixSocket(p) }
		cfg.Options = func(string) cache.NamespaceOptions { return *options.Load() }
	})
	u, err := openUser(ctx, path)
	require.NoError(t, err)
	keys := keysOf(1, 8)
	u.fill(keys)
	_, err = u.Store(ctx, keys, u.place(0, 8))
	require.NoError(t, err)
	require.NoError(t, u.Remove(ctx, keys[:1]))
	_, err = u.Load(ctx, keys, u.place(8, 8))
	require.NoError(t, err)

	report, err := u.Report(ctx)
	require.NoError(t, err)
	require.Equal(t, "node", report.Name)
	require.Equal(t, 1, report.Clients)
	require.Equal(t, map[cache.Outcome]uint64{cache.Done: 7, cache.Missing: 1}, report.Loads)
	require.EqualValues(t, 7, report.Tiers[cache.Memory].Blocks)
	require.EqualValues(t, 1, report.Requests["load"].Count())
	require.NotZero(t, report.Requests["load"].Percentile(99))

	spaces, err := u.Spaces(ctx)
	require.NoError(t, err)
	require.Len(t, spaces, 1)
	require.Equal(t, "model", spaces[0].Name)
	require.Equal(t, 3, spaces[0].Priority)
	require.EqualValues(t, 7, spaces[0].Blocks[cache.Memory])

	found, err := u.Find(ctx, spaces[0].Digest) // without its geometry
	require.NoError(t, err)
	list, next, err := found.Blocks(ctx, 0)
	require.NoError(t, err)
	require.Zero(t, next)
	var listed []cache.Key
	for _, b := range list {
		require.EqualValues(t, blockBytes, b.Bytes)
		require.Equal(t, cache.InMemory, b.Found)
		listed = append(listed, b.Key)
	}
	require.ElementsMatch(t, keys[1:], listed)
	one, text, err := found.Block(ctx, keys[1])
	require.NoError(t, err)
	require.EqualValues(t, blockBytes, one.Bytes)
	require.Contains(t, text, "in memory")
	one, _, err = found.Block(ctx, keys[0])
	require.NoError(t, err)
	require.Equal(t, cache.Nowhere, one.Found)
	may.Store(false)
	one, text, err = found.Block(ctx, keys[1])
	require.NoError(t, err)
	require.EqualValues(t, blockBytes, one.Bytes)
	require.Empty(t, text)
	may.Store(true)

	// options that were changed hold for namespaces that are open
	options.Store(&cache.NamespaceOptions{Priority: 5, Quota: [2]uint64{4 * blockBytes}})
	require.NoError(t, s.Reassign())
	spaces, err = u.Spaces(ctx)
	require.NoError(t, err)
	require.Equal(t, 5, spaces[0].Priority)
	require.EqualValues(t, 4*blockBytes, spaces[0].Quota[cache.Memory])

	// who may not is refused, and garbage harms nobody
	_, err = u.Find(ctx, [16]byte{1})
	require.ErrorIs(t, err, engine.ErrBounds)
	may.Store(false)
	_, err = u.Report(ctx)
	require.ErrorContains(t, err, "Unix socket")
	_, err = u.Find(ctx, spaces[0].Digest)
	require.ErrorContains(t, err, "Unix socket")
	may.Store(true)
	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		body := make([]byte, r.IntN(24))
		for k := range body {
			body[k] = byte(r.IntN(3))
		}
		_, _ = u.Client.ask(ctx, kindReport+kind(r.IntN(7)), request{rest: body})
	}
	require.NoError(t, u.Client.Close(ctx))
	require.Len(t, c.Spaces(), 1)
}

func TestLatency(t *testing.T) {
	var l latency
	for _, d := range []time.Duration{0, time.Microsecond, time.Microsecond + 1, time.Hour} {
		l.add(d)
	}
	r := l.read()
	require.Equal(t, map[int64]uint64{1: 2, 2: 1, LatencyMost: 1}, r.AtMost)
	require.Equal(t, time.Microsecond, r.Percentile(50))
	require.Equal(t, 2*time.Microsecond, r.Percentile(75))
	require.Equal(t, LatencyMost*time.Microsecond, r.Percentile(99))
	require.Zero(t, Latency{}.Percentile(99))
}

// TestDrain: a request that runs ends as it would have, a further one is refused.
func TestDrain(t *testing.T) {
	_, s, path := openWhole(t)
	u, err := openUser(t.Context(), path)
	require.NoError(t, err)
	u.fill(keysOf(1, 4))
	standing := testpoint.Stand(t, "cache: entered")[0]
	stored := make(chan error)
	go func() {
		outcomes, err := u.Store(t.Context(), keysOf(1, 4), u.place(0, 4))
		if err == nil && outcomes[3] != cache.Done {
			err = fmt.Errorf("outcomes %v", outcomes)
		}
		stored <- err
	}()
	<-standing.Came
	over, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, s.Drain(over), context.Canceled)
	_, err = u.Match(t.Context(), keysOf(1, 4))
	require.ErrorIs(t, err, engine.ErrClosed)
	standing.GoOn()
	require.NoError(t, <-stored)
	require.NoError(t, s.Drain(t.Context()))
	require.NoError(t, u.Client.Close(t.Context()))
}
