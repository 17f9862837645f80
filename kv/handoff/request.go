// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"sync"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/pool"
)

// Request is one request on its way to this side, or here. All methods may be
// called by any goroutine.
type Request struct {
	ID      uint64       // that Begin was given
	Peer    *engine.Peer // the sender
	Hashes  []pool.Hash  // of its blocks
	Blocks  []uint32     // where they are: one number for each hash
	Missing []int        // indices in Blocks of those that the sender writes

	r       *Receiver
	session uint64
	grant   *pool.Grant     // set when granted
	leases  []*engine.Lease // one for each of Missing
	layers  chan int

	begun    chan struct{} // closed when all of the begin is there
	alive    chan struct{} // one entry: the sender gave a sign of life
	stopped  chan struct{} // closed with end
	complete chan struct{} // closed when all layers and the last word are there
	closed   chan struct{} // closed when the outcome is known and no lease stands

	mu       sync.Mutex
	asked    assembly
	granted  bool
	arrived  []bool
	absent   int // layers
	done     bool
	end      *EndError
	finished bool  // nothing is noted any more
	err      error // the outcome, once closed is closed
	released bool

	// Guarded by Receiver.mu. It counts until it is neither under way nor in the queue of Accept.
	underWay, queued bool
}

func newRequest(r *Receiver, peer *engine.Peer, session uint64) *Request {
	layers := r.cfg.Geometry.Layers()
	return &Request{
		Peer: peer, r: r, underWay: true, session: session, layers: make(chan int, layers),
		begun: make(chan struct{}), alive: make(chan struct{}, 1), stopped: make(chan struct{}),
		complete: make(chan struct{}), closed: make(chan struct{}),
		arrived: make([]bool, layers), absent: layers,
	}
}

// Layers tells of each layer whose bytes are here, in the order of arrival. It is
// closed when the request ends: complete if Err is nil.
func (q *Request) Layers() <-chan int { return q.layers }

// Done is closed when the request is complete or has failed; Err says which. In
// both cases its sender cannot write to the blocks any more, unless Err is ErrUnproven: those
// blocks the pool has lost until there is a proof, or for good if the Receiver is closed before.
func (q *Request) Done() <-chan struct{} { return q.closed }

// Err returns why the request failed, an *EndError; nil while it has not ended
// and when it is complete.
func (q *Request) Err() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.err
}

// Cancel ends the request unless it is complete. When it returns nil, nothing
// lands in its blocks any more and the pool has them back; ErrUnproven where that could not be
// proved. ctx bounds the wait; the end goes on without it.
func (q *Request) Cancel(ctx context.Context) error {
	q.mu.Lock()
	q.stop(Cancelled, false)
	q.mu.Unlock()
	select {
	case <-q.closed:
		if errors.Is(q.Err(), engine.ErrUnproven) {
			return q.Err()
		}
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Release gives the blocks of a complete request back: they stay in the pool as
// long as there is room, for requests with the same prefix. A request that is
// not complete is cancelled, without a wait. It is idempotent.
func (q *Request) Release() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.released = true
	q.stop(Cancelled, false)
	if q.finished && q.err == nil {
		q.grant.Release()
	}
}
