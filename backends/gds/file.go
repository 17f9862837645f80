// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/csrc"
)

// fileID tells files apart: registrations of one file share its handle.
type fileID struct {
	dev, ino uint64
	flags    int // how the caller's descriptor was opened
}

// sameFile reports whether both are one file on the disk, however it was opened.
func (id fileID) sameFile(other fileID) bool { return id.dev == other.dev && id.ino == other.ino }

// file is an open file or block device that memories lie in.
type file struct {
	id     fileID
	refs   int // memories; guarded by Backend.mu
	fd     int // a descriptor of our own
	plain  int // the same file without O_DIRECT, for edges
	handle uint64
	why    string // it was opened without O_DIRECT; empty: with it

	// Guarded by Backend.mu.
	turn     *job // waits to write, with no more of the other kind beginning
	turnEdge bool // its kind
}

// openFile opens the file behind a caller's descriptor for ourselves, so that nothing of what we do depends on how long
// the caller keeps it, and registers it with cuFile. That wants O_DIRECT for the direct way; without, newer libraries take
// a file all the same.
func openFile(fd int, id fileID) (*file, error) {
	f := &file{id: id}
	mode := id.flags &^ unix.O_DIRECT
	var err error
	if f.fd, err = reopen(fd, mode|unix.O_DIRECT); err != nil {
		f.why = err.Error()
		if f.fd, err = reopen(fd, mode); err != nil {
			return nil, err
		}
	}
	if f.plain, err = reopen(fd, mode); err != nil {
		return nil, errors.Join(err, unix.Close(f.fd))
	}
	if f.handle, err = csrc.OpenCuFile(f.fd); err != nil {
		return nil, errors.Join(err, unix.Close(f.fd), unix.Close(f.plain))
	}
	return f, nil
}

func reopen(fd, flags int) (int, error) {
	again, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("open", err)
	}
	return again, nil
}

func (f *file) close() error {
	csrc.CloseCuFile(f.handle)
	return errors.Join(unix.Close(f.fd), unix.Close(f.plain))
}

// name is what the system calls it now.
func (f *file) name() string {
	name, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(f.fd))
	if err != nil {
		return fmt.Sprintf("file %d:%d", f.id.dev, f.id.ino)
	}
	return name
}

// examineFile looks at a caller's descriptor: what it is, and how many bytes it holds.
func examineFile(fd int) (id fileID, size uint64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return id, 0, fmt.Errorf("descriptor %d: %w", fd, os.NewSyscallError("fstat", err))
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return id, 0, fmt.Errorf("descriptor %d: %w", fd, os.NewSyscallError("fcntl", err))
	}
	if flags&(unix.O_APPEND|unix.O_PATH) != 0 {
		return id, 0, fmt.Errorf("descriptor %d: open it without O_APPEND and O_PATH: %w", fd, backends.ErrNotSupported)
	}
	id = fileID{uint64(st.Dev), st.Ino, flags & (unix.O_ACCMODE | unix.O_SYNC)}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return id, uint64(st.Size), nil
	case unix.S_IFBLK:
		size, err := deviceSize(fd)
		return id, size, err
	}
	return id, 0, fmt.Errorf("descriptor %d is neither a file nor a block device: %w", fd, backends.ErrNotSupported)
}

// deviceSize is where a block device ends. The descriptor's own place in it is not used.
func deviceSize(fd int) (uint64, error) {
	again, err := reopen(fd, unix.O_RDONLY)
	if err != nil {
		return 0, err
	}
	end, err := unix.Seek(again, 0, unix.SEEK_END)
	return uint64(end), errors.Join(err, unix.Close(again))
}

// admit refuses what transfers could not work with.
func admit(seg *backends.Segment, id fileID, size uint64) error {
	switch mode := id.flags & unix.O_ACCMODE; {
	case mode == unix.O_WRONLY:
		return fmt.Errorf("descriptor %d may only be written: open it with O_RDWR: %w", seg.FD, backends.ErrNotSupported)
	case mode == unix.O_RDONLY && !seg.ReadOnly:
		return fmt.Errorf("descriptor %d may only be read: set Segment.ReadOnly or open it with O_RDWR: %w", seg.FD, backends.ErrReadOnly)
	case seg.FileOff > size || seg.Len > size-seg.FileOff:
		return fmt.Errorf("[%d, +%d) of a file of %d bytes: make it as long first, with posix.File.Grow: %w",
			seg.FileOff, seg.Len, size, backends.ErrBounds)
	}
	return nil
}

// use finds the file of a segment, or opens it.
func (b *Backend) use(seg *backends.Segment) (*file, error) {
	id, size, err := examineFile(seg.FD)
	if err != nil {
		return nil, err
	}
	if err := admit(seg, id, size); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	f := b.files[id]
	if f == nil {
		if f, err = openFile(seg.FD, id); err != nil {
			return nil, err
		}
		b.files[id] = f
	}
	f.refs++
	return f, nil
}

// unuse closes a file that no memory lies in any more.
func (b *Backend) unuse(f *file) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if f.refs--; f.refs > 0 {
		return nil
	}
	delete(b.files, f.id)
	if err := f.close(); err != nil {
		return fmt.Errorf("close file: %w", err)
	}
	return nil
}
