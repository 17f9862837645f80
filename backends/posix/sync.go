// SPDX-License-Identifier: Apache-2.0

package posix

// A durable write has ended when an fdatasync has that began after its last byte was written.
// One is under way for each inode; what comes meanwhile waits for the next, so a burst of
// writes costs two.
//
// A sync that fails says that bytes of some write are lost, and no sync after it says so
// again: the pages count as clean. So it fails every durable write to the inode that was
// accepted before it ended, whether its bytes were to be covered or not.

// checkDurable says why a job cannot be durable.
func (j *job) checkDurable() error {
	for i := range j.Views {
		f := j.Views[i].Remote.Extent.file
		if err := f.inode.keeps(f); err != nil {
			return err
		}
	}
	return nil
}

// askSyncs has a job wait for a sync of each of its inodes.
func (b *Backend) askSyncs(j *job) {
	j.synced = true
	for i := range j.Views {
		n := j.Views[i].Remote.Extent.file.inode
		if k := len(n.tosync); k > 0 && n.tosync[k-1] == j {
			continue
		}
		n.tosync = append(n.tosync, j)
		j.syncs++
		b.wantSync(n)
	}
}

func (b *Backend) wantSync(n *inode) {
	if !n.syncing && !n.listed {
		n.listed = true
		b.unsynced = append(b.unsynced, n)
	}
}

// beginSyncs begins those that are asked for, while there is room.
func (b *Backend) beginSyncs() {
	for len(b.unsynced) > 0 && len(b.free) > 0 {
		n := b.unsynced[len(b.unsynced)-1]
		b.unsynced = b.unsynced[:len(b.unsynced)-1]
		n.listed, n.syncing = false, true
		n.covered, n.tosync = n.tosync, n.covered[:0]
		r := b.free[len(b.free)-1]
		b.free = b.free[:len(b.free)-1]
		r.beginSync(n)
		b.launch(r)
	}
}

// synced handles the end of a sync.
func (b *Backend) synced(n *inode, err error) {
	n.syncing = false
	if err != nil {
		b.lost(n, err)
	}
	for _, j := range n.covered {
		j.syncs--
		b.flights.Settle(&j.Job)
	}
	clear(n.covered)
	n.covered = n.covered[:0]
	if len(n.tosync) > 0 {
		b.wantSync(n)
	}
}

// lost fails every durable job under way that writes to the inode.
func (b *Backend) lost(n *inode, err error) {
	for i := range b.jobs {
		j := &b.jobs[i]
		if !j.UnderWay() || !j.durable {
			continue
		}
		for k := range j.Views {
			if j.Views[k].Remote.Extent.file.inode == n {
				b.flights.Fail(&j.Job, err)
				break
			}
		}
	}
}
