// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// scheduler decides when the transfers below SwapIn hand their batches to a backend.
//
// What it adds to a post, in this order:
//
//	enter     Post: a SwapIn holds the others back from here on; a lower one is refused where its
//	          resource has too many
//	request   submit, before each batch: ends a post that has not begun by its deadline, and one
//	          of a lower class whose connection is lost. Any other one of a lower class goes into
//	          the queue, unless this batch has had its turn
//	serve     a goroutine: takes posts out of the queues, in order, where there is room for their
//	          next batches, and submits one batch each. Those that wait for a post of a lower
//	          class do so, too; no other caller copies what waits
//	release   finish, with each batch: the room is free again
//	leave     settle: the SwapIn is over; room that a post still has is free again
//
// A post leaves its queue in three more ways: claim (Abort, a timeout, a failed batch), flush (a
// connection was lost or closed), and tick (its deadline). Each goes through submit, where the post
// ends: nothing of it is handed over.
//
// A queued post holds nothing that others wait for: no tag, no key in use, nothing that a revoke
// waits for, no right to send a long notification.
type scheduler struct {
	e        *Engine
	cfg      Schedule
	weights  [classes]float64
	patience time.Duration // how long a SwapIn without progress holds the others back

	swapIns atomic.Uint64 // posts of that class: counts has them not
	waiting atomic.Int64  // in queues
	kick    chan struct{} // there may be something for serve to do
	timer   *time.Timer   // has serve call tick

	mu      sync.Mutex  // guards the fields below; never held while Submit runs
	blocked []*resource // with a queue; the one that was served last is the last
	counts  [classes]ClassStats
	next    time.Duration // when the timer ends; 0: it does not run
}

// patienceDefault is what a SwapIn of one batch of 64 MiB needs at 256 MB/s.
const patienceDefault = 250 * time.Millisecond

func newScheduler(e *Engine, cfg *Schedule) *scheduler {
	if cfg == nil {
		return nil
	}
	s := &scheduler{e: e, cfg: *cfg, patience: patienceDefault, kick: make(chan struct{}, 1)}
	s.weights = [classes]float64{Prefetch: float64(cfg.Prefetch), SwapOut: float64(cfg.SwapOut),
		Replicate: float64(cfg.Replicate)}
	s.timer = time.NewTimer(time.Hour)
	s.timer.Stop()
	return s
}

// resource is what transfers have in common that go to one peer over one backend, or that read or
// write one file. A transfer belongs to that of its first entry.
type resource struct {
	name    string
	swapIns *atomic.Int64 // that hold lower classes back: of the whole backend, or of the file

	// Guarded by scheduler.mu.
	inFlight uint64               // bytes of lower classes that the backend has
	posts    int                  // of lower classes, under way
	queued   int                  // in queues
	queues   [classes][]*Transfer // in that of SwapIn wait those of which Promote was called
	served   [classes]float64     // bytes by weight: the class with the least is the next
	floor    float64              // served of the class that was the last one
}

// newResource returns nil without a schedule.
func (s *scheduler) newResource(name string, swapIns *atomic.Int64) *resource {
	if s == nil {
		return nil
	}
	return &resource{name: name, swapIns: swapIns}
}

// resourceOf returns the resource of a transfer whose first entry is this one: a file is one for
// itself, whichever backend serves it, but towards a peer: one that takes nothing must not hold it.
func (c *conn) resourceOf(local *Region, remote *Remote) *resource {
	switch {
	case local.file != nil && c.peer.isSelf():
		return local.file
	case remote.own != nil && remote.own.file != nil:
		return remote.own.file
	}
	return c.resource
}

// grants is what a transfer below SwapIn has of its resource.
type grants struct {
	inFlight [batchesInFlight]atomic.Uint64 // bytes of each batch that the backend has; by bit

	// Guarded by scheduler.mu.
	posted bool
	queue  Class // of resource.queues: the transfer's, or SwapIn behind Promote

	// Written by the submitter, under scheduler.mu.
	granted int           // batches for which there was room
	held    uint64        // bytes of those that have not ended
	since   time.Duration // queued
	waited  time.Duration // before
}

