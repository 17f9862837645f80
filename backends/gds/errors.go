// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"errors"
	"fmt"
	"io"
	"syscall"

	"github.com/sluicehq/sluice/csrc/cufile"
	"github.com/sluicehq/sluice/driver"
)

// FileError is why a transfer failed at a file. A *driver.PieceError around it names the piece of
// the batch.
type FileError struct {
	Op   string // "read" or "write"
	Name string // of the file, as the system knows it now
	Off  int64  // where in the file it ended, in bytes
	// a syscall.Errno, a *cufile.Error, or io.ErrUnexpectedEOF where the file has become shorter
	Err error
}

// Error names the file, the offset and what mends it where that is known.
func (e *FileError) Error() string {
	return fmt.Sprintf("%s %s at byte %d: %v%s", e.Op, e.Name, e.Off, e.Err, e.cure())
}

// Unwrap returns the cause.
func (e *FileError) Unwrap() error { return e.Err }

func (e *FileError) cure() string {
	var said *cufile.Error
	switch {
	case errors.Is(e.Err, syscall.ENOSPC), errors.Is(e.Err, syscall.EDQUOT):
		return " (reserve the room beforehand with posix.File.Grow)"
	case errors.Is(e.Err, syscall.EIO):
		return " (the device failed, see the kernel's log and cuFile's: what was written before " +
			"may be lost as well)"
	case errors.Is(e.Err, io.ErrUnexpectedEOF):
		return " (the file ends before: it was cut since it was registered, or, of a Segment " +
			"that Extends it, this part was never written)"
	case errors.As(e.Err, &said):
		return " (see cuFile's log)"
	}
	return ""
}

func unavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: "gds", Reason: reason, Fix: fix}
}
