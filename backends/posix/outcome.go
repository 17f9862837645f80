// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"io"
	"syscall"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// judge says what to do after a request has landed: to repeat it with what is left, or to
// end it, with an error or without.
func (r *request) judge(res int) (again bool, err error) {
	switch {
	case res < 0:
		return r.refused(syscall.Errno(-res))
	case r.kind == syncFile:
		return false, nil
	case res == 0:
		return false, r.stuck()
	}
	r.advance(uint64(res))
	switch {
	case r.done >= r.need, r.j.Err != nil:
		return false, nil
	case r.past && r.done%r.f.block != 0:
		if r.kind == readInto {
			// past the page cache a read ends within a block only where the file does
			return false, r.stuck()
		}
		r.past, r.fixed = false, -1
	}
	return true, nil
}

// refused judges an errno.
func (r *request) refused(errno syscall.Errno) (again bool, err error) {
	ended := r.j != nil && r.j.Err != nil
	switch errno {
	case syscall.EINTR, syscall.EAGAIN, syscall.ECANCELED:
		// Without our asking for it the kernel cancels what a thread had begun that has ended.
		if ended {
			return false, nil
		}
		if r.retries++; r.retries < retriesMax {
			return true, nil
		}
	case syscall.EFAULT:
		return false, r.failure(driver.ErrFault)
	case syscall.EINVAL:
		if r.past && !ended { // O_DIRECT was granted by open, and is not by this filesystem
			r.f.refuse("the filesystem refuses O_DIRECT at work: " + errno.Error())
			r.past, r.fixed = false, -1
			return true, nil
		}
	}
	return false, r.failure(errno)
}

// refuse has all further requests go through the page cache. The descriptor stays: others
// may be under way.
func (f *file) refuse(why string) {
	if f.block != 0 {
		f.refused, f.why = true, why
	}
}

// stuck is the error of a request that the kernel does no more of.
func (r *request) stuck() error {
	if r.kind == readInto {
		return r.failure(io.ErrUnexpectedEOF)
	}
	return r.failure(io.ErrShortWrite)
}

// failure names file, offset and piece.
func (r *request) failure(cause error) error {
	if r.kind == syncFile {
		name := ownfiles.ID{}.Name(r.inode.sync)
		return &FileError{Op: "sync", Name: name, Off: -1, Err: cause}
	}
	e := &FileError{Op: "read", Name: r.f.name(), Off: int64(r.off + r.done), Err: cause}
	if r.kind == writeFrom {
		e.Op = "write"
	}
	c := r.first
	at := r.j.place(c)
	for uint64(e.Off) >= at.off+uint64(len(at.mem)) {
		next := cursor{Item: c.Item + 1}
		if next.Item > r.last.Item || next == r.last {
			break
		}
		c, at = next, r.j.place(next)
	}
	if uint64(e.Off) < at.off { // in the gap before it
		e.Off = int64(at.off)
	}
	return &driver.PieceError{Piece: int(r.j.Items[c.Item].Index), Err: e}
}
