// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"io"
	"syscall"
)

// FileError is the error of a transfer that failed at a file. A *PieceError wraps it and names the
// piece of the batch, unless Op is "sync".
type FileError struct {
	Op   string // "read", "write", "sync" or "reserve"
	Name string // the file's name, as the kernel knows it now
	Off  int64  // offset in the file at which it failed, in bytes; -1 of a sync
	// a syscall.Errno, io.ErrUnexpectedEOF where the file has become shorter, ErrFault, or the
	// error of the library that moves the bytes
	Err error
}

// Error names the file, the offset, the cause and, where it is known, the fix.
func (e *FileError) Error() string {
	where := ""
	if e.Off >= 0 {
		where = fmt.Sprintf(" at byte %d", e.Off)
	}
	return fmt.Sprintf("%s %s%s: %v%s", e.Op, e.Name, where, e.Err, e.cure())
}

// Unwrap returns the cause.
func (e *FileError) Unwrap() error { return e.Err }

func (e *FileError) cure() string {
	switch {
	case errors.Is(e.Err, syscall.ENOSPC), errors.Is(e.Err, syscall.EDQUOT):
		return " (reserve the room beforehand with posix.File.Grow)"
	case errors.Is(e.Err, syscall.EBADF) && e.Op == "read":
		return " (its descriptor was opened for writing alone: open it with O_RDWR)"
	case errors.Is(e.Err, syscall.EIO):
		return " (the device failed, see the kernel's log: what was written before may be " +
			"lost as well)"
	case errors.Is(e.Err, io.ErrUnexpectedEOF):
		return " (the file ends before: it was cut since it was registered, or, of a Segment " +
			"that Extends it, this part was never written)"
	}
	return ""
}
