// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// sweeper ends transfers that are past their deadline, in three stages, each
// bounded by Config.AbortGrace: it cancels; it closes the connection, which
// proves the end; and, with a backend that breaks even that promise, it gives the
// transfer up and keeps its regions busy. Its timer runs only while something is
// posted.
type sweeper struct {
	e      *Engine
	period time.Duration
	armed  atomic.Bool
	mu     sync.Mutex // guards timer and ended
	timer  *time.Timer
	ended  bool

	sweeping sync.Mutex // one sweep at a time, and none after stop
}

// The stages of Transfer.stage.
const (
	inTime = iota
	cancelled
	disconnected
)

func (s *sweeper) init(e *Engine) {
	s.e = e
	s.period = min(max(min(e.cfg.TransferTimeout, e.cfg.AbortGrace)/8, time.Millisecond), time.Second)
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
		if t != nil && t.state.Load() == posted && t.isLate(now) && t.grip() {
			s.expire(t, now)
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

// expire takes the next step, if the transfer is still late now that it is gripped.
func (s *sweeper) expire(t *Transfer, now time.Duration) {
	grace := s.e.cfg.AbortGrace
	stage := t.stage.Load()
	if !t.isLate(now) || !t.stage.CompareAndSwap(stage, stage+1) {
		return
	}
	t.deadline.Store(int64(now + grace))
	switch stage {
	case inTime:
		t.interrupt(ErrTimeout) // keeps ErrAborted if that came first
	case cancelled:
		for _, c := range t.via() {
			c.sever()
		}
	case disconnected:
		t.abandon()
	}
}

// abandon ends a transfer without proof. Its regions stay busy for ever, and
// Abort says so.
func (t *Transfer) abandon() {
	if t.remaining.Swap(math.MinInt64/2) <= 0 {
		return // it ended by itself just now
	}
	t.unproven.Store(true)
	t.generation.Store(0) // completions of it find nobody
	t.short.Store(true)
	t.fail(ErrTimeout)
	t.settle()
}
