// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"sync"
	"sync/atomic"
	"time"
)

// sweeper ends transfers that are past their deadline, in three stages, each
// bounded by Config.AbortGrace: it cancels; it closes the connection, which
// proves the end; and, with a backend whose Close has returned and which breaks even that
// promise, it gives the transfer up and keeps its regions busy. Its timer runs only while something
// is posted.
type sweeper struct {
	e      *Engine
	period time.Duration
	armed  atomic.Bool
	mu     sync.Mutex // guards timer and ended
	timer  *time.Timer
	ended  bool

	sweeping sync.Mutex // one sweep at a time, and none after stop
}

func (s *sweeper) init(e *Engine) {
	s.e = e
	s.period = min(max(min(e.cfg.TransferTimeout, e.cfg.AbortGrace)/8, time.Millisecond),
		time.Second)
	s.timer = time.AfterFunc(time.Hour, s.sweep)
	s.timer.Stop()
}

// watch makes sure that the timer runs. It costs one load when it does.
func (s *sweeper) watch() {
	if s.armed.Load() || !s.armed.CompareAndSwap(false, true) {
		return
	}
	s.reset(s.period)
}

func (s *sweeper) reset(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.timer.Reset(d)
	}
}

func (s *sweeper) stop() {
	s.mu.Lock()
	s.ended = true
	s.timer.Stop()
	s.mu.Unlock()
	s.sweeping.Lock() // waits for one that runs
	defer s.sweeping.Unlock()
}

func (s *sweeper) hasEnded() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ended
}

func (s *sweeper) sweep() {
	s.sweeping.Lock()
	defer s.sweeping.Unlock()
	if s.hasEnded() {
		return
	}
	now := s.e.now()
	for i := range s.e.slots.live {
		t := s.e.slots.live[i].Load()
		if t == nil || t.look().phase() != posted || !t.isLate(now) {
			continue
		}
		if generation, ok := t.holdPost(); ok {
			s.expire(t, generation, now)
			t.letGo()
		}
	}
	if s.e.slots.posted() > 0 {
		s.reset(s.period)
		return
	}
	s.armed.Store(false)
	if s.e.slots.posted() > 0 { // posted while we disarmed, and thought us armed
		s.watch()
	}
}

func (t *Transfer) isLate(now time.Duration) bool { return now >= time.Duration(t.deadline.Load()) }

// expire takes the next step, if the transfer is still late now that it is held.
func (s *sweeper) expire(t *Transfer, generation uint64, now time.Duration) {
	w := t.look() // before the deadline: cancel sets that first
	if !t.isLate(now) {
		return
	}
	switch {
	case !w.has(cancelled):
		if !t.cancel(generation, now+s.e.cfg.AbortGrace) {
			return // by another goroutine, just now
		}
		t.interrupt(generation, ErrTimeout) // keeps ErrAborted if that came first
	case t.advance(generation, severed):
		t.deadline.Store(int64(now + closeMax))
		t.severAll(generation)
	case t.isReaped() || now > time.Duration(t.deadline.Load())+closeMax:
		t.abandon(generation)
	}
}

// isReaped takes the completions that the connections' backends have left, and reports whether it
// has them all: not where another goroutine has some in hand, which the scheduler may keep off.
func (t *Transfer) isReaped() bool {
	for _, c := range t.via() {
		if !c.lane.reaped() {
			return false
		}
	}
	return true
}

// cancel sets when the connection is closed, if no other goroutine has, and then says that the
// post is cancelled: what sees that sees no deadline of before.
func (t *Transfer) cancel(generation uint64, until time.Duration) bool {
	for {
		was := t.deadline.Load()
		if t.look().has(cancelled) {
			return false
		}
		if t.deadline.CompareAndSwap(was, int64(until)) {
			break
		}
	}
	if !t.advance(generation, cancelled) {
		return false
	}
	if now := t.deadline.Load(); now != int64(until) && !t.look().has(severed) {
		t.deadline.CompareAndSwap(now, int64(until)) // a batch that ended gave it more time
	}
	return true
}

// closeMax is after what time a backend's Close is taken for one that never returns.
const closeMax = time.Minute

// severAll closes the connections of a post. The time after which the transfer is given up
// begins when all have been closed: a backend's Close is bounded, but not by AbortGrace.
func (t *Transfer) severAll(generation uint64) {
	list := t.via()
	left := new(atomic.Int64)
	left.Store(int64(len(list)))
	for _, c := range list {
		c.sever(func() {
			if left.Add(-1) > 0 {
				return
			}
			if now, ok := t.holdPost(); ok {
				if now == generation {
					t.deadline.Store(int64(t.e.now() + t.e.cfg.AbortGrace))
				}
				t.letGo()
			}
		})
	}
}

// abandon ends a transfer without proof. Its regions stay busy for ever, and
// Abort says so.
func (t *Transfer) abandon(generation uint64) {
	if !t.isPost(generation) {
		return // isReaped has found its end
	}
	t.e.givenUp.list(t, generation)
	t.fail(generation, ErrTimeout)
	t.settle(generation, unproven|short)
}
