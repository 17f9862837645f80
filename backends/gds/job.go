// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"github.com/sluicehq/sluice/backends"
)

// job is a batch under way. Jobs are made at the start and reused, with the memory of their lists. All is guarded by
// Backend.mu.
type job struct {
	p    *peer
	op   backends.Op
	tag  uint64
	live bool

	items []item // of descriptors, in their order
	views []view

	at     cursor // what the next request begins with
	flying int    // requests
	queued bool   // in Backend.queue
	err    error
}

// cursor is a place in the items of a job.
type cursor struct {
	item int
	off  uint64 // within the item
}

// item is a descriptor.
type item struct {
	local, remote, n uint64
	view             uint32
}

// view is a pair of memories.
type view struct {
	localKey, remoteKey uint32
	local               *memory
	remote              remote
}

func (v *view) shows(localKey, remoteKey uint32) bool {
	return v.localKey == localKey && v.remoteKey == remoteKey
}

// reaches reports whether the job uses a memory by a token of an epoch before, or as its own, which has no epoch.
func (j *job) reaches(m *memory, epoch uint64) bool {
	for i := range j.views {
		v := &j.views[i]
		if v.remote.m == m && v.remote.epoch < epoch || v.local == m && m.closed {
			return true
		}
	}
	return false
}

// set takes a list, whose memory is the caller's.
func (j *job) set(descs []backends.Desc) {
	j.items = j.items[:0]
	view := uint32(0)
	for i := range descs {
		d := &descs[i]
		for !j.views[view].shows(d.LocalKey, d.RemoteKey) {
			view++
		}
		j.items = append(j.items, item{d.Local, d.Remote, d.Len, view})
	}
}

// clear forgets what the job pointed to.
func (j *job) clear() {
	clear(j.views)
	j.views, j.p, j.err = j.views[:0], nil, nil
	j.live = false
}

// anyJob reports whether there is a job that which picks.
//
// Preconditions: mu is held.
func (b *Backend) anyJob(which func(*job) bool) bool {
	for i := range b.jobs {
		if j := &b.jobs[i]; j.live && which(j) {
			return true
		}
	}
	return false
}

// turns is a queue of jobs that take turns; each stands in it once at most.
type turns struct {
	list    []*job
	head, n int
}

func (q *turns) push(j *job) {
	q.list[(q.head+q.n)%len(q.list)] = j
	q.n++
}

func (q *turns) pop() *job {
	j := q.list[q.head]
	q.list[q.head] = nil
	q.head = (q.head + 1) % len(q.list)
	q.n--
	return j
}
