// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"slices"
	"sync"
	"sync/atomic"
)

// parkUntilProgress marks the transfer as waiting for one of its batches to end, or for the
// fragment lock of c, where that is not nil. It returns true if that has happened meanwhile: the
// caller must then go on submitting.
func (t *Transfer) parkUntilProgress(flying uint64, c *conn) bool {
	t.waitingForRoom.Store(true) // [rest]
	again := t.state().has(stopped) || t.outstanding.Load() != flying ||
		c != nil && c.fragments.isHeldBy(t) // [look]
	return again && t.waitingForRoom.CompareAndSwap(true, false)
}

// resume hands a transfer that parkUntilProgress has marked to the backlog of a connection. The
// caller polls afterwards.
func (t *Transfer) resume(c *conn) {
	if t.waitingForRoom.CompareAndSwap(true, false) && !c.enqueue(t, false) { // [wake]
		t.submit(nil) // it is stopped, so nothing is submitted
	}
}

// claim makes the caller the submitter of a post that waits.
// Preconditions: the post is pinned.
func (t *Transfer) claim() bool {
	if t.waitingForRoom.CompareAndSwap(true, false) {
		return true
	}
	for _, c := range t.via() {
		if c.remove(t) {
			return true
		}
	}
	return t.queuedFor.Load() != nil && t.e.schedule.remove(t)
}

// pollAgain makes sure that a batch which was submitted out of the backlog of head is polled for:
// it may be done already, and no wake-up comes for that. The lane of head looks again, any other is
// woken.
func (c *conn) pollAgain(head *conn) {
	if c == head {
		c.served.Store(true)
		c.lane.wanted.Add(1)
		return
	}
	c.lane.wakeProgress()
}

// backlog is the posts of a connection that wait for room, first come, first served. Its lock
// is taken only where Submit has found no room, or where others wait already, and is never
// held while Submit runs. A peer that takes nothing holds up no other.
type backlog struct {
	mu    sync.Mutex // guards the fields below
	queue []*Transfer
	busy  bool // a goroutine submits for the first post
	again bool // there may be room since it looked

	waiting atomic.Int64 // len(queue), and one more while busy
}

// enqueue hands the transfer to the backlog; the caller must not touch it afterwards, unless
// enqueue reports false: the post was stopped meanwhile, and the caller is its submitter still.
func (c *conn) enqueue(t *Transfer, first bool) bool {
	c.mu.Lock()
	at := len(c.queue)
	if first {
		at = 0
	}
	c.queue = slices.Insert(c.queue, at, t) // [queue]
	c.recount()
	c.mu.Unlock()
	return !(t.state().has(stopped) && c.remove(t)) // [recheck]
}

// remove takes a post out. It reports whether it was there.
func (c *conn) remove(t *Transfer) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.Index(c.queue, t)
	if i < 0 {
		return false
	}
	c.queue = slices.Delete(c.queue, i, i+1)
	c.recount()
	return true
}

// drain lets the posts of a backlog submit, in order, until there is no room. One goroutine at
// a time does it; another that comes meanwhile has it try once more. The backlog is not empty until
// the first post has submitted, so that no post that comes meanwhile overtakes it.
func (c *conn) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.busy {
		c.again = true // [again]
		return
	}
	for room := true; (room || c.again) && len(c.queue) > 0; {
		t := c.queue[0] // [take]
		c.queue = slices.Delete(c.queue, 0, 1)
		c.again, c.busy = false, true
		c.recount()
		c.mu.Unlock()
		room = t.submit(c)
		c.mu.Lock()
	}
	c.again, c.busy = false, false
	c.recount()
}

// recount keeps waiting, and the lane's list, as they have to be.
// Preconditions: c.mu is held.
func (c *conn) recount() {
	n := int64(len(c.queue))
	if c.busy {
		n++
	}
	if was := c.waiting.Swap(n); (was > 0) != (n > 0) {
		c.lane.block(c, n > 0)
	}
}

// backlogs lists the connections of a lane that have a backlog.
type backlogs struct {
	blockedMu   sync.Mutex // guards blocked, round and conn.round
	blocked     []*conn
	round       uint64
	someBlocked atomic.Bool
}

func (l *backlogs) block(c *conn, blocked bool) {
	l.blockedMu.Lock()
	defer l.blockedMu.Unlock()
	if blocked {
		l.blocked = append(l.blocked, c)
	} else {
		i := slices.Index(l.blocked, c)
		l.blocked = slices.Delete(l.blocked, i, i+1)
	}
	l.someBlocked.Store(len(l.blocked) > 0)
}

// retry drains each backlog, first the one that has gone longest without room: room that all
// connections share goes to all, however many rounds find none.
func (l *backlogs) retry() {
	if !l.someBlocked.Load() {
		return
	}
	l.blockedMu.Lock()
	l.round++
	round := l.round
	l.blockedMu.Unlock()
	for c := l.nextOf(round); c != nil; c = l.nextOf(round) {
		c.drain()
		if c.served.Swap(false) {
			l.putLast(c)
		}
	}
}

// nextOf returns the first connection that no round so late has drained.
func (l *backlogs) nextOf(round uint64) *conn {
	l.blockedMu.Lock()
	defer l.blockedMu.Unlock()
	for _, c := range l.blocked {
		if c.round < round {
			c.round = round
			return c
		}
	}
	return nil
}

// putLast puts a connection behind the others, unless it has no backlog any more.
func (l *backlogs) putLast(c *conn) {
	l.blockedMu.Lock()
	defer l.blockedMu.Unlock()
	if i := slices.Index(l.blocked, c); i >= 0 {
		copy(l.blocked[i:], l.blocked[i+1:])
		l.blocked[len(l.blocked)-1] = c
	}
}

// A fragmentLock lets one transfer at a time send a fragmented notification over a connection.
type fragmentLock struct {
	mu      sync.Mutex // guards the fields below
	owner   *Transfer
	waiting []*Transfer
}

// tryLock reports whether t has the lock. Otherwise t is queued for it, before those of lower
// classes.
func (l *fragmentLock) tryLock(t *Transfer) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.owner == nil {
		l.owner = t
	}
	if l.owner != t && !slices.Contains(l.waiting, t) {
		at := len(l.waiting)
		for ; t.grants == nil && at > 0 && l.waiting[at-1].grants != nil; at-- {
		}
		l.waiting = slices.Insert(l.waiting, at, t)
	}
	return l.owner == t
}

// isHeldBy reports whether t has been given the lock.
func (l *fragmentLock) isHeldBy(t *Transfer) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.owner == t
}

// unlock gives up the lock of t, or its place in the queue, and returns the transfer that has got
// the lock.
func (l *fragmentLock) unlock(t *Transfer) (next *Transfer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting = slices.DeleteFunc(l.waiting, func(other *Transfer) bool { return other == t })
	if l.owner != t {
		return nil
	}
	l.owner = nil
	if len(l.waiting) > 0 {
		l.owner = l.waiting[0]
		l.waiting = slices.Delete(l.waiting, 0, 1)
	}
	return l.owner
}
