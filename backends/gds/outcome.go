// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"errors"
	"fmt"
	"io"
	"syscall"

	"github.com/sluicehq/sluice/csrc/cufile"
	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// judge says what to do after a request has ended: to repeat it with what is left, or to end it,
// with an error or without. What cuFile says of the bytes is held against what was asked for.
func (r *request) judge(d *ring.Done) (again bool, err error) {
	switch {
	case d.Status < 0:
		return r.refused(d)
	case d.Status == 0 && r.write:
		return false, r.failure(io.ErrShortWrite)
	case d.Status == 0:
		return false, r.failure(io.ErrUnexpectedEOF)
	case uint64(d.Status) > r.asked:
		return false, r.failure(fmt.Errorf("cuFile says that it moved %d bytes of %d: %w", d.Status,
			r.asked, driver.ErrCorrupt))
	}
	moved := uint64(d.Status)
	if r.write && !r.edge && moved < r.asked { // go on with whole blocks
		moved &^= blockBytes - 1
	}
	if moved == 0 {
		if r.retries++; r.retries > shortMax {
			r.done += uint64(d.Status)
			return false, r.failure(io.ErrShortWrite)
		}
	}
	r.done += moved
	return r.done < r.n && r.j.Err == nil, nil
}

// refused judges a failure.
func (r *request) refused(d *ring.Done) (again bool, err error) {
	if r.j.Err != nil {
		return false, nil // it has ended anyway
	}
	err = cufile.Status(r.op(), d)
	switch {
	case errors.Is(err, syscall.EINTR), errors.Is(err, syscall.EAGAIN),
		errors.Is(err, driver.ErrAborted):
		// not by us
		if r.retries++; r.retries < retriesMax {
			return true, nil
		}
	}
	return false, r.failure(err)
}

func (r *request) op() string {
	if r.write {
		return "write"
	}
	return "read"
}

// failure names file, offset and piece.
func (r *request) failure(cause error) error {
	piece, before := r.first.Item, r.done+r.first.Off
	for before >= r.j.Items[piece].Len && piece+1 < len(r.j.Items) {
		before -= r.j.Items[piece].Len
		piece++
	}
	return &driver.PieceError{Piece: int(r.j.Items[piece].Index), Err: &FileError{Op: r.op(),
		Name: r.f.name(), Off: int64(r.off + r.done), Err: cause}}
}
