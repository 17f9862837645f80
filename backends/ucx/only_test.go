// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
)

// TestNoRangesOpenNothing: a set of no ranges, which is not nil, opens nothing to peers.
func TestNoRangesOpenNothing(t *testing.T) {
	b, err := New(Config{})
	if err != nil {
		drivertest.SkipIfUnavailable(t, err)
	}
	defer func() { require.NoError(t, b.Close()) }()
	seg := driver.Segment{Kind: driver.DRAM, Mem: make([]byte, 4096), Len: 4096,
		Only: driver.Ranges{}}
	require.NotPanics(t, func() { _, err = b.Register(seg) })
}
