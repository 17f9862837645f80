// SPDX-License-Identifier: Apache-2.0

package files

import (
	"cmp"
	"slices"

	"github.com/sluicehq/sluice/driver"
)

// job is a batch under way. Open makes all jobs; they are reused, with the memory of their slices.
// Core.Mu guards all fields.
type job struct {
	op    driver.Op
	tag   uint64
	views []view
	items []item // all copies of the batch; within each view in the order of file offsets
	err   error  // the reason to end early; no more requests begin

	by      *Peer  // nil: the job is free
	next    *job   // in Core.queue
	queued  bool   // is in Core.queue
	at      cursor // where the next request begins
	flying  int    // requests with the Mover or waiting for another attempt
	durable bool   // completes only after the written data is on the disk
	synced  bool   // has asked for its syncs
	syncs   int    // files whose sync it waits for

	runs []driver.Desc // scratch: the runs of one entry of a pattern
}

// cursor is a position in the items of a job.
type cursor struct {
	item int
	off  uint64 // within the item
}

// item is one contiguous copy.
type item struct {
	local, remote, n uint64
	view, index      uint32 // index in job.views; index of the descriptor or entry in the batch
}

// itemsKept bounds the items whose memory a free job keeps: 128 KiB.
const itemsKept = 4 << 10

// view is the pair of memories of one or more consecutive descriptors.
type view struct {
	local, remote       *Memory
	localKey, remoteKey uint32
}

// clear makes the job free and drops its references.
func (j *job) clear() {
	clear(j.views)
	j.views, j.by, j.err = j.views[:0], nil, nil
	if j.items = j.items[:0]; cap(j.items) > itemsKept {
		j.items = nil
	}
}

// list checks a batch and fills in the job's views and items. It checks each entry of a pattern
// while it adds the items, because the program may change the index lists at any time.
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

// listOne adds an item, and a view if its memories differ from those of the item before.
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

// view adds a view of the memories of two keys.
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

// turns is a FIFO queue of jobs. A job is in it at most once.
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

// pop removes the first job. The queue must not be empty.
func (q *turns) pop() *job {
	j := q.first
	q.n--
	if q.first, j.next = j.next, nil; q.first == nil {
		q.last = nil
	}
	return j
}
