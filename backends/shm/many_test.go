// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

// TestManyRangesLeaveOthersTheirProof: memory of too many ranges for fresh pages has no proof
// against a frozen writer, but other memory of the same allocation keeps its own.
func TestManyRangesLeaveOthersTheirProof(t *testing.T) {
	const page, count = 4096, 3000
	b := hasty(t)
	buf, err := hostmem.Alloc(2*count*page, hostmem.Options{Purpose: "test",
		Huge: hostmem.HugeNone})
	require.NoError(t, err)
	t.Cleanup(func() { _ = b.Close(); _ = buf.Close() })
	register := func(seg driver.Segment) *memory {
		m, err := b.Register(seg)
		require.NoError(t, err)
		return m.(*memory)
	}
	seg := buf.Segment()
	for i := range uint64(count) {
		seg.Only = append(seg.Only, driver.Range{Off: 2 * i * page, Len: page})
	}
	many := register(seg)
	one, err := buf.Segment().Slice((2*count-1)*page, page, [16]byte{1})
	require.NoError(t, err)
	other := register(one)

	p := dial(t, open(t, Config{}), b.Addr())
	silent(p, many.Key(), driver.Write)
	if err := many.Revoke(t.Context()); err != nil {
		require.ErrorIs(t, err, driver.ErrFull)
	}
	silent(p, other.Key(), driver.Write)
	require.NoError(t, other.Revoke(t.Context()), "a lease of one page")
}
