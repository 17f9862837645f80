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

// inLink is the receiving end of one request between this rank and one sending rank. It exists also
// if that rank has no bytes for this one.
type inLink struct {
	r       *GroupReceiver
	from    int
	edge    *layout.Edge // nil: there are no bytes from it
	session uint64
	settled chan struct{} // closed with q or reason
	layers  chan arrival  // that are here or may be read; never full
	sums    chan layout.Digest

	// Guarded by GroupReceiver.mu.
	asked     assembly
	reserved  uint32 // of rank.places
	begin     groupBegin
	q         *GroupRequest // that it belongs to
	reason    Reason        // why it belongs to none
	granted   bool
	done      bool         // the sender has sent Done
	announced map[int]bool // layers
	left      int          // layers that are not here
	question  uint32       // number of the last one; 0: it has its answer

	// Of the goroutine of run.
	imports []groupImport
	digests *layout.Digester
	asks    uint32 // questions so far
}

// arrival is a layer that the sender has announced.
type arrival struct {
	layer  int
	digest []byte // empty: none
}

func newInLink(r *GroupReceiver, from int, session uint64) *inLink {
	l := &inLink{r: r, from: from, edge: r.edges[from], session: session,
		settled: make(chan struct{}), sums: make(chan layout.Digest, 1), announced: map[int]bool{}}
	if l.edge != nil {
		l.left = len(l.edge.Layers)
	}
	l.layers = make(chan arrival, l.left)
	return l
}

// isComplete reports whether the sender has handed over its part. Precondition: r.mu is held.
func (l *inLink) isComplete() bool { return l.granted && l.done && l.left == 0 }

// reject ends a link that belongs to no request, and tells the sender why. Precondition: r.mu is
// held.
func (l *inLink) reject(reason Reason) {
	if l.reason == 0 {
		l.reason = reason
		close(l.settled)
	}
}

// receive handles a message of the sender. Precondition: r.mu is held.
func (l *inLink) receive(m *message) {
	ok := false
	switch {
	case l.reason != 0 || l.q != nil && l.q.end != nil:
		l.r.count.strays.Add(1)
		return
	case l.q == nil:
		whole := false
		if m.kind == kindBegin {
			var err error
			whole, err = l.asked.add(m, uint64(groupBeginLen)+l.r.placesMax(l.from, engine.Read))
			ok = err == nil
		}
		if !ok {
			l.reject(Garbled)
		} else if whole {
			l.attach()
		}
		return
	case m.kind == kindAbort:
		l.q.failLocked(&EndError{Remote: true, Reason: m.reason}, l)
		return
	case m.kind == kindLayer:
		layer := int(m.layer)
		ok = l.granted && l.edge != nil && l.edge.Carries(layer) && !l.announced[layer] &&
			(len(m.bytes) == 0 || l.begin.digests)
		if !ok {
			break
		}
		l.announced[layer] = true
		if l.follows() {
			l.layers <- arrival{layer, m.bytes}
		} else {
			l.q.arrivedLocked(l, layer)
		}
	case m.kind == kindDone:
		if l.done {
			return // sent again by another Finish: it does not extend IdleTimeout
		}
		ok = l.granted
		l.done = true
		l.q.checkComplete()
	case m.kind == kindSum:
		number, rest, _ := cut32(m.bytes, true)
		d, whole := decodeDigest(rest)
		if ok = whole && l.question != 0 && uint32(number) == l.question; ok {
			l.question = 0
			l.sums <- d
		}
	}
	if !ok {
		l.q.failLocked(&EndError{Reason: Garbled, Peer: l.r.cfg.Peers[l.from].Name()}, nil)
		return
	}
	signal(l.q.alive)
}

// follows reports whether this rank has to read or compare the layers that the sender announces.
func (l *inLink) follows() bool { return l.edge.Op == engine.Read || l.begin.digests }

// attach adds the link to the request that the sender has begun. Precondition: r.mu is held.
func (l *inLink) attach() {
	g, err := decodeGroupBegin(l.asked.bytes)
	r, q := l.r, l.r.requests[g.request]
	switch {
	case err != nil:
		l.reject(Garbled)
		return
	case r.past[g.request] != 0:
		l.reject(r.past[g.request])
		return
	case q != nil && q.links[l.from] != nil:
		l.reject(Garbled) // the first one goes on
		return
	case q == nil:
		q = r.add(g.request)
	}
	l.begin, l.q = g, q
	q.links[l.from] = l
	q.work.Add(1)
	close(l.settled)
	signal(q.alive)
	if g.plan != r.plan || g.op != r.op(l.from) {
		q.failLocked(&EndError{Reason: Mismatch, Peer: r.cfg.Peers[l.from].Name(),
			Err: errors.New("the ranks have other plans, another order of peers, or other " +
				"operations of an edge")}, nil)
	}
}

// run serves the link from its first message to its end.
func (l *inLink) run() {
	limit := time.NewTimer(l.r.cfg.MeetTimeout)
	defer limit.Stop()
	select {
	case <-l.settled:
	case <-limit.C:
		l.r.mu.Lock()
		if l.q == nil {
			l.reject(TimedOut)
		}
		l.r.mu.Unlock()
	}
	if l.q == nil {
		l.r.mu.Lock()
		l.r.count.addEnd(l.reason)
		l.r.drop(l)
		l.r.mu.Unlock()
		l.r.notify(l.from, l.session, kindEnd, l.reason)
		return
	}
	defer l.q.work.Done()
	if err := l.receiveAll(); err != nil {
		l.r.mu.Lock()
		l.q.failLocked(l.r.endOf(l.q.ctx, l.q.ID, l.from, err), nil)
		l.r.mu.Unlock()
	}
	l.r.lines[l.from].keepLastImport(l.imports)
}

