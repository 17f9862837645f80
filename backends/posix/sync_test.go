// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
	"github.com/sluicehq/sluice/internal/testing/machine"
)

// lossyDisk stands in for a disk that loses bytes: the first sync ends only when it is let, and
// then with EIO; those after it end well, as Linux has it. All is guarded by flights.Mu.
type lossyDisk struct {
	files.Mover
	held   *files.Landing // the end of the first sync
	let    bool
	syncs  int
	writes int
}

func (d *lossyDisk) Reap(out []files.Landing) int {
	n := d.Mover.Reap(out[:len(out)-1])
	kept := 0
	for _, l := range out[:n] {
		if l.R.Kind == files.Write {
			d.writes++
		}
		if l.R.Kind == files.Sync {
			if d.syncs++; d.syncs == 1 {
				d.held = &l
				continue
			}
		}
		out[kept] = l
		kept++
	}
	if d.held != nil && d.let {
		out[kept] = files.Landing{R: d.held.R, Err: syscall.EIO}
		d.held = nil
		kept++
	}
	return kept
}

// durableWrite submits part i of four.
func (r *rig) durableWrite(t *testing.T, tag, i, part uint64) {
	t.Helper()
	d := driver.Desc{Local: i * part, Remote: i * part, Len: part,
		LocalKey: r.local, RemoteKey: r.remote}
	batch := driver.Batch{Op: driver.Write, Durable: true, Descs: []driver.Desc{d}}
	require.NoError(t, r.p.Submit(tag, &batch))
}

// when polls until a condition holds under the lock, and returns what has completed.
func (r *rig) when(t *testing.T, what string, met func() bool) map[uint64]error {
	t.Helper()
	ended := map[uint64]error{}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Microsecond) {
		k, err := r.b.Poll(r.done[:])
		require.NoError(t, err)
		for _, c := range r.done[:k] {
			ended[c.Tag] = c.Err
		}
		r.b.core.Mu.Lock()
		is := met()
		r.b.core.Mu.Unlock()
		if is {
			return ended
		}
		require.False(t, time.Now().After(end), "%s did not come", what)
	}
}

// TestFailedSyncFailsAllAccepted has a sync fail that covers one write, while a second has been
// written and waits for the next sync, through another descriptor of the same file. The pages of
// both count as clean then, so both fail; a write that is accepted later does not.
func TestFailedSyncFailsAllAccepted(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const part = 4 << 10
		f := newFile(t, t.TempDir(), 4*part)
		r := newRig(t, cfg, fileSegment(f, 4*part), 4*part)
		again, err := os.OpenFile(f.Name(), os.O_RDWR|unix.O_DSYNC, 0)
		require.NoError(t, err)
		defer again.Close()
		m, err := r.b.Register(fileSegment(again, 4*part))
		require.NoError(t, err)
		token, err := m.AppendToken(nil)
		require.NoError(t, err)
		first := r.remote
		second, _, err := r.p.Import(token)
		require.NoError(t, err)
		disk := &lossyDisk{Mover: r.b.core.Mover}
		r.b.core.Mu.Lock()
		r.b.core.Mover = disk
		r.b.core.Mu.Unlock()

		r.durableWrite(t, 1, 0, part)
		none := r.when(t, "the first sync", func() bool { return disk.held != nil })
		require.Empty(t, none)
		r.remote = second
		r.durableWrite(t, 2, 1, part)
		none = r.when(t, "the second write", func() bool { return disk.writes == 2 })
		require.Empty(t, none)
		r.b.core.Mu.Lock()
		disk.let = true
		r.b.core.Mu.Unlock()
		r.b.core.Serve()
		ended := map[uint64]error{}
		for len(ended) < 2 {
			maps.Copy(ended, r.when(t, "an end", func() bool { return true }))
		}
		for _, tag := range []uint64{1, 2} {
			var why *driver.FileError
			require.ErrorAs(t, ended[tag], &why, "write %d", tag)
			require.Equal(t, "sync", why.Op)
			require.ErrorIs(t, why, syscall.EIO)
		}
		r.remote = first
		r.durableWrite(t, 3, 2, part)
		require.NoError(t, r.outcome(t, 3))
	})
}

// fullDisk is a disk that takes no write: a loop device whose file lies on a full tmpfs.
func fullDisk(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		needs(t, "mount: "+err.Error())
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	file := filepath.Join(dir, "disk")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.NoError(t, os.Truncate(file, 16<<20))
	full, err := os.Create(filepath.Join(dir, "full"))
	require.NoError(t, err)
	for err == nil {
		_, err = full.Write(make([]byte, 4096))
	}
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.NoError(t, full.Close())
	device, _ := machine.LoopDevice(t, file)
	return device
}

// TestDiskLosesDurableWrites writes to a disk that loses all: no durable write may say that it is
// done, whatever sync of the program takes the news first.
func TestDiskLosesDurableWrites(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const n, len, apart = 192, 512, 64 << 10
		f, err := Open(fullDisk(t), OpenOptions{})
		require.NoError(t, err)
		defer f.Close()
		r := newRig(t, cfg, f.Segment(), 1<<20)
		for i := range r.mem {
			r.mem[i] = 0xa5
		}
		for i := range uint64(n) {
			d := driver.Desc{Local: i * len, Remote: i * apart, Len: len,
				LocalKey: r.local, RemoteKey: r.remote}
			batch := driver.Batch{Op: driver.Write, Durable: true, Descs: []driver.Desc{d}}
			require.NoError(t, r.p.Submit(i, &batch))
			if i%16 == 0 {
				_ = f.f.Sync() // the program's own, by the descriptor that was registered
			}
		}
		done, failed := 0, 0
		for done+failed < n {
			for _, err := range r.when(t, "a completion", func() bool { return true }) {
				if err == nil {
					done++
				} else if failed++; !errors.Is(err, syscall.EIO) {
					t.Errorf("a write that was lost: %v", err)
				}
			}
		}
		require.Zero(t, done, "durable writes that the disk has lost were reported done")
	})
}
