// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
)

// TestBufferedSegment registers a file twice: bytes of the one that is Buffered go through the page
// cache alone, those of the other past it, and both see one file.
func TestBufferedSegment(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const size = 1 << 20
		f := newFile(t, t.TempDir(), size)
		seg := fileSegment(f, size)
		seg.Buffered = true
		r := newRig(t, cfg, seg, size)
		buffered := r.remote
		seg.Buffered = false
		m, err := r.b.Register(seg)
		require.NoError(t, err)
		token, err := m.AppendToken(nil)
		require.NoError(t, err)
		plain, _, err := r.p.Import(token)
		require.NoError(t, err)
		require.Contains(t, r.p.Explain(r.local, buffered),
			"through the page cache: as its registration asked (Segment.Buffered)")

		past := 0
		sabotage(r, func(l *files.Landing) {
			if l.R.Direct {
				past++
			}
		})
		direct := m.(*files.Memory).File.CanDirect()
		for i, way := range [][2]uint32{{buffered, plain}, {plain, buffered}} {
			want := bytes.Repeat([]byte{byte(i + 1), 7, 9}, size)[:size]
			copy(r.mem, want)
			for k, op := range []driver.Op{driver.Write, driver.Read} {
				r.remote, past = way[k], 0
				require.NoError(t, r.move(t, op, driver.Desc{Len: size}))
				require.Equal(t, direct && r.remote == plain, past > 0)
				if op == driver.Write {
					clear(r.mem)
				}
			}
			require.True(t, bytes.Equal(want, r.mem), "one does not see what the other wrote")
		}
	})
}
