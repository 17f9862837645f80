// SPDX-License-Identifier: Apache-2.0

package files

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// A durable write completes after an fdatasync that began after its last byte was written. There is
// at most one fdatasync at a time for each inode. Writes that end during it wait for the next, so a
// burst of writes costs two.
//
// A failed fdatasync means that some written bytes are lost. The kernel reports that only once,
// since it marks the pages clean. So a failure fails every durable write to the inode that was
// accepted before the fdatasync ended, even one that the fdatasync did not cover.

// reopen is Reopen; a test replaces it.
var reopen = Reopen

// keeps returns an error if writes to the file cannot be durable. Its first call opens the file
// again for the syncs. A duplicate of the caller's descriptor does not suffice: the kernel reports
// lost bytes once for each open file description, and an fsync of the program could consume the
// report.
//
// Preconditions: Core.Mu is held, and the writes have not begun: the kernel reports only losses
// after the open.
func (n *inode) keeps(f *File) error {
	if n.sync >= 0 || n.syncNo != nil {
		return n.syncNo
	}
	if n.sync, n.syncNo = reopen(f.own(), unix.O_RDONLY); n.syncNo != nil {
		n.sync, n.syncNo = reopen(f.own(), f.Flags&unix.O_ACCMODE)
	}
	if n.syncNo != nil {
		n.syncNo = fmt.Errorf("no durable writes: the file cannot be opened once more for a sync "+
			"of our own (%w): mount /proc, and keep the right to open it: %w", n.syncNo,
			driver.ErrNotSupported)
	}
	return n.syncNo
}

// askSyncs makes a job wait for a sync of each of its inodes.
func (c *Core) askSyncs(j *job) {
	j.synced = true
	for i := range j.views {
		n := j.views[i].remote.File.inode
		if k := len(n.tosync); k > 0 && n.tosync[k-1] == j {
			continue
		}
		n.tosync = append(n.tosync, j)
		j.syncs++
		c.wantSync(n)
	}
	c.beginSyncs()
}

func (c *Core) wantSync(n *inode) {
	if !n.syncing && !n.listed {
		n.listed = true
		c.unsynced = append(c.unsynced, n)
	}
}

// beginSyncs begins the syncs that jobs wait for, while requests are free.
func (c *Core) beginSyncs() {
	for len(c.unsynced) > 0 && len(c.free) > 0 {
		n := c.unsynced[len(c.unsynced)-1]
		c.unsynced = c.unsynced[:len(c.unsynced)-1]
		n.listed, n.syncing = false, true
		n.covered, n.tosync = n.tosync, n.covered[:0]
		r := c.free[len(c.free)-1]
		c.free = c.free[:len(c.free)-1]
		r.begin(Sync, nil)
		r.inode = n
		c.launch(r)
	}
}

// synced handles the end of a sync.
func (c *Core) synced(n *inode, err error) {
	n.syncing = false
	for i := range c.jobs {
		if j := &c.jobs[i]; err != nil && j.by != nil && j.durable && j.writesTo(n) {
			c.fail(j, err)
		}
	}
	for _, j := range n.covered {
		j.syncs--
		c.settle(j)
	}
	clear(n.covered)
	n.covered = n.covered[:0]
	if len(n.tosync) > 0 {
		c.wantSync(n)
	}
}

func (j *job) writesTo(n *inode) bool {
	for i := range j.views {
		if j.views[i].remote.File.inode == n {
			return true
		}
	}
	return false
}
