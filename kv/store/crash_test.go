// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/files"
)

// TestCreateLargest asks for as many blocks as there can be: the disk has no room for them, which
// is said before the memory for their records is taken.
func TestCreateLargest(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store")
	_, err := Create(path, Geometry{BlockBytes: 4 << 10, Blocks: 1 << 31}, Options{})
	var room *RoomError
	require.ErrorAs(t, err, &room)
	require.NoFileExists(t, path)
}

// TestCreateKeepsTheName: the entry of a new store in its folder is synced, and a disk that fails
// then fails Create.
func TestCreateKeepsTheName(t *testing.T) {
	synced := ""
	var answer error
	syncEntry = func(f *os.File) error {
		synced = f.Name()
		return errors.Join(answer, files.SyncEntry(f))
	}
	defer func() { syncEntry = files.SyncEntry }()
	path := filepath.Join(t.TempDir(), "store")
	s, err := Create(path, Geometry{BlockBytes: 4096, Blocks: 4}, Options{Durable: true})
	require.NoError(t, err)
	require.Equal(t, path, synced)
	require.NoError(t, s.Close())
	answer = syscall.EIO
	_, err = Create(path+"2", Geometry{BlockBytes: 4096, Blocks: 4}, Options{Durable: true})
	require.ErrorIs(t, err, syscall.EIO)
	require.NoFileExists(t, path+"2")
}

// TestCreateThatFailsKeepsTheLock until the name is gone: another process could open the store
// otherwise, and lose it.
func TestCreateThatFailsKeepsTheLock(t *testing.T) {
	events, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	require.NoError(t, err)
	defer unix.Close(events)
	syncEntry = func(f *os.File) error {
		_, err := unix.InotifyAddWatch(events, f.Name(), unix.IN_ATTRIB|unix.IN_CLOSE_WRITE)
		return errors.Join(err, syscall.EIO)
	}
	defer func() { syncEntry = files.SyncEntry }()
	_, err = Create(filepath.Join(t.TempDir(), "store"), Geometry{BlockBytes: 4096, Blocks: 4},
		Options{})
	require.ErrorIs(t, err, syscall.EIO)
	var first [4096]byte
	n, err := unix.Read(events, first[:])
	require.NoError(t, err)
	require.GreaterOrEqual(t, n, unix.SizeofInotifyEvent)
	require.EqualValues(t, unix.IN_ATTRIB, binary.NativeEndian.Uint32(first[4:]),
		"a file that is removed has a link less, which comes before it is closed")
}

func needs(t *testing.T, reason, fix string) {
	t.Helper()
	missing := &driver.UnavailableError{Backend: "store", Reason: reason, Fix: fix}
	drivertest.SkipIfUnavailable(t, missing)
}

// unwritten is how many pages of header and records the disk has not.
func unwritten(t *testing.T, path string) uint64 {
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	var s unix.Cachestat_t
	err = unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{Len: 2 * headerBytes}, &s, 0)
	if errors.Is(err, unix.ENOSYS) {
		needs(t, "the kernel has no cachestat", "Linux 6.5 or later")
	}
	require.NoError(t, err)
	return s.Dirty + s.Writeback
}

// TestBeginAfterKill opens a durable store whose process was killed between the write of an empty
// record and its sync: Begin has nothing to write, and returns only with the record on the disk.
func TestBeginAfterKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "store")
	s, err := Create(path, Geometry{BlockBytes: 4096, Blocks: 16}, Options{Durable: true})
	require.NoError(t, err)
	_, err = s.Commit(0, Name{1}, 4096, 7)
	require.NoError(t, err)
	require.NoError(t, s.Close())
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	require.NoError(t, err)
	dirty := false
	for range 100 { // the kernel may write a page back at once
		_, err = f.WriteAt(make([]byte, recordBytes), headerBytes)
		require.NoError(t, err)
		if dirty = unwritten(t, path) > 0; dirty {
			break
		}
	}
	require.NoError(t, f.Close())
	if !dirty {
		needs(t, "the filesystem of TMPDIR counts no dirty pages", "TMPDIR on a disk")
	}
	s, err = Open(path, Options{Durable: true})
	require.NoError(t, err)
	require.NoError(t, s.Begin(0))
	require.Zero(t, unwritten(t, path), "pages of header and records that the disk has not")
	require.NoError(t, s.Close())
}
