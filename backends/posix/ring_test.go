// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
)

// TestCancelsLeaveRoom has cancels that the kernel has not taken, because their callers stand
// before the call: they never take the places of requests, and the ring goes on.
func TestCancelsLeaveRoom(t *testing.T) {
	const size = 8192
	f := newFile(t, t.TempDir(), size)
	r := newRig(t, Config{Path: PathRing, Depth: 2}, fileSegment(f, size), size)
	g := r.b.ring
	b := &driver.Batch{Op: driver.Read, Descs: []driver.Desc{{Len: size, LocalKey: r.local,
		RemoteKey: r.remote}}}
	for tag := range uint64(3) {
		r.b.core.Mu.Lock()
		for range 4 * len(g.sqes) {
			g.Cancel(&files.Request{Slot: 1, Kind: files.Read})
		}
		waiting := int(g.tail - g.sq.head.Load())
		r.b.core.Mu.Unlock()
		require.LessOrEqual(t, waiting, len(g.sqes)-2)
		require.Positive(t, waiting)
		require.NoError(t, r.p.Submit(tag, b))
		for end := time.Now().Add(30 * time.Second); ; {
			n, err := r.b.Poll(r.done[:])
			require.NoError(t, err)
			if n == 1 {
				require.NoError(t, r.done[0].Err)
				break
			}
			require.True(t, time.Now().Before(end), "a read does not end")
		}
	}
}

// TestALockOutlastsTheProcess where requests go by another description than the caller's: the
// kernel holds the caller's, too, until all have ended.
func TestALockOutlastsTheProcess(t *testing.T) {
	const size = 8192
	for _, flags := range []int{0, unix.O_DIRECT} {
		for _, buffered := range []bool{false, true} {
			f := newFile(t, t.TempDir(), size)
			at, err := os.OpenFile(f.Name(), os.O_RDWR|flags, 0)
			require.NoError(t, err)
			defer at.Close()
			r := newRig(t, Config{Path: PathRing, Buffered: buffered}, fileSegment(at, size), size)
			own := r.file.Own.(*ringFile)
			theirs, place := r.file.FD, own.fixed
			if flags != 0 {
				theirs, place = r.file.Direct, own.fixedDirect
			}
			require.NoError(t, unix.Flock(int(at.Fd()), unix.LOCK_EX|unix.LOCK_NB))
			require.NoError(t, unix.Flock(theirs, unix.LOCK_EX|unix.LOCK_NB), "another one")
			require.GreaterOrEqual(t, place, int32(0))
			require.Equal(t, !buffered, r.file.CanDirect())
		}
	}
}

// TestWithoutAPlaceForIt a file goes through the page cache, by the caller's description.
func TestWithoutAPlaceForIt(t *testing.T) {
	const size = 8192
	f := newFile(t, t.TempDir(), size)
	r := newRig(t, Config{Path: PathRing}, fileSegment(f, size), size)
	r.b.ring.files = nil
	other := newFile(t, t.TempDir(), size)
	m, err := r.b.Register(fileSegment(other, size))
	require.NoError(t, err)
	file := m.(*files.Memory).File
	require.False(t, file.CanDirect())
	require.Contains(t, file.Why, "raise RLIMIT_NOFILE")
	require.NoError(t, m.Revoke(t.Context()))
	direct, err := os.OpenFile(other.Name(), os.O_RDWR|unix.O_DIRECT, 0)
	require.NoError(t, err)
	defer direct.Close()
	_, err = r.b.Register(fileSegment(direct, size))
	require.ErrorIs(t, err, driver.ErrFull)
}

// TestWhatTheRingDoesNotGiveUp stays taken, and Close says so, until the kernel has given it up:
// the file with the lock of its program.
func TestWhatTheRingDoesNotGiveUp(t *testing.T) {
	const size = 8192
	f := newFile(t, t.TempDir(), size)
	r := newRig(t, Config{Path: PathRing}, fileSegment(f, size), size)
	at := newFile(t, t.TempDir(), size)
	require.NoError(t, unix.Flock(int(at.Fd()), unix.LOCK_EX|unix.LOCK_NB))
	file, err := r.b.Register(fileSegment(at, size))
	require.NoError(t, err)
	g, places := r.b.ring, len(r.b.ring.files)
	ring := g.fd
	g.fd = -1
	fileErr := file.Revoke(t.Context())
	g.fd = ring
	require.Error(t, fileErr)
	require.NoError(t, file.Revoke(t.Context()))
	require.Equal(t, places+2, len(g.files))
	other, err := os.OpenFile(at.Name(), os.O_RDWR, 0)
	require.NoError(t, err)
	defer other.Close()
	require.NoError(t, at.Close())
	require.Eventually(t, func() bool { // the kernel may give the file up a moment later
		return unix.Flock(int(other.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil
	}, 30*time.Second, time.Millisecond, "the kernel holds the lock of a file that is closed")
}
