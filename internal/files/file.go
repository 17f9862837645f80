// SPDX-License-Identifier: Apache-2.0

package files

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// File is an open file or block device. Registrations of one file with the same open flags share a
// File.
type File struct {
	ID
	Buffered bool // all access goes through the page cache

	FD      int    // the core's own descriptor, through the page cache; -1: see plain
	Direct  int    // a descriptor of the same file with O_DIRECT; -1: none
	Why     string // why Direct is -1 or not used
	Swapped bool   // Direct duplicates the caller's descriptor and FD is new; else the other way
	Block   uint64 // alignment of offsets and lengths with O_DIRECT; a power of two; 0: do not use
	Align   uint64 // alignment of memory addresses with O_DIRECT
	Own     any    // for the Mover's use

	// Guarded by Core.Mu.
	refs    int // memories
	inode   *inode
	refused bool // a request with O_DIRECT has failed: see Why
}

// fileKey is the key of a File in Core.files.
type fileKey struct {
	ID
	buffered bool
}

const (
	blockMin    = 4 << 10  // least File.Block
	BounceBytes = 64 << 10 // size of a request's buffer
)

// use returns the File of a segment, with one more user. It opens the file if it is the first.
func (c *Core) use(seg *driver.Segment) (*File, error) {
	id, err := admit(seg)
	if err != nil {
		return nil, err
	}
	why := ""
	switch {
	case c.Buffered:
		why = "Config.Buffered"
	case seg.Buffered:
		why = "as its registration asked (Segment.Buffered)"
	}
	c.Mu.Lock()
	defer c.Mu.Unlock()
	key := fileKey{id, why != ""}
	f := c.files[key]
	if f == nil {
		f = &File{ID: id, Buffered: key.buffered, Why: why, FD: -1, Direct: -1}
		if err = f.open(seg.FD); err == nil {
			err = c.Mover.AddFile(f)
		}
		if err != nil {
			return nil, errors.Join(err, f.close())
		}
		f.inode = c.inodeOf(id)
		c.files[key] = f
	}
	f.refs++
	return f, nil
}

// unuse ends the use of a file by one memory, and closes the file after the last. It may be called
// again after an error: the Mover then still has the file. An error of closing itself is returned
// only once.
func (c *Core) unuse(f *File) error {
	c.Mu.Lock()
	defer c.Mu.Unlock()
	if f.refs == 0 {
		return nil // it was closed, with an error
	}
	if f.refs > 1 {
		f.refs--
		return nil
	}
	if err := c.Mover.DropFile(f); err != nil {
		return fmt.Errorf("close file: %w", err)
	}
	f.refs = 0
	delete(c.files, fileKey{f.ID, f.Buffered})
	if err := errors.Join(c.dropInode(f), f.close()); err != nil {
		return fmt.Errorf("close file: %w", err)
	}
	return nil
}

// open opens descriptors of the core's own for the file behind a caller's descriptor, so that the
// caller may close its own.
func (f *File) open(fd int) (err error) {
	own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("duplicate descriptor %d: %w", fd, os.NewSyscallError("fcntl", err))
	}
	f.Swapped = f.Flags&unix.O_DIRECT != 0
	if f.Swapped {
		f.Direct = own
	} else {
		f.FD = own
	}
	if f.Buffered {
		return errors.Join(f.plain(), f.DropDirect(f.Why))
	}
	if f.Direct < 0 {
		if f.Direct, err = Reopen(f.FD, f.Flags|unix.O_DIRECT); err != nil {
			f.Direct, f.Why = -1, "no O_DIRECT: "+err.Error()
			return nil
		}
	}
	// Find the alignment that O_DIRECT needs. Block is at least a page: a direct write and a write
	// through the page cache must never touch the same page at once.
	f.Block, f.Align = max(blockMin, uint64(os.Getpagesize())), 512
	var st unix.Statx_t
	err = unix.Statx(f.Direct, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err == nil && st.Mask&unix.STATX_DIOALIGN != 0 {
		if st.Dio_offset_align == 0 {
			return f.DropDirect("the filesystem has no O_DIRECT for this file")
		}
		f.Align = uint64(st.Dio_mem_align)
		f.Block = max(f.Block, uint64(st.Dio_offset_align))
	}
	if f.Block > BounceBytes/2 || f.Block&(f.Block-1) != 0 || f.Align > f.Block || f.Align == 0 {
		return f.DropDirect(fmt.Sprintf("O_DIRECT wants blocks of %d bytes", f.Block))
	}
	return nil
}

