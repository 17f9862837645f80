// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// scheduler decides when the transfers below SwapIn hand their batches to a backend.
//
// What it adds to a post, in this order:
//
//	enter     Post: counts a SwapIn as under way; refuses a lower one where the queue is full
//	request   submit, before each batch of a lower class: room for its bytes, or a place in the
//	          queue of the resource. Whoever takes the transfer out of the queue is its submitter
//	release   finish, with each batch: the room is free again
//	leave     settle: the SwapIn is over; room that a post still has is free again
//	pump      lane.poll, behind release and leave: takes transfers out of the queues, in order,
//	          while there is room, and submits them
//
// A transfer leaves its queue in three more ways: claim (Abort, a timeout, a failed batch), flush
// (a connection was lost or closed), and tick (its deadline). Each goes through submit, which finds
// the post stopped, or the connection lost, and ends it: nothing of it was handed over.
//
// A queued transfer holds nothing of a backend: no tag, no key in use, nothing that a revoke waits
// for.
type scheduler struct {
	e        *Engine
	cfg      Schedule
	weights  [classes]float64
	patience time.Duration // how long a SwapIn without progress holds the others back

	swapIns atomic.Uint64 // posts of that class: counts has them not
	waiting atomic.Int64  // in queues, or about to be
	again   atomic.Bool   // there may be room for one of them: pump must look

	mu      sync.Mutex  // guards the fields below; never held while Submit runs
	blocked []*resource // with a queue
	counts  [classes]ClassStats
	timer   *time.Timer   // calls tick
	next    time.Duration // when; 0: it does not run
}

// patienceDefault is what a SwapIn of one batch of 64 MiB needs at 256 MB/s.
const patienceDefault = 250 * time.Millisecond

func newScheduler(e *Engine, cfg *Schedule) *scheduler {
	if cfg == nil {
		return nil
	}
	s := &scheduler{e: e, cfg: *cfg, patience: patienceDefault}
	s.weights = [classes]float64{Prefetch: float64(cfg.Prefetch), SwapOut: float64(cfg.SwapOut),
		Replicate: float64(cfg.Replicate)}
	s.timer = time.AfterFunc(time.Hour, s.tick)
	s.timer.Stop()
	return s
}

// resource is what transfers have in common that go to one peer over one backend, or that read or
// write one file. A transfer belongs to that of its first entry.
type resource struct {
	name    string
	swapIns *swapIns // of the whole backend, or of the file

	// Guarded by scheduler.mu.
	inFlight uint64 // bytes of lower classes that the backend has
	posts    int    // of lower classes, of which not all was handed over
	pending  uint64 // bytes of these that were not
	queued   int    // in queues
	queues   [classes][]*Transfer
	served   [classes]float64 // bytes by weight: the class with the least is the next
	floor    float64          // served of the class that was the last one
}

// swapIns are the swap-ins under way that hold lower classes back.
type swapIns struct {
	posts    atomic.Int64
	progress atomic.Int64 // when one was posted, or had a batch ended, last
}

// newResource returns nil without a schedule.
func (s *scheduler) newResource(name string, shared *swapIns) *resource {
	if s == nil {
		return nil
	}
	return &resource{name: name, swapIns: shared}
}

// resourceOf returns the resource of a transfer whose first entry is this one: a file is one for
// itself, whichever backend serves it.
func (c *conn) resourceOf(local *Region, remote *Remote) *resource {
	switch {
	case local.file != nil:
		return local.file
	case remote.own != nil && remote.own.file != nil:
		return remote.own.file
	}
	return c.resource
}

// grants is what a transfer below SwapIn has of its resource.
type grants struct {
	inFlight [batchesInFlight]atomic.Uint64 // bytes of each batch that the backend has; by bit

	// Written by the submitter, under scheduler.mu.
	granted int    // batches for which there was room
	held    uint64 // bytes of those that have not ended
	pending uint64 // bytes that are still to be granted
	queued  bool
	since   time.Duration // queued
	waited  time.Duration // before
}

