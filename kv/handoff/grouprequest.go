// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// GroupRequest is one request that decode has opened at this rank. All methods may be called by any
// goroutine.
type GroupRequest struct {
	ID uint64 // as Open was given it

	r        *GroupReceiver
	tables   layout.Tables
	span     layout.Span
	leases   []groupLease
	ready    chan int
	ctx      context.Context // cancelled when the request has failed
	cancel   context.CancelCauseFunc
	prepared chan struct{}  // closed when Open makes no more leases
	opened   chan struct{}  // closed when Open has succeeded
	alive    chan struct{}  // one entry: a sender has given a sign of life
	complete chan struct{}  // closed when all senders have handed over their parts
	closed   chan struct{}  // closed when the outcome is known and all leases are revoked
	work     sync.WaitGroup // goroutines of links

	// Guarded by GroupReceiver.mu.
	claimed bool        // Open has taken the request
	links   []*inLink   // by sender; nil: the sender has not begun
	edges   map[int]int // by layer: the number of edges that have not brought it
	end     *EndError   // why the request failed
	err     error       // the outcome, once closed is closed

	unproven error // set if a read was ended without a proof
}

func newGroupRequest(r *GroupReceiver, number uint64) *GroupRequest {
	q := &GroupRequest{ID: number, r: r, prepared: make(chan struct{}),
		opened: make(chan struct{}), alive: make(chan struct{}, 1), complete: make(chan struct{}),
		closed: make(chan struct{}), links: make([]*inLink, len(r.others)), edges: map[int]int{}}
	q.ctx, q.cancel = context.WithCancelCause(context.Background())
	for _, e := range r.rank.edges {
		if e != nil {
			for _, l := range e.Layers {
				q.edges[l]++
			}
		}
	}
	q.ready = make(chan int, len(q.edges))
	return q
}

// Ready delivers the global number of each layer that has come from all senders that have a part
// of it, in the order of arrival. It is closed when the request ends: complete if Err is nil.
func (q *GroupRequest) Ready() <-chan int { return q.ready }

// Done is closed when this rank has all of the request, or the request has failed; Err says which.
// In both cases nothing lands in its blocks any more, unless Err is ErrUnproven: then the
// *LeasesError in it tells when nothing lands any more, which with ErrInUse is never. Other ranks
// may have failed, so ask each of them.
func (q *GroupRequest) Done() <-chan struct{} { return q.closed }

// Err returns why the request failed, an *EndError; nil while it has not ended and when it is
// complete.
func (q *GroupRequest) Err() error {
	q.r.mu.Lock()
	defer q.r.mu.Unlock()
	return q.err
}

