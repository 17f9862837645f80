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

// SenderConfig is what NewSender needs. Region and Geometry have no default.
type SenderConfig struct {
	Region   *engine.Region   // the blocks of this side
	Geometry *layout.Geometry // of Region; any arrangement
	Route    engine.Route     // of the writes
	Limits                    // RequestsMax: with one peer

	// OnLayer, if set, is called for each layer that was written, in order, by a
	// goroutine of the Push. It must not wait.
	OnLayer func(LayerReport)
}

func (c *SenderConfig) check() error {
	if err := checkPool("sender", c.Region, c.Geometry); err != nil {
		return err
	}
	return c.Limits.check("sender")
}

func checkPool(who string, r *engine.Region, g *layout.Geometry) error {
	switch {
	case r == nil || g == nil:
		return fmt.Errorf("%s: Region and Geometry are needed: %w", who, engine.ErrBounds)
	case r.Size() < g.PoolBytes():
		return fmt.Errorf("%s: region %s has %d bytes, its %d blocks need %d: %w", who, r.Name(),
			r.Size(), g.Blocks(), g.PoolBytes(), engine.ErrBounds)
	}
	return nil
}

// groupConfig is that of a group of one rank.
func groupConfig(plan *layout.Plan, p *engine.Peer, r *engine.Region, l Limits) GroupConfig {
	return GroupConfig{Plan: plan, Regions: []*engine.Region{r}, Peers: []*engine.Peer{p},
		Limits: l, Edge: func(e *layout.Edge) { e.Op = engine.Write }}
}

// Sender is the prefill side. All methods may be called by any goroutine.
type Sender struct {
	cfg     SenderConfig
	mux     *Mux
	handler *handler
	count   counters
	peers   peers[*GroupSender]
	closing chan struct{}

	mu     sync.Mutex
	closed bool
	offers map[uint64]*outOffer // by session
}

// outOffer is an offer that has no answer yet.
type outOffer struct {
	answered chan struct{} // closed with answer or end
	answer   assembly
	end      Reason
}

// NewSender makes the one Sender of a Mux.
func NewSender(m *Mux, cfg SenderConfig) (*Sender, error) {
	cfg.ensureDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	s := &Sender{cfg: cfg, mux: m, closing: make(chan struct{}), offers: map[uint64]*outOffer{}}
	s.peers = peers[*GroupSender]{own: cfg.Geometry, sends: true,
		of: map[[16]byte]*peerGroup[*GroupSender]{}, make: s.meet}
	var err error
	s.handler, err = m.handle(toSender, nil, s.receive)
	return s, err
}

// meet makes the group of one peer.
func (s *Sender) meet(plan *layout.Plan, peer *engine.Peer) (*GroupSender, error) {
	cfg := groupConfig(plan, peer, s.cfg.Region, s.cfg.Limits)
	cfg.Route, cfg.OnLayer, cfg.count = s.cfg.Route, s.cfg.OnLayer, &s.count
	return NewGroupSender(s.mux, cfg)
}

// Block is one block of a request on this side.
type Block struct {
	Hash  pool.Hash // zero: never shared
	Local uint32    // its number in this side's pool
}

// Push is one request on its way to a Receiver. Its layers are those of the geometry. It holds
// resources of both sides until Finish has succeeded or Abort was called.
type Push struct {
	*GroupPush
	s       *Sender
	missing []int
	blocks  int
}

// Begin offers the blocks of a request to a peer's Receiver, and returns when
// that has found room for those that it lacks: Push.MissingBlocks, whose content
// must be there layer by layer as Push.Layer is called, and stay until the Push
// has ended. ctx and MeetTimeout bound the wait. The number names one hand-over to that peer for
// ever: another attempt needs another one. Errors are *EndError, but for what is wrong with the
// call.
func (s *Sender) Begin(ctx context.Context, peer *engine.Peer, request uint64, blocks []Block) (
	*Push, error) {
	if err := s.check(peer, blocks); err != nil {
		return nil, fmt.Errorf("begin request %d: %w", request, err)
	}
	o, session := &outOffer{answered: make(chan struct{})}, newSession()
	s.mu.Lock()
	closed := s.closed
	s.offers[session] = o
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		delete(s.offers, session)
		s.mu.Unlock()
	}()
	if closed {
		return nil, fmt.Errorf("begin request %d: %w", request, engine.ErrClosed)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.MeetTimeout, engine.ErrTimeout)
	defer cancel()
	p, counted, err := s.begin(ctx, peer, request, blocks, o, session)
	if err == nil {
		return p, nil
	}
	end := endOf(ctx, request, err)
	end.Request, end.Peer = request, peer.Name()
	if end.Reason == Failed && isLost(peer) {
		end.Reason = PeerLost
	}
	if !counted {
		s.count.ended(end.Reason)
	}
	if !end.Remote && !isLost(peer) {
		limit, cancel := context.WithTimeout(context.Background(), s.cfg.NotifyTimeout)
		defer cancel()
		// Where it cannot be told, its own limits end the request.
		_ = peer.Notify(limit, appendHeader(nil, toReceiver, kindAbort, end.Reason, session))
	}
	return nil, end
}

