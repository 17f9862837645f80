// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/pool"
)

// ReceiverConfig is what NewReceiver needs. Region, Geometry and Pool have no
// default.
type ReceiverConfig struct {
	Region   *engine.Region   // the blocks of this side
	Geometry *layout.Geometry // of Region
	Pool     *pool.Pool       // whose block numbers are those of Geometry

	// RequestsMax counts those of all peers that wait for room or were not accepted, too. One
	// peer has at most three quarters of them, so that it does not shut the others out. What is
	// beyond is refused. MeetTimeout bounds the wait for room in the pool as well.
	Limits
}

func (c *ReceiverConfig) check() error {
	if err := checkPool("receiver", c.Region, c.Geometry); err != nil {
		return err
	}
	if c.Pool == nil || uint64(c.Pool.Stats().Blocks) > c.Geometry.Blocks() {
		return fmt.Errorf("receiver: a Pool is needed, of at most the %d blocks of Geometry: %w",
			c.Geometry.Blocks(), engine.ErrBounds)
	}
	return c.Limits.check("receiver")
}

// Receiver is the decode side. All methods may be called by any goroutine.
type Receiver struct {
	cfg     ReceiverConfig
	mux     *Mux
	handler *handler
	count   counters
	peers   peers[*GroupReceiver]
	accept  chan *Request
	refuse  chan refusal

	unmet   *handler // of messages of groups that are gone
	closing chan struct{}
	running sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	requests map[uint64]*Request // by session
	byPeer   map[*engine.Peer]int
	counted  int // of them all
}

// requestsOfPeer is how many requests one peer may have.
func (c *ReceiverConfig) requestsOfPeer() int { return c.RequestsMax - c.RequestsMax/4 }

// refusal is a request that is turned away.
type refusal struct {
	peer    *engine.Peer
	session uint64
	reason  Reason
	to      byte
}

// NewReceiver makes the one Receiver of a Mux.
func NewReceiver(m *Mux, cfg ReceiverConfig) (*Receiver, error) {
	cfg.ensureDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	r := &Receiver{
		cfg: cfg, mux: m, requests: map[uint64]*Request{}, byPeer: map[*engine.Peer]int{},
		accept: make(chan *Request, cfg.RequestsMax), refuse: make(chan refusal, cfg.RequestsMax),
		closing: make(chan struct{}),
	}
	r.peers = peers[*GroupReceiver]{own: cfg.Geometry,
		of: map[[16]byte]*peerGroup[*GroupReceiver]{}, make: r.meet}
	var err error
	if r.handler, err = m.handle(toReceiver, nil, r.receive); err != nil {
		return nil, err
	}
	if r.unmet, err = m.handle(toGroupReceiver, nil, r.turnAway); err != nil {
		m.forget(r.handler)
		return nil, err
	}
	r.running.Go(r.refuseAll)
	return r, nil
}

// meet makes the group of one peer.
func (r *Receiver) meet(plan *layout.Plan, peer *engine.Peer) (*GroupReceiver, error) {
	cfg := groupConfig(plan, peer, r.cfg.Region, r.cfg.Limits)
	cfg.count = &r.count
	return NewGroupReceiver(r.mux, cfg)
}

