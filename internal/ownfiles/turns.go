// SPDX-License-Identifier: Apache-2.0

package ownfiles

import "github.com/sluicehq/sluice/driver"

// turnMax is how many requests of one job begin before the next job has its turn.
const turnMax = 32

// Add makes a job known, which is as yet free, of those that are made at the start: one
// for each of Config.JobsMax.
func (b *Flights[E]) Add(j *Job[E]) {
	b.jobs = append(b.jobs, j)
	b.free = append(b.free, j)
}

// Can implements driver.Peer.
func (p *Peer[E]) Can() driver.Can { return p.flights.cfg.Can }

// Submit implements driver.Peer. It begins the first requests of a batch.
func (p *Peer[E]) Submit(tag uint64, batch *driver.Batch) error {
	b := p.flights
	if err := batch.Check(b.cfg.Can); err != nil {
		return err
	}
	if !b.Gate.Enter() {
		return driver.ErrClosed
	}
	defer b.Gate.Exit()
	b.Mu.Lock()
	if err := p.accept(tag, batch); err != nil {
		b.Mu.Unlock()
		return err
	}
	b.Pump()
	b.cfg.Leave()
	return nil
}

// accept makes a free job of a batch, or says why not.
func (p *Peer[E]) accept(tag uint64, batch *driver.Batch) error {
	b := p.flights
	if p.closed {
		return driver.ErrClosed
	}
	if len(b.free) == 0 || !b.Done.Take() { // a job for each place, but those that wait for Poll
		return driver.ErrFull
	}
	j := b.free[len(b.free)-1]
	j.Op, j.Tag, j.At, j.Flying = batch.Op, tag, Cursor{}, 0
	err := j.take(p, batch, b.cfg.DescsMax, b.cfg.RunsMax)
	if err == nil && b.cfg.Take != nil {
		err = b.cfg.Take(j, batch)
	}
	if err != nil {
		j.Clear()
		b.Done.GiveBack()
		return err
	}
	b.free = b.free[:len(b.free)-1]
	j.by, j.queued = p, true
	b.queue.push(j)
	return nil
}

// Admit enters memory that a request is to land in. False: a Renew waits or runs, and what is to be
// begun begins when that is over. It waits for nothing: what the Renew waits for ends under Mu.
//
// Preconditions: Mu is held.
func (b *Flights[E]) Admit(s driver.Shared) bool {
	if s.TryEnter() {
		return true
	}
	if _, waits := b.returning[s]; !waits && b.Gate.Enter() {
		b.returning[s] = struct{}{}
		go b.comeBack(s)
	}
	return false
}

// comeBack begins what waits for a Renew, once that is over or has waited for long itself.
func (b *Flights[E]) comeBack(s driver.Shared) {
	defer b.Gate.Exit()
	s.Enter()
	s.Leave()
	b.Mu.Lock()
	delete(b.returning, s)
	b.Pump()
	b.cfg.Leave()
}

// Queued reports whether there are jobs with pieces that no request was made of.
//
// Preconditions: Mu is held.
func (b *Flights[E]) Queued() bool { return b.queue.n > 0 }

// Pump begins what there is room for, the jobs in turn.
//
// Preconditions: Mu is held.
func (b *Flights[E]) Pump() {
	if b.cfg.First != nil {
		b.cfg.First()
	}
	for idle := 0; idle < b.queue.n && (b.cfg.Room() || b.failed); {
		j := b.queue.pop()
		before := j.At
		if b.advance(j) {
			j.queued = false
			b.Settle(j)
			continue
		}
		b.queue.push(j)
		if idle++; j.At != before {
			idle = 0
		}
	}
	b.failed = false
}

// advance makes requests of a job, as many as it may in its turn. It reports whether there is
// nothing to make any more.
func (b *Flights[E]) advance(j *Job[E]) bool {
	for range turnMax {
		if j.Err != nil || j.At.Item == len(j.Items) {
			return true
		}
		if !b.cfg.Room() || !b.cfg.Cut(j) {
			return false
		}
		j.Flying++
	}
	return false
}

// Landed notes the end of a request of a job, and completes the job if it was the last.
//
// Preconditions: Mu is held.
func (b *Flights[E]) Landed(j *Job[E], err error) {
	j.Flying--
	if err != nil {
		b.Fail(j, err)
	}
	b.Settle(j)
}

// Fail has a job end before it is done.
//
// Preconditions: Mu is held.
func (b *Flights[E]) Fail(j *Job[E], err error) {
	if j.Err == nil {
		j.Err = err
	}
	b.failed = true
}

// Settle completes a job that has nothing under way and nothing to begin.
//
// Preconditions: Mu is held.
func (b *Flights[E]) Settle(j *Job[E]) {
	if j.queued || j.Flying > 0 || !b.cfg.Ends(j) {
		return
	}
	tag, err := j.Tag, j.Err
	j.Clear()
	b.free = append(b.free, j)
	b.Done.Push(tag, err)
	b.News = true
	if b.waiters > 0 {
		b.ended.Broadcast()
	}
}

// Pop is for driver.Backend.Poll.
func (b *Flights[E]) Pop(done []driver.Completion) (int, error) {
	n := b.Done.Pop(done)
	if n == 0 && b.Closed() && b.Done.Taken() == 0 {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// turns is a queue of jobs that take turns; each stands in it once at most.
type turns[J any] struct {
	list    []*J
	head, n int
}

// newTurns makes room for so many.
func newTurns[J any](most int) turns[J] { return turns[J]{list: make([]*J, most)} }

// push puts one behind the others.
func (q *turns[J]) push(j *J) {
	q.list[(q.head+q.n)%len(q.list)] = j
	q.n++
}

// pop takes the first, of one or more.
func (q *turns[J]) pop() *J {
	j := q.list[q.head]
	q.list[q.head] = nil
	q.head = (q.head + 1) % len(q.list)
	q.n--
	return j
}
