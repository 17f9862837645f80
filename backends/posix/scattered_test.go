// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"bytes"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// apart are n pieces of 656 bytes, 1,000 bytes apart in the file and in the opposite order in
// memory.
func apart(n uint64) (descs []driver.Desc) {
	for i := range n {
		descs = append(descs, driver.Desc{Local: (n - i) * 656, Remote: i * 1000, Len: 656})
	}
	return descs
}

// TestScatteredWrites makes few requests of short pieces that are apart, each of whose bytes is
// where it has to be, also where the kernel writes a part of what it was asked for.
func TestScatteredWrites(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const pieces, size = 200, 256 << 10
		cfg.Buffered = true
		for _, cut := range []int{size, 3000, 656, 655} {
			f := newFile(t, t.TempDir(), size)
			r := newRig(t, cfg, fileSegment(f, size), size)
			s := sabotage(r, func(l *files.Landing) { l.N = min(l.N, cut) })
			want := make([]byte, size)
			for i := range r.mem {
				r.mem[i] = byte(i*31 + i>>9)
			}
			descs := apart(pieces)
			for _, d := range descs {
				copy(want[d.Remote:][:d.Len], r.mem[d.Local:])
			}
			require.NoError(t, r.move(t, driver.Write, descs...))
			got, err := os.ReadFile(f.Name())
			require.NoError(t, err)
			require.True(t, bytes.Equal(got, want), "%d bytes at a time", cut)
			if cut == size {
				require.Equal(t, [2]int{(pieces + placesMax - 1) / placesMax, 0}, s.kinds)
			}
		}
	})
}

// TestErrorOfAScatteredWrite names the piece that failed and its byte in the file.
func TestErrorOfAScatteredWrite(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const size = 64 << 10
		cfg.Buffered = true
		r := newRig(t, cfg, fileSegment(newFile(t, t.TempDir(), size), size), size)
		first := true
		sabotage(r, func(l *files.Landing) {
			if first {
				l.N = 3*656 + 100
			} else {
				l.N, l.Err = 0, syscall.EIO
			}
			first = false
		})
		wantFileError(t, r.move(t, driver.Write, apart(10)...), 3, "write", 3100, syscall.EIO)
	})
}

// TestScatteredWriteEndsBetweenPieces: one that is cancelled begins no more of its pieces.
func TestScatteredWriteEndsBetweenPieces(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const size = 64 << 10
		cfg.Buffered = true
		f := newFile(t, t.TempDir(), size)
		r := newRig(t, cfg, fileSegment(f, size), size)
		for i := range r.mem {
			r.mem[i] = 1
		}
		testpoint.First("posix: piece written", func() { r.p.Cancel(7) })
		defer testpoint.First("posix: piece written", nil)
		require.ErrorIs(t, r.move(t, driver.Write, apart(10)...), driver.ErrAborted)
		got, err := os.ReadFile(f.Name())
		require.NoError(t, err)
		want := make([]byte, size)
		copy(want, r.mem[:656])
		require.True(t, bytes.Equal(got, want))
	})
}
