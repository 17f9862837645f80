// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"fmt"

	"github.com/sluicehq/sluice/engine"
)

// Finish waits until every layer is written, and until the receiver has taken
// the blocks over. It returns nil when and only when that has confirmed it; ctx
// and TakenTimeout bound the wait, and where ctx ends it the Push goes on, to be
// finished or aborted. ErrBusy means that a layer has not been pushed.
func (p *Push) Finish(ctx context.Context) error {
	if err := p.drain(ctx); err != nil {
		return err
	}
	limit, cancel := context.WithTimeoutCause(ctx, p.s.cfg.TakenTimeout, engine.ErrTimeout)
	defer cancel()
	err := p.peer.Notify(limit, appendHeader(nil, toReceiver, kindDone, 0, p.session))
	if err == nil {
		select {
		case <-p.over:
		case <-limit.Done():
			err = fmt.Errorf("wait for the receiver to take it over: %w", context.Cause(limit))
		}
	}
	if ctx.Err() != nil && !isClosed(p.over) {
		return context.Cause(ctx)
	}
	if err != nil {
		p.failHere(limit, err)
	}
	<-p.ended
	return p.Err()
}

// drain waits until all layers are written.
func (p *Push) drain(ctx context.Context) error {
	for {
		p.mu.Lock()
		ready, err := p.mayFinish()
		p.mu.Unlock()
		if err != nil || ready {
			return err
		}
		select {
		case <-p.drained:
		case <-p.over:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// mayFinish reports whether the last word may be sent. Precondition: p.mu is held.
func (p *Push) mayFinish() (ready bool, err error) {
	switch {
	case isClosed(p.over):
		return false, p.outcome()
	case p.unposted > 0:
		return false, fmt.Errorf("finish request %d: %d layers have not been pushed: %w", p.request,
			p.unposted, engine.ErrBusy)
	}
	p.doneSent = p.inFlight == 0
	return p.doneSent, nil
}

// Abort ends the Push. When it returns nil, no byte of it lands any more, its
// imports are closed, and the receiver has been told, where it can be. ctx
// bounds the wait; the end goes on without it. Another error means that the engine has no
// proof for a transfer: the blocks of this side must not change. It is idempotent, and does
// nothing to a Push that has ended.
func (p *Push) Abort(ctx context.Context) error {
	p.fail(&EndError{Request: p.request, Reason: Aborted})
	select {
	case <-p.ended:
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.unproven
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
