// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"sync"

	"github.com/sluicehq/sluice/csrc/copy"
	"github.com/sluicehq/sluice/driver"
)

// run is a stretch of a batch between one pair of memories.
type run struct {
	local    *memory
	remote   *imported
	first, n int // descriptors, or runs of the pattern
}

// piece is what a worker copies between two looks at the job.
type piece struct {
	run
	op      driver.Op
	descs   []driver.Desc   // nil: runs of pattern
	pattern *driver.Pattern // nil: descs
	way     copy.Way
}

// job is a batch that workers copy. Every worker that has a piece of it in hand,
// and every place in the queue, holds it; the last to let go finishes it.
type job struct {
	peer *peer // constant while the job is live
	op   driver.Op
	tag  uint64
	tail tail

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
	pattern   driver.Pattern
	loops     [driver.LoopsMax]driver.Loop // of pattern
	patterned bool
	bytes     uint64
	way       copy.Way // of so many bytes
	left      uint64   // bytes not yet cut
	run       int      // the cursor: which run,
	next      int      // which descriptor or run of it,
	skip      uint64   // and how much of that is cut already
}

// jobPool hands out jobs. session.Completions bounds the live tags, so it never runs dry.
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

// cut takes the next piece off: whole descriptors, or runs of the pattern, up to
// max bytes, or a part of one that is longer. scratch holds such a part.
// Preconditions: j.mu is held, something is left.
func (j *job) cut(max uint64, scratch *[1]driver.Desc) piece {
	r := j.runs[j.run]
	p := piece{run: r, op: j.op, way: j.way}
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
	bytes := j.fill(&p, r.n-j.next, max)
	j.next += p.n
	j.took(bytes)
	return p
}

// fill gives a piece as many descriptors or runs as fit in max bytes: at least one does.
func (j *job) fill(p *piece, most int, max uint64) (bytes uint64) {
	if j.patterned {
		p.pattern, p.n = &j.pattern, int(min(uint64(most), max/j.pattern.Run))
		return uint64(p.n) * j.pattern.Run
	}
	for p.n = 0; p.n < most; p.n++ {
		n := j.descs[p.first+p.n].Len
		if bytes+n > max {
			break
		}
		bytes += n
	}
	p.descs, p.first = j.descs[p.first:p.first+p.n], 0
	return bytes
}

func (j *job) took(n uint64) {
	j.left -= n
	if j.next == j.runs[j.run].n {
		j.run, j.next = j.run+1, 0
	}
}

func (j *job) at(i int) driver.Desc {
	if j.patterned {
		return copy.Run(&j.pattern, i)
	}
	return j.descs[i]
}

// wanted reports whether the job is to end without its pages.
func (j *job) wanted() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.cancelled
}

// fail keeps the first error.
func (j *job) fail(err error) {
	j.mu.Lock()
	if j.err == nil {
		j.err = err
	}
	j.mu.Unlock()
}
