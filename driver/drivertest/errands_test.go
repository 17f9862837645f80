// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMemoryOutlivesErrands: a call that within has given up may still use memory.
func TestMemoryOutlivesErrands(t *testing.T) {
	goOn, freed := make(chan struct{}), make(chan struct{})
	require.ErrorIs(t, within(time.Millisecond, func() error { <-goOn; return nil }), errLate)
	require.NoError(t, errands.afterwards(func() error { close(freed); return nil }))
	require.Equal(t, 1, errands.wait(time.Millisecond))
	require.False(t, stopped(freed), "memory was freed while a call used it")
	close(goOn)
	require.Zero(t, errands.wait(errandsMax))
	require.True(t, stopped(freed), "memory was not freed behind the last call")
	require.ErrorIs(t, errands.afterwards(func() error { return errLate }), errLate)
}
