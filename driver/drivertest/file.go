// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// fileGuard is what lies painted around memory in a file: nothing may change it.
const fileGuard = 64 << 10

// FileMemory makes memory that is a range of a new file in a directory, which has no name.
// The range begins at off beyond a guard, so that off says how it is aligned. The memory's
// Free looks at the bytes around it.
func FileMemory(dir string, off uint64) Allocator {
	return func(n uint64) (*Space, error) {
		f, err := os.CreateTemp(dir, "drivertest")
		if err != nil {
			return nil, err
		}
		if err := os.Remove(f.Name()); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		return wholeFile(f, off, n, f.Close)
	}
}

// NamedFileMemory is FileMemory whose files keep their names until they are freed: NVIDIA's
// libcufile opens a file anew by its name.
func NamedFileMemory(dir string, off uint64) Allocator {
	return func(n uint64) (*Space, error) {
		f, err := os.CreateTemp(dir, "drivertest")
		if err != nil {
			return nil, err
		}
		return wholeFile(f, off, n, func() error {
			return errors.Join(os.Remove(f.Name()), f.Close())
		})
	}
}

func wholeFile(f *os.File, off, n uint64, free func() error) (*Space, error) {
	space, err := fileSpace(f, 0, off, n, free)
	if err != nil {
		return nil, errors.Join(err, free())
	}
	return space, nil
}

// DeviceMemory makes memory that is ranges of one block device of that size, each aligned
// as FileMemory has it. What was freed is used again only when none of it is in use.
func DeviceMemory(path string, size, off uint64) Allocator {
	var mu sync.Mutex
	var used, next uint64
	return func(n uint64) (*Space, error) {
		mu.Lock()
		defer mu.Unlock()
		if used == 0 {
			next = 0
		}
		whole := (2*fileGuard + off + n + fileGuard - 1) &^ (fileGuard - 1)
		if next+whole > size {
			return nil, fmt.Errorf("%s: %d bytes at %d do not fit in %d", path, whole, next, size)
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			return nil, err
		}
		space, err := fileSpace(f, next, off, n, func() error {
			mu.Lock()
			defer mu.Unlock()
			used--
			return f.Close()
		})
		if err != nil {
			return nil, errors.Join(err, f.Close())
		}
		next, used = next+whole, used+1
		space.Bytes = deviceBytes{space.Bytes.(fileBytes)}
		return space, nil
	}
}

// fileSpace lays a guard, the memory and another guard into a file.
func fileSpace(f *os.File, at, off, n uint64, done func() error) (*Space, error) {
	before, after := painted(fileGuard+off, at+1), painted(fileGuard, at+2)
	start := at + uint64(len(before))
	err := writeAll(f, at, before)
	if err == nil {
		err = writeAll(f, start+n, after)
	}
	if err == nil {
		err = writeZeros(f, start, n)
	}
	if err != nil {
		return nil, err
	}
	free := func() error {
		return errors.Join(unchanged(f, at, before), unchanged(f, start+n, after), done())
	}
	return &Space{
		Segment: driver.Segment{Kind: driver.File, Len: n, FD: int(f.Fd()), FileOff: start},
		Bytes:   fileBytes{f, start, n},
		Free:    free,
	}, nil
}

func writeAll(f *os.File, at uint64, p []byte) error {
	_, err := f.WriteAt(p, int64(at))
	return err
}

func writeZeros(f *os.File, at, n uint64) error {
	zeros := make([]byte, min(n, 1<<20))
	for n > 0 {
		k := min(n, uint64(len(zeros)))
		if err := writeAll(f, at, zeros[:k]); err != nil {
			return err
		}
		at, n = at+k, n-k
	}
	return nil
}

// unchanged compares a guard with what was painted.
func unchanged(f *os.File, at uint64, want []byte) error {
	got := make([]byte, len(want))
	if _, err := f.ReadAt(got, int64(at)); err != nil {
		return fmt.Errorf("read bytes beside the memory: %w", err)
	}
	if bytes.Equal(got, want) {
		return nil
	}
	return fmt.Errorf("bytes of the file beside the memory, from %d on: %s", at,
		difference(got, want))
}

// fileBytes is Bytes over a range of a file.
type fileBytes struct {
	f     *os.File
	at, n uint64
}

func (b fileBytes) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 || uint64(off)+uint64(len(p)) > b.n {
		return 0, errPastEnd
	}
	return b.f.ReadAt(p, int64(b.at)+off)
}

// deviceBytes is fileBytes of a block device. Where ReadAt meets bytes that io_uring is just
// writing past the page cache, the kernel keeps the old ones in the cache for good: it drops them
// as a write begins, and as one ends that a system call waited for, but not as one of io_uring
// ends. So ReadAt drops them first.
type deviceBytes struct{ fileBytes }

func (b deviceBytes) ReadAt(p []byte, off int64) (int, error) {
	if err := unix.Fadvise(int(b.f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return 0, fmt.Errorf("drop what is cached of the device: %w", err)
	}
	return b.fileBytes.ReadAt(p, off)
}

func (b fileBytes) WriteAt(p []byte, off int64) (int, error) {
	if off < 0 || uint64(off)+uint64(len(p)) > b.n {
		return 0, errPastEnd
	}
	return b.f.WriteAt(p, int64(b.at)+off)
}
