// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/testing/machine"
	"github.com/sluicehq/sluice/internal/testing/testkit"
)

// bothPaths runs a test over each of them.
func bothPaths(t *testing.T, run func(t *testing.T, cfg Config)) {
	for name, cfg := range map[string]Config{"ring": {Path: PathRing},
		"threads": {Path: PathThreads, Threads: 3}} {
		t.Run(name, func(t *testing.T) {
			testkit.CheckLeaks(t)
			run(t, cfg)
		})
	}
}

// newFile makes a file of that many bytes.
func newFile(t testing.TB, dir string, n int64) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "file"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = f.Close() })
	require.NoError(t, f.Truncate(n))
	return f
}

func fileSegment(f *os.File, n uint64) driver.Segment {
	return driver.Segment{Kind: driver.File, Len: n, FD: int(f.Fd())}
}

// move runs a batch and returns its outcome.
func (r *rig) move(t *testing.T, op driver.Op, descs ...driver.Desc) error {
	t.Helper()
	for i := range descs {
		descs[i].LocalKey, descs[i].RemoteKey = r.local, r.remote
	}
	if err := r.p.Submit(7, &driver.Batch{Op: op, Descs: descs}); err != nil {
		return err
	}
	return r.outcome(t, 7)
}

// outcome waits for the only tag under way.
func (r *rig) outcome(t *testing.T, tag uint64) error {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Microsecond) {
		k, err := r.b.Poll(r.done[:])
		switch {
		case err != nil:
			t.Fatalf("poll: %v", err)
		case k == 1 && r.done[0].Tag == tag:
			return r.done[0].Err
		case k > 0:
			t.Fatalf("%d completions, the first %+v", k, r.done[0])
		case time.Now().After(end):
			t.Fatalf("no completion")
		}
	}
}

// wantFileError wants an error to say which piece failed, how, and where.
func wantFileError(t *testing.T, err error, piece int, op string, off int64, cause error) {
	t.Helper()
	var p *driver.PieceError
	var f *driver.FileError
	if !errors.As(err, &p) || !errors.As(err, &f) || !errors.Is(err, cause) {
		t.Fatalf("%v: want a *PieceError of a *driver.FileError of %v", err, cause)
	}
	if p.Piece != piece || f.Op != op || f.Off != off && off >= 0 {
		t.Errorf("%v: want piece %d, %s, byte %d", err, piece, op, off)
	}
}

func TestFileCutShort(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		for _, buffered := range []bool{false, true} {
			const size, left = 8 << 20, 3<<20 + 1234
			cfg.Buffered = buffered
			f := newFile(t, t.TempDir(), size)
			r := newRig(t, cfg, fileSegment(f, size), size)
			require.NoError(t, r.move(t, driver.Read, driver.Desc{Len: size}))
			require.NoError(t, f.Truncate(left))
			whole := []driver.Desc{{Len: 1 << 20}, {Local: 1 << 20, Remote: 1 << 20,
				Len: size - 1<<20}}
			wantFileError(t, r.move(t, driver.Read, whole...), 1, "read", -1, io.ErrUnexpectedEOF)
			for _, n := range []uint64{1, 656} {
				gone := driver.Desc{Remote: left - 1, Len: n + 1}
				wantFileError(t, r.move(t, driver.Read, gone), 0, "read", left, io.ErrUnexpectedEOF)
			}
			for _, d := range []driver.Desc{{Len: left}, {Remote: left - 656, Len: 656}} {
				require.NoError(t, r.move(t, driver.Read, d), "read of %d bytes that are there",
					d.Len)
			}
		}
	})
}

func TestDescriptorClosed(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const size = 1 << 20
		f := newFile(t, t.TempDir(), size)
		r := newRig(t, cfg, fileSegment(f, size), size)
		gone := fileSegment(f, size)
		require.NoError(t, f.Close())
		if _, err := r.b.Register(gone); !errors.Is(err, syscall.EBADF) {
			t.Errorf("register a closed descriptor: %v", err)
		}
		copy(r.mem, "still here")
		require.NoError(t, r.move(t, driver.Write, driver.Desc{Len: size}),
			"write to a file whose caller has closed it")
		clear(r.mem)
		if err := r.move(t, driver.Read, driver.Desc{Len: 10}); err != nil ||
			string(r.mem[:10]) != "still here" {
			t.Errorf("read %q, %v", r.mem[:10], err)
		}
	})
}

func TestDiskFull(t *testing.T) {
	device, _ := machine.LoopDevice(t, machine.DiskFile(t, 24<<20))
	machine.FormatDisk(t, device)
	dir, _ := machine.MountDisk(t, device)
	bothPaths(t, func(t *testing.T, cfg Config) {
		for _, buffered := range []bool{false, true} {
			cfg.Buffered = buffered
			const size = 64 << 20
			f := newFile(t, dir, size) // has no blocks yet
			r := newRig(t, cfg, fileSegment(f, size), size)
			for i := range r.mem {
				r.mem[i] = byte(i)
			}
			err := r.move(t, driver.Write, driver.Desc{Len: size})
			wantFileError(t, err, 0, "write", -1, syscall.ENOSPC)
			require.NoError(t, f.Truncate(0))
			require.NoError(t, f.Truncate(size))
			require.NoError(t, r.move(t, driver.Write, driver.Desc{Len: 1 << 20}),
				"write when there is room again")
		}
	})
}

// TestDeviceFails cuts the file under a loop device: what is past its end is EIO.
func TestDeviceFails(t *testing.T) {
	file := machine.DiskFile(t, 8<<20)
	device, _ := machine.LoopDevice(t, file)
	bothPaths(t, func(t *testing.T, cfg Config) {
		require.NoError(t, os.Truncate(file, 8<<20))
		f, err := Open(device, OpenOptions{})
		require.NoError(t, err)
		defer f.Close()
		r := newRig(t, cfg, f.Segment(), 8<<20)
		require.NoError(t, r.move(t, driver.Read, driver.Desc{Len: 8 << 20}))
		require.NoError(t, os.Truncate(file, 4<<20))
		require.NoError(t, r.move(t, driver.Read, driver.Desc{Len: 4 << 20}),
			"read of what is there")
		err = r.move(t, driver.Read, driver.Desc{Len: 1 << 20}, driver.Desc{Local: 1 << 20,
			Remote: 5 << 20, Len: 3 << 20})
		wantFileError(t, err, 1, "read", -1, syscall.EIO)
	})
}

// TestFlagsStay opens what the caller has opened with O_DIRECT, or O_DSYNC, or both.
func TestFlagsStay(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const size = 300_000
		made := newFile(t, t.TempDir(), size)
		for _, flags := range []int{unix.O_DIRECT, unix.O_DSYNC, unix.O_DIRECT | unix.O_DSYNC} {
			f, err := os.OpenFile(made.Name(), os.O_RDWR|flags, 0)
			require.NoError(t, err)
			r := newRig(t, cfg, fileSegment(f, size), size)
			for i := range r.mem {
				r.mem[i] = byte(i * flags >> 7)
			}
			for off := uint64(0); off < 3; off++ {
				require.NoError(t, r.move(t, driver.Write, driver.Desc{Local: off, Remote: off,
					Len: size - off}))
			}
			if got, err := os.ReadFile(f.Name()); err != nil || !bytes.Equal(got, r.mem) {
				t.Errorf("flags %#x: the file differs (%v)", flags, err)
			}
			for _, fd := range []int{r.file.FD, r.file.Direct} {
				got, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
				if err != nil || got&unix.O_DSYNC != flags&unix.O_DSYNC {
					t.Errorf("opened with %#x, and once more with %#x, %v", flags, got, err)
				}
			}
			require.NoError(t, f.Close())
		}
	})
}
