// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"context"
	"fmt"
	"slices"
)

// waiter is an Acquire that found no room. The goroutine that makes room takes
// the blocks in its name, so that no other can slip in between.
type waiter struct {
	hashes []Hash
	done   chan struct{} // closed when grant or err is set
	grant  *Grant
	err    error
}

func (w *waiter) end(g *Grant, err error) {
	w.grant, w.err = g, err
	close(w.done)
}

// Acquire is TryAcquire that waits for room, in order of arrival: a large
// request is not passed by smaller ones. It holds nothing while it waits, and
// learns only then which blocks are known. Errors are ErrTooLarge, ErrClosed
// and the cause of ctx.
func (p *Pool) Acquire(ctx context.Context, hashes []Hash) (*Grant, error) {
	p.mu.Lock()
	if err := p.check(len(hashes)); err != nil {
		p.mu.Unlock()
		return nil, err
	}
	if p.waiting.Len() == 0 {
		if g := p.grant(hashes); g != nil {
			p.mu.Unlock()
			return g, nil
		}
	}
	w := &waiter{hashes: slices.Clone(hashes), done: make(chan struct{})}
	place := p.waiting.PushBack(w)
	p.mu.Unlock()

	select {
	case <-w.done:
		return w.grant, w.err
	case <-ctx.Done():
	}
	p.mu.Lock()
	select {
	case <-w.done: // at the same moment
		p.mu.Unlock()
		if w.grant != nil {
			w.grant.Release()
		}
	default:
		p.waiting.Remove(place)
		p.serve() // the waiter behind may need less
		p.mu.Unlock()
	}
	return nil, fmt.Errorf("wait for %d blocks: %w", len(hashes), context.Cause(ctx))
}

// serve grants what fits to the waiters, the first one first. One that asks for more than blocks
// are left, as some were retired since, holds up no other.
func (p *Pool) serve() {
	for e := p.waiting.Front(); e != nil; e = p.waiting.Front() {
		w := e.Value.(*waiter)
		err := p.check(len(w.hashes))
		var g *Grant
		if err == nil {
			if g = p.grant(w.hashes); g == nil {
				return
			}
		}
		p.waiting.Remove(e)
		w.end(g, err)
	}
}

func (p *Pool) check(blocks int) error {
	if p.closed {
		return ErrClosed
	}
	if left := len(p.blocks) - p.retired - p.retiring; blocks > left {
		return fmt.Errorf("%d blocks, the pool has %d: %w", blocks, left, ErrTooLarge)
	}
	return nil
}
