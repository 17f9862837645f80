// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestFencesBesideAPeerThatStands: each asks the peer; what that does not take must not pile up.
// The last one is answered when the peer goes on.
func TestFencesBesideAPeerThatStands(t *testing.T) {
	spots, w := openSpots(t), ways[2]
	w.config.Spots = spots
	l := openLane(t, w)
	a, err := l.near.Allocate(4096)
	require.NoError(t, err)
	const key = testKey + 1
	require.NoError(t, l.near.Map(key, Memory{Ticket: 1, In: a, Mem: a.Bytes()}))
	t.Cleanup(func() {
		l.near.Unmap(key)
		require.NoError(t, a.Close())
	})
	goOn := stand(t, spots, AtCopy, func() error {
		return submit(l.conn, driver.Write, 1, []driver.Desc{l.desc(0, 0, testBytes)}, nil)
	})
	for ticket := uint64(2); ticket < 2000; ticket++ {
		_, may := l.near.Export(key)
		require.True(t, may)
		require.ErrorIs(t, l.near.Fence(key, ticket, 0), driver.ErrTimeout)
		require.LessOrEqual(t, int(l.conn.Sends()), 300, "messages that UCX keeps")
	}
	require.NoError(t, goOn())
	require.NoError(t, l.near.Fence(key, 0, testLimit))
	require.NoError(t, l.outcome(t, 1))
}

// TestIdle leaves a connection alone for 500 times the Grace of its ends: they keep it alive, and
// it works as before.
func TestIdle(t *testing.T) {
	everyWay(t, func(t *testing.T, l *lane) {
		for range 500 {
			for _, c := range []*Context{l.near, l.far} {
				c.Elapse(testGrace)
				for m, ok := c.Control(); ok; m, ok = c.Control() {
					require.False(t, m.Lost, "an idle peer was given up")
				}
			}
		}
		require.Eventually(t, func() bool { return max(l.conn.Sends(), l.back.Sends()) <= 2 },
			testLimit, time.Millisecond, "messages that UCX keeps")
		l.works(t)
	})
}
