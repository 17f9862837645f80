// SPDX-License-Identifier: Apache-2.0

package files

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// ID identifies a file and how it was opened. Registrations with the same ID share descriptors.
type ID struct {
	Dev, Ino uint64
	Flags    int // the caller's open flags, masked with O_ACCMODE, O_DIRECT and O_SYNC
}

// IsDevice reports whether the file is a block device; otherwise it is a regular file.
func (id ID) IsDevice() bool { return id.Ino == math.MaxUint64 }

// Examine returns the ID and the size in bytes of the file behind a caller's descriptor.
func Examine(fd int) (id ID, size uint64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return id, 0, fmt.Errorf("descriptor %d: %w", fd, os.NewSyscallError("fstat", err))
	}
	flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
	if err != nil {
		return id, 0, fmt.Errorf("descriptor %d: %w", fd, os.NewSyscallError("fcntl", err))
	}
	if flags&(unix.O_APPEND|unix.O_PATH) != 0 {
		return id, 0, fmt.Errorf("descriptor %d: open it without O_APPEND and O_PATH: %w", fd,
			driver.ErrNotSupported)
	}
	id = ID{uint64(st.Dev), st.Ino, flags & (unix.O_ACCMODE | unix.O_DIRECT | unix.O_SYNC)}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return id, uint64(st.Size), nil
	case unix.S_IFBLK:
		id.Dev, id.Ino = uint64(st.Rdev), math.MaxUint64 // a device may have several nodes
		size, err := deviceSize(fd)
		return id, size, err
	}
	return id, 0, fmt.Errorf("descriptor %d is neither a file nor a block device: %w", fd,
		driver.ErrNotSupported)
}

// admit examines the descriptor of a segment, and refuses a descriptor or a range that transfers
// cannot use.
func admit(seg *driver.Segment) (ID, error) {
	id, size, err := Examine(seg.FD)
	if err != nil {
		return id, err
	}
	switch {
	case id.Flags&unix.O_ACCMODE == unix.O_RDONLY && !seg.ReadOnly:
		return id, fmt.Errorf("descriptor %d may only be read: set Segment.ReadOnly or open it "+
			"with O_RDWR: %w", seg.FD, driver.ErrReadOnly)
	case seg.Extends && !seg.ReadOnly && !id.IsDevice():
		size = math.MaxInt64
	}
	if seg.FileOff > size || seg.Len > size-seg.FileOff {
		return id, fmt.Errorf("[%d, +%d) of a file of %d bytes: make it as long first, with "+
			"posix.File.Grow, or set Segment.Extends: %w",
			seg.FileOff, seg.Len, size, driver.ErrBounds)
	}
	return id, nil
}

// Reopen opens the file behind a descriptor again, with other flags. The new descriptor has its own
// open file description and stays valid when the first is closed.
func Reopen(fd, flags int) (int, error) {
	again, err := unix.Open(path(fd), flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, os.NewSyscallError("open", err)
	}
	return again, nil
}

// SyncEntry makes the directory entry of a file durable. If the directory cannot be opened or
// synced, SyncEntry syncs the whole filesystem.
func SyncEntry(f *os.File) error {
	folder, err := os.Open(filepath.Dir(f.Name()))
	if err == nil {
		err = errors.Join(folder.Sync(), folder.Close())
	}
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EINVAL) {
		err = os.NewSyscallError("syncfs", unix.Syncfs(int(f.Fd())))
	}
	if err != nil {
		return fmt.Errorf("sync the folder of %s: %w", f.Name(), err)
	}
	return nil
}

// name returns the present path of the file behind a descriptor.
func name(fd int, id ID) string {
	name, err := os.Readlink(path(fd))
	if err != nil {
		return fmt.Sprintf("file %d:%d", id.Dev, id.Ino)
	}
	return name
}

func path(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }
