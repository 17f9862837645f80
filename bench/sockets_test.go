// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestSocketsStandFirst: the ratio is to bare sockets where there are such, in both directions.
func TestSocketsStandFirst(t *testing.T) {
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		s := Shape{Op: op, Size: 3 * socketPart / 2, Batch: 2, Threads: 2}
		l := loop(t, s)
		l.Sockets = 8
		r, err := Run(t.Context(), l, s, Options{Rounds: 2, Slice: time.Millisecond})
		require.NoError(t, err)
		require.Len(t, r.Baselines, 3)
		require.Equal(t, SocketsName, r.Baselines[0].Name)
		require.Positive(t, r.Baselines[0].GBps)
		require.InDelta(t, r.GBps/r.Baselines[0].GBps, r.Ratio, 1e-9)
	}
}

// TestSocketsCarryTheBatch, each byte of it, over no more connections than pay.
func TestSocketsCarryTheBatch(t *testing.T) {
	for _, c := range []struct {
		op          driver.Op
		size        uint64
		asked, want int
	}{{driver.Write, 656, 3, 1}, {driver.Read, 2*socketPart + 1, 3, 2},
		{driver.Write, 10 * socketPart, 3, 3}} {
		s := Shape{Op: c.op, Size: c.size, Batch: 1, Threads: 1}
		k, err := newSockets(t.Context(), &s, c.asked)
		require.NoError(t, err)
		require.Len(t, k.near, c.want)
		var bytes uint64
		for _, part := range k.parts {
			bytes += uint64(len(part))
		}
		require.Equal(t, c.size, bytes)
		for i := range 3 {
			require.NoError(t, k.do(i))
		}
		k.close()
	}
}

// TestSocketsEndWithTheContext, also in the middle of a batch.
func TestSocketsEndWithTheContext(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	s := Shape{Op: driver.Write, Size: socketPart, Batch: 1, Threads: 1}
	k, err := newSockets(ctx, &s, 1)
	require.NoError(t, err)
	defer k.close()
	cause := errors.New("enough")
	cancel(cause)
	require.Eventually(t, func() bool { return errors.Is(k.do(0), cause) }, 30*time.Second,
		time.Millisecond)
}