// Cancel ends the request on all ranks, unless it is complete here. When it returns nil, nothing
// lands in the blocks of this rank any more; it returns driver.ErrUnproven if that cannot be
// proved. ctx bounds the wait alone: the request ends also if the wait does not last so long.
func (q *GroupRequest) Cancel(ctx context.Context) error {
	q.fail(&EndError{Reason: Cancelled})
	select {
	case <-q.closed:
		if err := q.Err(); errors.Is(err, engine.ErrUnproven) {
			return err
		}
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// fail is failLocked, for callers that do not hold r.mu.
func (q *GroupRequest) fail(end *EndError) {
	q.r.mu.Lock()
	defer q.r.mu.Unlock()
	q.failLocked(end, nil)
}

// failLocked ends a request that is not complete. It notifies all senders at once, except from,
// which has ended the request itself. Precondition: r.mu is held.
func (q *GroupRequest) failLocked(end *EndError, from *inLink) {
	if q.end != nil || isClosed(q.complete) {
		return
	}
	end.Request = q.ID
	if from != nil {
		end.Peer = q.r.cfg.Peers[from.from].Name()
	}
	q.end, end.counted = end, true
	q.r.remember(q)
	q.cancel(end)
	for _, l := range q.links {
		if l != nil && l != from {
			q.r.running.Go(func() { q.r.notify(l.from, l.session, kindEnd, end.Reason) })
		}
	}
}

// run waits for the outcome, and then revokes the leases.
func (q *GroupRequest) run() {
	q.await()
	q.r.mu.Lock()
	claimed := q.claimed // does not change any more: Open takes no request that has ended
	q.r.mu.Unlock()
	if claimed {
		<-q.prepared
	}
	err := q.r.revoke(q.leases)
	q.work.Wait()
	q.cancel(nil)
	q.settle(err)
}

// await returns when the request is complete or has failed. It fails a request that exceeds
// MeetTimeout or IdleTimeout.
func (q *GroupRequest) await() {
	limit := time.NewTimer(q.r.cfg.MeetTimeout)
	defer limit.Stop()
	for {
		select {
		case <-q.complete:
			return
		case <-q.ctx.Done():
			return
		case <-q.alive:
			q.r.mu.Lock()
			begun := isClosed(q.opened) && q.missing() == nil
			q.r.mu.Unlock()
			if begun {
				limit.Reset(q.r.cfg.IdleTimeout)
			} else {
				limit.Reset(q.r.cfg.MeetTimeout)
			}
		case <-limit.C:
			q.r.mu.Lock()
			q.failLocked(&EndError{Reason: TimedOut, Err: q.overdue()}, nil)
			q.r.mu.Unlock()
		}
	}
}

// missing lists the sending ranks that have not begun the request. Precondition: r.mu is held.
func (q *GroupRequest) missing() (list []int) {
	for i, l := range q.links {
		if l == nil {
			list = append(list, q.r.others[i].Rank)
		}
	}
	return list
}

// overdue returns an error that says who has exceeded which limit. Precondition: r.mu is held.
func (q *GroupRequest) overdue() error {
	if !isClosed(q.opened) {
		return fmt.Errorf("this rank has not opened it within %v", q.r.cfg.MeetTimeout)
	}
	if list := q.missing(); list != nil {
		return fmt.Errorf("sending ranks %v have not begun it within %v", list, q.r.cfg.MeetTimeout)
	}
	var list []int
	for i, l := range q.links {
		if !l.isComplete() {
			list = append(list, q.r.others[i].Rank)
		}
	}
	return fmt.Errorf("no sign of life within %v; sending ranks %v are not done",
		q.r.cfg.IdleTimeout, list)
}

// settle records the outcome, forgets the request, and confirms a complete one to the senders.
func (q *GroupRequest) settle(unproven error) {
	q.r.mu.Lock()
	unproven = errors.Join(unproven, q.unproven)
	if unproven != nil && q.end == nil {
		q.end = &EndError{Request: q.ID, Reason: Failed}
	}
	end, complete := q.end, isClosed(q.complete)
	what, reason := kindTaken, Reason(0)
	if end != nil {
		last := *end // others may be reading it
		last.Err = errors.Join(last.Err, unproven)
		q.err, what, reason = &last, kindEnd, last.Reason
	} else {
		q.r.count.finished.Add(1)
	}
	if q.r.requests[q.ID] == q { // else a later request has the same ID
		delete(q.r.requests, q.ID)
	}
	if q.claimed {
		q.r.opened--
	}
	for _, l := range q.links {
		if l != nil {
			q.r.drop(l)
			if complete { // else failLocked has notified them
				q.r.running.Go(func() { q.r.notify(l.from, l.session, what, reason) })
			}
		}
	}
	q.r.mu.Unlock()
	close(q.ready)
	close(q.closed)
}

// arrived records that the edge from the sender of l has brought a layer.
func (q *GroupRequest) arrived(l *inLink, layer int) {
	q.r.mu.Lock()
	defer q.r.mu.Unlock()
	q.arrivedLocked(l, layer)
}

// arrivedLocked is arrived for callers that hold r.mu.
func (q *GroupRequest) arrivedLocked(l *inLink, layer int) {
	if q.end != nil {
		return
	}
	l.left--
	signal(q.alive) // while this rank reads or compares, the senders say nothing
	if q.edges[layer]--; q.edges[layer] == 0 {
		q.ready <- layer // has room for all of them
	}
	q.checkComplete()
}

// checkComplete completes the request if it is open and all senders have handed over their parts.
// Precondition: r.mu is held.
func (q *GroupRequest) checkComplete() {
	for _, l := range q.links {
		if l == nil || !l.isComplete() {
			return
		}
	}
	if q.end == nil && isClosed(q.opened) && !isClosed(q.complete) {
		close(q.complete)
	}
}
