// SPDX-License-Identifier: Apache-2.0

package ring

import (
	"syscall"

	"github.com/sluicehq/sluice/driver"
)

// ErrnoErrors are the errors of package driver for the errnos that mean the same in each C library.
var ErrnoErrors = map[syscall.Errno]error{
	0: nil, syscall.EAGAIN: driver.ErrFull, syscall.ERANGE: driver.ErrBounds,
	syscall.EROFS: driver.ErrReadOnly, syscall.EPIPE: driver.ErrPeerLost,
	syscall.EBADF: driver.ErrClosed, syscall.ESTALE: driver.ErrRevoked,
	syscall.EBUSY: driver.ErrBusy,
}

// Refusal returns the error of a submit in C that has returned rc, not 0: an errno in the low 16
// bits, and above them the piece that is wrong. err is the error for the errno. Refusal adds the
// piece to an error that is about one.
func Refusal(rc int64, err error) error {
	switch err {
	case driver.ErrBounds, driver.ErrReadOnly, driver.ErrRevoked, driver.ErrNoRoute:
		return &driver.PieceError{Piece: int(rc >> 16), Err: err}
	}
	return err
}
