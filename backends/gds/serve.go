// SPDX-License-Identifier: Apache-2.0

package gds

import "github.com/sluicehq/sluice/csrc/ring"

// serve handles requests that have ended, and begins what there is room for.
func (b *Backend) serve() {
	b.books.Mu.Lock()
	for {
		n := b.ends.Poll(b.landed[:])
		for i := range n {
			b.land(&b.landed[i])
		}
		if n < len(b.landed) {
			break
		}
	}
	b.pump()
	b.leave()
}

// leave gives the lock up, and then does what must not be done under it.
func (b *Backend) leave() {
	need := b.queue.Len() > 0 || b.books.Waited() // what has ended cannot wait for Poll
	nudge := need && !b.heeding
	switch {
	case nudge:
		b.ends.Heed(1)
	case !need && b.heeding:
		b.ends.Heed(-1)
	}
	b.heeding = need
	news := b.news
	b.news = false
	p := b.takeParcel()
	b.books.Mu.Unlock()
	if p != nil {
		b.hand(p)
	}
	if news {
		b.wake()
	}
	if nudge {
		_ = b.heed.Signal() // of what had ended before; fails only when closed
	}
}

// pump begins what there is room for, the jobs in turn.
//
// Preconditions: books.Mu is held.
func (b *Backend) pump() {
	for idle := 0; idle < b.queue.Len() && (len(b.free) > 0 || b.failed); {
		j := b.queue.Pop()
		before := j.at
		if b.advance(j) {
			j.queued = false
			b.settle(j)
			continue
		}
		b.queue.Push(j)
		if idle++; j.at != before {
			idle = 0
		}
	}
	b.failed = false
}

// advance makes requests of a job, as many as it may in its turn. It reports whether there is nothing to make any more.
func (b *Backend) advance(j *job) bool {
	for range turnMax {
		if j.Err != nil || j.at.item == len(j.Items) {
			return true
		}
		if len(b.free) == 0 {
			return false
		}
		r := b.cut(j)
		if r == nil {
			return false
		}
		j.flying++
		b.launch(r)
	}
	return false
}

// land handles the end of a request, which may be the beginning of another try.
func (b *Backend) land(d *ring.Done) {
	r := &b.requests[d.Tag]
	again, err := r.judge(d)
	if again {
		b.launch(r)
		return
	}
	if s := r.mem.Extent.shared; s != nil && !r.write {
		s.Leave()
	}
	j := r.j
	*r = request{slot: r.slot}
	b.free = append(b.free, r)
	j.flying--
	if err != nil {
		b.fail(j, err)
	}
	b.settle(j)
}

func (b *Backend) fail(j *job, err error) {
	if j.Err == nil {
		j.Err = err
	}
	b.failed = true
}

// settle completes a job that has nothing under way and nothing to begin.
func (b *Backend) settle(j *job) {
	if j.queued || j.flying > 0 {
		return
	}
	for i := range j.Views {
		j.Views[i].Remote.Extent.file.endTurn(j)
	}
	tag, err := j.Tag, j.Err
	j.Clear()
	b.freeJobs = append(b.freeJobs, j)
	b.done.Push(tag, err)
	b.news = true
	b.books.Ended()
}

// stop ends requests of jobs that have failed, and begins no more of them.
//
// Preconditions: books.Mu is held.
func (b *Backend) stop() {
	b.failed = true
	for i := range b.requests {
		if r := &b.requests[i]; r.j != nil && r.j.Err != nil && !r.ending {
			r.ending = true
			b.mover.Cancel(r.slot, true)
		}
	}
	b.pump()
}
