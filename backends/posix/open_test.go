// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// TestCreateKeepsTheName: a new file's entry in its folder is synced, and a disk that fails then
// fails Open.
func TestCreateKeepsTheName(t *testing.T) {
	synced := ""
	var answer error
	syncEntry = func(f *os.File) error {
		synced = f.Name()
		return errors.Join(answer, files.SyncEntry(f))
	}
	defer func() { syncEntry = files.SyncEntry }()
	path := filepath.Join(t.TempDir(), "pool")
	f, err := Open(path, OpenOptions{Create: true, Len: 4096})
	require.NoError(t, err)
	require.Equal(t, path, synced)
	require.NoError(t, f.Close())
	answer = syscall.EIO
	_, err = Open(path, OpenOptions{Create: true, Len: 4096})
	require.ErrorIs(t, err, syscall.EIO)
}

func TestOpen(t *testing.T) {
	testkit.CheckLeaks(t)
	path := filepath.Join(t.TempDir(), "pool")
	if _, err := Open(path, OpenOptions{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("open what is not there: %v", err)
	}
	f, err := Open(path, OpenOptions{Create: true, Off: 4096, Len: 1 << 20})
	require.NoError(t, err)
	defer f.Close()
	if s := f.Segment(); s.Kind != driver.File || s.FileOff != 4096 || s.Len != 1<<20 {
		t.Errorf("segment %+v", s)
	}
	blocks := func() int64 {
		var st syscall.Stat_t
		require.NoError(t, syscall.Stat(path, &st))
		return st.Blocks * 512
	}
	if n := blocks(); n < 1<<20 {
		t.Errorf("%d bytes reserved of %d", n, 1<<20)
	}
	require.NoError(t, f.Grow(4<<20))
	if n := blocks(); n < 4<<20 || f.Segment().Len != 4<<20 {
		t.Errorf("after Grow: %d bytes reserved, segment of %d", n, f.Segment().Len)
	}
	for _, n := range []uint64{0, 1 << 20, math.MaxUint64, math.MaxInt64} {
		require.ErrorIs(t, f.Grow(n), driver.ErrBounds, "grow to %d", n)
	}
	for _, o := range []OpenOptions{{Off: 8 << 20}, {Off: 4096, Len: 4<<20 + 1}, {Off: 1 << 63},
		{Off: 5, Len: math.MaxUint64}, {ReadOnly: true, Len: 8 << 20}} {
		if _, err := Open(path, o); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("open %+v of 4 MiB: %v", o, err)
		}
	}
	reader, err := Open(path, OpenOptions{ReadOnly: true})
	require.NoError(t, err)
	defer reader.Close()
	if s := reader.Segment(); !s.ReadOnly || s.Len != 4<<20+4096 {
		t.Errorf("segment %+v", s)
	}
	require.ErrorIs(t, reader.Grow(8<<20), driver.ErrReadOnly, "grow what may only be read")
	for _, path := range []string{os.DevNull, t.TempDir()} {
		if _, err := Open(path, OpenOptions{ReadOnly: true}); err == nil {
			t.Errorf("opened %s", path)
		}
	}
}