// enter begins a post. An error refuses it.
func (s *scheduler) enter(t *Transfer) error {
	r, x := t.resource, t.grants
	if x == nil {
		s.swapIns.Add(1)
		r.swapIns.progress.Store(int64(s.e.now()))
		r.swapIns.posts.Add(1)
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.posts > 0 && (r.posts >= s.cfg.QueuedMax ||
		r.pending+t.bytes > uint64(s.cfg.QueuedBytes)) {
		s.counts[t.class].Refused++
		return fmt.Errorf("post transfer: %d transfers of %d bytes wait for %s already: post it "+
			"later, or raise Schedule.QueuedMax or QueuedBytes: %w", r.posts, r.pending, r.name,
			ErrBusy)
	}
	s.counts[t.class].Posts++
	x.granted, x.waited, x.pending = 0, 0, t.bytes
	if t.bytes > 0 {
		r.posts++
		r.pending += t.bytes
	}
	return nil
}

// request asks for room for the next batch of a post of a lower class. Without it the post goes
// into the queue, and the caller must not touch it afterwards, unless mine is true: the post was
// stopped meanwhile, and the caller is its submitter still.
func (s *scheduler) request(t *Transfer) (granted, mine bool) {
	r, x, next := t.resource, t.grants, int(t.submitted.Load())
	b := &t.batches[next]
	s.mu.Lock()
	if x.granted > next || b.bytes == 0 || b.conn.isLost() { // the backend says of a lost one how
		s.mu.Unlock()
		return true, true
	}
	now := s.e.now()
	s.waiting.Add(1) // before the look at the swap-ins: leave does both the other way round
	if r.queued == 0 && s.hasRoom(r, b.bytes, now) {
		s.waiting.Add(-1)
		s.charge(t, b.bytes)
		s.mu.Unlock()
		return true, true
	}
	if r.queued++; r.queued == 1 {
		s.blocked = append(s.blocked, r)
	}
	at := len(r.queues[t.class])
	if next > 0 {
		at = 0 // it has begun: it goes on before others begin
	}
	r.queues[t.class] = slices.Insert(r.queues[t.class], at, t)
	s.counts[t.class].Queued++
	x.queued, x.since = true, now
	if t.expires != 0 && next == 0 {
		s.arm(t.expires)
	}
	s.mu.Unlock()
	return false, t.state().has(stopped) && s.remove(t)
}

// yields reports whether a resource serves swap-ins alone now.
func (s *scheduler) yields(r *resource, now time.Duration) bool {
	return r.swapIns.posts.Load() > 0 &&
		now < time.Duration(r.swapIns.progress.Load())+s.patience
}

// hasRoom reports whether a piece of a lower class may go. Where only time may change that, it sets
// the timer.
// Preconditions: s.mu is held, and what asks is counted in waiting.
func (s *scheduler) hasRoom(r *resource, n uint64, now time.Duration) bool {
	if s.yields(r, now) {
		s.arm(time.Duration(r.swapIns.progress.Load()) + s.patience)
		return false
	}
	return r.inFlight == 0 || r.inFlight+n <= uint64(s.cfg.BytesInFlight)
}

// charge gives a post room for its next batch.
// Preconditions: s.mu is held, and the post is in no queue.
func (s *scheduler) charge(t *Transfer, n uint64) {
	r, x := t.resource, t.grants
	x.granted = int(t.submitted.Load()) + 1
	x.held += n
	r.inFlight += n
	x.pending -= n
	r.pending -= n
	if x.pending == 0 {
		r.posts--
	}
	r.served[t.class] = max(r.served[t.class], r.floor) // what it did not use is gone
	r.floor = r.served[t.class]
	r.served[t.class] += float64(n) / s.weights[t.class]
}

// release frees the room of a batch that has ended.
func (s *scheduler) release(t *Transfer, n uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free(t, n)
}

// free frees room of a post, unless leave has done so.
// Preconditions: s.mu is held.
func (s *scheduler) free(t *Transfer, n uint64) {
	n = min(n, t.grants.held)
	t.grants.held -= n
	t.resource.inFlight -= n
	if s.waiting.Load() > 0 {
		s.again.Store(true)
	}
}

// leave ends a post. The caller polls afterwards.
func (s *scheduler) leave(t *Transfer) {
	r, x := t.resource, t.grants
	if x == nil {
		r.swapIns.progress.Store(int64(s.e.now()))
		if r.swapIns.posts.Add(-1) == 0 && s.waiting.Load() > 0 {
			s.again.Store(true)
		}
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free(t, x.held)
	if x.pending > 0 {
		r.posts--
		r.pending -= x.pending
		x.pending = 0
	}
}

// pump submits what is queued and has room. by is the lane whose poll the caller is in, or nil.
func (s *scheduler) pump(by *lane) {
	for s.again.Load() && s.again.Swap(false) {
		for {
			t, late := s.dequeue()
			if t == nil {
				break
			}
			if late {
				s.expire(t)
			} else {
				s.submit(t, by)
			}
		}
	}
}

// submit submits a transfer out of a queue, and has the lanes polled to which it went: some of it
// may be done, and no wake-up comes for that. by is the lane that the caller polls, or nil.
func (s *scheduler) submit(t *Transfer, by *lane) {
	conns := t.via() // before: behind it t may be another goroutine's
	t.submit(nil)
	for _, c := range conns {
		if c.lane == by {
			by.wanted.Add(1)
		} else {
			c.lane.wakeProgress()
		}
	}
}

// dequeue takes the next transfer out of a queue for which there is room, or whose deadline has
// passed. The caller is its submitter.
func (s *scheduler) dequeue() (t *Transfer, late bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.e.now()
	for _, r := range s.blocked {
		first := Class(0)
		for c := Prefetch; c < classes; c++ {
			if len(r.queues[c]) > 0 && (first == 0 || r.served[c] < r.served[first]) {
				first = c
			}
		}
		t := r.queues[first][0]
		if t.isExpired(now) {
			s.drop(t, 0, now)
			return t, true
		}
		if n := t.batches[t.submitted.Load()].bytes; s.hasRoom(r, n, now) {
			s.drop(t, 0, now)
			s.charge(t, n)
			return t, false
		}
	}
	return nil, false
}

// drop takes a transfer out of its queue.
// Preconditions: s.mu is held.
func (s *scheduler) drop(t *Transfer, at int, now time.Duration) {
	r, x := t.resource, t.grants
	r.queues[t.class] = slices.Delete(r.queues[t.class], at, at+1)
	if r.queued--; r.queued == 0 {
		at := slices.Index(s.blocked, r)
		s.blocked = slices.Delete(s.blocked, at, at+1)
	}
	s.waiting.Add(-1)
	took := now - x.since
	x.queued, x.waited = false, x.waited+took
	s.counts[t.class].Queued--
	s.counts[t.class].Waited += took
}

// remove takes a transfer out of its queue. It reports whether it was there: then the caller is its
// submitter.
func (s *scheduler) remove(t *Transfer) bool {
	return len(s.removeIf(func(other *Transfer) bool { return other == t })) > 0
}

// flush has the transfers whose connection is gone end: submit asks the backend, which refuses
// them.
func (s *scheduler) flush() {
	for _, t := range s.removeIf(func(t *Transfer) bool {
		return t.batches[t.submitted.Load()].conn.isLost()
	}) {
		s.submit(t, nil)
	}
}

// removeIf takes the transfers out of the queues for which a condition holds. The caller is their
// submitter.
func (s *scheduler) removeIf(holds func(*Transfer) bool) (list []*Transfer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.e.now()
	for i := len(s.blocked) - 1; i >= 0; i-- { // from the end: drop takes out what is empty
		r := s.blocked[i]
		for c := range r.queues {
			for at := len(r.queues[c]) - 1; at >= 0; at-- {
				if t := r.queues[c][at]; holds(t) {
					list = append(list, t)
					s.drop(t, at, now)
				}
			}
		}
	}
	return list
}

// isExpired reports whether a transfer has not begun by its deadline.
func (t *Transfer) isExpired(now time.Duration) bool {
	return t.expires != 0 && now >= t.expires && t.submitted.Load() == 0
}

// expire ends a post that has not begun. The caller is its submitter, and is not afterwards.
func (s *scheduler) expire(t *Transfer) {
	s.mu.Lock()
	s.counts[t.class].Expired++
	s.mu.Unlock()
	generation := t.state().generation()
	t.fail(generation, ErrExpired)
	t.mark(generation, stopped)
	t.submit(nil)
}

// arm has tick called at a time, or before.
// Preconditions: s.mu is held.
func (s *scheduler) arm(at time.Duration) {
	if s.next == 0 || at < s.next {
		s.next = at
		s.timer.Reset(at - s.e.now())
	}
}

// tick ends the transfers whose deadlines have passed, sets the timer for the next one, and looks
// for resources whose swap-ins have stood still for too long.
func (s *scheduler) tick() {
	s.mu.Lock()
	s.next = 0
	now := s.e.now()
	for _, r := range s.blocked {
		for _, q := range r.queues {
			for _, t := range q {
				if t.expires > now && t.submitted.Load() == 0 {
					s.arm(t.expires)
				}
			}
		}
	}
	s.mu.Unlock()
	for _, t := range s.removeIf(func(t *Transfer) bool { return t.isExpired(now) }) {
		s.expire(t)
	}
	s.again.Store(true)
	s.pump(nil)
}
