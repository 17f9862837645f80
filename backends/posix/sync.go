// SPDX-License-Identifier: Apache-2.0

package posix

// A write that is to be durable, as all are with Config.Durable, has ended when an fdatasync has that began after its last
// byte was written. One is under way for each file; who comes meanwhile waits for the
// next, so a burst of writes costs two.

// askSyncs has a job wait for a sync of each of its files.
func (b *Backend) askSyncs(j *job) {
	j.synced = true
	for i := range j.Views {
		f := j.Views[i].Remote.Extent.file
		if n := len(f.waiting); n > 0 && f.waiting[n-1] == j {
			continue
		}
		f.waiting = append(f.waiting, j)
		j.syncs++
		b.wantSync(f)
	}
}

func (b *Backend) wantSync(f *file) {
	if !f.syncing && !f.listed {
		f.listed = true
		b.unsynced = append(b.unsynced, f)
	}
}

// beginSyncs begins those that are asked for, while there is room.
func (b *Backend) beginSyncs() {
	for len(b.unsynced) > 0 && len(b.free) > 0 {
		f := b.unsynced[len(b.unsynced)-1]
		b.unsynced = b.unsynced[:len(b.unsynced)-1]
		f.listed, f.syncing = false, true
		f.covered, f.waiting = f.waiting, f.covered[:0]
		r := b.free[len(b.free)-1]
		b.free = b.free[:len(b.free)-1]
		r.beginSync(f)
		b.launch(r)
	}
}

// synced handles the end of a sync. Its error is that of every write that it covers: which
// of their bytes the disk has is not known.
func (b *Backend) synced(f *file, err error) {
	f.syncing = false
	for _, j := range f.covered {
		if err != nil {
			b.fail(j, err)
		}
		j.syncs--
		b.settle(j)
	}
	clear(f.covered)
	f.covered = f.covered[:0]
	if len(f.waiting) > 0 {
		b.wantSync(f)
	}
}
