// SPDX-License-Identifier: Apache-2.0

package standin

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLibrary(t *testing.T) {
	l, err := BuildCuFile()
	require.NoError(t, err)
	t.Cleanup(l.Remove)
	t.Run("set", func(t *testing.T) {
		l.Set(t, "delay_us", 7)
		require.Equal(t, uint32(7), l.Get("delay_us"))
	})
	require.Zero(t, l.Get("delay_us"), "what was before")
	l.Put("hold", 1)
	l.Put("handles", 3)
	l.Put("reads", 4)
	require.Equal(t, map[string]uint64{"cufile handles": 3}, l.InUse())
	require.Panics(t, func() { l.Get("speed") })
	l.Remove()
	require.NoDirExists(t, l.dir)
}
