// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/kv/layout"
	"github.com/sluicehq/sluice/kv/pool"
)

// RequestBlocksMax bounds the blocks of one request.
const RequestBlocksMax = 1 << 20

// SenderConfig is what NewSender needs. Region and Geometry have no default.
type SenderConfig struct {
	Region   *engine.Region   // the blocks of this side
	Geometry *layout.Geometry // of Region; any arrangement
	Route    engine.Route     // of the writes

	Window    int // layers in flight of one Push; default 4
	PushesMax int // at once; default 256

	AnswerTimeout time.Duration // for Begin, the wait for room included; default 30 s
	LayerTimeout  time.Duration // for one layer to be written; default 10 s
	TakenTimeout  time.Duration // for the receiver to take it over in the end; default 10 s
	AbortTimeout  time.Duration // for the news of an end to leave, and to come; default 5 s
	MessageMax    int           // bytes of a notification; default 4 KiB, at least MessageMin

	// OnLayer, if set, is called for each layer that was written, in order, by a
	// goroutine of the Push. It must not wait.
	OnLayer func(LayerReport)
}

// LayerReport is one layer of one request.
type LayerReport struct {
	Request uint64
	Layer   int
	Bytes   uint64
	Took    time.Duration // from Post to completion
}

func (c *SenderConfig) ensureDefaults() {
	session.SetDefault(&c.Window, 4)
	session.SetDefault(&c.PushesMax, 256)
	session.SetDefault(&c.AnswerTimeout, 30*time.Second)
	session.SetDefault(&c.LayerTimeout, 10*time.Second)
	session.SetDefault(&c.TakenTimeout, 10*time.Second)
	session.SetDefault(&c.AbortTimeout, 5*time.Second)
	session.SetDefault(&c.MessageMax, messageDefault)
}

// messageDefault holds the leases of some twenty blocks.
const messageDefault = 4 << 10 // 4 KiB

func (c *SenderConfig) check() error {
	switch {
	case c.Region == nil || c.Geometry == nil:
		return fmt.Errorf("sender: Region and Geometry are needed: %w", engine.ErrBounds)
	case c.Region.Size() < c.Geometry.PoolBytes():
		return fmt.Errorf("sender: region %s has %d bytes, its %d blocks need %d: %w",
			c.Region.Name(), c.Region.Size(), c.Geometry.Blocks(), c.Geometry.PoolBytes(),
			engine.ErrBounds)
	case min(c.AnswerTimeout, c.LayerTimeout, c.TakenTimeout, c.AbortTimeout) < 0:
		return fmt.Errorf("sender: a negative timeout: %w", engine.ErrBounds)
	}
	return errors.Join(session.CheckWithin("Window", c.Window, 1, layout.LayersMax),
		session.CheckWithin("PushesMax", c.PushesMax, 1, requestsMax),
		session.CheckWithin("MessageMax", c.MessageMax, MessageMin, messageMost))
}

// requestsMax and messageMost are the most that a Config may ask for.
const (
	requestsMax = 1 << 20
	messageMost = 1 << 30
)

// Sender is the prefill side. All methods may be called by any goroutine.
type Sender struct {
	cfg     SenderConfig
	mux     *Mux
	handler *handler
	count   counters

	mu     sync.Mutex
	closed bool
	pushes map[uint64]*Push
	lines  map[*engine.Peer]*line
}

// NewSender makes the one Sender of a Mux.
func NewSender(m *Mux, cfg SenderConfig) (*Sender, error) {
	cfg.ensureDefaults()
	if err := cfg.check(); err != nil {
		return nil, err
	}
	s := &Sender{cfg: cfg, mux: m, pushes: map[uint64]*Push{}, lines: map[*engine.Peer]*line{}}
	var err error
	s.handler, err = m.handle(toSender, nil, s.receive)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Block is one block of a request on this side.
type Block struct {
	Hash  pool.Hash // zero: never shared
	Local uint32    // its number in this side's pool
}

// Begin offers the blocks of a request to a peer's Receiver, and returns when
// that has found room for those that it lacks: Push.MissingBlocks, whose content
// must be there layer by layer as Push.Layer is called, and stay until the Push
// has ended. ctx and AnswerTimeout bound the wait. Errors are *EndError, but for
// what is wrong with the call.
func (s *Sender) Begin(ctx context.Context, peer *engine.Peer, request uint64, blocks []Block) (
	*Push, error) {
	if peer == nil {
		return nil, fmt.Errorf("begin request %d: no peer: %w", request, engine.ErrBounds)
	}
	if err := s.checkBlocks(blocks); err != nil {
		return nil, fmt.Errorf("begin request %d: %w", request, err)
	}
	p, err := s.open(peer, request, blocks)
	if err != nil {
		return nil, fmt.Errorf("begin request %d: %w", request, err)
	}
	go p.run()
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.AnswerTimeout, engine.ErrTimeout)
	defer cancel()
	err = p.begin(ctx)
	close(p.ready)
	if err != nil {
		p.failHere(ctx, err)
		<-p.ended
		return nil, p.Err()
	}
	return p, nil
}

func (s *Sender) checkBlocks(blocks []Block) error {
	if len(blocks) > RequestBlocksMax {
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

// Close aborts every Push, waits for that, and closes the transfers. The engine,
// the Mux and the region stay open. It is idempotent.
func (s *Sender) Close() error {
	s.mu.Lock()
	s.closed = true
	pushes := make([]*Push, 0, len(s.pushes))
	for _, p := range s.pushes {
		pushes = append(pushes, p)
	}
	s.mu.Unlock()
	for _, p := range pushes {
		p.fail(&EndError{Request: p.request, Reason: Closed})
	}
	for _, p := range pushes {
		<-p.ended
	}
	s.mux.forget(s.handler)
	return s.closeLines()
}
