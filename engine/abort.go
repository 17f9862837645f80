// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// Abort ends the transfer and returns nil when its outcome is known and final:
// then no byte of it lands any more, on either side, and Err says how it ended
// (ErrAborted, or whatever came first, which may be success). What lands a write over tcp or
// ucx is the owner: one that stands still may finish the copy that it was in (see
// docs/promises.md), and its own Revoke waits for that. A backend that cannot prove this
// within Config.AbortGrace loses its connection to the peer, which proves it, but over rdma, where
// Abort returns ErrUnproven when the peer does not answer; Abort of a backend that breaks even
// that promise returns an error. When ctx ends first, Abort returns its error,
// nothing is proved yet, and Abort may be called again.
func (t *Transfer) Abort(ctx context.Context) error {
	return t.abort(ctx, t.look().generation())
}

// abort ends the post of a generation, and no other: another goroutine may post anew as soon
// as that one has ended.
func (t *Transfer) abort(ctx context.Context, generation uint64) error {
	if t.stop(generation, ErrAborted) {
		if err := t.park(ctx, generation); err != nil && t.isPost(generation) {
			return err
		}
	}
	switch w := t.look(); {
	case w.has(unproven):
		return &OpError{Op: "abort", Peer: t.p.name, Err: errNotEnded}
	case t.lastUnanswered.Load() >= max(generation, 1):
		return &OpError{Op: "abort", Peer: t.p.name, Err: errNotAnswered}
	}
	return nil
}

var (
	errNotEnded = fmt.Errorf("the backend neither ended the transfer nor closed its connection: "+
		"do not reuse the memory: %w", ErrTimeout)
	errNotAnswered = fmt.Errorf("memory here is free, but the peer may still place what it "+
		"has in hand, "+
		"until it revokes or ends: %w", driver.ErrUnproven)
)

// stop is abort without the wait. It reports whether there was something to end.
func (t *Transfer) stop(generation uint64, why error) bool {
	held, ok := t.holdPost()
	if !ok {
		return t.isPost(generation)
	}
	defer t.letGo()
	if held != generation {
		return false
	}
	if t.cancel(generation, t.e.now()+t.e.cfg.AbortGrace) {
		t.e.sweeper.watch()
	}
	t.interrupt(generation, why)
	return true
}

// interrupt stops a post: what the backend has is cancelled, what it has not is left out.
// Preconditions: the post is held.
func (t *Transfer) interrupt(generation uint64, why error) {
	t.fail(generation, why)
	if !t.mark(generation, stopped) {
		return // its outcome is fixed
	}
	bits := t.outstanding.Load()
	for _, c := range t.via() {
		for bit := range batchesInFlight {
			if bits&(1<<bit) != 0 {
				c.p.Cancel(tag(t.slot, generation, bit))
			}
		}
	}
	if t.takeOut() {
		t.submit(nil) // leaves out what has not been submitted
	}
	t.poll()
}

// backendError is what a transfer that Submit refused ends with.
func (t *Transfer) backendError(c *conn, err error) error {
	return &OpError{Op: t.op.String(), Backend: c.lane.caps.Name, Peer: t.p.name,
		Err: t.p.reason(c, err)}
}

// reason is why a call of a connection failed: that the engine closes one that was lost is its own
// affair.
func (p *Peer) reason(c *conn, err error) error {
	if errors.Is(err, driver.ErrClosed) && c.isLost() && !p.ending.Load() {
		return ErrPeerLost
	}
	return err
}
