// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/backends/mem"
	"github.com/sluicehq/sluice/backends/shm"
	"github.com/sluicehq/sluice/driver"
)

// over runs a test with each backend that the two sides may have in common.
func over(t *testing.T, test func(t *testing.T, open func(testing.TB) driver.Backend)) {
	t.Run("mem", func(t *testing.T) { test(t, newMem) })
	t.Run("shm", func(t *testing.T) { test(t, newShm) })
}

func newMem(t testing.TB) driver.Backend {
	t.Helper()
	b, err := mem.New(mem.Config{})
	require.NoError(t, err)
	return b
}

func newShm(t testing.TB) driver.Backend {
	t.Helper()
	b, err := shm.New(shm.Config{})
	require.NoError(t, err)
	return b
}
