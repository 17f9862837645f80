// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/ownfiles"
)

// fileKey tells files apart: registrations with one key share a file.
type fileKey struct {
	ownfiles.ID
	buffered bool // all goes through the page cache
}

// file is an open file or block device that memories lie in.
type file struct {
	fileKey
	refs int // memories; guarded by flights.Mu

	fd      int    // a descriptor of our own, through the page cache
	direct  int    // the same file past the page cache; -1: there is none
	why     string // there is none, or it is of no use
	swapped bool   // direct is the caller's description, and fd another; else the other way round
	block   uint64 // offsets and lengths past the page cache are multiples of it; a power of two
	align   uint64 // so are addresses of this one

	fixed, fixedDirect int32   // places in the table of io_uring; -1: none
	writes             bool    // a writer does short writes through the page cache, not io_uring
	writer             *writer // nil until there is one; guarded by flights.Mu

	inode *inode

	refused bool // direct is of no use, as has turned out: see why; guarded by flights.Mu
}

// openFile opens the file behind a caller's descriptor for ourselves, so that nothing of
// what we do depends on how long the caller keeps it. why says why it is buffered, where it is.
func openFile(fd int, key fileKey, why string) (_ *file, err error) {
	f := &file{fileKey: key, why: why, fd: -1, direct: -1, fixed: -1, fixedDirect: -1}
	defer func() {
		if err != nil {
			_ = f.close()
		}
	}()
	if f.fd, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		f.fd = -1
		return nil, fmt.Errorf("duplicate descriptor %d: %w", fd, os.NewSyscallError("fcntl", err))
	}
	mode := key.Flags &^ unix.O_DIRECT
	if key.Flags&unix.O_DIRECT != 0 {
		if err := f.swapDirect(mode); err != nil {
			return nil, err
		}
	}
	switch {
	case key.buffered:
		err = f.dropDirect()
	case f.direct < 0:
		f.openDirect(mode)
	}
	if err == nil && f.direct >= 0 {
		f.measure()
	}
	return f, err
}

// swapDirect keeps a caller's O_DIRECT descriptor for what it is, and opens another.
func (f *file) swapDirect(mode int) error {
	plain, err := ownfiles.Reopen(f.fd, mode)
	if err != nil {
		return fmt.Errorf("open once more without O_DIRECT, for what is no whole block: %w", err)
	}
	f.direct, f.fd, f.swapped = f.fd, plain, true
	return nil
}

func (f *file) openDirect(mode int) {
	fd, err := ownfiles.Reopen(f.fd, mode|unix.O_DIRECT)
	if err != nil {
		f.why = "no O_DIRECT: " + err.Error()
		return
	}
	f.direct = fd
}

// measure asks how blocks past the page cache must be aligned. A page is the least: two
// kinds of write within one would not keep apart.
func (f *file) measure() {
	f.block, f.align = blockMin, 512
	var st unix.Statx_t
	err := unix.Statx(f.direct, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err == nil && st.Mask&unix.STATX_DIOALIGN != 0 {
		f.align = uint64(st.Dio_mem_align)
		f.block = max(f.block, uint64(st.Dio_offset_align))
	}
	f.block = max(f.block, uint64(os.Getpagesize()))
	if err == nil && st.Mask&unix.STATX_DIOALIGN != 0 && st.Dio_offset_align == 0 {
		f.why = "the filesystem has no O_DIRECT for this file"
		_ = f.dropDirect()
		return
	}
	if f.block > bounceBytes/2 || f.block&(f.block-1) != 0 || f.align > f.block || f.align == 0 {
		f.why = fmt.Sprintf("O_DIRECT wants blocks of %d bytes", f.block)
		_ = f.dropDirect()
	}
}

// mayPast reports whether there is a way past the page cache.
func (f *file) mayPast() bool { return f.direct >= 0 && !f.refused }

// dropDirect ends the way past the page cache. The caller's description is kept for its lock.
func (f *file) dropDirect() error {
	f.block = 0
	if f.swapped {
		f.refused = true
		return nil
	}
	return f.closeDirect()
}

func (f *file) closeDirect() error {
	fd := f.direct
	f.direct = -1
	if fd < 0 {
		return nil
	}
	return unix.Close(fd)
}

// name is what the system calls it now.
func (f *file) name() string { return f.ID.Name(f.fd) }

func (f *file) close() error {
	err := f.closeDirect()
	if f.fd >= 0 {
		err = errors.Join(err, unix.Close(f.fd))
	}
	return err
}
