// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/park"
)

// TestTimedRefreshOfMuchMemory puts fresh pages under so much memory that it takes long. Others
// have their turn with the worker after each step: peers that the fence has nothing to do with
// would take it for silent.
func TestTimedRefreshOfMuchMemory(t *testing.T) {
	const steps, size = 64, 64 * (4 << 20)
	wake, err := park.NewEvent()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, wake.Close()) })
	c := openContext(t, ways[0].config, wake)
	a, err := c.Allocate(size)
	require.NoError(t, err)
	clear(a.Bytes()) // the pages are there, so that a step takes its time
	require.NoError(t, c.Map(testKey, Memory{Mem: a.Bytes(), Ticket: 5, In: a}))
	over := make(chan error, 1)
	go func() { over <- c.Refresh(testKey) }()
	turns := 0
	for len(over) == 0 {
		begin := time.Now()
		_, _ = c.Control()
		if time.Since(begin) > 100*time.Microsecond { // behind a step
			turns++
		}
	}
	require.NoError(t, <-over)
	require.Greater(t, turns, steps/2, "others have no turn")
	c.Unmap(testKey)
	require.NoError(t, a.Close())
	require.NoError(t, c.Close())
}
