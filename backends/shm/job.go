// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/csrc/copy"
	"github.com/sluicehq/sluice/driver"
)

// job is a batch that workers copy. Each worker that copies a piece of it holds it, and so does
// each place in the queue. The last holder to let go completes it.
type job struct {
	peer    *peer // constant while the job is live
	op      driver.Op
	tag     uint64
	message entry // where its notification is in the ring

	mu        sync.Mutex
	live      bool
	cancelled bool
	helped    bool      // a goroutine in Help has it, and uses scratch
	restart   bool      // pages moved under a piece: copy all of it once more
	lacks     *imported // the memory whose pages moved
	held      int       // workers with a piece of it, and places in the queue
	err       error
	runs      []run
	descs     []driver.Desc  // our copy
	scratch   [1]driver.Desc // of the goroutine that helps
	pattern   driver.Pattern
	loops     [driver.LoopsMax]driver.Loop // of pattern
	patterned bool
	bytes     uint64
	way       copy.Way // how to copy a transfer of so many bytes
	left      uint64   // bytes not yet cut
	run       int      // the cursor: index in runs,
	next      int      // the descriptor, or run of the pattern, in that,
	skip      uint64   // and the bytes of it that are cut already
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

// newJob copies a batch into a job, so that the caller may reuse the batch. The job keeps its
// imports alive until it ends.
func (p *peer) newJob(tag uint64, b *driver.Batch, message entry, bytes uint64) *job {
	j := p.b.jobs.get()
	j.mu.Lock()
	defer j.mu.Unlock()
	j.peer, j.op, j.tag, j.message = p, b.Op, tag, message
	j.live, j.cancelled, j.helped, j.restart, j.lacks, j.err = true, false, false, false, nil, nil
	add := func(localKey, remoteKey uint32, first, n int) {
		local, remote := p.b.memory(localKey), p.use(remoteKey)
		if local == nil || remote == nil {
			j.err = driver.ErrRevoked
		}
		j.runs = append(j.runs, run{local, remote, first, n})
	}
	if j.patterned = b.Pattern != nil; j.patterned {
		j.pattern = *b.Pattern
		j.pattern.Loops = append(j.loops[:0], b.Pattern.Loops...) // the caller's may change
		add(j.pattern.LocalKey, j.pattern.RemoteKey, 0, j.pattern.Count*j.pattern.Runs())
	}
	j.descs = append(j.descs[:0], b.Descs...)
	for i := 0; i < len(j.descs); {
		n := stretch(j.descs[i:])
		add(j.descs[i].LocalKey, j.descs[i].RemoteKey, i, n)
		i += n
	}
	j.bytes, j.way = bytes, copy.For(max(bytes, b.Total))
	j.rewind()
	j.held = 1
	return j
}

// rewind puts the cursor to the start.
func (j *job) rewind() {
	j.run, j.next, j.skip, j.left = 0, 0, 0, j.bytes
}

// cut takes the next piece off: whole descriptors, or runs of the pattern, up to
// max bytes, or a part of one that is longer. scratch holds such a part.
// Preconditions: j.mu is held, something is left.
func (j *job) cut(max uint64, scratch *[1]driver.Desc) piece {
	pc := piece{run: j.runs[j.run], op: j.op, way: j.way}
	if j.patterned {
		pc.pattern = &j.pattern
	} else {
		pc.descs = j.descs
	}
	begin, most := pc.first+j.next, pc.n-j.next
	pc.first = 0
	var bytes uint64
	switch first := pc.at(begin); {
	case j.skip > 0 || first.Len > max:
		bytes = min(max, first.Len-j.skip)
		scratch[0] = first
		scratch[0].Local += j.skip
		scratch[0].Remote += j.skip
		scratch[0].Len = bytes
		pc.descs, pc.pattern, pc.n = scratch[:], nil, 1
		if j.skip += bytes; j.skip == first.Len {
			j.next, j.skip = j.next+1, 0
		}
	case j.patterned:
		pc.first, pc.n = begin, int(min(uint64(most), max/first.Len))
		bytes = uint64(pc.n) * first.Len
		j.next += pc.n
	default:
		for pc.n = 0; pc.n < most && bytes+j.descs[begin+pc.n].Len <= max; pc.n++ {
			bytes += j.descs[begin+pc.n].Len
		}
		pc.descs = j.descs[begin : begin+pc.n]
		j.next += pc.n
	}
	j.left -= bytes
	if j.next == j.runs[j.run].n {
		j.run, j.next = j.run+1, 0
	}
	return pc
}

// isCancelled reports whether Cancel has been called for the job.
func (j *job) isCancelled() bool {
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

// work copies pieces until the queue is closed. Where another job waits after a piece, that has its
// turn: a long one does not keep short ones waiting.
func (b *Backend) work(id int) {
	defer b.tasks.Done()
	var scratch [1]driver.Desc
	for j := b.queue.next(); j != nil; j = b.queue.next() {
		for b.step(j, announceWorkers+id, &scratch, true) {
			if b.queue.len() > 0 {
				b.queue.push(j)
				break
			}
		}
	}
}

// Help implements driver.Peer.
func (p *peer) Help(tag uint64, stop <-chan struct{}) bool {
	if p.b.queue.len() == 0 || p.enter() != nil {
		return false
	}
	defer p.exit()
	j := p.b.queue.takeTag(p, tag)
	if j == nil {
		return false
	}
	for p.b.step(j, 0, &j.scratch, false) {
		select {
		case <-stop:
			j.mu.Lock()
			j.helped = false // the next goroutine may help
			j.mu.Unlock()
			p.b.queue.push(j)
			return true
		default:
		}
	}
	return true
}

// step copies one piece of a job. It reports false when the caller holds the job no more, as after
// the last piece: the last to hold the job completes it, and wakes the program if wake is set.
func (b *Backend) step(j *job, line int, scratch *[1]driver.Desc, wake bool) (more bool) {
	j.mu.Lock()
	// A job that is all copied ends well.
	if j.err == nil && (j.left > 0 || j.restart) {
		switch {
		case j.cancelled:
			j.err = driver.ErrAborted
		case j.peer.closing.Load():
			j.err = driver.ErrClosed
		case j.peer.lost.Load():
			j.err = driver.ErrPeerLost
		}
	}

	if j.err == nil && !j.restart && j.left > 0 {
		pc := j.cut(uint64(b.cfg.PieceMax), scratch)
		hands := b.cfg.Workers // that may copy one job
		if j.helped {
			hands++
		}
		join := j.left > 0 && j.held < hands && b.queue.len() < b.cfg.JobsMax
		if join {
			j.held++
		}
		j.mu.Unlock()
		if join {
			b.queue.push(j) // for another worker to join in
		}
		err := j.peer.move(&pc, line)
		j.mu.Lock()
		switch {
		case err == errStale:
			j.restart, j.lacks = true, pc.remote
		case err != nil && j.err == nil:
			j.err = err // the first
		}
		if j.err != nil || j.restart || j.left > 0 {
			j.mu.Unlock()
			return true
		}
	}

	// The caller lets go, and so do the places in the queue: the job need not wait for a worker to
	// find that nothing is left. Where pages have moved, all of it is copied again once they are
	// mapped.
	if j.held > 1 {
		j.mu.Unlock()
		places := b.queue.removeAll(j)
		j.mu.Lock()
		j.held -= places
	}
	j.held--
	if j.held > 0 {
		j.mu.Unlock()
		return false
	}
	if j.restart && j.err == nil {
		j.restart, j.held = false, 1
		j.rewind()
		j.mu.Unlock()
		j.peer.park(j)
		return false
	}

	// The job is over. Its message goes out or is dropped, then all that it held is given back,
	// then the completion shows.
	j.live = false
	p, tag, err := j.peer, j.tag, j.err
	j.mu.Unlock()
	p.notify(j.message, err == nil)
	for i := range j.runs {
		p.unuse(j.runs[i].remote)
		j.runs[i] = run{}
	}
	j.runs, j.descs, j.pattern, j.message = j.runs[:0], j.descs[:0], driver.Pattern{}, entry{}
	b.jobs.put(j)
	b.done.Push(tag, err)
	if wake {
		b.wake()
	}
	p.exit()
	return false
}

// Cancel implements driver.Peer.
func (p *peer) Cancel(tag uint64) {
	b := p.b
	for i := range b.jobs.all {
		j := &b.jobs.all[i]
		j.mu.Lock()
		hit := j.live && j.peer == p && j.tag == tag
		if hit {
			j.cancelled = true
		}
		j.mu.Unlock()
		if hit {
			p.unpark()
			return
		}
	}
}

// queue is where jobs wait for a worker, or for the goroutine that waits for
// them. A channel would hand a job to a worker that has yet to wake up, and the
// goroutine that is awake could not have it.
type queue struct {
	wake chan struct{} // a token for each push, as many as there are workers

	mu   sync.Mutex
	ring []*job
	head int
	n    int

	closed bool         // with wake; guarded by mu
	size   atomic.Int64 // n, to look at without mu
}

func (q *queue) init(size, workers int) {
	q.ring = make([]*job, size)
	q.wake = make(chan struct{}, workers)
}

// push appends a job. There is always room: a job stands here once for each of
// those that hold it, and those are bounded.
func (q *queue) push(j *job) {
	q.mu.Lock()
	q.ring[(q.head+q.n)%len(q.ring)] = j
	q.n++
	q.size.Store(int64(q.n))
	if !q.closed { // a worker may have ended the job, and with it the last peer, by now
		select {
		case q.wake <- struct{}{}:
		default: // every worker has a token already
		}
	}
	q.mu.Unlock()
}

// next waits for a job; nil when the queue was closed.
func (q *queue) next() *job {
	for {
		q.mu.Lock()
		j := q.remove(0)
		q.mu.Unlock()
		if j != nil {
			return j
		}
		if _, open := <-q.wake; !open {
			return nil
		}
	}
}

// remove closes the gap from the front.
// Preconditions: q.mu is held.
func (q *queue) remove(at int) *job {
	if at >= q.n {
		return nil
	}
	j := q.ring[(q.head+at)%len(q.ring)]
	for ; at > 0; at-- {
		q.ring[(q.head+at)%len(q.ring)] = q.ring[(q.head+at-1)%len(q.ring)]
	}
	q.ring[q.head] = nil
	q.head = (q.head + 1) % len(q.ring)
	q.n--
	q.size.Store(int64(q.n))
	return j
}

// takeTag removes the job of a tag for the one goroutine that may help with it.
func (q *queue) takeTag(p *peer, tag uint64) *job {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.n {
		j := q.ring[(q.head+i)%len(q.ring)]
		j.mu.Lock()
		mine := j.live && j.peer == p && j.tag == tag && !j.helped
		if mine {
			j.helped = true
		}
		j.mu.Unlock()
		if mine {
			return q.remove(i)
		}
	}
	return nil
}

// removeAll removes the places of a job. It returns how many there were.
func (q *queue) removeAll(j *job) (places int) {
	if q.len() == 0 {
		return 0
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := 0; i < q.n; {
		if q.ring[(q.head+i)%len(q.ring)] != j {
			i++
			continue
		}
		q.remove(i)
		places++
	}
	return places
}

func (q *queue) len() int { return int(q.size.Load()) }

// close ends next. No job that is not done is pushed any more.
func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	close(q.wake)
}
