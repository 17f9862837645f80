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

// SenderConfig is what NewSender needs. Region and Geometry have no default.
type SenderConfig struct {
	Region   *engine.Region   // the blocks of this side
	Geometry *layout.Geometry // of Region; any arrangement
	Route    engine.Route     // of the writes
	Class    engine.Class     // of the same; default SwapIn, as the receiver waits for them
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

// Sender is the prefill side. All methods may be called by any goroutine.
type Sender struct {
	cfg      SenderConfig
	mux      *Mux
	unhandle func() // ends the handler of the Mux
	count    counters
	peers    peers[*GroupSender]
	closing  chan struct{}

	mu     sync.Mutex
	closed bool
	offers map[uint64]*outOffer // by session
}

// outOffer is an offer whose request has not begun yet.
type outOffer struct {
	answered chan struct{} // closed with answer
	answer   assembly
	end      context.CancelCauseFunc // of Begin
}

// NewSender makes the one Sender of a Mux.
func NewSender(m *Mux, cfg SenderConfig) (*Sender, error) {
	cfg.ensureDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	s := &Sender{cfg: cfg, mux: m, closing: make(chan struct{}), offers: map[uint64]*outOffer{}}
	s.peers.make = s.meet
	var err error
	s.unhandle, err = m.handle(toSender, nil, s.receive)
	return s, err
}

// meet makes the group of one peer.
func (s *Sender) meet(peer *engine.Peer) (*GroupSender, error) {
	cfg, err := pairConfig(peer, s.cfg.Region, s.cfg.Geometry, s.cfg.Limits)
	if err != nil {
		return nil, err
	}
	cfg.Route, cfg.Class = s.cfg.Route, s.cfg.Class
	cfg.OnLayer, cfg.count = s.cfg.OnLayer, &s.count
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
	missing []int
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
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.MeetTimeout, engine.ErrTimeout)
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	o, session := &outOffer{answered: make(chan struct{}), end: stop}, newSession()
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
	p, err := s.begin(ctx, peer, request, blocks, o, session)
	if err == nil {
		return p, nil
	}
	end := endOf(ctx, request, err)
	end.Request, end.Peer = request, peer.Name()
	if end.Reason == Failed && isLost(peer) {
		end.Reason = PeerLost
	}
	if !end.counted {
		s.count.ended(end.Reason)
	}
	if !end.Remote && !isLost(peer) {
		tell(peer, s.cfg.NotifyTimeout, toReceiver, kindAbort, end.Reason, session)
	}
	return nil, end
}

// begin asks what is missing, and hands that over as a group does.
func (s *Sender) begin(ctx context.Context, peer *engine.Peer, request uint64, blocks []Block,
	o *outOffer, session uint64) (*Push, error) {
	ask := offer{request: request, fingerprint: s.cfg.Geometry.Fingerprint(),
		hashes: make([]pool.Hash, len(blocks))}
	for i, b := range blocks {
		ask.hashes[i] = b.Hash
	}
	if err := sendFragments(ctx, peer, toReceiver, kindBegin, session, ask.append(nil),
		s.cfg.MessageMax); err != nil {
		return nil, fmt.Errorf("ask for room: %w", err)
	}
	select {
	case <-o.answered:
	case <-peer.Lost():
		return nil, engine.ErrPeerLost
	case <-s.closing:
		return nil, engine.ErrClosed
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for room: %w", context.Cause(ctx))
	}
	missing, err := decodeAnswer(o.answer.bytes, len(blocks))
	if err != nil {
		return nil, err
	}
	table := make([]uint32, len(missing))
	for i, at := range missing {
		table[i] = blocks[at].Local
	}
	group, err := s.peers.get(ctx, peer)
	if err != nil {
		return nil, err
	}
	push, err := group.Begin(ctx, request, layout.Tables{table},
		layout.Span{To: uint64(len(table)) * uint64(s.cfg.Geometry.Tokens())})
	if err != nil {
		return nil, err
	}
	return &Push{push, missing}, nil
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

// receive handles a message to the sender. It does not wait.
func (s *Sender) receive(n engine.Notification) {
	m, err := decode(n.Data)
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.offers[m.session]
	switch {
	case err != nil || o == nil:
		s.count.strays.Add(1)
	case m.kind == kindEnd:
		o.end(&EndError{Remote: true, Reason: m.reason})
	default:
		whole, err := o.answer.add(&m, answerMax(RequestBlocksMax))
		if err != nil {
			o.end(err)
		} else if whole {
			close(o.answered)
		}
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
	s.unhandle()
	return err
}
