// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"sync"
	"sync/atomic"
)

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
		default: // every worker is told already
		}
	}
	q.mu.Unlock()
}

// next waits for a job; nil when the queue was closed.
func (q *queue) next() *job {
	for {
		if j := q.take(0); j != nil {
			return j
		}
		if _, open := <-q.wake; !open {
			return nil
		}
	}
}

// take removes the job at a place.
func (q *queue) take(at int) *job {
	if q.len() == 0 {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.remove(at)
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

func (q *queue) len() int { return int(q.size.Load()) }

// close ends next. No job that is not done is pushed any more.
func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	close(q.wake)
}
