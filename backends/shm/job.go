// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// run is a stretch of a batch between one pair of memories.
type run struct {
	local    *memory
	remote   *imported
	first, n int // descriptors, or entries of the pattern
}

// piece is what a worker copies between two looks at the job.
type piece struct {
	run
	op    driver.Op
	descs []driver.Desc // nil: entries of pages
	pages *driver.Pages
}

// job is a batch that workers copy. Every worker that has a piece of it in hand,
// and every place in the queue, holds it; the last to let go finishes it.
type job struct {
	peer *peer // constant while the job is live
	op   driver.Op
	tag  uint64
	note note // the message that follows

	mu        sync.Mutex
	live      bool
	cancelled bool
	helped    bool      // its scratch is in use
	stale     bool      // pages moved under a piece: begin anew
	waits     *imported // whose pages moved
	held      int
	err       error
	runs      []run
	descs     []driver.Desc  // our copy
	scratch   [1]driver.Desc // of the goroutine that helps
	pages     driver.Pages
	paged     bool
	bytes     uint64
	left      uint64 // bytes not yet cut
	run       int    // the cursor: which run,
	next      int    // which descriptor or entry of it,
	skip      uint64 // and how much of that is cut already
}

// jobPool hands out jobs. done.Ring bounds the live tags, so it never runs dry.
type jobPool struct {
	mu   sync.Mutex
	all  []job
	free []*job
}

func (p *jobPool) init(n int) {
	p.all = make([]job, n)
	p.free = make([]*job, n)
	for i := range p.all {
		p.free[i] = &p.all[n-1-i]
	}
}

func (p *jobPool) get() *job {
	p.mu.Lock()
	j := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	p.mu.Unlock()
	return j
}

func (p *jobPool) put(j *job) {
	p.mu.Lock()
	p.free = append(p.free, j)
	p.mu.Unlock()
}

// rewind puts the cursor to the start.
func (j *job) rewind() {
	j.run, j.next, j.skip, j.left = 0, 0, 0, j.bytes
}

// cut takes the next piece off: whole descriptors or entries of one run up to
// max bytes, or a part of one that is longer. scratch holds such a part.
// Preconditions: j.mu is held, something is left.
func (j *job) cut(max uint64, scratch *[1]driver.Desc) piece {
	r := j.runs[j.run]
	p := piece{run: r, op: j.op}
	p.first = r.first + j.next
	if first := j.at(p.first); j.skip > 0 || first.Len > max {
		n := min(max, first.Len-j.skip)
		scratch[0] = first
		scratch[0].Local += j.skip
		scratch[0].Remote += j.skip
		scratch[0].Len = n
		p.descs, p.first, p.n = scratch[:], 0, 1
		j.skip += n
		if j.skip == first.Len {
			j.next, j.skip = j.next+1, 0
		}
		j.took(n)
		return p
	}
	var bytes uint64
	for p.n = 0; p.n < r.n-j.next; p.n++ {
		n := j.lenAt(p.first + p.n)
		if bytes+n > max {
			break
		}
		bytes += n
	}
	if j.paged {
		p.pages = &j.pages
	} else {
		p.descs, p.first = j.descs[p.first:p.first+p.n], 0
	}
	j.next += p.n
	j.took(bytes)
	return p
}

func (j *job) took(n uint64) {
	j.left -= n
	if j.next == j.runs[j.run].n {
		j.run, j.next = j.run+1, 0
	}
}

func (j *job) at(i int) driver.Desc {
	if j.paged {
		return j.pages.Desc(i)
	}
	return j.descs[i]
}

func (j *job) lenAt(i int) uint64 {
	if j.paged {
		return j.pages.EntryLen
	}
	return j.descs[i].Len
}

// wanted reports whether the job is to end without its pages.
func (j *job) wanted() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.cancelled
}

// fail notes the first error.
func (j *job) fail(err error) {
	j.mu.Lock()
	if j.err == nil {
		j.err = err
	}
	j.mu.Unlock()
}
