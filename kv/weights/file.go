// SPDX-License-Identifier: Apache-2.0

package weights

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// File is an open file that bypasses the page cache (O_DIRECT) unless the cache already holds most
// of the file. Weights are read once: a copy in the page cache costs time and evicts data of
// others.
//
// O_DIRECT needs memory at the same offset within a page as the bytes in the file, which
// Config.Straight arranges. Other reads go through the page cache, as do all reads if the
// filesystem does not support O_DIRECT. All methods except Close may be called by any goroutine.
type File struct {
	f    *os.File
	past int // descriptor of the same file, opened with O_DIRECT; -1: none
	size int64

	straight atomic.Bool  // reads use O_DIRECT where they can
	passed   atomic.Int64 // bytes read with O_DIRECT
}

// pageBytes is the alignment that O_DIRECT needs for offsets, lengths and addresses.
const pageBytes = 4 << 10

// OpenFile opens a file to read. It returns engine.ErrCorrupt if that is not a regular file.
func OpenFile(path string) (*File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // else opening a FIFO would block
	if err != nil {
		return nil, err // names the path
	}
	file := &File{f: f, past: -1}
	if err := file.open(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return file, nil
}

func (f *File) open() error {
	info, err := f.f.Stat()
	switch {
	case err != nil:
		return err
	case info.IsDir():
		return faulty(f.f.Name(), "", "it is a directory: name the files in it")
	case !info.Mode().IsRegular():
		return faulty(f.f.Name(), "", "it is no regular file")
	}
	f.size = info.Size()
	past, err := unix.Open("/proc/self/fd/"+strconv.Itoa(int(f.f.Fd())),
		unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err == nil {
		f.past = past
	}
	f.choose()
	return nil
}

// choose sets straight unless more than half of the file is in the page cache.
func (f *File) choose() {
	cached, known := f.Cached()
	f.straight.Store(f.past >= 0 && !(known && cached > f.size/2))
}

// Cached returns how many bytes of the file are in the page cache; known is false if the
// kernel cannot tell: Linux before 6.5.
func (f *File) Cached() (bytes int64, known bool) {
	var s unix.Cachestat_t
	if err := unix.Cachestat(uint(f.f.Fd()), &unix.CachestatRange{Len: uint64(f.size)}, &s,
		0); err != nil {
		return 0, false
	}
	return min(int64(s.Cache)*int64(os.Getpagesize()), f.size), true
}

// Drop writes the file back and drops it from the page cache, so that later reads come from the
// disk.
func (f *File) Drop() error {
	fd := int(f.f.Fd())
	if err := unix.Fdatasync(fd); err != nil && !errors.Is(err, unix.EROFS) &&
		!errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("drop %s from the page cache: %w", f.f.Name(),
			os.NewSyscallError("fdatasync", err))
	}
	if err := unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED); err != nil {
		return fmt.Errorf("drop %s from the page cache: %w", f.f.Name(),
			os.NewSyscallError("posix_fadvise", err))
	}
	f.choose()
	return nil
}

// Passed returns how many bytes have been read past the page cache so far.
func (f *File) Passed() int64 { return f.passed.Load() }

// Source returns the file as an argument for Open. Errors name its path.
func (f *File) Source() Source { return Source{Name: f.f.Name(), ReaderAt: f, Size: f.size} }

// ReadAt implements io.ReaderAt.
func (f *File) ReadAt(p []byte, off int64) (n int, err error) {
	head, whole := f.split(p, off)
	if whole == 0 {
		return f.f.ReadAt(p, off)
	}
	if head > 0 {
		if n, err = f.f.ReadAt(p[:head], off); err != nil {
			return n, err
		}
	}
	m, err := f.readPast(p[head:head+whole], off+int64(head))
	n = head + m
	if err != nil || n == len(p) {
		return n, err
	}
	m, err = f.f.ReadAt(p[n:], off+int64(n))
	return n + m, err
}

// split returns which part of a read may use O_DIRECT: whole bytes after head bytes.
func (f *File) split(p []byte, off int64) (head, whole int) {
	if !f.straight.Load() || off < 0 {
		return 0, 0
	}
	head = int(-off & (pageBytes - 1))
	if head >= len(p) {
		return 0, 0
	}
	whole = (len(p) - head) &^ (pageBytes - 1)
	if whole == 0 || addressOf(p[head:])%pageBytes != 0 {
		return 0, 0
	}
	return head, whole
}

// readPast reads whole pages with O_DIRECT. If the filesystem refuses that, this and all later
// reads go through the page cache.
func (f *File) readPast(p []byte, off int64) (n int, err error) {
	for n < len(p) {
		m, err := unix.Pread(f.past, p[n:], off+int64(n))
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EINVAL):
			f.straight.Store(false)
			m, err := f.f.ReadAt(p[n:], off+int64(n))
			return n + m, err
		case err != nil:
			return n, &os.PathError{Op: "read", Path: f.f.Name(), Err: err}
		case m == 0:
			return n, io.EOF
		default:
			n += m
			f.passed.Add(int64(m))
			if m%pageBytes != 0 {
				return n, io.EOF // the file ends within the page
			}
		}
	}
	return n, nil
}

// Close closes the file. No read may be in progress.
func (f *File) Close() error {
	err := f.f.Close()
	if f.past >= 0 {
		err = errors.Join(err, unix.Close(f.past))
		f.past = -1
	}
	return err
}
