// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"errors"
	"fmt"
	"math"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/files"
)

// OpenOptions say which range of a file is opened, and how.
type OpenOptions struct {
	Off, Len uint64 // bytes; Len 0 is all from Off to the end
	Create   bool   // make the file if there is none, so that it stays, and Grow it to the range
	ReadOnly bool
}

// File is a range of an open file or block device, for the engine to register. Only one goroutine
// may use it at a time.
type File struct {
	f        *os.File
	off, n   uint64
	device   bool
	readOnly bool
}

// Open opens a range of a file or of a block device. It returns ErrBounds for a range past the end,
// unless the options let the file grow.
func Open(path string, o OpenOptions) (*File, error) {
	flags := os.O_RDWR
	if o.ReadOnly {
		flags = os.O_RDONLY
	}
	if o.Create {
		flags |= os.O_CREATE
	}
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open region: %w", err)
	}
	r := &File{f: f, off: o.Off, readOnly: o.ReadOnly}
	err = r.open(&o)
	if err == nil && o.Create {
		err = syncEntry(f) // or a loss of power may take the name of what was written durably
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open region of %s: %w", path, err), f.Close())
	}
	return r, nil
}

// syncEntry is files.SyncEntry, a variable so that a test can replace it.
var syncEntry = files.SyncEntry

func (r *File) open(o *OpenOptions) error {
	info, err := r.f.Stat()
	if err != nil {
		return err
	}
	_, size, err := files.Examine(int(r.f.Fd()))
	if err != nil {
		return err
	}
	r.device = info.Mode()&os.ModeDevice != 0
	if o.Off > math.MaxInt64 || o.Len > math.MaxInt64-o.Off {
		return fmt.Errorf("[%d, +%d) is no range of a file: %w", o.Off, o.Len, driver.ErrBounds)
	}
	r.n = o.Len
	if o.Len == 0 {
		r.n = size - min(o.Off, size)
	}
	switch {
	case r.n == 0:
		return fmt.Errorf("no bytes from %d on: give a length: %w", o.Off, driver.ErrBounds)
	case o.Off+r.n <= size:
		return nil
	case o.Create:
		return r.Grow(r.n)
	}
	return fmt.Errorf("[%d, +%d) of %d bytes: set OpenOptions.Create, or open less: %w", o.Off, r.n,
		size, driver.ErrBounds)
}

// Grow makes the range n bytes long and reserves disk space for all of it, so that no later write
// to it runs out of space. The new bytes read as zeros. Regions that are registered keep their
// length. A device, or a filesystem that cannot reserve space, gives ErrNotSupported.
func (r *File) Grow(n uint64) error {
	if n < r.n || n > math.MaxInt64-r.off {
		return fmt.Errorf("grow region from %d to %d bytes: %w", r.n, n, driver.ErrBounds)
	}
	if r.readOnly {
		return fmt.Errorf("grow region: %w", driver.ErrReadOnly)
	}
	if r.device {
		return fmt.Errorf("grow region: a block device has the size it has: %w",
			driver.ErrNotSupported)
	}
	for {
		switch err := unix.Fallocate(int(r.f.Fd()), 0, int64(r.off), int64(n)); err {
		case nil:
			r.n = n
			return nil
		case unix.EINTR:
		case unix.EOPNOTSUPP:
			return fmt.Errorf("grow region: the filesystem cannot reserve room: %w",
				driver.ErrNotSupported)
		default:
			return fmt.Errorf("grow region: %w", &driver.FileError{Op: "reserve", Name: r.f.Name(),
				Off: int64(r.off), Err: err})
		}
	}
}

// Segment returns the segment for Engine.Register. It uses the File's descriptor: do not close the
// File before Register has returned.
func (r *File) Segment() driver.Segment {
	return driver.Segment{Kind: driver.File, Len: r.n, FD: int(r.f.Fd()), FileOff: r.off,
		ReadOnly: r.readOnly}
}

// Close closes the descriptor. Regions that are registered remain usable.
func (r *File) Close() error { return r.f.Close() }