// begin asks what is missing, and hands that over as a group does. counted reports whether the
// group has counted a failure.
func (s *Sender) begin(ctx context.Context, peer *engine.Peer, request uint64, blocks []Block,
	o *outOffer, session uint64) (p *Push, counted bool, err error) {
	ask := offer{request: request, fingerprint: s.cfg.Geometry.Fingerprint(),
		shape: shapeOf(s.cfg.Geometry), hashes: make([]pool.Hash, len(blocks))}
	for i, b := range blocks {
		ask.hashes[i] = b.Hash
	}
	if err := sendFragments(ctx, peer, toReceiver, kindBegin, session, ask.append(nil),
		s.cfg.MessageMax); err != nil {
		return nil, false, fmt.Errorf("ask for room: %w", err)
	}
	select {
	case <-o.answered:
	case <-peer.Lost():
		return nil, false, engine.ErrPeerLost
	case <-s.closing:
		return nil, false, engine.ErrClosed
	case <-ctx.Done():
		return nil, false, fmt.Errorf("wait for room: %w", context.Cause(ctx))
	}
	if o.end != 0 {
		return nil, false, &EndError{Remote: true, Reason: o.end}
	}
	there, missing, err := decodeAnswer(o.answer.bytes, len(blocks))
	if err != nil {
		return nil, false, err
	}
	table := make([]uint32, len(missing))
	for i, at := range missing {
		table[i] = blocks[at].Local
	}
	group, err := s.peers.get(ctx, peer, there)
	if err != nil {
		return nil, false, err
	}
	push, err := group.Begin(ctx, request, layout.Tables{table},
		layout.Span{To: uint64(len(table)) * uint64(s.cfg.Geometry.Tokens())})
	var end *EndError
	return &Push{push, s, missing, len(blocks)}, errors.As(err, &end), err
}

func (s *Sender) check(peer *engine.Peer, blocks []Block) error {
	switch {
	case peer == nil:
		return fmt.Errorf("no peer: %w", engine.ErrBounds)
	case len(blocks) > RequestBlocksMax:
		return fmt.Errorf("%d blocks, at most %d: %w", len(blocks), RequestBlocksMax,
			engine.ErrBounds)
	}
	for i, b := range blocks {
		if uint64(b.Local) >= s.cfg.Geometry.Blocks() {
			return fmt.Errorf("block %d is number %d of %d: %w", i, b.Local,
				s.cfg.Geometry.Blocks(), engine.ErrBounds)
		}
	}
	return nil
}

// MissingBlocks returns which blocks the receiver lacks: those that are written, as ascending
// indices into what Begin was given. The others are not read, and need no content. The slice must
// not be changed.
func (p *Push) MissingBlocks() []int { return p.missing }

// Finish is GroupPush.Finish: it returns nil when and only when the receiver has confirmed that it
// has taken the blocks over.
func (p *Push) Finish(ctx context.Context) error {
	err := p.GroupPush.Finish(ctx)
	if err == nil {
		p.s.count.handed(p.s.cfg.Geometry, len(p.missing), p.blocks)
	}
	return err
}

// receive handles a message to the sender. It does not wait.
func (s *Sender) receive(n engine.Notification) {
	if n.Err != nil {
		return // Begin watches its own peer
	}
	m, err := decode(n.Data)
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.offers[m.session]
	if err != nil || o == nil || isClosed(o.answered) {
		s.count.strays.Add(1)
		return
	}
	whole := m.kind == kindEnd
	o.end = m.reason
	if !whole {
		if whole, err = o.answer.add(&m, answerMax(RequestBlocksMax)); err != nil ||
			m.kind != kindGrant {
			whole, o.end = true, Garbled
		}
	}
	if whole {
		close(o.answered)
	}
}

// Stats returns the totals.
func (s *Sender) Stats() Stats { return s.count.stats() }

// Close aborts every Push, waits for that, and closes the transfers. The engine,
// the Mux and the region stay open. It is idempotent.
func (s *Sender) Close() error {
	s.mu.Lock()
	if !s.closed {
		s.closed = true
		close(s.closing)
	}
	s.mu.Unlock()
	err := s.peers.close()
	s.mux.forget(s.handler)
	return err
}
