// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestHostCopy: a Config that names no copy of this machine is refused.
func TestHostCopy(t *testing.T) {
	_, err := New(Config{HostCopy: "quick"})
	require.ErrorContains(t, err, `copy by "quick": this machine has `)
	require.ErrorIs(t, err, driver.ErrBounds)
}
