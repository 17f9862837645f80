// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// GroupPush sends the part of a request that one prefill rank has. It holds resources of all ranks
// until Finish has succeeded or Abort was called. Layer may be called by several goroutines, Abort
// and the others by any; Finish by one.
type GroupPush struct {
	s       *GroupSender
	request uint64
	tables  layout.Tables
	span    layout.Span
	links   []*outLink // by receiver
	leases  []groupLease
	seed    layout.Seed
	digests *layout.Digester // nil: none

	flights chan *groupFlight // posted, in order; never full
	asked   chan asking       // one entry a link: see question
	window  chan struct{}     // one entry for each layer in flight
	drained chan struct{}     // one entry: no layer is in flight
	ready   chan struct{}     // closed when Begin has done all it does
	over    chan struct{}     // closed when the outcome is known
	ended   chan struct{}     // closed when nothing is left of it

	mu          sync.Mutex
	err         error // the outcome, once over is closed; nil: handed over
	unproven    error // a transfer was ended without a proof
	spare       []*groupFlight
	claimed     map[int]bool // by layer that an edge carries
	unposted    int          // layers
	inFlight    int          // layers
	finishing   bool
	unconfirmed int // links
}

// outLink is the sending end of one request between this rank and one receiving rank. It exists
// also if this rank has no bytes for that one. GroupPush.mu guards the fields that messages change.
type outLink struct {
	push      *GroupPush
	to        int
	edge      *layout.Edge // nil: there are no bytes for it
	session   uint64
	sent      chan struct{} // closed when no more of the begin is sent
	granted   chan struct{} // closed when all of the grant is there
	grant     assembly
	reserved  uint32 // of rank.places; 0: there is no grant yet
	confirmed bool   // it has taken over all that it gets
	asking    bool   // a question of that rank has no answer yet

	there   places // where that rank has the request; set before ready is closed
	imports []groupImport
}

// groupFlight is one layer in flight to several ranks.
type groupFlight struct {
	layer  int
	posted time.Time
	sent   []sentLayer
}

type sentLayer struct {
	to *outLink
	t  *layerTransfer
}

type asking struct {
	from *outLink
	q    question
}

func newGroupPush(s *GroupSender, request uint64, t layout.Tables, in layout.Span) (*GroupPush,
	error) {
	p := &GroupPush{s: s, request: request, tables: t, span: in, unconfirmed: len(s.edges),
		flights: make(chan *groupFlight, s.cfg.Window), asked: make(chan asking, len(s.edges)),
		window: make(chan struct{}, s.cfg.Window), drained: make(chan struct{}, 1),
		ready: make(chan struct{}), over: make(chan struct{}), ended: make(chan struct{}),
		claimed: map[int]bool{}}
	for to, e := range s.edges {
		p.links = append(p.links, &outLink{push: p, to: to, edge: e, session: newSession(),
			sent: make(chan struct{}), granted: make(chan struct{})})
		if e != nil {
			for _, l := range e.Layers {
				p.claimed[l] = false
			}
		}
	}
	p.unposted = len(p.claimed)
	if s.cfg.Digest == nil {
		return p, nil
	}
	rand.Read(p.seed[:])
	var err error
	p.digests, err = s.cfg.Plan.NewDigester(p.seed)
	return p, err
}

// begin calls meet for all receivers at the same time. An error ends the push.
func (p *GroupPush) begin(ctx context.Context) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-p.over:
			cancel(engine.ErrAborted)
		case <-ctx.Done():
		}
	}()
	var mine places
	for to := range p.links {
		if p.s.op(to) == engine.Read && p.leases == nil {
			var err error
			p.leases, err = p.s.lease(p.tables, p.span, engine.LeaseOptions{ReadOnly: true})
			mine = placesOf(p.tables, p.leases)
			if err != nil {
				p.fail(endOf(ctx, p.request, err), nil)
				break
			}
		}
	}
	var all sync.WaitGroup
	for _, l := range p.links {
		all.Go(func() {
			if err := p.meet(ctx, l, mine); err != nil {
				p.fail(p.s.endOf(ctx, p.request, l.to, err), nil)
			}
		})
	}
	all.Wait()
}

// placesOf returns the places of a request in the form that goes to the other group.
func placesOf(t layout.Tables, leases []groupLease) places {
	p := places{tables: t}
	for _, l := range leases {
		p.tokens = append(p.tokens, token{l.layerRange, l.lease.Token()})
	}
	return p
}

