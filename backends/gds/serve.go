// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"context"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/csrc"
)

// serve handles requests that have ended, and begins what there is room for.
func (b *Backend) serve() {
	b.mu.Lock()
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
	need := b.queue.n > 0 || b.waiters > 0 // what has ended cannot wait for Poll
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
	b.mu.Unlock()
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
// Preconditions: mu is held.
func (b *Backend) pump() {
	for idle := 0; idle < b.queue.n && (len(b.free) > 0 || b.failed); {
		j := b.queue.pop()
		before := j.at
		if b.advance(j) {
			j.queued = false
			b.settle(j)
			continue
		}
		b.queue.push(j)
		if idle++; j.at != before {
			idle = 0
		}
	}
	b.failed = false
}

// advance makes requests of a job, as many as it may in its turn. It reports whether there is nothing to make any more.
func (b *Backend) advance(j *job) bool {
	for range turnMax {
		if j.err != nil || j.at.item == len(j.items) {
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
func (b *Backend) land(d *csrc.Done) {
	r := &b.requests[d.Tag]
	again, err := r.judge(d)
	if again {
		b.launch(r)
		return
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
	if j.err == nil {
		j.err = err
	}
	b.failed = true
}

// settle completes a job that has nothing under way and nothing to begin.
func (b *Backend) settle(j *job) {
	if j.queued || j.flying > 0 {
		return
	}
	for i := range j.views {
		j.views[i].remote.m.file.endTurn(j)
	}
	tag, err := j.tag, j.err
	j.clear()
	b.freeJobs = append(b.freeJobs, j)
	b.done.Push(tag, err)
	b.news = true
	if b.waiters > 0 {
		b.calm.Broadcast()
	}
}

// endJobs ends those that which picks, as early as can be.
//
// Preconditions: mu is held.
func (b *Backend) endJobs(why error, which func(*job) bool) {
	for i := range b.jobs {
		if j := &b.jobs[i]; j.live && which(j) {
			b.fail(j, why)
		}
	}
	for i := range b.requests {
		if r := &b.requests[i]; r.j != nil && r.j.err != nil && !r.ending {
			r.ending = true
			b.mover.Cancel(r.slot, true)
		}
	}
	b.pump()
}

// wait returns when the condition holds, or the context has ended. It gives the lock up meanwhile; the condition is
// looked at whenever a job has ended.
//
// Preconditions: mu is held.
func (b *Backend) wait(ctx context.Context, met func() bool) error {
	b.waiters++
	defer func() { b.waiters-- }()
	b.leave()
	b.mu.Lock()
	stop := context.AfterFunc(ctx, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.calm.Broadcast()
	})
	defer stop()
	for !met() {
		if ctx.Err() != nil {
			return backends.ContextError(ctx)
		}
		b.calm.Wait()
	}
	return nil
}
