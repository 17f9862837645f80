// SPDX-License-Identifier: Apache-2.0

package handoff

import "context"

// Finish waits until every layer is written, and until the receiver has taken
// the blocks over. It returns nil when and only when that has confirmed it; ctx
// and TakenTimeout bound the wait, and where ctx ends it the Push goes on, to be
// finished or aborted. ErrBusy means that a layer has not been pushed.
func (p *Push) Finish(ctx context.Context) error {
	return p.finish(ctx, p.s.cfg.TakenTimeout, func(limit context.Context) {
		msg := appendHeader(nil, toReceiver, kindDone, 0, p.session)
		if err := p.peer.Notify(limit, msg); err != nil && ctx.Err() == nil {
			p.failHere(limit, err)
		}
	}, p.failHere)
}

// Abort ends the Push. When it returns nil, no byte of it lands any more, its
// imports are closed, and the receiver has been told, where it can be. ctx
// bounds the wait; the end goes on without it. driver.ErrUnproven means that the engine has no
// proof for a transfer: bytes may land at the receiver until it revokes or ends. The blocks of this
// side may change all the same, unless the error is ErrInUse. It is idempotent, and does nothing to
// a Push that has ended.
func (p *Push) Abort(ctx context.Context) error {
	p.fail(&EndError{Request: p.request, Reason: Aborted})
	return p.awaitEnded(ctx)
}
