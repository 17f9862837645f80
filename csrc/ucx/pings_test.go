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
	spots.Park(AtCopy)
	require.NoError(t, submit(l.conn, driver.Write, 1, []driver.Desc{l.desc(0, 0, testBytes)}, nil))
	require.NoError(t, spots.Await())
	for ticket := uint64(2); ticket < 2000; ticket++ {
		_, may := l.near.Export(key)
		require.True(t, may)
		require.ErrorIs(t, l.near.Fence(key, ticket, 0), driver.ErrTimeout)
		require.LessOrEqual(t, int(l.conn.Sends()), 300, "messages that UCX keeps")
	}
	require.NoError(t, spots.Leave())
	require.NoError(t, l.near.Fence(key, 0, 10*time.Second))
	require.NoError(t, l.outcome(t, 1))
}
