// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRetiredBlocksEndWaiters: a request that has become larger than what is left of the pool is
// told so, and holds up none behind it.
func TestRetiredBlocksEndWaiters(t *testing.T) {
	p, err := New(2)
	require.NoError(t, err)
	g, err := p.Acquire(t.Context(), []Hash{{}, {}})
	require.NoError(t, err)
	wait := func(blocks int) chan error {
		done, before := make(chan error, 1), p.Stats().Waiting
		go func() {
			_, err := p.Acquire(t.Context(), make([]Hash, blocks))
			done <- err
		}()
		for p.Stats().Waiting == before {
			runtime.Gosched()
		}
		return done
	}
	large, small := wait(2), wait(1)
	restore := g.Retire(0)
	require.ErrorIs(t, <-large, ErrTooLarge)
	g.Release()
	require.NoError(t, <-small)
	want(t, p, 0, 1, 0)
	again := wait(1)
	restore()
	restore()
	require.NoError(t, <-again, "the block is not used again")
}

// TestRetiredBlockIsRestoredBeforeItsRelease: the proof comes while the grant has its blocks.
func TestRetiredBlockIsRestoredBeforeItsRelease(t *testing.T) {
	p := newPool(t, 1)
	g := take(t, p, 1)
	g.Retire(0)()
	g.Release()
	want(t, p, 1, 0, 0)
}
