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
	proof := make(chan struct{})
	g.Retire(0, proof)
	require.ErrorIs(t, <-large, ErrTooLarge)
	g.Release()
	require.NoError(t, <-small)
	want(t, p, 0, 1, 0)
	again := wait(1)
	close(proof)
	require.NoError(t, <-again, "the block is not used again")
}

// TestRetiredBlockIsRestoredBeforeItsRelease: the proof comes while the grant has its blocks.
func TestRetiredBlockIsRestoredBeforeItsRelease(t *testing.T) {
	p := newPool(t, 2)
	g := take(t, p, 1, 2)
	proof := make(chan struct{})
	g.Retire(0, proof)
	close(proof)
	g.Retire(1, proof) // not needed
	for retiring := 1; retiring > 0; runtime.Gosched() {
		p.mu.Lock()
		retiring = p.retiring
		p.mu.Unlock()
	}
	g.Release()
	want(t, p, 2, 0, 0)
}
