// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"slices"
	"sync"
	"sync/atomic"
)

// backlogs is the part of a lane that knows which transfers wait for room: they are posted,
// but were answered with ErrFull. Each connection has a backlog of its own, first come,
// first served, so that a peer that takes nothing holds up no other.
type backlogs struct {
	backlogMu sync.Mutex   // guards blocked and conn.backlog
	blocked   []*conn      // with a backlog
	backlog   atomic.Int64 // transfers in all of them

	retrying, retryAgain atomic.Bool
	turn                 []*conn // guarded by retrying
}

// retry lets each backlog submit, in order, until there is no room again. One
// goroutine at a time does it; another that comes meanwhile sets a flag and goes.
func (l *backlogs) retry() {
	for l.backlog.Load() > 0 {
		l.retryAgain.Store(true)
		if !l.retrying.CompareAndSwap(false, true) {
			return
		}
		l.retryAgain.Store(false)
		l.turn = l.nextTurn(l.turn[:0])
		for _, c := range l.turn {
			c.drain()
		}
		clear(l.turn)
		l.retrying.Store(false)
		if !l.retryAgain.Load() {
			return
		}
	}
}

// drain lets the transfers of a backlog submit, in order, until there is no room. While one
// is pumped it may be listed once more: a completion then finds that it has to go on.
func (c *conn) drain() {
	for t := c.head(); t != nil; t = c.head() {
		t.queued.Store(false)
		if !t.pump(c) {
			t.queued.Store(true)
			return
		}
		c.dropHead()
	}
}

// nextTurn lists the connections with a backlog, each time beginning with another one: room that
// all connections share goes to all.
func (l *backlogs) nextTurn(dst []*conn) []*conn {
	l.backlogMu.Lock()
	defer l.backlogMu.Unlock()
	if n := len(l.blocked); n > 1 {
		first := l.blocked[0]
		copy(l.blocked, l.blocked[1:])
		l.blocked[n-1] = first
	}
	return append(dst, l.blocked...)
}

// head returns the transfer that is next. It stays in the backlog while it submits, so that
// no transfer that is posted meanwhile overtakes it.
func (c *conn) head() *Transfer {
	c.lane.backlogMu.Lock()
	defer c.lane.backlogMu.Unlock()
	if len(c.backlog) == 0 {
		return nil
	}
	return c.backlog[0]
}

func (c *conn) dropHead() {
	l := c.lane
	l.backlogMu.Lock()
	defer l.backlogMu.Unlock()
	c.backlog = slices.Delete(c.backlog, 0, 1)
	if len(c.backlog) == 0 {
		i := slices.Index(l.blocked, c)
		l.blocked = slices.Delete(l.blocked, i, i+1)
	}
	c.waiting.Add(-1)
	l.backlog.Add(-1)
}

// push lists a transfer, unless it waits in a backlog already: it waits for one connection
// at a time.
func (c *conn) push(t *Transfer) {
	if !t.queued.CompareAndSwap(false, true) {
		return
	}
	l := c.lane
	l.backlogMu.Lock()
	defer l.backlogMu.Unlock()
	if len(c.backlog) == 0 {
		l.blocked = append(l.blocked, c)
	}
	c.backlog = append(c.backlog, t)
	c.waiting.Add(1)
	l.backlog.Add(1)
}