// drop forgets a link. Precondition: r.mu is held.
func (r *GroupReceiver) drop(l *inLink) {
	delete(r.links, l.session)
	r.begun[l.from]--
	r.places.Add(-int64(l.reserved))
}

// receiveAll returns nil once all bytes that the sender has for this rank are here, or the request
// has ended.
func (l *inLink) receiveAll() (err error) {
	q, peer, side := l.q, l.r.cfg.Peers[l.from], l.r.others[l.from]
	select {
	case <-q.opened:
	case <-q.ctx.Done():
		return nil
	}
	if l.begin.span != q.span {
		return fmt.Errorf("rank %d has tokens %d to %d, this one %d to %d: %w", side.Rank,
			l.begin.span.From, l.begin.span.To, q.span.From, q.span.To, ErrSpan)
	}
	if l.begin.op == engine.Read {
		if err := side.CheckTables(l.begin.tables, q.span); err != nil {
			return garbled("a begin of rank %d: %v", side.Rank, err)
		}
		l.imports, err = l.r.importAll(q.ctx, l.from, l.begin.places)
		if err != nil {
			return l.whyRevoked(err)
		}
	}
	if l.begin.digests {
		if l.digests, err = l.r.cfg.Plan.NewDigester(l.begin.seed); err != nil {
			return err
		}
	}
	var mine places
	if l.begin.op == engine.Write {
		mine = placesOf(q.tables, q.leases)
	}
	l.r.mu.Lock()
	ended := q.end != nil
	l.granted = !ended
	l.r.mu.Unlock()
	if ended { // a grant beside the end would have Begin succeed
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(q.ctx, l.r.cfg.MeetTimeout, engine.ErrTimeout)
	defer cancel()
	if err := sendFragments(ctx, peer, toSender, kindGrant, l.session, mine.append(nil),
		l.r.cfg.MessageMax); err != nil {
		return fmt.Errorf("grant: %w", err)
	}
	return l.followLayers()
}

// pull is a layer that this rank is reading.
type pull struct {
	arrival
	t *layerTransfer
}

// followLayers reads the layers that the sender announces, if the operation of the edge is Read,
// and compares their digests. It returns when all layers are here or the request has ended.
func (l *inLink) followLayers() (err error) {
	if l.edge == nil || !l.follows() {
		return nil
	}
	var flying []pull // in the order in which they were posted
	defer func() { err = errors.Join(err, l.abort(flying)) }()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for left := len(l.edge.Layers); left > 0; {
		layers := l.layers
		if len(flying) == l.r.cfg.Window {
			layers = nil
		}
		var completed <-chan struct{}
		if len(flying) > 0 {
			completed = flying[0].t.t.Completed()
		}
		select {
		case a := <-layers:
			if l.edge.Op == engine.Read {
				var p pull
				if p, err = l.read(a); err != nil {
					return err
				}
				if p.t != nil {
					if flying = append(flying, p); len(flying) == 1 {
						timer.Reset(l.r.cfg.LayerTimeout)
					}
					continue
				}
			}
			left--
			err = l.arrived(a)
		case <-completed:
			p := flying[0]
			if !p.t.t.Done() {
				continue // it was the signal of an earlier post
			}
			if err = p.t.t.Err(); err != nil {
				return l.whyRevoked(fmt.Errorf("read a layer: %w", err))
			}
			l.r.lines[l.from].putBack(p.t, nil)
			flying = flying[1:]
			timer.Reset(l.r.cfg.LayerTimeout)
			left--
			err = l.arrived(p.arrival)
		case <-timer.C:
			if len(flying) > 0 {
				err = fmt.Errorf("read layer %d: %w", flying[0].layer, engine.ErrTimeout)
			}
		case <-l.q.ctx.Done():
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// read starts to read a layer. A layer without bytes needs no transfer.
func (l *inLink) read(a arrival) (pull, error) {
	t, err := l.r.lines[l.from].transfer()
	if err != nil {
		return pull{}, err
	}
	err = t.fill(l.edge, a.layer, l.begin.tables, l.q.tables, l.q.span, l.r.cfg.Regions, l.imports)
	if err == nil && len(t.patterns) > 0 {
		if err = t.t.Post(); err == nil {
			return pull{a, t}, nil
		}
	}
	l.r.lines[l.from].putBack(t, err)
	return pull{}, err
}

// whyRevoked waits for the sender to say why it has revoked a lease, if that is the error.
func (l *inLink) whyRevoked(err error) error {
	if !errors.Is(err, engine.ErrRevoked) {
		return err
	}
	limit := time.NewTimer(l.r.cfg.NotifyTimeout)
	defer limit.Stop()
	select {
	case <-l.q.ctx.Done():
	case <-limit.C:
	}
	return &EndError{Remote: true, Reason: Aborted, Err: err}
}

// abort aborts the reads in flight, all at the same time.
func (l *inLink) abort(flying []pull) error {
	errs := make([]error, len(flying))
	var all sync.WaitGroup
	for i, p := range flying {
		all.Go(func() { errs[i] = p.t.abort() })
	}
	all.Wait()
	for _, p := range flying {
		l.r.lines[l.from].putBack(p.t, p.t.t.Err())
	}
	err := errors.Join(errs...)
	if err != nil {
		l.r.mu.Lock()
		l.q.unproven = errors.Join(l.q.unproven, err)
		l.r.mu.Unlock()
	}
	return err
}

// arrived compares the digest of a layer that is here, and records the layer in the request.
func (l *inLink) arrived(a arrival) error {
	if len(a.digest) > 0 {
		if err := l.compare(a); err != nil {
			return err
		}
	}
	l.q.arrived(l, a.layer)
	return nil
}
