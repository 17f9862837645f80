// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFullExtents: places that come and go in extents that are full otherwise leave nothing behind.
func TestFullExtents(t *testing.T) {
	s := newSlots(4*granule, 2*granule)
	var places [4]uint32
	require.Equal(t, 4, s.reserve(1, places[:]))
	for k := range 100 {
		s.giveBack(places[k%4])
		require.Equal(t, 1, s.reserve(1, places[k%4:k%4+1]))
	}
	require.LessOrEqual(t, len(s.partial[1]), len(s.extents))
}
