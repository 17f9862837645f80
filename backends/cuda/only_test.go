// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cuda

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
)

// TestRangesOfHBMByChain leases some ranges of device memory to a peer that reaches them by a
// chain: the bytes are then placed by this engine itself, which looks at each piece.
func TestRangesOfHBMByChain(t *testing.T) {
	near, err := openChainEnd("tcp")
	require.NoError(t, err)
	defer func() { require.NoError(t, near.free()) }()
	r, err := near.e.Register("hbm", near.hbm)
	require.NoError(t, err)
	l, err := r.LeaseRanges([]engine.Range{{Off: 4096, Len: 4096}}, engine.LeaseOptions{})
	require.NoError(t, err)
	require.NoError(t, l.Revoke(t.Context()))
}
