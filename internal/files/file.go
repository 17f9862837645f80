// SPDX-License-Identifier: Apache-2.0

package files

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// File is an open file or block device that memories lie in. Registrations of one file that was
// opened alike share it.
type File struct {
	ID
	Buffered bool // all goes through the page cache

	FD      int    // a descriptor of our own, through the page cache
	Direct  int    // the same file past the page cache; -1: there is none
	Why     string // there is none, or it is of no use
	Swapped bool   // Direct is the caller's description, and FD another; else the other way round
	Block   uint64 // offsets and lengths past the page cache are multiples of it; a power of two
	Align   uint64 // so are addresses of this one
	Own     any    // the Mover's

	// Guarded by Core.Mu.
	refs    int // memories
	inode   *inode
	refused bool // Direct is of no use, as has turned out: see Why
}

// fileKey tells files apart.
type fileKey struct {
	ID
	buffered bool
}

const (
	blockMin    = 4 << 10  // whole blocks and nothing else go past the page cache: a page at least
	BounceBytes = 64 << 10 // of the buffer of a request
)

// use finds the file of a segment, or opens it.
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

// unuse closes a file that no other memory lies in. After an error the Mover keeps the file still,
// unless closing it was the error, which is told once.
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

// open opens the file behind a caller's descriptor for ourselves, so that nothing of what we do
// depends on how long the caller keeps it.
func (f *File) open(fd int) (err error) {
	if f.FD, err = unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0); err != nil {
		f.FD = -1
		return fmt.Errorf("duplicate descriptor %d: %w", fd, os.NewSyscallError("fcntl", err))
	}
	mode := f.Flags &^ unix.O_DIRECT
	if f.Flags&unix.O_DIRECT != 0 { // it stays what it is, and another is opened
		plain, err := Reopen(f.FD, mode)
		if err != nil {
			return fmt.Errorf("open once more without O_DIRECT, for what is no whole block: %w",
				err)
		}
		f.Direct, f.FD, f.Swapped = f.FD, plain, true
	}
	if f.Buffered {
		return f.DropDirect(f.Why)
	}
	if f.Direct < 0 {
		if f.Direct, err = Reopen(f.FD, mode|unix.O_DIRECT); err != nil {
			f.Direct, f.Why = -1, "no O_DIRECT: "+err.Error()
			return nil
		}
	}
	// How must blocks past the page cache be aligned? A page is the least: two kinds of write
	// within one would not keep apart.
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

// MayPast reports whether there is a way past the page cache.
func (f *File) MayPast() bool { return f.Block > 0 && !f.refused }

// DropDirect ends the way past the page cache before the first request. The caller's description
// is kept for its lock.
func (f *File) DropDirect(why string) error {
	f.Block, f.Why = 0, why
	if f.Swapped || f.Direct < 0 {
		return nil
	}
	fd := f.Direct
	f.Direct = -1
	return unix.Close(fd)
}

// Name is what the system calls the file now.
func (f *File) Name() string { return name(f.FD, f.ID) }

func (f *File) close() (err error) {
	for _, fd := range []int{f.Direct, f.FD} {
		if fd >= 0 {
			err = errors.Join(err, unix.Close(fd))
		}
	}
	f.Direct, f.FD = -1, -1
	return err
}

// inode is a file or block device on the disk, however often and with whatever flags it was
// opened: what must not depend on that. All is guarded by Core.Mu.
type inode struct {
	refs int // files

	writing [2]int // requests under way: through the page cache, past it
	waiting [2]int // of Core.again, for those of the other kind to end
	turn    *job   // waits until the other kind of write has ended
	turnTo  int    // and wants this kind

	// sync is a descriptor for fdatasync alone. Linux tells of bytes that it could not write
	// once for each open file description, to the sync that asks first: this one is
	// not shared.
	sync   int   // opened for the first durable write; -1: there is none
	syncNo error // why there is none, though one was wanted

	syncing bool
	tosync  []*job // wait for a sync that has not begun
	covered []*job // by that under way
	listed  bool   // in Core.unsynced
}

// The two kinds of access, as indices of inode.writing.
const (
	cached = iota
	direct
)

// inodeKey tells inodes apart.
type inodeKey struct{ dev, ino uint64 }

// inodeOf returns what is known of a file on the disk, with one more user.
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

// dropInode ends the use of a file.
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
