// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// RoomError says that the disk has no room for a store. It wraps the system's error:
// syscall.ENOSPC, or EDQUOT.
type RoomError struct {
	Path string
	Need uint64 // bytes of the store
	Free uint64 // bytes that the filesystem had left before
	Err  error
}

// Error names the file and what mends it.
func (e *RoomError) Error() string {
	return fmt.Sprintf("%s needs %d bytes, its filesystem has %d left: %v (free some, choose a "+
		"path on another disk, or fewer blocks)",
		e.Path, e.Need, e.Free, e.Err)
}

// Unwrap returns the cause.
func (e *RoomError) Unwrap() error { return e.Err }

// reserve makes the file as long as that, with room on the disk where the filesystem can
// say so. What cannot fit is not begun: it would take from others what is left.
func reserve(f *os.File, n uint64) error {
	free, known := room(f)
	if known && n > free {
		return &RoomError{Path: f.Name(), Need: n, Free: free, Err: unix.ENOSPC}
	}
	for {
		switch err := unix.Fallocate(int(f.Fd()), 0, 0, int64(n)); {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EOPNOTSUPP):
			return f.Truncate(int64(n))
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
			return &RoomError{Path: f.Name(), Need: n, Free: free, Err: err}
		default:
			return os.NewSyscallError("fallocate", err)
		}
	}
}

// room is how many bytes a program like this one may still put there. A filesystem that counts
// no blocks has no such number.
func room(f *os.File) (free uint64, known bool) {
	var s unix.Statfs_t
	if unix.Fstatfs(int(f.Fd()), &s) != nil || s.Blocks == 0 || s.Bsize <= 0 {
		return 0, false
	}
	blocks := s.Bavail
	if os.Geteuid() == 0 {
		blocks = s.Bfree // what is kept back is for root
	}
	return blocks * uint64(s.Bsize), true
}
