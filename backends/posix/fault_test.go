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
	"github.com/sluicehq/sluice/internal/testing/disk"
	"github.com/sluicehq/sluice/internal/testing/leak"
)

// bothPaths runs a test over each of them.
func bothPaths(t *testing.T, run func(t *testing.T, cfg Config)) {
	for name, cfg := range map[string]Config{"ring": {Path: PathRing},
		"threads": {Path: PathThreads, Threads: 3}} {
		t.Run(name, func(t *testing.T) {
			leak.Check(t)
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
	var f *FileError
	if !errors.As(err, &p) || !errors.As(err, &f) || !errors.Is(err, cause) {
		t.Fatalf("%v: want a *PieceError of a *FileError of %v", err, cause)
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
				if err := r.move(t, driver.Read, d); err != nil {
					t.Errorf("read of %d bytes that are there: %v", d.Len, err)
				}
			}
		}
	})
}

// TestFileCutMeanwhile cuts and grows a file under reads: each ends, well or with the
// typed error.
func TestFileCutMeanwhile(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const size = 4 << 20
		f := newFile(t, t.TempDir(), size)
		r := newRig(t, cfg, fileSegment(f, size), size)
		stop, stopped := make(chan struct{}), make(chan error)
		go func() {
			var err error
			for i := 0; err == nil; i++ {
				select {
				case <-stop:
					stopped <- nil
					return
				default:
					err = f.Truncate(int64(i % 5 * (size / 4)))
				}
			}
			<-stop
			stopped <- err
		}()
		failed := 0
		for range 200 {
			err := r.move(t, driver.Read, driver.Desc{Len: size - 1})
			if err == nil {
				continue
			}
			failed++
			wantFileError(t, err, 0, "read", -1, io.ErrUnexpectedEOF)
		}
		close(stop)
		require.NoError(t, <-stopped)
		t.Logf("%d of 200 reads found the file cut", failed)
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
		if err := r.move(t, driver.Write, driver.Desc{Len: size}); err != nil {
			t.Errorf("write to a file whose caller has closed it: %v", err)
		}
		clear(r.mem)
		if err := r.move(t, driver.Read, driver.Desc{Len: 10}); err != nil ||
			string(r.mem[:10]) != "still here" {
			t.Errorf("read %q, %v", r.mem[:10], err)
		}
	})
}

func TestRegisterRefuses(t *testing.T) {
	leak.Check(t)
	b, err := New(Config{})
	require.NoError(t, err)
	defer b.Close()
	f := newFile(t, t.TempDir(), 5000)
	reader, err := os.Open(f.Name())
	require.NoError(t, err)
	defer reader.Close()
	// writes of any offset would go to its end
	appender, err := os.OpenFile(f.Name(), os.O_RDWR|os.O_APPEND, 0)
	require.NoError(t, err)
	defer appender.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	require.NoError(t, err)
	defer null.Close()
	past := fileSegment(f, 4000)
	past.FileOff = 1001
	for name, c := range map[string]struct {
		seg  driver.Segment
		want error
	}{
		"longer than the file": {fileSegment(f, 5001), driver.ErrBounds},
		"past the end":         {past, driver.ErrBounds},
		"may only be read":     {fileSegment(reader, 5000), driver.ErrReadOnly},
		"appends":              {fileSegment(appender, 5000), driver.ErrNotSupported},
		"no file":              {fileSegment(null, 5000), driver.ErrNotSupported},
	} {
		if _, err := b.Register(c.seg); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	seg := fileSegment(reader, 5000)
	seg.ReadOnly = true
	if _, err := b.Register(seg); err != nil {
		t.Errorf("a file that may only be read, for reading: %v", err)
	}
}

func TestDiskFull(t *testing.T) {
	device, _ := disk.Loop(t, disk.File(t, 24<<20))
	disk.Format(t, device)
	dir, _ := disk.Mount(t, device)
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
			if err := r.move(t, driver.Write, driver.Desc{Len: 1 << 20}); err != nil {
				t.Errorf("write when there is room again: %v", err)
			}
		}
	})
}

// TestDeviceFails cuts the file under a loop device: what is past its end is EIO.
func TestDeviceFails(t *testing.T) {
	file := disk.File(t, 8<<20)
	device, _ := disk.Loop(t, file)
	bothPaths(t, func(t *testing.T, cfg Config) {
		require.NoError(t, os.Truncate(file, 8<<20))
		f, err := Open(device, OpenOptions{})
		require.NoError(t, err)
		defer f.Close()
		r := newRig(t, cfg, f.Segment(), 8<<20)
		require.NoError(t, r.move(t, driver.Read, driver.Desc{Len: 8 << 20}))
		require.NoError(t, os.Truncate(file, 4<<20))
		if err := r.move(t, driver.Read, driver.Desc{Len: 4 << 20}); err != nil {
			t.Errorf("read of what is there: %v", err)
		}
		err = r.move(t, driver.Read, driver.Desc{Len: 1 << 20}, driver.Desc{Local: 1 << 20,
			Remote: 5 << 20, Len: 3 << 20})
		wantFileError(t, err, 1, "read", -1, syscall.EIO)
	})
}

// TestMixedWrites has neighbours in the same pages written past the page cache and through
// it, from many batches at once: none of the bytes may get lost.
func TestMixedWrites(t *testing.T) {
	bothPaths(t, func(t *testing.T, cfg Config) {
		const part, parts = 100_000, 40
		f := newFile(t, t.TempDir(), part*parts)
		r := newRig(t, cfg, fileSegment(f, part*parts), part*parts)
		s := sabotage(r, nil)
		for round := range 6 {
			for i := range r.mem {
				r.mem[i] = byte(i*7 + i>>13 + round)
			}
			for i := range uint64(parts) {
				d := []driver.Desc{{Local: i * part, Remote: i * part, Len: part, LocalKey: r.local,
					RemoteKey: r.remote}}
				require.NoError(t, r.p.Submit(i, &driver.Batch{Op: driver.Write, Descs: d}))
			}
			for left := parts; left > 0; {
				k, err := r.b.Poll(r.done[:])
				for _, c := range r.done[:k] {
					err = errors.Join(err, c.Err)
				}
				require.NoError(t, err)
				left -= k
			}
			require.NoError(t, f.Sync(), "sync")
			require.NoError(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
			got, err := os.ReadFile(f.Name())
			if err != nil || !bytes.Equal(got, r.mem) {
				t.Fatalf("round %d: the file differs from what was written (%v)", round, err)
			}
		}
		if s.kinds[cached] == 0 || s.kinds[direct] == 0 || s.mixed > 0 {
			t.Errorf("%d writes through the page cache and %d past it, %d of them beside "+
				"the other kind",
				s.kinds[cached], s.kinds[direct], s.mixed)
		}
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
			for fd := range r.b.descriptors() {
				got, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
				if err != nil || got&unix.O_DSYNC != flags&unix.O_DSYNC {
					t.Errorf("opened with %#x, and once more with %#x, %v", flags, got, err)
				}
			}
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
			require.NoError(t, f.Close())
		}
	})
}

// descriptors visits those of all files.
func (b *Backend) descriptors() func(yield func(int) bool) {
	return func(yield func(int) bool) {
		for _, f := range b.files {
			for _, fd := range []int{f.fd, f.direct} {
				if fd >= 0 && !yield(fd) {
					return
				}
			}
		}
	}
}
