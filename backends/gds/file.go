// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/csrc/cufile"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// file is an open file or block device that memories lie in.
type file struct {
	id     ownfiles.ID
	refs   int // memories; guarded by flights.Mu
	fd     int // a descriptor of our own
	plain  int // the same file without O_DIRECT, for edges
	handle uint64
	why    string // it was opened without O_DIRECT; empty: with it

	// Guarded by flights.Mu.
	turn     *job // waits to write, with no more of the other kind beginning
	turnEdge bool // its kind
}

// openFile opens the file behind a caller's descriptor for ourselves, so that nothing of what we do
// depends on how long the caller keeps it, and registers it with cuFile. That wants O_DIRECT for
// the direct way; without, newer libraries take a file all the same.
func openFile(fd int, id ownfiles.ID) (*file, error) {
	f := &file{id: id}
	var err error
	if f.fd, err = ownfiles.Reopen(fd, id.Flags|unix.O_DIRECT); err != nil {
		f.why = err.Error()
		if f.fd, err = ownfiles.Reopen(fd, id.Flags); err != nil {
			return nil, err
		}
	}
	if f.plain, err = ownfiles.Reopen(fd, id.Flags); err != nil {
		return nil, errors.Join(err, unix.Close(f.fd))
	}
	if f.handle, err = cufile.Open(f.fd); err != nil {
		return nil, errors.Join(err, unix.Close(f.fd), unix.Close(f.plain))
	}
	return f, nil
}

func (f *file) close() error {
	cufile.Close(f.handle)
	return errors.Join(unix.Close(f.fd), unix.Close(f.plain))
}

// name is what the system calls it now.
func (f *file) name() string { return f.id.Name(f.fd) }

// use finds the file of a segment, or opens it.
func (b *Backend) use(seg *driver.Segment) (*file, error) {
	id, err := ownfiles.Admit(seg)
	if err != nil {
		return nil, err
	}
	if id.Flags&unix.O_ACCMODE == unix.O_WRONLY {
		return nil, fmt.Errorf("descriptor %d may only be written: use posix, or open it with "+
			"O_RDWR: %w", seg.FD, driver.ErrNotSupported)
	}
	id.Flags &^= unix.O_DIRECT // either way of opening it is used
	b.flights.Mu.Lock()
	defer b.flights.Mu.Unlock()
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
	b.flights.Mu.Lock()
	defer b.flights.Mu.Unlock()
	if f.refs--; f.refs > 0 {
		return nil
	}
	delete(b.files, f.id)
	if err := f.close(); err != nil {
		return fmt.Errorf("close file: %w", err)
	}
	return nil
}
