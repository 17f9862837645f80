// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	hostcopy "github.com/sluicehq/sluice/csrc/copy"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/hostmem"
)

func TestCopy(t *testing.T) {
	s := Shape{Op: driver.Write, Size: 4096, Batch: 16, Threads: 1}
	r, err := Copy(t.Context(), s, Options{Rounds: 2, Slice: 1})
	require.NoError(t, err)
	require.Equal(t, []any{CopyOp, "chosen", 2, "go-copy"},
		[]any{r.Op, r.Backend, r.Rounds, r.Baseline.Name})
	require.Len(t, r.Baselines, 1+len(hostcopy.Variants()))
	require.Equal(t, []string{hostcopy.Chosen().Why}, r.Notes)
	require.Positive(t, r.GBps)
	require.Zero(t, hostmem.InUse()["bench-baseline"])
	_, err = Copy(t.Context(), Shape{}, Options{})
	require.ErrorIs(t, err, ErrShape)
}

func TestCopyWaysCopyAll(t *testing.T) {
	s := Shape{Op: driver.Write, Size: 5000, Batch: 3, Threads: 1}
	mem := make([]byte, 2*s.BatchBytes())
	for i := range mem {
		mem[i] = byte(i * i >> 5)
	}
	ways, err := copyWays(&s, mem)
	require.NoError(t, err)
	for _, w := range ways {
		clear(mem[:s.BatchBytes()])
		require.NoError(t, w.threads[0].do(0))
		require.True(t, bytes.Equal(mem[:s.BatchBytes()], mem[s.BatchBytes():]), w.name)
	}
	for _, s := range CopyShapes(256 << 20) {
		require.NoError(t, s.Check())
	}
}