// Accept returns the next request that was granted its blocks; its layers are
// on their way. Each accepted Request must be released, also one that failed.
func (r *Receiver) Accept(ctx context.Context) (*Request, error) {
	select {
	case q := <-r.accept:
		q.setQueued(false)
		return q, nil
	case <-r.closing:
		return nil, fmt.Errorf("accept: %w", engine.ErrClosed)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

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
	r.mu.Lock()
	q := r.requests[m.session]
	switch {
	case q != nil:
	case m.kind != kindBegin || m.offset != 0:
		r.count.strays.Add(1) // late
	case r.closed:
		r.refuseLater(n.Peer, m.session, Closed)
	case r.counted >= r.cfg.RequestsMax || r.byPeer[n.Peer] >= r.cfg.requestsOfPeer():
		r.refuseLater(n.Peer, m.session, Refused)
	case uint64(m.total) > r.offerMax():
		r.refuseLater(n.Peer, m.session, TooLarge)
	default:
		q = newRequest(r, n.Peer, m.session)
		r.requests[m.session] = q
		r.counted++
		r.byPeer[n.Peer]++
		r.running.Go(q.run)
	}
	r.mu.Unlock()
	if q != nil {
		q.receive(&m)
	}
}

// turnAway ends what a sender begins with a group that was closed since, when its peer was lost.
func (r *Receiver) turnAway(n engine.Notification) {
	m, err := decode(n.Data)
	if n.Err != nil || err != nil || n.Peer == nil || m.kind != kindBegin || m.offset != 0 {
		return
	}
	select {
	case r.refuse <- refusal{n.Peer, m.session, Closed, toGroupSender}:
	default:
	}
}

func (r *Receiver) offerMax() uint64 {
	return offerMax(min(r.cfg.Pool.Stats().Blocks, RequestBlocksMax))
}

// refuseLater has another goroutine refuse. Where too many are to be refused,
// the sender's own limit ends its wait.
func (r *Receiver) refuseLater(peer *engine.Peer, session uint64, reason Reason) {
	r.count.ended(reason)
	select {
	case r.refuse <- refusal{peer, session, reason, toSender}:
	default:
	}
}

func (r *Receiver) refuseAll() {
	for {
		select {
		case f := <-r.refuse:
			r.tell(f)
		case <-r.closing:
			return
		}
	}
}

// tell ends an offer or a begin. Where that cannot be sent, the sender's own limit ends its wait.
func (r *Receiver) tell(f refusal) {
	ctx, cancel := context.WithTimeout(context.Background(), r.cfg.NotifyTimeout)
	defer cancel()
	_ = f.peer.Notify(ctx, appendHeader(nil, f.to, kindEnd, f.reason, f.session))
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

// Stats returns the totals.
func (r *Receiver) Stats() Stats { return r.count.stats() }

// Close ends every request that is not complete, in bounded time, and tells
// their senders. Complete ones stay their holder's until Release; those that
// were not accepted are released. The engine, the Mux and the pool stay open.
// It is idempotent.
func (r *Receiver) Close() error {
	r.mu.Lock()
	if !r.closed {
		r.closed = true
		close(r.closing)
	}
	r.mu.Unlock()
	err := r.peers.close()
	r.running.Wait()
	r.mux.forget(r.handler)
	r.mux.forget(r.unmet)
	for {
		select {
		case q := <-r.accept:
			q.Release()
		default:
			return err
		}
	}
}

// Request is one request on its way to this side, or here: a GroupRequest whose blocks come from
// a pool. Its layers are those of the geometry. All methods may be called by any goroutine.
type Request struct {
	*GroupRequest
	Peer    *engine.Peer // the sender
	Hashes  []pool.Hash  // of its blocks
	Blocks  []uint32     // where they are: one number for each hash
	Missing []int        // indices in Blocks of those that the sender writes

	r       *Receiver
	session uint64
	begun   chan struct{} // closed when all of the offer is there
	stop    chan struct{} // closed with reason

	mu       sync.Mutex
	asked    assembly
	reason   Reason // of the sender, before the group has the request
	open     bool   // the group has it
	grant    *pool.Grant
	settled  bool // the outcome is known, and no lease stands but those of retired blocks
	complete bool
	released bool

	// Guarded by Receiver.mu. It counts until it is neither under way nor in the queue of Accept.
	underWay, queued bool
}

func newRequest(r *Receiver, peer *engine.Peer, session uint64) *Request {
	return &Request{Peer: peer, r: r, underWay: true, session: session,
		begun: make(chan struct{}), stop: make(chan struct{})}
}

// receive notes what a message says.
func (q *Request) receive(m *message) {
	q.mu.Lock()
	reason := m.reason
	if m.kind != kindAbort {
		whole, err := q.asked.add(m, q.r.offerMax())
		switch {
		case m.kind != kindBegin || err != nil || q.open:
			reason = Garbled
		case whole:
			close(q.begun)
		}
	}
	open := q.open
	if reason != 0 && q.reason == 0 && !open {
		q.reason = reason
		close(q.stop)
	}
	q.mu.Unlock()
	if reason != 0 && open {
		q.GroupRequest.fail(&EndError{Remote: reason == m.reason, Reason: reason,
			Peer: q.Peer.Name()})
	}
}

// run takes blocks for an offer and opens the request; the group leads it to its end.
func (q *Request) run() {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	go func() { // whatever ends the request also ends its waits
		select {
		case <-q.stop:
			cancel(&EndError{Remote: q.reason != Garbled, Reason: q.reason})
		case <-q.Peer.Lost():
			cancel(engine.ErrPeerLost)
		case <-q.r.closing:
			cancel(engine.ErrClosed)
		case <-ctx.Done():
		}
	}()
	counted, err := q.lead(ctx)
	if err == nil {
		return
	}
	q.settle(false, nil)
	end := endOf(ctx, 0, err)
	if !counted {
		q.r.count.ended(end.Reason)
	}
	if !end.Remote && !isLost(q.Peer) {
		q.r.tell(refusal{q.Peer, q.session, end.Reason, toSender})
	}
}

// lead returns nil when the group has the request. counted reports whether that has counted a
// failure.
func (q *Request) lead(ctx context.Context) (counted bool, err error) {
	room, cancel := context.WithTimeoutCause(ctx, q.r.cfg.MeetTimeout, engine.ErrTimeout)
	defer cancel()
	select {
	case <-q.begun:
	case <-room.Done():
		return false, context.Cause(room)
	}
	ask, err := decodeOffer(q.asked.bytes)
	if err != nil {
		return false, err
	}
	g := q.r.cfg.Geometry
	if ask.fingerprint != g.Fingerprint() {
		return false, fmt.Errorf("this side has %d layers of %d bytes: %w", g.Layers(),
			g.LayerBytes(), ErrGeometry)
	}
	grant, err := q.r.cfg.Pool.Acquire(room, ask.hashes)
	if err != nil {
		return false, err
	}
	q.grant, q.Hashes, q.Blocks, q.Missing = grant, ask.hashes, grant.Blocks, grant.Missing
	group, err := q.r.peers.get(room, q.Peer, ask.shape)
	if err != nil {
		return false, err
	}
	table := make([]uint32, len(q.Missing))
	for i, at := range q.Missing {
		table[i] = q.Blocks[at]
	}
	q.setQueued(true)
	request, err := group.open(room, ask.request, layout.Tables{table},
		layout.Span{To: uint64(len(table)) * uint64(g.Tokens())}, q.settle)
	if err != nil {
		q.setQueued(false)
		var end *EndError
		return errors.As(err, &end), err
	}
	q.mu.Lock()
	q.GroupRequest, q.open = request, true
	reason := q.reason
	q.mu.Unlock()
	q.r.accept <- q // has room for all that count
	if reason != 0 {
		request.fail(&EndError{Remote: true, Reason: reason, Peer: q.Peer.Name()})
		return false, nil
	}
	if err := sendFragments(room, q.Peer, toSender, kindGrant, q.session,
		appendAnswer(nil, shapeOf(g), q.Missing), q.r.cfg.MessageMax); err != nil {
		request.fail(endOf(room, ask.request, fmt.Errorf("answer: %w", err)))
	}
	return false, nil
}

// setQueued notes whether Accept is to return the request.
func (q *Request) setQueued(queued bool) {
	q.r.mu.Lock()
	defer q.r.mu.Unlock()
	q.queued = queued
	if !queued {
		q.r.uncount(q)
	}
}

// settle gives the blocks to the request or to the pool, once nothing lands in them any more, and
// forgets the session. Those for which there is no proof are retired until there is one: better a
// smaller pool than a wrong byte. The group calls it before any side learns the outcome.
func (q *Request) settle(complete bool, unproven error) {
	q.mu.Lock()
	if q.settled {
		q.mu.Unlock()
		return
	}
	q.settled, q.complete = true, complete
	var restore []func()
	for _, at := range q.Missing {
		if complete {
			q.grant.Publish(at)
		} else if unproven != nil {
			restore = append(restore, q.grant.Retire(at))
		}
	}
	if complete {
		q.r.count.handed(q.r.cfg.Geometry, len(q.Missing), len(q.Blocks))
	}
	if q.grant != nil && (!complete || q.released) {
		q.grant.Release()
	}
	q.mu.Unlock()
	var stand *LeasesError
	if errors.As(unproven, &stand) && !errors.Is(unproven, ErrInUse) {
		q.r.running.Go(func() {
			for _, l := range stand.Leases {
				select {
				case <-l.Revoked():
				case <-q.r.closing:
					return
				}
			}
			for _, f := range restore {
				f()
			}
		})
	}
	q.r.mu.Lock()
	delete(q.r.requests, q.session)
	q.underWay = false
	q.r.uncount(q)
	q.r.mu.Unlock()
}

// Release gives the blocks of a complete request back: they stay in the pool as
// long as there is room, for requests with the same prefix. A request that is
// not complete is cancelled, without a wait. It is idempotent.
func (q *Request) Release() {
	q.fail(&EndError{Reason: Cancelled})
	q.mu.Lock()
	defer q.mu.Unlock()
	q.released = true
	if q.complete {
		q.grant.Release()
	}
}