// plain opens FD where the caller's descriptor has O_DIRECT. Most of those files are moved in whole
// blocks, so it is opened when the first request needs it.
//
// Preconditions: Core.Mu is held, or no request can use the file yet.
func (f *File) plain() (err error) {
	if f.FD >= 0 {
		return nil
	}
	if f.FD, err = Reopen(f.Direct, f.Flags&^unix.O_DIRECT); err != nil {
		return fmt.Errorf("open once more without O_DIRECT, for what is no whole block: %w", err)
	}
	return nil
}

// own returns one of the core's descriptors of the file.
func (f *File) own() int {
	if f.FD < 0 {
		return f.Direct
	}
	return f.FD
}

// CanDirect reports whether requests may bypass the page cache.
func (f *File) CanDirect() bool { return f.Block > 0 && !f.refused }

// DropDirect stops the use of Direct, and closes it. It must be called before the first request.
// If Direct duplicates the caller's descriptor, it stays open, since closing could release a lock.
func (f *File) DropDirect(why string) error {
	f.Block, f.Why = 0, why
	if f.Swapped || f.Direct < 0 {
		return nil
	}
	fd := f.Direct
	f.Direct = -1
	return unix.Close(fd)
}

// Name returns the present path of the file.
func (f *File) Name() string { return name(f.own(), f.ID) }

func (f *File) close() (err error) {
	for _, fd := range []int{f.Direct, f.FD} {
		if fd >= 0 {
			err = errors.Join(err, unix.Close(fd))
		}
	}
	f.Direct, f.FD = -1, -1
	return err
}

// inode is the state of a file or block device that all its open Files share. Core.Mu guards it.
type inode struct {
	refs int // Files

	writing [2]int // writes under way; index cached or direct
	waiting [2]int // writes in Core.again, which wait for those of the other kind to end
	// the job whose next write, of blockedKind, waits until writes of the other kind have ended;
	// nil: none
	blocked     *job
	blockedKind int

	// sync is a descriptor for fdatasync alone. Linux reports lost bytes once for each open file
	// description, to the first fdatasync on it, so this one must not be shared.
	sync   int   // opened for the first durable write; -1: not open
	syncNo error // why it could not be opened

	syncing bool   // an fdatasync is under way
	tosync  []*job // jobs that wait for the next fdatasync
	covered []*job // jobs that wait for the present fdatasync
	listed  bool   // is in Core.unsynced
}

// The two kinds of access, as indices of inode.writing.
const (
	cached = iota
	direct
)

// inodeKey identifies an inode.
type inodeKey struct{ dev, ino uint64 }

// inodeOf returns the inode of a file, with one more user.
func (c *Core) inodeOf(id ID) *inode {
	key := inodeKey{id.Dev, id.Ino}
	n := c.inodes[key]
	if n == nil {
		n = &inode{sync: -1}
		c.inodes[key] = n
	}
	n.refs++
	return n
}

// dropInode ends the use of an inode by a File.
func (c *Core) dropInode(f *File) error {
	n := f.inode
	if n.refs--; n.refs > 0 {
		return nil
	}
	delete(c.inodes, inodeKey{f.Dev, f.Ino})
	if n.sync < 0 {
		return nil
	}
	return unix.Close(n.sync)
}
