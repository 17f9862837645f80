// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// inode is a file or block device on the disk, however often and with whatever flags it was
// opened: what must not depend on that. All is guarded by flights.Mu.
type inode struct {
	refs int // files

	writing [2]int // requests under way: through the page cache, past it
	waiting [2]int // of Backend.again, for those of the other kind to end
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
	listed  bool   // in Backend.unsynced
}

// The two kinds of access, as indices of inode.writing.
const (
	cached = iota
	direct
)

// inodeKey tells inodes apart.
type inodeKey struct{ dev, ino uint64 }

// inodeOf returns what is known of a file on the disk, with one more user.
func (b *Backend) inodeOf(id ownfiles.ID) *inode {
	key := inodeKey{id.Dev, id.Ino}
	n := b.inodes[key]
	if n == nil {
		n = &inode{sync: -1}
		b.inodes[key] = n
	}
	n.refs++
	return n
}

// dropInode ends one use.
func (b *Backend) dropInode(id ownfiles.ID, n *inode) error {
	if n.refs--; n.refs > 0 {
		return nil
	}
	delete(b.inodes, inodeKey{id.Dev, id.Ino})
	if n.sync < 0 {
		return nil
	}
	return unix.Close(n.sync)
}

// reopen is ownfiles.Reopen; a test has it fail.
var reopen = ownfiles.Reopen

// openSync opens the file once more. A duplicate of the caller's descriptor would not do: a sync
// of the program's would take the news of lost bytes away.
func (n *inode) openSync(fd int, id ownfiles.ID) {
	if n.sync, n.syncNo = reopen(fd, unix.O_RDONLY); n.syncNo == nil {
		return
	}
	if n.sync, n.syncNo = reopen(fd, id.Flags&unix.O_ACCMODE); n.syncNo == nil {
		return
	}
	n.syncNo = fmt.Errorf("no durable writes: the file cannot be opened once more for a sync of "+
		"our own (%w): mount /proc, and keep the right to open it: %w",
		n.syncNo, driver.ErrNotSupported)
}

// keeps reports why writes to the file cannot be durable, nil where they can.
//
// Preconditions: flights.Mu is held, and the writes have not begun, so that the kernel tells the
// descriptor which of them it lost.
func (n *inode) keeps(f *file) error {
	if n.sync < 0 && n.syncNo == nil {
		n.openSync(f.fd, f.ID)
	}
	return n.syncNo
}

// mayRelaunch reports whether a request that is to be handed over once more may be now: none of
// the other kind is under way.
func (n *inode) mayRelaunch(r *request) bool {
	return r.kind != writeFrom || n.writing[1-r.access()] == 0
}
