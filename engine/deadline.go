// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
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

func (s *sweeper) sweep() {
	s.sweeping.Lock()
	defer s.sweeping.Unlock()
	s.mu.Lock()
	ended := s.ended
	s.mu.Unlock()
	if ended {
		return
	}
	now := s.e.now()
	for i := range s.e.slots.live {
		t := s.e.slots.live[i].Load()
		if t == nil || t.state().phase() != posted || !t.isLate(now) {
			continue
		}
		if generation, ok := t.pin(); ok {
			s.expire(t, generation, now)
			t.unpin()
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
	w := t.state() // before the deadline: cancel sets that first
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
		// The time after which the transfer is given up begins when all connections have been
		// closed: a backend's Close is bounded, but not by AbortGrace.
		t.deadline.Store(int64(now + closeMax))
		left := new(atomic.Int64)
		left.Store(int64(len(t.via())))
		for _, c := range t.via() {
			c.sever(func() {
				if left.Add(-1) > 0 {
					return
				}
				if now, ok := t.pin(); ok {
					if now == generation {
						t.deadline.Store(int64(t.e.now() + t.e.cfg.AbortGrace))
					}
					t.unpin()
				}
			})
		}
	case slices.ContainsFunc(t.via(), func(c *conn) bool { return !c.lane.reaped() }) &&
		now <= time.Duration(t.deadline.Load())+closeMax:
		// Another goroutine has completions in hand: the scheduler may keep it off.
	default:
		t.abandon(generation)
	}
}

// cancel sets when the connection is closed, if no other goroutine has, and then says that the
// post is cancelled: a goroutine that sees the flag sees the new deadline, too.
func (t *Transfer) cancel(generation uint64, until time.Duration) bool {
	for {
		was := t.deadline.Load()
		if t.state().has(cancelled) {
			return false
		}
		if t.deadline.CompareAndSwap(was, int64(until)) {
			break
		}
	}
	if !t.advance(generation, cancelled) {
		return false
	}
	if now := t.deadline.Load(); now != int64(until) && !t.state().has(severed) {
		t.deadline.CompareAndSwap(now, int64(until)) // a batch that ended gave it more time
	}
	return true
}

// extendDeadline has the time of a post begin anew: one of its batches has ended well, and others
// have not. A post that is being ended is not given more.
func (t *Transfer) extendDeadline(generation uint64) {
	was := t.deadline.Load()
	w := t.state()
	if w.phase() != posted || w.generation() != generation || w.has(cancelled) {
		return
	}
	// Where cancelled was set since, its deadline stands, or is about to be stored.
	t.deadline.CompareAndSwap(was, int64(t.e.now()+t.e.cfg.TransferTimeout))
}

// closeMax is the time after which a backend's Close is taken for one that never returns.
const closeMax = time.Minute

// abandon ends a transfer without proof. Its regions stay busy for ever, and Abort says so. Its
// slot comes free once its backends have ended their batches after all.
func (t *Transfer) abandon(generation uint64) {
	if !t.isPost(generation) {
		return // a completion that was reaped just now has ended it
	}
	t.fail(generation, ErrTimeout)
	t.settle(generation, unproven|short)
}

// Abort ends the transfer and returns nil when its outcome is known and final:
// then no byte of it lands any more, on either side, and Err says how it ended
// (ErrAborted, or whatever came first, which may be success). What lands a write over tcp or
// ucx is the owner: one that stands still may finish the copy that it was in (see
// docs/promises.md), and its own Revoke waits for that. A backend that cannot prove this
// within Config.AbortGrace loses its connection to the peer, which proves it, but over rdma, where
// Abort returns ErrUnproven when the peer does not answer; Abort of a backend that breaks even
// that promise returns an error. When ctx ends first, Abort returns its error,
// nothing is proved yet, and Abort may be called again.
func (t *Transfer) Abort(ctx context.Context) error {
	return t.abort(ctx, t.state().generation())
}

// abort ends the post of a generation, and no other: another goroutine may post anew as soon
// as that one has ended.
func (t *Transfer) abort(ctx context.Context, generation uint64) error {
	if t.stop(generation, ErrAborted) {
		if err := t.park(ctx, generation); err != nil && t.isPost(generation) {
			return err
		}
	}
	switch w := t.state(); {
	case w.has(unproven):
		return &OpError{Op: "abort", Peer: t.p.name, Err: errNotEnded}
	case t.lastUnanswered.Load() >= max(generation, 1):
		return &OpError{Op: "abort", Peer: t.p.name, Err: errNotAnswered}
	}
	return nil
}

var (
	errNotEnded = fmt.Errorf("the backend neither ended the transfer nor closed its connection: "+
		"do not reuse the memory: %w", ErrTimeout)
	errNotAnswered = fmt.Errorf("memory here is free, but the peer may still place what it "+
		"has in hand, "+
		"until it revokes or ends: %w", driver.ErrUnproven)
)

// stop is abort without the wait. It reports whether there was something to end.
func (t *Transfer) stop(generation uint64, why error) bool {
	held, ok := t.pin()
	if !ok {
		return t.isPost(generation)
	}
	defer t.unpin()
	if held != generation {
		return false
	}
	if t.cancel(generation, t.e.now()+t.e.cfg.AbortGrace) {
		t.e.sweeper.watch()
	}
	t.interrupt(generation, why)
	return true
}

// interrupt stops a post: it cancels the batches that backends have, and leaves the others out.
// Preconditions: the post is pinned.
func (t *Transfer) interrupt(generation uint64, why error) {
	t.fail(generation, why)
	if !t.mark(generation, stopped) {
		return // its outcome is fixed
	}
	bits := t.outstanding.Load()
	for _, c := range t.via() {
		for bit := range batchesInFlight {
			if bits&(1<<bit) != 0 {
				c.p.Cancel(tag(t.slot, generation, bit))
			}
		}
	}
	if t.claim() {
		t.submit(nil) // leaves out the batches that were not submitted
	}
	t.poll()
}

// completionError returns the outcome of a transfer of which a backend has ended a batch with err.
func (t *Transfer) completionError(l *lane, err error) error {
	if err == driver.ErrAborted {
		return ErrAborted // by us: no news about backend and peer
	}
	return t.backendError(t.p.conns[l.index], err)
}

// backendError returns the outcome of a transfer that Submit has refused.
func (t *Transfer) backendError(c *conn, err error) error {
	return &OpError{Op: t.op.String(), Backend: c.lane.caps.Name, Peer: t.p.name,
		Err: t.p.reason(c, err)}
}

// reason is why a call of a connection failed: that the engine closes one that was lost is its own
// affair.
func (p *Peer) reason(c *conn, err error) error {
	if errors.Is(err, driver.ErrClosed) && c.isLost() && !p.ending.Load() {
		return ErrPeerLost
	}
	return err
}
