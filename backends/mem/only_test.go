// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestListThatChangesStaysWithinTheRanges: an index list that changes once Submit has looked at it
// leads to no byte beside Segment.Only, for entries of one run as for nests.
func TestListThatChangesStaysWithinTheRanges(t *testing.T) {
	for name, loops := range map[string][]driver.Loop{"plain": nil, "nest": {{N: 1}}} {
		t.Run(name, func(t *testing.T) {
			const block = 4096
			owner, holder := testBackend(t), testBackend(t)
			pool, src := make([]byte, 8*block), bytes.Repeat([]byte{1}, 8*block)
			theirs, err := owner.Register(driver.Segment{Kind: driver.DRAM, Mem: pool,
				Len: uint64(len(pool)), Only: driver.Ranges{{Off: block, Len: block}}})
			require.NoError(t, err)
			mine, err := holder.Register(driver.Segment{Kind: driver.DRAM, Mem: src,
				Len: uint64(len(src))})
			require.NoError(t, err)
			p, err := holder.Connect(t.Context(), owner.Addr())
			require.NoError(t, err)
			token, err := theirs.AppendToken(nil)
			require.NoError(t, err)
			key, _, err := p.Import(token)
			require.NoError(t, err)

			list := []uint32{1}
			gate := &theirs.(*memory).gate
			gate.Lock() // the worker stands before its first piece
			err = p.Submit(7, &driver.Batch{Op: driver.Write, Pattern: &driver.Pattern{Run: block,
				Loops: loops, Count: 1, Remote: driver.Side{Stride: block, List: list},
				LocalKey: mine.Key(), RemoteKey: key}})
			list[0] = 5
			gate.Unlock()
			require.NoError(t, err)
			var done [1]driver.Completion
			for n := 0; n == 0; {
				n, err = holder.Poll(done[:])
				require.NoError(t, err)
			}
			require.True(t, bytes.Equal(make([]byte, block), pool[5*block:][:block]),
				"bytes landed beside the ranges")
		})
	}
}

func testBackend(t *testing.T) driver.Backend {
	t.Helper()
	b, err := New(Config{InlineMax: 1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b
}
