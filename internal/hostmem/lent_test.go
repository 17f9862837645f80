// SPDX-License-Identifier: Apache-2.0

package hostmem

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

func TestCheckNotLent(t *testing.T) {
	AddLent(4096, 4096)
	for _, r := range [][2]uint64{{4096, 1}, {8191, 1}, {0, 4097}, {0, 1 << 20}, {5000, 10}} {
		require.ErrorIs(t, CheckNotLent(r[0], r[1]), driver.ErrNotSupported, "%v", r)
	}
	for _, r := range [][2]uint64{{0, 4096}, {8192, 4096}} {
		require.NoError(t, CheckNotLent(r[0], r[1]), "%v", r)
	}
	RemoveLent(4096)
	require.NoError(t, CheckNotLent(4096, 4096))
}
