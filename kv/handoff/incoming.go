// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"

	"github.com/sluicehq/sluice/engine"
)

// receive handles a message to the receiver. It does not wait.
func (r *Receiver) receive(n engine.Notification) {
	if n.Err != nil {
		return // each Request watches its own peer
	}
	m, err := decode(n.Data)
	if err != nil || n.Peer == nil {
		r.count.strays.Add(1)
		return
	}
	if q := r.find(n.Peer, &m); q != nil {
		q.receive(&m)
	}
}

// find returns the request of a message, a new one where it begins one.
func (r *Receiver) find(peer *engine.Peer, m *message) *Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	if q := r.requests[m.session]; q != nil {
		return q
	}
	switch {
	case m.kind != kindBegin || m.offset != 0:
		r.count.strays.Add(1) // late
	case r.closed:
		r.refuseLater(peer, m.session, Closed)
	case r.counted >= r.cfg.RequestsMax || r.byPeer[peer] >= r.cfg.requestsOfPeer():
		r.refuseLater(peer, m.session, Refused)
	case uint64(m.total) > beginMax(min(r.cfg.Pool.Stats().Blocks, RequestBlocksMax)):
		r.refuseLater(peer, m.session, TooLarge)
	default:
		q := newRequest(r, peer, m.session)
		r.requests[m.session] = q
		r.counted++
		r.byPeer[peer]++
		r.count.begun.Add(1)
		r.running.Go(q.run)
		return q
	}
	return nil
}

// refuseLater has another goroutine refuse. Where too many are to be refused,
// the sender's own limit ends its wait.
func (r *Receiver) refuseLater(peer *engine.Peer, session uint64, reason Reason) {
	r.count.ended(reason)
	select {
	case r.refuse <- refusal{peer, session, reason}:
	default:
	}
}

func (r *Receiver) refuseAll() {
	for {
		select {
		case f := <-r.refuse:
			r.tell(f.peer, f.session, kindEnd, f.reason)
		case <-r.closing:
			return
		}
	}
}

// tell sends a message without a body. Where it cannot be sent, the sender's own
// limit ends the request there.
func (r *Receiver) tell(peer *engine.Peer, session uint64, what kind, reason Reason) {
	ctx, cancel := context.WithTimeout(context.Background(), r.cfg.NotifyTimeout)
	defer cancel()
	_ = peer.Notify(ctx, appendHeader(nil, toSender, what, reason, session))
}

func (r *Receiver) forget(session uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	q := r.requests[session]
	if q == nil {
		return
	}
	delete(r.requests, session)
	q.underWay = false
	r.uncount(q)
}

// queue has Accept return a request. There is room for all that count.
func (r *Receiver) queue(q *Request) {
	r.mu.Lock()
	q.queued = true
	r.mu.Unlock()
	r.accept <- q
}

// accepted notes that a request has left the queue of Accept.
func (r *Receiver) accepted(q *Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	q.queued = false
	r.uncount(q)
}

// uncount gives the place of a request back once it has ended and was accepted: what one peer ends
// may not fill the queue against others. Preconditions: r.mu is held.
func (r *Receiver) uncount(q *Request) {
	if q.underWay || q.queued {
		return
	}
	r.counted--
	if r.byPeer[q.Peer]--; r.byPeer[q.Peer] == 0 {
		delete(r.byPeer, q.Peer)
	}
}

// receive notes what a message says.
func (q *Request) receive(m *message) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.finished {
		q.r.count.strays.Add(1)
		return
	}
	switch m.kind {
	case kindBegin:
		whole, err := q.asked.add(m, beginMax(q.r.cfg.Pool.Stats().Blocks))
		if err != nil {
			q.stop(Garbled, false)
		} else if whole {
			close(q.begun)
		}
	case kindLayer:
		q.layer(int(m.layer))
	case kindDone:
		if q.done {
			return // said again: no sign of life, or it would hold the blocks for ever
		}
		q.done = true
		q.checkComplete()
	case kindAbort:
		q.stop(m.reason, true)
	}
	poke(q.alive)
}

// layer notes that a layer has arrived. Precondition: q.mu is held.
func (q *Request) layer(l int) {
	if !q.granted || len(q.Missing) == 0 || l >= len(q.arrived) || q.arrived[l] {
		q.stop(Garbled, false)
		return
	}
	q.arrived[l] = true
	q.absent--
	q.layers <- l // has room for all of them
	q.r.count.layers.Add(1)
	q.checkComplete()
}

func (q *Request) checkComplete() {
	if q.granted && q.done && q.absent == 0 && !isClosed(q.complete) {
		close(q.complete)
	}
}

// stop asks for an end before completion. Precondition: q.mu is held.
func (q *Request) stop(reason Reason, remote bool) {
	if q.end == nil && !isClosed(q.complete) {
		q.end = &EndError{Reason: reason, Remote: remote}
		close(q.stopped)
	}
}
