// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"bytes"
	"os"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
)

// TestRequestsStayWithinPieceMax reads a piece that fills a request, and a long one a short gap
// behind it.
func TestRequestsStayWithinPieceMax(t *testing.T) {
	const size, piece = 4 << 20, 64 << 10
	f := newFile(t, t.TempDir(), size)
	for _, c := range []struct {
		gap      uint64
		buffered bool
	}{{1 << 10, true}, {4 << 10, true}, {4 << 10, false}} {
		gap, cfg := c.gap, Config{Buffered: c.buffered, PieceMax: piece, Depth: 1}
		for _, first := range []uint64{piece, piece - 1, piece - gap} {
			r := newRig(t, cfg, fileSegment(f, size), size)
			var most atomic.Uint64
			sabotage(r, func(l *files.Landing) { most.Store(max(most.Load(), l.R.N)) })
			at := first + gap
			long := driver.Desc{Local: at, Remote: at, Len: 1 << 20}
			err := r.move(t, driver.Read, driver.Desc{Len: first}, long)
			require.NoError(t, err)
			require.LessOrEqual(t, most.Load(), uint64(piece), "%d bytes, a gap of %d", first, gap)
		}
	}
}

// TestMixedWrites has neighbours in the same pages written by two descriptors of one file, opened
// with other flags, from many batches at once: writes past the page cache and through it keep
// apart, and none of the bytes gets lost.
func TestMixedWrites(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const part, parts = 100_000, 24
		f := newFile(t, t.TempDir(), part*parts)
		other, err := os.OpenFile(f.Name(), os.O_RDWR|unix.O_DSYNC, 0)
		require.NoError(t, err)
		defer other.Close()
		r := newRig(t, cfg, fileSegment(f, part*parts), part*parts)
		m, err := r.b.Register(fileSegment(other, part*parts))
		require.NoError(t, err)
		token, err := m.AppendToken(nil)
		require.NoError(t, err)
		second, _, err := r.p.Import(token)
		require.NoError(t, err)
		s := sabotage(r, nil)
		for i := range r.mem {
			r.mem[i] = byte(i*7 + i>>13)
		}
		for i := range uint64(parts) {
			d := driver.Desc{Local: i * part, Remote: i * part, Len: part,
				LocalKey: r.local, RemoteKey: r.remote}
			if i%2 == 1 {
				d.RemoteKey = second
			}
			batch := driver.Batch{Op: driver.Write, Descs: []driver.Desc{d}}
			require.NoError(t, r.p.Submit(i, &batch))
		}
		for left := parts; left > 0; {
			k, err := r.b.Poll(r.done[:])
			require.NoError(t, err)
			for _, c := range r.done[:k] {
				require.NoError(t, c.Err)
			}
			left -= k
		}
		require.NoError(t, f.Sync())
		require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
		got, err := os.ReadFile(f.Name())
		require.NoError(t, err)
		require.True(t, bytes.Equal(got, r.mem), "the file differs from what was written")
		require.Zero(t, s.mixed, "writes of one kind began beside one of the other")
		require.NotZero(t, s.kinds[cached])
		require.NotZero(t, s.kinds[direct])
	})
}

// TestRelaunchKeepsKindsApart has a filesystem refuse O_DIRECT at work for one of many writes under
// way: what is done again through the page cache waits until those past it have ended.
func TestRelaunchKeepsKindsApart(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const part, parts = 128 << 10, 12
		f := newFile(t, t.TempDir(), part*parts)
		r := newRig(t, cfg, fileSegment(f, part*parts), part*parts)
		refused := 0
		s := sabotage(r, func(l *files.Landing) {
			if l.R.Kind == files.Write && l.R.Direct && refused == 0 {
				l.Err, refused = syscall.EINVAL, 1
			}
		})
		for i := range r.mem {
			r.mem[i] = byte(i*7 + i>>13)
		}
		var descs []driver.Desc
		for i := range uint64(parts) {
			descs = append(descs, driver.Desc{Local: (parts - 1 - i) * part, Remote: i * part,
				Len: part})
		}
		require.NoError(t, r.move(t, driver.Write, descs...))
		require.Equal(t, 1, refused)
		require.Contains(t, r.p.Explain(r.local, r.remote), "refuses O_DIRECT")
		require.NotZero(t, s.kinds[cached])
		require.Zero(t, s.mixed, "a write through the page cache began beside one past it")
		got, err := os.ReadFile(f.Name())
		require.NoError(t, err)
		for i := range parts {
			require.True(t, bytes.Equal(got[i*part:][:part], r.mem[(parts-1-i)*part:][:part]),
				"part %d", i)
		}
	})
}
