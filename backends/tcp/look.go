// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"sync/atomic"
	"time"
)

// looks has a goroutine that polls again and again read the sockets itself: the goroutines that
// read them wait in the runtime's poller, which a program that spins leaves no processor for.
type looks struct {
	misses atomic.Int64            // calls that found nothing since a goroutine last went to sleep
	conns  [2]atomic.Pointer[conn] // where something came last
}

// Which connection a call reads: Poll is for what our peers acknowledge, Receive for what others
// send. Answers of our peers come to an engine, which calls both.
const (
	ofPeer = iota
	ofInbound
)

// looksAfter is how many calls in a row find nothing before the caller spins for us: one that is
// about to sleep makes fewer.
const looksAfter = 8

// note keeps a connection that has something to read.
func (l *looks) note(c *conn) {
	at := &l.conns[ofPeer]
	if _, inbound := c.end.(*inbound); inbound {
		at = &l.conns[ofInbound]
	}
	if at.Load() != c {
		at.Store(c)
	}
}

// missed is called where nothing was found. It reports whether something may be there now.
func (l *looks) missed(whose int) bool {
	if l.misses.Add(1) < looksAfter {
		return false
	}
	c := l.conns[whose].Load()
	if c == nil {
		return false
	}
	n, ok := c.look()
	if !ok {
		l.conns[whose].CompareAndSwap(c, nil) // until the reader notes it again
	}
	return n > 0
}

// drop forgets a connection that is over.
func (l *looks) drop(c *conn) {
	for i := range l.conns {
		l.conns[i].CompareAndSwap(c, nil)
	}
}

// look reads what is there once, unless a goroutine does so now. It waits for nothing, and leaves
// to the reader what may take long. The runtime's poller need not tell that one of what was read
// here, so where only the reader can go on, look rouses it, and reports false.
func (c *conn) look() (n int, ok bool) {
	if !c.rmu.TryLock() {
		return 0, true
	}
	defer c.rmu.Unlock()
	if c.over.Load() || c.in.chunk != nil {
		return 0, false // it is held, or in the middle of a frame
	}
	c.in.chunk = c.b.chunks.take()
	c.looked, c.saw, c.looking = 0, more, true
	err := c.raw.Control(c.lookNow)
	c.looking = false
	if err != nil || c.saw != more {
		_ = c.tcp.SetReadDeadline(time.Unix(1, 0)) // fails only where it is closed
		return c.looked, false
	}
	if c.in.phase == atHead {
		c.rest()
	}
	c.kickAnswers()
	return c.looked, true
}

// quick reports whether the last frame was one that takes no time. look leaves Reads and large
// Writes to the reader, which it has to rouse for that.
func (in *receiver) quick() bool {
	return in.h.kind != kindRead && in.h.payload() <= chunkBytes
}
