// SPDX-License-Identifier: Apache-2.0

package ring

import (
	"syscall"

	"github.com/sluicehq/sluice/driver"
)

// ErrnoErrors maps an errno to the error of package driver that means the same in every C library.
var ErrnoErrors = map[syscall.Errno]error{
	0: nil, syscall.EAGAIN: driver.ErrFull, syscall.ERANGE: driver.ErrBounds,
	syscall.EROFS: driver.ErrReadOnly, syscall.EPIPE: driver.ErrPeerLost,
	syscall.EBADF: driver.ErrClosed, syscall.ESTALE: driver.ErrRevoked,
	syscall.EBUSY: driver.ErrBusy,
}

// PieceError adds to the error of a batch, which is not nil, the index of the piece that failed, if
// that is known.
func (d Done) PieceError(err error) error {
	if d.Piece < 0 {
		return err
	}
	return &driver.PieceError{Piece: int(d.Piece), Err: err}
}

// Refusal returns the error for rc, the result of a submit in C that was refused. The low 16 bits
// of rc are an errno, for which err is the error, and the bits above them the index of the piece at
// fault. Refusal adds that index if the error is about one piece.
func Refusal(rc int64, err error) error {
	switch err {
	case driver.ErrBounds, driver.ErrReadOnly, driver.ErrRevoked, driver.ErrNoRoute:
		return &driver.PieceError{Piece: int(rc >> 16), Err: err}
	}
	return err
}
