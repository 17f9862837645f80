// SPDX-License-Identifier: Apache-2.0

package lentmem

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

func TestCheck(t *testing.T) {
	Add(4096, 4096)
	for _, r := range [][2]uint64{{4096, 1}, {8191, 1}, {0, 4097}, {0, 1 << 20}, {5000, 10}} {
		require.ErrorIs(t, Check(r[0], r[1]), driver.ErrNotSupported, "%v", r)
	}
	for _, r := range [][2]uint64{{0, 4096}, {8192, 4096}} {
		require.NoError(t, Check(r[0], r[1]), "%v", r)
	}
	Remove(4096)
	require.NoError(t, Check(4096, 4096))
}
