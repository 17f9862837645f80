// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
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
	Geometry *layout.Geometry // of Region; block-major, so that a block is one lease
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
	if c.Geometry.Arrangement() != layout.BlockMajor {
		return fmt.Errorf("receiver: a %v pool cannot be leased out block by block, use a %v one: "+
			"%w", c.Geometry.Arrangement(), layout.BlockMajor, engine.ErrNotSupported)
	}
	return c.Limits.check("receiver")
}

// Receiver is the decode side. All methods may be called by any goroutine.
type Receiver struct {
	cfg      ReceiverConfig
	mux      *Mux
	unhandle func() // ends the handler of the Mux
	count    counters
	peers    peers[*GroupReceiver]
	accept   chan *Request
	refuse   refusals

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

// NewReceiver makes the one Receiver of a Mux.
func NewReceiver(m *Mux, cfg ReceiverConfig) (*Receiver, error) {
	cfg.ensureDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	r := &Receiver{
		cfg: cfg, mux: m, requests: map[uint64]*Request{}, byPeer: map[*engine.Peer]int{},
		accept: make(chan *Request, cfg.RequestsMax), closing: make(chan struct{}),
	}
	r.refuse = refusals{toSender, cfg.NotifyTimeout, make(chan refusal, cfg.RequestsMax), &r.count}
	r.peers.make = r.meet
	var err error
	if r.unhandle, err = m.handle(toReceiver, nil, r.receive); err != nil {
		return nil, err
	}
	r.running.Go(func() { r.refuse.run(r.closing) })
	return r, nil
}

// meet makes the group of one peer.
func (r *Receiver) meet(peer *engine.Peer) (*GroupReceiver, error) {
	cfg, err := pairConfig(peer, r.cfg.Region, r.cfg.Geometry, r.cfg.Limits)
	if err != nil {
		return nil, err
	}
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
		r.refuse.add(n.Peer, m.session, Closed)
	case r.counted >= r.cfg.RequestsMax || r.byPeer[n.Peer] >= r.cfg.requestsOfPeer():
		r.refuse.add(n.Peer, m.session, Refused)
	case uint64(m.total) > r.offerMax():
		r.refuse.add(n.Peer, m.session, TooLarge)
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

func (r *Receiver) offerMax() uint64 {
	return offerMax(min(r.cfg.Pool.Stats().Blocks, RequestBlocksMax))
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
	r.unhandle()
	r.refuse.drain()
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
	session uint64 // of the offer
	asked   assembly
	begun   chan struct{}   // closed when all of the offer is there
	ctx     context.Context // is over when the request has ended, or is to end
	cancel  context.CancelCauseFunc

	mu       sync.Mutex
	grant    *pool.Grant
	settled  bool // the outcome is known, and no lease stands but those of retired blocks
	complete bool
	released bool

	// Guarded by Receiver.mu. It counts until it is neither under way nor in the queue of Accept.
	underWay, queued bool
}

func newRequest(r *Receiver, peer *engine.Peer, session uint64) *Request {
	q := &Request{Peer: peer, r: r, underWay: true, session: session, begun: make(chan struct{})}
	q.ctx, q.cancel = context.WithCancelCause(context.Background())
	return q
}

// receive notes what a message says. The handler of the Mux calls it.
func (q *Request) receive(m *message) {
	if m.kind == kindAbort {
		q.cancel(&EndError{Remote: true, Reason: m.reason})
		return
	}
	whole, err := q.asked.add(m, q.r.offerMax())
	if err != nil {
		q.cancel(err)
	} else if whole {
		close(q.begun)
	}
}

// run takes blocks for an offer and opens the request; the group leads it to its end.
func (q *Request) run() {
	met := make(chan struct{})
	q.r.running.Go(func() { // the group watches for the same from then on
		select {
		case <-q.Peer.Lost():
			q.cancel(engine.ErrPeerLost)
		case <-q.r.closing:
			q.cancel(engine.ErrClosed)
		case <-q.ctx.Done():
		case <-met:
		}
	})
	err := q.open()
	close(met)
	if err != nil {
		q.settle(endOf(q.ctx, 0, err), nil, false)
	}
}

// open returns nil when the group has the request.
func (q *Request) open() error {
	room, cancel := context.WithTimeoutCause(q.ctx, q.r.cfg.MeetTimeout, engine.ErrTimeout)
	defer cancel()
	select {
	case <-q.begun:
	case <-room.Done():
		return context.Cause(room)
	}
	ask, err := decodeOffer(q.asked.bytes)
	if err != nil {
		return err
	}
	g := q.r.cfg.Geometry
	if ask.fingerprint != g.Fingerprint() {
		return fmt.Errorf("this side has %d layers of %d bytes: %w", g.Layers(), g.LayerBytes(),
			ErrGeometry)
	}
	grant, err := q.r.cfg.Pool.Acquire(room, ask.hashes)
	if err != nil {
		return err
	}
	q.grant, q.Hashes, q.Blocks, q.Missing = grant, ask.hashes, grant.Blocks, grant.Missing
	group, err := q.r.peers.get(room, q.Peer)
	if err != nil {
		return err
	}
	table := make([]uint32, len(q.Missing))
	for i, at := range q.Missing {
		table[i] = q.Blocks[at]
	}
	q.setQueued(true)
	q.GroupRequest, err = group.open(room, ask.request, layout.Tables{table},
		layout.Span{To: uint64(len(table)) * uint64(g.Tokens())}, q.settle)
	if err != nil {
		q.setQueued(false)
		return err
	}
	context.AfterFunc(q.ctx, func() { q.fail(endOf(q.ctx, ask.request, context.Cause(q.ctx))) })
	q.r.accept <- q // has room for all that count
	if err := sendFragments(room, q.Peer, toSender, kindGrant, q.session,
		appendAnswer(nil, q.Missing), q.r.cfg.MessageMax); err != nil {
		q.fail(endOf(room, ask.request, fmt.Errorf("answer: %w", err)))
	}
	return nil
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
// forgets the session. Those whose lease still stands are retired until there is a proof of its
// end: better a smaller pool than a wrong byte. The group calls it before any side learns the
// outcome. A sender that has not begun with the group learns it here.
func (q *Request) settle(end *EndError, leases []groupLease, met bool) {
	q.mu.Lock()
	if q.settled {
		q.mu.Unlock()
		return
	}
	q.settled, q.complete = true, end == nil
	for i, at := range q.Missing {
		if q.complete {
			q.grant.Publish(at)
		} else if i < len(leases) {
			q.grant.Retire(at, leases[i].lease.Revoked())
		}
	}
	if q.grant != nil && (!q.complete || q.released) {
		q.grant.Release()
	}
	q.mu.Unlock()
	q.cancel(nil)
	q.r.mu.Lock()
	delete(q.r.requests, q.session)
	q.underWay = false
	q.r.uncount(q)
	q.r.mu.Unlock()
	if end == nil {
		return
	}
	if !end.counted {
		q.r.count.ended(end.Reason)
	}
	if !met && !end.Remote && !isLost(q.Peer) {
		q.r.running.Go(func() {
			tell(q.Peer, q.r.cfg.NotifyTimeout, toSender, kindEnd, end.Reason, q.session)
		})
	}
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
