// SPDX-License-Identifier: Apache-2.0

package files

import (
	"cmp"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// job is a batch under way. Jobs are made at the start and reused, with the memory of their lists.
// All is guarded by Core.Mu.
type job struct {
	op    driver.Op
	tag   uint64
	views []view
	items []item // of the batch alone, rising in the file within each view
	err   error  // why it ends before it is done

	by      *Peer  // nil: not under way
	next    *job   // in Core.queue
	queued  bool   // there
	at      cursor // what the next request begins with
	flying  int    // requests
	durable bool   // it ends once the disk has what it wrote
	synced  bool   // it has asked for that
	syncs   int    // files whose sync it waits for

	runs []driver.Desc // of one entry of a pattern
}

// cursor is a place in the items of a job.
type cursor struct {
	item int
	off  uint64 // within the item
}

// item is one contiguous copy.
type item struct {
	local, remote, n uint64
	view, index      uint32 // in job.views; of the descriptor or the entry in its batch
}

// itemsKept bounds the memory that a job keeps for its next batch: 128 KiB.
const itemsKept = 4 << 10

// view is a pair of memories that a stretch of descriptors names.
type view struct {
	local, remote       *Memory
	localKey, remoteKey uint32
}

// clear ends it, or a try to begin it, and forgets what it pointed to.
func (j *job) clear() {
	clear(j.views)
	j.views, j.by, j.err = j.views[:0], nil, nil
	if j.items = j.items[:0]; cap(j.items) > itemsKept {
		j.items = nil
	}
}

// list checks a batch and lists what it moves, so that nothing of it is read later. Entries of a
// pattern are checked as they are listed: the index lists may change at any time.
func (j *job) list(p *Peer, b *driver.Batch) error {
	c := p.core
	if b.Pattern == nil {
		if len(b.Descs) > c.Caps.DescsMax {
			return driver.ErrBounds
		}
		for i := range b.Descs {
			if err := j.listOne(p, &b.Descs[i], i); err != nil {
				return err
			}
		}
	} else {
		g := b.Pattern
		if err := j.view(p, g.LocalKey, g.RemoteKey); err != nil {
			return err
		}
		if err := g.Check(j.views[0].local.Size, j.views[0].remote.Size); err != nil {
			return err
		}
		if uint64(g.Runs())*uint64(g.Count) > uint64(c.Caps.RunsMax) {
			return driver.ErrBounds
		}
		for i := range g.Count {
			j.runs = g.AppendDescs(j.runs[:0], i)
			for k := range j.runs {
				if err := j.listOne(p, &j.runs[k], i); err != nil {
					return err
				}
			}
		}
		if cap(j.runs) > itemsKept {
			j.runs = nil
		}
	}
	for i := range j.views {
		if f := j.views[i].remote.File; j.durable {
			if err := f.inode.keeps(f); err != nil {
				return err
			}
		}
	}
	if !slices.IsSortedFunc(j.items, compare) {
		slices.SortFunc(j.items, compare)
	}
	return nil
}

func compare(a, b item) int {
	return cmp.Or(cmp.Compare(a.view, b.view), cmp.Compare(a.remote, b.remote))
}

// listOne lists one copy, and the memories of each stretch of copies that has the same.
func (j *job) listOne(p *Peer, d *driver.Desc, index int) error {
	at := len(j.views) - 1
	if at < 0 || j.views[at].localKey != d.LocalKey || j.views[at].remoteKey != d.RemoteKey {
		if err := j.view(p, d.LocalKey, d.RemoteKey); err != nil {
			return err
		}
		at++
	}
	v := &j.views[at]
	if d.Len == 0 || !within(d.Local, d.Len, v.local.Size) ||
		!within(d.Remote, d.Len, v.remote.Size) {
		return d.Check(v.local.Size, v.remote.Size)
	}
	j.items = append(j.items, item{d.Local, d.Remote, d.Len, uint32(at), uint32(index)})
	return nil
}

func within(off, n, size uint64) bool { return off <= size && n <= size-off }

// view notes both memories of a pair of keys.
func (j *job) view(p *Peer, localKey, remoteKey uint32) error {
	local, remote := p.core.table.At(localKey), p.imports.At(remoteKey)
	if local == nil || local.revoked || remote == nil {
		return errUnknownKey
	}
	switch {
	case local.Kind == driver.File:
		return p.core.foreign
	case remote.revoked:
		return driver.ErrRevoked
	case j.op == driver.Write && remote.readOnly:
		return driver.ErrReadOnly
	}
	j.views = append(j.views, view{local, remote, localKey, remoteKey})
	return nil
}

// turns is a queue of jobs that take turns; each stands in it once at most.
type turns struct {
	first, last *job
	n           int
}

func (q *turns) push(j *job) {
	if q.n++; q.last == nil {
		q.first = j
	} else {
		q.last.next = j
	}
	q.last = j
}

// pop takes the first, of one or more.
func (q *turns) pop() *job {
	j := q.first
	q.n--
	if q.first, j.next = j.next, nil; q.first == nil {
		q.last = nil
	}
	return j
}
