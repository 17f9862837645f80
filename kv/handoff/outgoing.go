// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// outgoing is what a Push and a GroupPush have in common: layers in flight, and an outcome.
type outgoing struct {
	request uint64
	window  chan struct{} // one entry for each layer in flight
	drained chan struct{} // one entry: no layer is in flight
	ready   chan struct{} // closed when Begin has done all it does
	over    chan struct{} // closed when the outcome is known
	ended   chan struct{} // closed when nothing is left of it

	mu        sync.Mutex
	err       error // the outcome, once over is closed; nil: handed over
	unproven  error // a transfer was ended without a proof
	unposted  int   // layers
	inFlight  int   // layers
	finishing bool
}

func newOutgoing(request uint64, window int) outgoing {
	return outgoing{request: request, window: make(chan struct{}, window),
		drained: make(chan struct{}, 1), ready: make(chan struct{}), over: make(chan struct{}),
		ended: make(chan struct{})}
}

// Request returns the number that Begin was given.
func (o *outgoing) Request() uint64 { return o.request }

// Err returns why the push ended, nil while it has not and when it succeeded.
func (o *outgoing) Err() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// Ended is closed when nothing is left of the push: no transfer, lease or import. The blocks of
// this side may then change, unless Err or Abort returns a *LeasesError, whose leases are to end
// before, or ErrInUse: then never.
func (o *outgoing) Ended() <-chan struct{} { return o.ended }

// outcome is what a call on a push that is over returns. Precondition: o.mu is held.
func (o *outgoing) outcome() error {
	if o.err != nil {
		return o.err
	}
	return fmt.Errorf("request %d is handed over already: %w", o.request, engine.ErrClosed)
}

// finish is Finish: say sends the last word, and fail ends the push.
func (o *outgoing) finish(ctx context.Context, taken time.Duration, say func(limit context.Context),
	fail func(limit context.Context, err error)) error {
	if err := o.drain(ctx); err != nil {
		return err
	}
	limit, cancel := context.WithTimeoutCause(ctx, taken, engine.ErrTimeout)
	defer cancel()
	say(limit)
	select {
	case <-o.over:
	case <-limit.Done():
	}
	if !isClosed(o.over) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		fail(limit, fmt.Errorf("wait for the other side to take it over: %w",
			context.Cause(limit)))
	}
	<-o.ended
	return o.Err()
}

// drain waits until all layers are written.
func (o *outgoing) drain(ctx context.Context) error {
	for {
		o.mu.Lock()
		ready, err := o.beginFinish()
		o.mu.Unlock()
		if err != nil || ready {
			return err
		}
		select {
		case <-o.drained:
		case <-o.over:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// beginFinish reports whether the last word may be sent. Precondition: o.mu is held.
func (o *outgoing) beginFinish() (ready bool, err error) {
	switch {
	case isClosed(o.over):
		return false, o.outcome()
	case o.unposted > 0:
		return false, fmt.Errorf("finish request %d: %d layers have not been handed over: %w",
			o.request, o.unposted, engine.ErrBusy)
	}
	o.finishing = o.inFlight == 0
	return o.finishing, nil
}

// landed notes that a layer is in flight no more.
func (o *outgoing) landed() {
	o.mu.Lock()
	o.inFlight--
	drained := o.inFlight == 0
	o.mu.Unlock()
	<-o.window
	if drained {
		poke(o.drained)
	}
}

// addUnproven keeps an answer that there is no proof for a transfer.
func (o *outgoing) addUnproven(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.unproven = errors.Join(o.unproven, err)
}

// awaitEnded is the second half of Abort.
func (o *outgoing) awaitEnded(ctx context.Context) error {
	select {
	case <-o.ended:
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.unproven
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
