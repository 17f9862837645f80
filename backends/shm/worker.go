// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"github.com/sluicehq/sluice/driver"
)

// work copies pieces until the queue is closed.
func (b *Backend) work(id int) {
	defer b.tasks.Done()
	var scratch [1]driver.Desc
	for {
		j := b.queue.next()
		if j == nil {
			return
		}
		b.carry(j, announceWorkers+id, &scratch)
	}
}

// carry copies pieces of a job until none is left or another job waits: a long
// one does not keep short ones waiting.
func (b *Backend) carry(j *job, line int, scratch *[1]driver.Desc) {
	for b.step(j, line, scratch, b.wake) {
		if b.queue.len() > 0 {
			b.queue.push(j)
			return
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
	for p.b.step(j, 0, &j.scratch, noWake) {
		select {
		case <-stop:
			p.b.queue.push(j)
			return true
		default:
		}
	}
	return true
}

func noWake() {}

// step copies one piece of a job. It reports false when the caller holds the
// job no more; wake is called when the job completed by it.
func (b *Backend) step(j *job, line int, scratch *[1]driver.Desc, wake func()) bool {
	j.mu.Lock()
	j.look()
	if j.err != nil || j.stale || j.left == 0 {
		b.letGo(j, wake)
		return false
	}
	p := j.cut(uint64(b.cfg.PieceMax), scratch)
	join := j.left > 0 && j.held < b.hands(j) && b.queue.len() < b.cfg.JobsMax
	if join {
		j.held++
	}
	j.mu.Unlock()
	if join {
		b.queue.push(j) // for another worker to join in
	}
	j.landed(&p, j.peer.move(&p, line))
	return true
}

// hands is how many may copy one job: the workers, and the goroutine that helps.
// Preconditions: j.mu is held.
func (b *Backend) hands(j *job) int {
	if j.helped {
		return b.cfg.Workers + 1
	}
	return b.cfg.Workers
}

// landed keeps how the copy of a piece ended.
func (j *job) landed(p *piece, err error) {
	switch err {
	case nil:
	case errStale:
		j.mu.Lock()
		j.stale, j.waits = true, p.remote
		j.mu.Unlock()
	default:
		j.fail(err)
	}
}

// look finds what ends a job early. A job that is all copied ends well.
// Preconditions: j.mu is held.
func (j *job) look() {
	if j.err != nil || j.left == 0 && !j.stale {
		return
	}
	switch {
	case j.cancelled:
		j.err = driver.ErrAborted
	case j.peer.closing.Load():
		j.err = driver.ErrClosed
	case j.peer.lost.Load():
		j.err = driver.ErrPeerLost
	}
}

// letGo drops one hold. The last one finishes the job, or parks it until fresh
// pages are mapped.
// Preconditions: j.mu is held; it is released.
func (b *Backend) letGo(j *job, wake func()) {
	j.held--
	if j.held > 0 {
		j.mu.Unlock()
		return
	}
	if j.stale && j.err == nil {
		j.stale, j.held = false, 1
		j.rewind()
		j.mu.Unlock()
		j.peer.park(j)
		return
	}
	j.live = false
	p, err := j.peer, j.err
	j.mu.Unlock()
	b.finish(j, err)
	wake()
	p.exit()
}

// finish completes a job: its tail goes out or is dropped, then everything
// that the job held is given back, then the completion shows.
func (b *Backend) finish(j *job, err error) {
	p := j.peer
	p.endTail(&j.tail, err == nil)
	for i := range j.runs {
		p.unuse(j.runs[i].remote)
		j.runs[i] = run{}
	}
	j.runs, j.descs, j.pattern, j.tail = j.runs[:0], j.descs[:0], driver.Pattern{}, tail{}
	tag := j.tag
	b.jobs.put(j)
	b.done.Push(tag, err)
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
