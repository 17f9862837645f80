// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// GroupReceiver receives the requests of one decode rank. All methods may be called by any
// goroutine.
type GroupReceiver struct {
	*rank
	zeros    zeros
	refusing chan struct{} // one entry for each refusal that is being sent
	refusals sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	opened   int
	requests map[uint64]*GroupRequest // by number; begun or opened
	links    map[uint64]*inLink       // by session
	begun    []int                    // links by sender
	past     map[uint64]Reason        // of requests that failed, by number
	pastList []uint64                 // the oldest first
}

// NewGroupReceiver makes the GroupReceiver of a Mux for one group of peers, as NewGroupSender.
func NewGroupReceiver(m *Mux, cfg GroupConfig) (*GroupReceiver, error) {
	base, err := newRank(m, cfg, false)
	if err != nil {
		return nil, err
	}
	r := &GroupReceiver{rank: base, refusing: make(chan struct{}, base.cfg.RequestsMax),
		requests: map[uint64]*GroupRequest{}, links: map[uint64]*inLink{},
		begun: make([]int, len(base.others)), past: map[uint64]Reason{}}
	if err := r.prepareZeros(); err != nil {
		return nil, err
	}
	if r.unhandle, err = m.handle(toReceiver, r.cfg.Peers, r.receive); err != nil {
		return nil, errors.Join(err, r.zeros.close())
	}
	r.watch(r.lost)
	return r, nil
}

// Open expects the tokens of a span of a request in this rank's blocks: it leases them out, and
// fills what lies behind the span in the last ones with zeros. The senders may have begun the
// request before, or do so within MeetTimeout. Nothing else may use the blocks until
// GroupRequest.Done, and the tables must not change. Errors are *EndError where the request has
// ended on another rank already.
func (r *GroupReceiver) Open(ctx context.Context, request uint64, t layout.Tables,
	in layout.Span) (*GroupRequest, error) {
	if err := r.side.CheckTarget(t, in); err != nil {
		return nil, fmt.Errorf("open request %d: %w", request, err)
	}
	q, err := r.claim(request)
	if err != nil {
		return nil, err
	}
	q.tables, q.span = t, in
	err = r.zeroTails(ctx, t, in)
	if err == nil && r.anyWrite() {
		q.leases, err = r.lease(t, in, engine.LeaseOptions{})
	}
	if errors.Is(err, engine.ErrUnproven) { // zeros may land still
		r.mu.Lock()
		q.unproven = err
		r.mu.Unlock()
	}
	close(q.prepared)
	r.mu.Lock()
	if err != nil {
		q.failLocked(endOf(ctx, request, fmt.Errorf("open: %w", err)), nil)
	}
	ended := q.end != nil
	if !ended {
		close(q.opened)
		signal(q.alive)
	}
	r.mu.Unlock()
	if ended {
		<-q.closed
		return nil, q.Err()
	}
	return q, nil
}

// claim returns the request of a number to its one call of Open.
func (r *GroupReceiver) claim(request uint64) (*GroupRequest, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	other, lost := r.lostPeer()
	q := r.requests[request]
	var err error
	switch {
	case r.closed:
		err = engine.ErrClosed
	case r.past[request] != 0:
		return nil, &EndError{Request: request, Remote: true, Reason: r.past[request]}
	case q != nil && q.claimed:
		err = fmt.Errorf("it is open: %w", engine.ErrBusy)
	case r.opened >= r.cfg.RequestsMax:
		err = fmt.Errorf("%d requests are open: wait for some or raise RequestsMax: %w", r.opened,
			engine.ErrFull)
	case lost:
		return nil, r.endOf(context.Background(), request, other, engine.ErrPeerLost)
	}
	if err != nil {
		return nil, fmt.Errorf("open request %d: %w", request, err)
	}
	if q == nil {
		q = r.add(request)
	}
	q.claimed = true
	r.opened++
	return q, nil
}

// add makes a request. Precondition: r.mu is held.
func (r *GroupReceiver) add(request uint64) *GroupRequest {
	q := newGroupRequest(r, request)
	r.requests[request] = q
	r.count.begun.Add(1)
	r.running.Go(q.run)
	return q
}

// remember removes a request that has failed, and keeps the reason for a while, for ranks that
// begin it late. Precondition: r.mu is held.
func (r *GroupReceiver) remember(q *GroupRequest) {
	delete(r.requests, q.ID)
	r.count.addEnd(q.end.Reason)
	r.past[q.ID] = q.end.Reason
	r.pastList = append(r.pastList, q.ID)
	if len(r.pastList) > r.cfg.RequestsMax {
		delete(r.past, r.pastList[0])
		r.pastList = r.pastList[1:]
	}
}

// anyWrite reports whether any sender writes to this rank.
func (r *GroupReceiver) anyWrite() bool {
	return slices.ContainsFunc(r.edges, func(e *layout.Edge) bool {
		return e != nil && e.Op == engine.Write
	})
}

// lost ends every request of which a lost rank has not handed over its part.
func (r *GroupReceiver) lost(other int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, q := range r.requests {
		if l := q.links[other]; l == nil || !l.isComplete() {
			q.failLocked(&EndError{Reason: PeerLost, Peer: r.cfg.Peers[other].Name()}, l)
		}
	}
	for _, l := range r.links {
		if l.from == other && l.q == nil {
			l.reject(PeerLost)
		}
	}
}

// receive handles a message to a receiving rank. It does not wait.
func (r *GroupReceiver) receive(n engine.Notification) {
	from := slices.IndexFunc(r.cfg.Peers, func(p *engine.Peer) bool {
		return n.Peer != nil && p.ID() == n.Peer.ID()
	})
	m, _ := decode(n.Data) // a link refuses what has no kind
	if from < 0 {
		r.count.strays.Add(1)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.links[m.session]
	switch {
	case l != nil && l.from == from:
		l.receive(&m)
	case l != nil || m.kind != kindBegin || m.offset != 0:
		r.count.strays.Add(1) // late, or of another rank
	case r.closed:
		r.refuse(from, m.session, Closed)
	case r.begun[from] >= 2*r.cfg.RequestsMax || !r.reserve(m.total):
		r.refuse(from, m.session, Refused)
	default:
		l = newInLink(r, from, m.session)
		l.reserved = m.total
		r.links[m.session] = l
		r.begun[from]++
		r.running.Go(l.run)
		l.receive(&m)
	}
}

// refuse rejects a request. A goroutine notifies its sender, since the handler of a Mux must not
// wait. Where too many are under way, the sender's own limit ends its wait. Precondition: r.mu is
// held.
func (r *GroupReceiver) refuse(from int, session uint64, reason Reason) {
	r.count.addEnd(reason)
	select {
	case r.refusing <- struct{}{}:
		r.refusals.Go(func() {
			r.notify(from, session, kindEnd, reason)
			<-r.refusing
		})
	default:
	}
}

// Close ends every request that is not complete, in bounded time, and notifies the senders. The
// engine, the Mux and the regions stay open. It is idempotent.
func (r *GroupReceiver) Close() error {
	r.mu.Lock()
	if !r.closed {
		r.closed = true
		close(r.closing)
	}
	for _, q := range r.requests {
		q.failLocked(&EndError{Reason: Closed}, nil)
	}
	for _, l := range r.links {
		if l.q == nil {
			l.reject(Closed)
		}
	}
	r.mu.Unlock()
	r.running.Wait()
	r.unhandle()
	r.refusals.Wait() // which none comes to
	return errors.Join(r.closeLines(), r.zeros.close())
}