// enter begins a post. An error refuses it.
func (s *scheduler) enter(t *Transfer) error {
	r, x := t.resource, t.grants
	if x == nil {
		s.swapIns.Add(1)
		r.swapIns.Add(1)
		t.holds.Store(r.swapIns)
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.posts >= s.cfg.QueuedMax {
		s.counts[t.class].Refused++
		return fmt.Errorf("post transfer: %d transfers wait for %s already: post it later, or "+
			"raise Schedule.QueuedMax: %w", r.posts, r.name, ErrBusy)
	}
	s.counts[t.class].Posts++
	x.granted, x.waited, x.posted, x.queue = 0, 0, true, t.class
	r.posts++
	return nil
}

// turn is what request says of the next batch of a post.
type turn int

const (
	goes   turn = iota // it may be handed over
	queued             // the post waits, and the caller must not touch it any more
	ended              // the post is stopped, and the caller its submitter still
)

// request asks for the turn of the next batch of a post. The caller is its submitter.
func (s *scheduler) request(t *Transfer, generation uint64) turn {
	next := int(t.submitted.Load())
	if t.hasExpired() {
		s.mu.Lock()
		s.counts[t.class].Expired++
		s.mu.Unlock()
		t.fail(generation, ErrExpired)
		t.mark(generation, stopped)
		return ended
	}
	s.watch(t)
	r, x, b := t.resource, t.grants, &t.batches[next]
	if x == nil {
		return goes
	}
	s.mu.Lock()
	switch {
	case b.conn.isLost(): // by its peer, or by us: then the backend may take batches still
		s.mu.Unlock()
		t.fail(generation, t.backendError(b.conn, driver.ErrClosed))
		t.mark(generation, stopped)
		return ended
	case x.granted > next || b.bytes == 0:
		s.mu.Unlock()
		return goes
	}
	if r.queued++; r.queued == 1 {
		s.blocked = append(s.blocked, r)
	}
	at := len(r.queues[x.queue])
	if t.hasBegun() {
		at = 0 // it has begun: it goes on before others begin
	}
	r.queues[x.queue] = slices.Insert(r.queues[x.queue], at, t)
	s.counts[t.class].Queued++
	x.since = s.e.now()
	t.queuedFor.Store(r)
	s.waiting.Add(1)
	s.mu.Unlock()
	s.wake()
	if t.state().has(stopped) && s.remove(t) {
		return ended
	}
	return queued
}

// wake has serve look for what it may do.
func (s *scheduler) wake() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// serve submits what is queued and has room, a batch each in turn, until the engine is closed.
func (s *scheduler) serve() {
	defer s.timer.Stop()
	for {
		select {
		case <-s.kick:
		case <-s.timer.C:
			s.tick()
		case <-s.e.closing: // all connections are, and nothing is queued
			return
		}
		if s.handOver() {
			s.wake()
		}
	}
}

// handOver submits one batch that has room, of whichever post; false: there is none.
func (s *scheduler) handOver() bool {
	t := s.dequeue()
	if t == nil {
		return false
	}
	conns := t.via() // before: behind it t may be another goroutine's
	t.submit(nil)
	t.sleepers.wake() // to help
	for _, c := range conns {
		c.lane.poll()
	}
	return true
}

// dequeue takes a transfer out of a queue for whose next batch there is room. The caller is its
// submitter.
func (s *scheduler) dequeue() *Transfer {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.e.now()
	for i, r := range s.blocked {
		promoted := len(r.queues[SwapIn]) > 0
		if r.swapIns.Load() > 0 && !promoted {
			s.arm(now + s.patience)
			continue
		}
		first := SwapIn
		for c := Prefetch; c < classes && !promoted; c++ {
			if len(r.queues[c]) > 0 && (first == SwapIn || r.served[c] < r.served[first]) {
				first = c
			}
		}
		t := r.queues[first][0]
		n := t.batches[t.submitted.Load()].bytes
		if promoted || r.inFlight == 0 || r.inFlight+n <= uint64(s.cfg.BytesInFlight) {
			s.blocked = append(slices.Delete(s.blocked, i, i+1), r)
			s.drop(t, 0, now)
			s.charge(t, n)
			return t
		}
	}
	return nil
}

// charge gives a post room for its next batch.
// Preconditions: s.mu is held, and the post is in no queue.
func (s *scheduler) charge(t *Transfer, n uint64) {
	r, x := t.resource, t.grants
	x.granted = int(t.submitted.Load()) + 1
	x.held += n
	r.inFlight += n
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
		s.wake()
	}
}

// leave ends a post.
func (s *scheduler) leave(t *Transfer) {
	if x := t.grants; x != nil {
		s.mu.Lock()
		s.free(t, x.held)
		t.resource.posts--
		x.posted = false
		s.mu.Unlock()
	}
	if n := t.holds.Swap(nil); n != nil && n.Add(-1) == 0 && s.waiting.Load() > 0 {
		s.wake()
	}
}

