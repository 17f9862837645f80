// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"io"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestExtends writes past the end of a file whose range may lie there. What was not written is no
// zeros: a read of it fails, also where the file ends within it.
func TestExtends(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		for _, buffered := range []bool{false, true} {
			cfg.Buffered = buffered
			const size = 64 << 10
			f := newFile(t, t.TempDir(), 0)
			seg := fileSegment(f, 1<<40)
			seg.Extends = true
			r := newRig(t, cfg, seg, size)
			for i := range r.mem {
				r.mem[i] = byte(i * 7)
			}
			want := string(r.mem)
			require.ErrorIs(t, r.move(t, driver.Read, driver.Desc{Len: 4096}), io.ErrUnexpectedEOF)
			require.NoError(t, r.move(t, driver.Write, driver.Desc{Len: size, Remote: 8192}))
			at, err := f.Stat()
			require.NoError(t, err)
			require.EqualValues(t, 8192+size, at.Size())
			clear(r.mem)
			require.NoError(t, r.move(t, driver.Read, driver.Desc{Len: size, Remote: 8192}))
			require.Equal(t, want, string(r.mem))
			require.NoError(t, r.move(t, driver.Write, driver.Desc{Len: 100, Remote: 8192 + size}))
			require.ErrorIs(t, r.move(t, driver.Read, driver.Desc{Len: 4096, Remote: 8192 + size}),
				io.ErrUnexpectedEOF)

			seg.ReadOnly = true
			_, err = r.b.Register(seg)
			require.ErrorIs(t, err, driver.ErrBounds)
		}
	})
}

// TestOneDirection registers a file by a descriptor that is good for one direction alone. The other
// fails, and says why.
func TestOneDirection(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const size = 64 << 10
		f := newFile(t, t.TempDir(), size)
		opened := func(flags int) driver.Segment {
			one, err := os.OpenFile(f.Name(), flags, 0)
			require.NoError(t, err)
			t.Cleanup(func() { _ = one.Close() })
			seg := fileSegment(one, size)
			seg.ReadOnly = flags&os.O_WRONLY == 0
			return seg
		}
		w := newRig(t, cfg, opened(os.O_WRONLY), size)
		for i := range w.mem {
			w.mem[i] = byte(i * 7)
		}
		for _, d := range []driver.Desc{{Len: size}, {Len: 100, Remote: 5000, Local: 5000}} {
			require.NoError(t, w.move(t, driver.Write, d))
			require.ErrorContains(t, w.move(t, driver.Read, d), "opened for writing alone")
		}
		r := newRig(t, cfg, opened(os.O_RDONLY), size)
		require.NoError(t, r.move(t, driver.Read, driver.Desc{Len: size}))
		require.Equal(t, w.mem, r.mem)
		require.ErrorIs(t, r.move(t, driver.Write, driver.Desc{Len: size}), driver.ErrReadOnly)
	})
}
