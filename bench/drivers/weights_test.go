// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench"
)

func TestWeightsAreLoaded(t *testing.T) {
	for _, name := range []string{"weights", "weights-mmap", "weights-fio"} {
		if name == "weights-fio" {
			needFio(t)
		}
		dir := t.TempDir()
		e, _ := opened(t, name, []string{dir}, bench.Request{Lane: "weights",
			FarBytes: 130 << 20})
		left, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Empty(t, left)
		p, err := e.Prepare(bench.OpRead, 0, nil, nil)
		require.NoError(t, err, name)
		require.Equal(t, uint64(128<<20), p.(bench.Sizer).Bytes())
		took, err := p.(bench.Measurer).Measure(t.Context())
		require.NoError(t, err, name)
		require.Positive(t, took)
	}
}

// TestWeightsThatDiffer: a tensor whose bytes are others is found before anything is measured.
func TestWeightsThatDiffer(t *testing.T) {
	e, _ := opened(t, "weights", []string{t.TempDir()}, bench.Request{Lane: "weights"})
	f := e.(*weightsEnd).open[2]
	info, err := f.Stat()
	require.NoError(t, err)
	_, err = f.WriteAt([]byte{1, 2, 3}, info.Size()-3)
	require.NoError(t, err)
	_, err = e.Prepare(bench.OpRead, 0, nil, nil)
	require.ErrorIs(t, err, bench.ErrNonsense)
	require.ErrorContains(t, err, "2.0")

	e, err = newWeights("ours")([]string{"/no/such/folder"})
	require.NoError(t, err)
	_, err = e.Open(&bench.Request{Lane: "weights"})
	require.Error(t, err)
}