// promote makes a post that is under way a SwapIn from now on.
func (s *scheduler) promote(t *Transfer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	x := t.grants
	if !x.posted || x.queue == SwapIn {
		return
	}
	r := t.resource
	if t.queuedFor.Load() != nil {
		at := slices.Index(r.queues[x.queue], t)
		r.queues[x.queue] = slices.Delete(r.queues[x.queue], at, at+1)
		r.queues[SwapIn] = append(r.queues[SwapIn], t)
	}
	x.queue = SwapIn
	r.swapIns.Add(1)
	t.holds.Store(r.swapIns)
	s.wake()
}

// drop takes a transfer out of its queue.
// Preconditions: s.mu is held.
func (s *scheduler) drop(t *Transfer, at int, now time.Duration) {
	r, x := t.resource, t.grants
	r.queues[x.queue] = slices.Delete(r.queues[x.queue], at, at+1)
	if r.queued--; r.queued == 0 {
		at := slices.Index(s.blocked, r)
		s.blocked = slices.Delete(s.blocked, at, at+1)
	}
	s.waiting.Add(-1)
	took := now - x.since
	x.waited += took
	t.queuedFor.Store(nil)
	s.counts[t.class].Queued--
	s.counts[t.class].Waited += took
}

// remove takes a transfer out of its queue. It reports whether it was there: then the caller is its
// submitter.
func (s *scheduler) remove(t *Transfer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := t.queuedFor.Load()
	if r != nil {
		s.drop(t, slices.Index(r.queues[t.grants.queue], t), s.e.now())
	}
	return r != nil
}

// flush ends the queued transfers whose connection is gone.
func (s *scheduler) flush() {
	var list []*Transfer
	s.mu.Lock()
	now := s.e.now()
	for _, r := range slices.Clone(s.blocked) {
		for c := range r.queues {
			for at, t := range slices.Backward(slices.Clone(r.queues[c])) { // the end moves nothing
				if t.batches[t.submitted.Load()].conn.isLost() {
					list = append(list, t)
					s.drop(t, at, now)
				}
			}
		}
	}
	s.mu.Unlock()
	for _, t := range list {
		t.submit(nil)
	}
}

// hasBegun reports whether a backend was given a batch of the post: a hello is none.
func (t *Transfer) hasBegun() bool {
	n := t.submitted.Load()
	if first := t.batches[0].Notify; len(first) > 0 && first[0] == wire.KindHello {
		n--
	}
	return n > 0
}

// hasExpired reports whether a transfer has not begun by its deadline.
func (t *Transfer) hasExpired() bool {
	at := t.expires.Load()
	return at != 0 && int64(t.e.now()) >= at && !t.hasBegun()
}

// watch has tick look at a post that has not begun when its deadline comes.
func (s *scheduler) watch(t *Transfer) {
	if at := t.expires.Load(); at != 0 && !t.hasBegun() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.arm(time.Duration(at))
	}
}

// arm has tick called at a time, or before.
// Preconditions: s.mu is held.
func (s *scheduler) arm(at time.Duration) {
	if s.next == 0 || at < s.next {
		s.next = at
		s.timer.Reset(at - s.e.now())
	}
}

// tick ends the posts that have not begun by their deadlines, wherever they wait; has swap-ins that
// have stood still for too long hold nothing back any more; and sets the timer for the next of
// either.
func (s *scheduler) tick() {
	s.mu.Lock()
	s.next = 0
	s.mu.Unlock()
	now, next := s.e.now(), time.Duration(math.MaxInt64)
	for i := range s.e.slots.live {
		t := s.e.slots.live[i].Load()
		if t == nil || t.expires.Load() == 0 && t.holds.Load() == nil {
			continue
		}
		if _, ok := t.pin(); ok {
			next = min(next, s.checkPost(t, now))
			t.unpin()
		}
	}
	if next < math.MaxInt64 {
		s.mu.Lock()
		s.arm(next)
		s.mu.Unlock()
	}
}

// checkPost is tick's part for one post. It returns when the next is due.
// Preconditions: the post is pinned.
func (s *scheduler) checkPost(t *Transfer, now time.Duration) time.Duration {
	next := time.Duration(math.MaxInt64)
	if n := t.holds.Load(); n != nil && s.waiting.Load() > 0 {
		began := time.Duration(t.deadline.Load()) - s.e.cfg.TransferTimeout // or had a batch end
		if at := began + s.patience; at > now {
			next = at
		} else if t.holds.CompareAndSwap(n, nil) {
			n.Add(-1)
		}
	}
	if at := time.Duration(t.expires.Load()); at != 0 && !t.hasBegun() {
		switch {
		case at > now:
			next = min(next, at)
		case t.claim():
			t.submit(nil)
		default: // a goroutine has it in hand: it may be about to wait
			next = now + time.Millisecond
		}
	}
	return next
}
