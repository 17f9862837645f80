// SPDX-License-Identifier: Apache-2.0

package copy

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/standin"
)

// guard is more than any turn of a loop, and blank is what stands where nothing was copied.
const guard = 512

var blank = bytes.Repeat([]byte{pattern}, 8192)

// TestStream copies between all places of a line, and looks at all around.
func TestStream(t *testing.T) {
	const most = 4096 + 600
	size := most + 2*guard + 64
	from, to, want := filled(size, 1), bytes.Clone(blank[:size]), bytes.Clone(blank[:size])
	check := func(dst, src, n int) {
		copy(want[dst:], from[src:src+n])
		Way(0).Copy(to[dst:dst+n], from[src:src+n])
		if !bytes.Equal(want, to) {
			t.Fatalf("%d bytes from %d to %d mod 64 differ from the plain copy", n, src%64, dst%64)
		}
		for _, mem := range [][]byte{to, want} {
			copy(mem[dst:dst+n], blank)
		}
	}
	for n := range 601 {
		for at := range 64 {
			check(guard+at, guard+(at*n)%64, n)
		}
	}
	for _, n := range []int{4095, 4096, 4097, most} {
		for dst := range 64 {
			for src := range 64 {
				check(guard+dst, guard+src, n)
			}
		}
	}
}

// TestNarrowStream does that, in C, with the registers that each x86-64 has. Other processors have
// one kind.
func TestNarrowStream(t *testing.T) {
	program := filepath.Join(t.TempDir(), "narrow")
	standin.Compile(t, "-O2", "-Wall", "-Wextra", "-Werror", "-o", program, "testdata/narrow.c")
	out, err := exec.Command(program).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// TestBatchesAreStreamed as they are copied by libc.
func TestBatchesAreStreamed(t *testing.T) {
	const size = 256 << 10
	descs := []driver.Desc{{Local: 1, Remote: 77, Len: 20_000},
		{Local: 20_001, Remote: 20_077, Len: 10_000},
		{Local: 50_003, Remote: 60_000, Len: 8191}, {Local: 9, Remote: 80_000, Len: 6}}
	pages := driver.Pattern{Count: 3, Run: 12_001,
		Local:  driver.Side{Base: 70_000, Stride: 12_001},
		Remote: driver.Side{Base: 90_000, Stride: 13_000, List: []uint32{2, 0, 1}}}
	nest := driver.Pattern{Count: 2, Run: 5000,
		Local:  driver.Side{Base: 120_001, Stride: 40_000},
		Remote: driver.Side{Base: 140_003, Stride: 50_000},
		Loops:  []driver.Loop{{N: 3, Local: 5000, Remote: 9000}}}
	here, there := filled(size, 1), filled(size, 2)
	local, remote := make([]byte, size), make([]byte, size)
	for _, op := range []driver.Op{driver.Write, driver.Read} {
		wantLocal, wantRemote := bytes.Clone(here), bytes.Clone(there)
		want(op, wantLocal, wantRemote, descs)
		for _, p := range []*driver.Pattern{&pages, &nest} {
			require.NoError(t, p.Check(size, size))
			for i := range p.Count * p.Runs() {
				want(op, wantLocal, wantRemote, []driver.Desc{Run(p, i)})
			}
		}
		for _, w := range []Way{0, 8192} {
			copy(local, here)
			copy(remote, there)
			require.NoError(t, Descs(op, local, remote, descs, w))
			for _, p := range []*driver.Pattern{&pages, &nest} {
				require.NoError(t, Runs(op, local, remote, p, 0, p.Count*p.Runs(), w))
			}
			require.True(t, bytes.Equal(wantLocal, local) && bytes.Equal(wantRemote, remote),
				"%d, %v", w, op)
		}
	}
}

// TestFor: batches that leave room in the last-level cache are not streamed.
func TestFor(t *testing.T) {
	for cache, batch := range map[uint64]uint64{1 << 20: 1 << 20, 30 << 20: 10 << 20,
		260 << 20: 16 << 20} {
		require.Equal(t, batch, smallestStreamed(cache))
	}
	require.Equal(t, Plain, For(streamBatchMin-1))
	require.Equal(t, Plain, For(streamBatch()-1))
	if streams {
		require.Equal(t, Way(streamRun), For(streamBatchMax))
	}
}

func TestLastLevelCache(t *testing.T) {
	dir := t.TempDir()
	require.EqualValues(t, unknownCache, lastLevel(dir))
	for name, size := range map[string]string{"index0": "32K\n", "index3": "49152K\n",
		"index4": "many\n"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name, "size"), []byte(size), 0o644))
	}
	require.EqualValues(t, 48<<20, lastLevel(dir))
}
