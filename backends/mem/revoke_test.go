// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestRevokeWhileACopyStands has a copy hold the gate of a memory, as in a page that does not come:
// Revoke ends the epoch, waits no longer than its context, keeps the key, and has its proof when
// the copy has gone on.
func TestRevokeWhileACopyStands(t *testing.T) {
	b := testBackend(t)
	registered, err := b.Register(driver.Segment{Kind: driver.DRAM, Len: 8, Mem: make([]byte, 8)})
	require.NoError(t, err)
	m := registered.(*memory)
	p, err := b.Connect(t.Context(), b.Addr())
	require.NoError(t, err)
	token, err := m.AppendToken(nil)
	require.NoError(t, err)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	m.gate.RLock()
	for range 2 {
		require.ErrorIs(t, m.Revoke(over), context.Canceled)
		_, _, err = p.Import(token)
		require.ErrorIs(t, err, driver.ErrRevoked)
		_, err = m.AppendToken(nil)
		require.ErrorIs(t, err, driver.ErrClosed)
		require.Same(t, m, b.(*Backend).memories.At(m.key), "the key is free without a proof")
	}
	m.gate.RUnlock()
	require.NoError(t, m.Revoke(t.Context()))
	require.NoError(t, m.Revoke(over), "after nil it returns nil")
	require.Nil(t, b.(*Backend).memories.At(m.key))
}