// meet begins the request at one receiver, waits for its grant, and imports its leases.
func (p *GroupPush) meet(ctx context.Context, l *outLink, mine places) error {
	ask := groupBegin{request: p.request, plan: p.s.plan, op: p.s.op(l.to), span: p.span,
		digests: p.digests != nil, seed: p.seed}
	if ask.op == engine.Read {
		ask.places = mine
	}
	err := sendFragments(ctx, p.s.cfg.Peers[l.to], toReceiver, kindBegin, l.session,
		ask.append(nil), p.s.cfg.MessageMax)
	close(l.sent)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	select {
	case <-l.granted:
	case <-ctx.Done():
		return fmt.Errorf("wait for rank %d to open the request: %w", p.s.others[l.to].Rank,
			context.Cause(ctx))
	}
	if l.there, err = decodePlaces(l.grant.bytes); err != nil || ask.op != engine.Write {
		return err
	}
	side := p.s.others[l.to]
	if err := side.CheckTables(l.there.tables, p.span); err != nil {
		return garbled("a grant of rank %d: %v", side.Rank, err)
	}
	l.imports, err = p.s.importAll(ctx, l.to, l.there)
	if errors.Is(err, engine.ErrRevoked) {
		p.awaitEnd(l, err, time.NewTimer(0))
	}
	return err
}

// Err returns why the push ended, nil while it has not and when it succeeded.
func (p *GroupPush) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Ended is closed when nothing is left of the push: no transfer, lease or import. The blocks of
// this side may then change, unless Err returns a *LeasesError, whose leases are to end before, or
// ErrInUse: then never.
func (p *GroupPush) Ended() <-chan struct{} { return p.ended }

// outcome returns the error of a call on a push that is over. Precondition: p.mu is held.
func (p *GroupPush) outcome() error {
	if p.err != nil {
		return p.err
	}
	return fmt.Errorf("request %d is handed over already: %w", p.request, engine.ErrClosed)
}

// fail gives the push its outcome, unless it has one, and notifies all receivers at once, except
// from, which has ended it.
func (p *GroupPush) fail(end *EndError, from *outLink) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isClosed(p.over) {
		return
	}
	end.Request = p.request
	if from != nil {
		end.Peer = p.s.cfg.Peers[from.to].Name()
	}
	p.err, end.counted = end, true
	p.s.count.addEnd(end.Reason)
	close(p.over)
	for _, l := range p.links {
		if l == from || l.confirmed {
			continue
		}
		p.s.running.Go(func() {
			<-l.sent // after all of the begin: it would be a stray
			p.s.notify(l.to, l.session, kindAbort, end.Reason)
		})
	}
}

// lost ends the push, unless the lost rank has confirmed its part.
func (p *GroupPush) lost(l *outLink) {
	p.mu.Lock()
	confirmed := l.confirmed
	p.mu.Unlock()
	if !confirmed {
		p.fail(&EndError{Reason: PeerLost}, l)
	}
}

// receive handles a message of a receiver. It does not wait.
func (p *GroupPush) receive(l *outLink, m *message) {
	if m.kind == kindEnd {
		p.fail(&EndError{Remote: true, Reason: m.reason}, l)
		return
	}
	p.mu.Lock()
	ok := false
	switch m.kind {
	case kindTaken:
		if ok = p.finishing && !l.confirmed; ok {
			l.confirmed = true
			if p.unconfirmed--; p.unconfirmed == 0 && !isClosed(p.over) {
				p.s.count.finished.Add(1)
				close(p.over)
			}
		}
	case kindGrant:
		if l.reserved == 0 && !isClosed(p.over) && p.s.reserve(m.total) {
			l.reserved = m.total
		}
		if l.reserved == 0 { // or it is late
			p.mu.Unlock()
			p.fail(&EndError{Reason: Failed, Err: fmt.Errorf("block tables and leases of all "+
				"requests have more than %d bytes: raise PlacesMax: %w", p.s.cfg.PlacesMax,
				engine.ErrFull)}, nil)
			return
		}
		whole, err := l.grant.add(m, p.s.placesMax(l.to, engine.Write))
		if ok = err == nil && !isClosed(l.granted); ok && whole {
			close(l.granted)
		}
	case kindAsk:
		q, whole := decodeQuestion(m.bytes)
		// one at a time, and of layers that nothing changes any more
		if ok = whole && p.digests != nil && l.edge != nil && !l.asking &&
			p.claimed[int(q.layer)]; ok {
			l.asking = true
			p.asked <- asking{l, q} // has room for one of each link
		}
	}
	p.mu.Unlock()
	if !ok {
		p.fail(&EndError{Reason: Garbled, Peer: p.s.cfg.Peers[l.to].Name()}, nil)
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
