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

// ReceiverConfig is what NewReceiver needs. Region, Geometry and Pool have no
// default.
type ReceiverConfig struct {
	Region   *engine.Region   // the blocks of this side
	Geometry *layout.Geometry // of Region; block-major, so that a block is one lease
	Pool     *pool.Pool       // whose block numbers are those of Geometry

	// RequestsMax is how many there may be at once, those that wait for room or were not
	// accepted included; default 256. One peer has at most three quarters of them, so that it
	// does not shut the others out. What is beyond is refused.
	RequestsMax int

	RoomTimeout   time.Duration // for the pool to have room; default 30 s
	IdleTimeout   time.Duration // between two signs of life of a sender; default 60 s
	RevokeTimeout time.Duration // for one of three tries to revoke the leases; default 5 s
	NotifyTimeout time.Duration // for a message to leave; default 5 s
	MessageMax    int           // bytes of a notification; default 4 KiB, at least MessageMin
}

func (c *ReceiverConfig) ensureDefaults() {
	session.SetDefault(&c.RequestsMax, 256)
	session.SetDefault(&c.RoomTimeout, 30*time.Second)
	session.SetDefault(&c.IdleTimeout, 60*time.Second)
	session.SetDefault(&c.RevokeTimeout, 5*time.Second)
	session.SetDefault(&c.NotifyTimeout, 5*time.Second)
	session.SetDefault(&c.MessageMax, messageDefault)
}

func (c *ReceiverConfig) check() error {
	if c.Region == nil || c.Geometry == nil || c.Pool == nil {
		return fmt.Errorf("receiver: Region, Geometry and Pool are needed: %w", engine.ErrBounds)
	}
	blocks := uint64(c.Pool.Stats().Blocks)
	switch {
	case c.Geometry.Arrangement() != layout.BlockMajor:
		return fmt.Errorf("receiver: a %v pool cannot be leased out block by block, use "+
			"a %v one: %w",
			c.Geometry.Arrangement(), layout.BlockMajor, engine.ErrNotSupported)
	case c.Geometry.Blocks() < blocks || c.Region.Size() < c.Geometry.PoolBytes():
		return fmt.Errorf("receiver: the pool has %d blocks, the geometry %d of %d bytes, region "+
			"%s %d bytes: %w",
			blocks, c.Geometry.Blocks(), c.Geometry.BlockBytes(), c.Region.Name(), c.Region.Size(),
			engine.ErrBounds)
	case min(c.RoomTimeout, c.IdleTimeout, c.RevokeTimeout, c.NotifyTimeout) < 0:
		return fmt.Errorf("receiver: a negative timeout: %w", engine.ErrBounds)
	}
	return errors.Join(session.CheckWithin("RequestsMax", c.RequestsMax, 1, requestsMax),
		session.CheckWithin("MessageMax", c.MessageMax, MessageMin, messageMost))
}

// Receiver is the decode side. All methods may be called by any goroutine.
type Receiver struct {
	cfg     ReceiverConfig
	mux     *Mux
	handler *handler
	count   counters
	accept  chan *Request
	refuse  chan refusal

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
	var err error
	if r.handler, err = m.handle(toReceiver, nil, r.receive); err != nil {
		return nil, err
	}
	r.running.Go(r.refuseAll)
	return r, nil
}

// Accept returns the next request that was granted its blocks; its layers are
// on their way. Each accepted Request must be released, also one that failed.
func (r *Receiver) Accept(ctx context.Context) (*Request, error) {
	select {
	case q := <-r.accept:
		r.accepted(q)
		return q, nil
	case <-r.closing:
		return nil, fmt.Errorf("accept: %w", engine.ErrClosed)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Stats returns the totals.
func (r *Receiver) Stats() Stats { return r.count.stats() }

// Close ends every request that is not complete, in bounded time, and tells
// their senders. Complete ones stay their holder's until Release; those that
// were not accepted are released. The engine, the Mux and the pool stay open.
// It is idempotent.
func (r *Receiver) Close() {
	r.mu.Lock()
	if !r.closed {
		r.closed = true
		close(r.closing)
	}
	r.mu.Unlock()
	r.running.Wait()
	r.mux.forget(r.handler)
	for {
		select {
		case q := <-r.accept:
			q.Release()
		default:
			return
		}
	}
}
