// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"slices"
	"sync"
	"sync/atomic"
)

// backlog is the posts of a connection that wait for room, first come, first served. Its lock
// is taken only where Submit has found no room, or where others wait already, and is never
// held while Submit runs. A peer that takes nothing holds up no other.
type backlog struct {
	mu    sync.Mutex // guards what follows
	queue []*Transfer
	busy  bool // a goroutine submits for what was the first
	again bool // there may be room since it looked

	waiting atomic.Int64 // len(queue), and one more while busy
}

// wait puts a post into the backlog, whose submitter the caller is, and is not from then on.
// It reports false when the post was stopped meanwhile, and is the caller's still.
func (c *conn) wait(t *Transfer, first bool) bool {
	c.mu.Lock()
	at := len(c.queue)
	if first {
		at = 0
	}
	c.queue = slices.Insert(c.queue, at, t) // [queue]
	c.recount()
	c.mu.Unlock()
	return !(t.look().has(stopped) && c.remove(t)) // [recheck]
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
// a time does it; another that comes meanwhile has it try once more.
func (c *conn) drain() {
	for t := c.first(); t != nil; {
		t = c.next(t.submit(c))
	}
}

// first begins to drain and returns the first post, if there is one.
func (c *conn) first() *Transfer {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.busy {
		c.again = true // [again]
		return nil
	}
	return c.pop()
}

// next returns the post that is next, if there was room or may be now.
func (c *conn) next(room bool) *Transfer {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !room && !c.again {
		c.busy = false
		c.recount()
		return nil
	}
	return c.pop()
}

// pop takes the first post out. The backlog is not empty until that has submitted, so that no
// post that comes meanwhile overtakes it.
// Preconditions: c.mu is held.
func (c *conn) pop() (t *Transfer) {
	c.again = false
	if c.busy = len(c.queue) > 0; c.busy {
		t = c.queue[0] // [take]
		c.queue = slices.Delete(c.queue, 0, 1)
	}
	c.recount()
	return t
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
