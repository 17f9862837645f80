// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	gpu "github.com/sluicehq/sluice/csrc/cuda"
	"github.com/sluicehq/sluice/csrc/ring"
	"github.com/sluicehq/sluice/driver"
)

// queue is completions that wait for Poll, in a ring with a place for each tag.
type queue struct {
	places   []driver.Completion
	first, n int
}

func (q *queue) put(c driver.Completion) {
	q.places[(q.first+q.n)%len(q.places)] = c
	q.n++
}

func (q *queue) take(done []driver.Completion) int {
	n := min(len(done), q.n)
	for i := range n {
		at := (q.first + i) % len(q.places)
		done[i], q.places[at] = q.places[at], driver.Completion{}
	}
	q.first, q.n = (q.first+n)%len(q.places), q.n-n
	return n
}

// reap takes what has ended off the ring. The caller holds reaping.
func (b *Backend) reap() {
	if b.down {
		return
	}
	for {
		n := b.ends.Poll(b.done)
		for i := range b.done[:n] {
			b.finish(&b.done[i])
		}
		if n < len(b.done) {
			return
		}
	}
}

// help is reap by another backend, which waits for a batch of this one.
func (b *Backend) help() {
	b.reaping.Lock()
	defer b.reaping.Unlock()
	b.reap()
}

// attend takes ends off the ring where the program may not poll: the notifications behind them
// wait.
func (b *Backend) attend() {
	defer close(b.attended)
	for b.heed.Wait() == nil && !b.closing.Load() {
		b.help()
	}
}

// finish ends a batch. The caller holds reaping.
func (b *Backend) finish(d *ring.Done) {
	j := b.jobs[d.Tag]
	j.serial.Load() // what was written before C had the job is seen from here on
	p, c := j.p, driver.Completion{Tag: j.tag, Err: j.outcome(d)}
	parked.At(spotEnded)
	if c.Err == nil && j.overtaken() {
		c.Err = driver.ErrRevoked
	}
	parked.At(spotJudged)
	if j.heeded() {
		b.ends.Heed(-1)
	}
	p.sender.Post(j.notify, c.Err)
	j.give()
	b.ready.put(c)
	p.unfinished.Add(-1)
}

// heeded reports whether something awaits the end that does not poll: a notification, or another
// process.
func (j *job) heeded() bool { return j.notify != nil || j.p.far != nil }

func (j *job) outcome(d *ring.Done) error {
	if d.Status == 0 {
		return nil
	}
	if why := j.why.Load(); why != nil && d.Status == gpu.Canceled {
		return *why
	}
	err := gpu.Status(j.call, d.Status)
	if d.Piece >= 0 {
		return &driver.PieceError{Piece: int(d.Piece), Err: err}
	}
	return err
}

// complete ends a tag that was no batch.
func (b *Backend) complete(c driver.Completion) {
	b.reaping.Lock()
	defer b.reaping.Unlock()
	b.ready.put(c)
}
