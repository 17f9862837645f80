// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// Layer starts to hand over a layer, by its global number, which must be complete in this rank's
// memory: it writes it to the receivers that this rank writes to, and notifies those that read it.
// It waits while Window layers are in flight, and ctx bounds that wait, not the write. Each layer
// is handed over once, in any order; those that no edge carries may be left out.
func (p *GroupPush) Layer(ctx context.Context, layer int) error {
	carried, err := p.claim(layer)
	if err != nil || !carried {
		return err
	}
	select {
	case p.window <- struct{}{}:
	case <-p.over:
		return p.Err()
	case <-ctx.Done():
		p.mu.Lock()
		p.claimed[layer] = false
		p.mu.Unlock()
		return context.Cause(ctx)
	}
	f := p.newFlight(layer)
	err = p.fill(f)
	if err = p.post(f, err); err != nil {
		p.fail(endOf(ctx, p.request, err), nil)
		err = p.Err()
	}
	return err
}

// newFlight returns a flight whose layer has landed, or a new one. There are at most Window
// flights.
func (p *GroupPush) newFlight(layer int) *groupFlight {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.spare); n > 0 {
		f := p.spare[n-1]
		p.spare = p.spare[:n-1]
		f.layer, f.sent = layer, f.sent[:0]
		return f
	}
	return &groupFlight{layer: layer}
}

func (p *GroupPush) claim(layer int) (carried bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	claimed, carried := p.claimed[layer]
	switch {
	case isClosed(p.over):
		return false, p.outcome()
	case claimed:
		return false, fmt.Errorf("hand layer %d over twice: %w", layer, engine.ErrBusy)
	case carried:
		p.claimed[layer] = true
		return true, nil
	}
	for i := range p.s.side.Views {
		if p.s.side.Views[i].Layer == layer {
			return false, nil
		}
	}
	return false, fmt.Errorf("hand layer %d over: it is not on rank %d: %w", layer, p.s.side.Rank,
		engine.ErrBounds)
}

// fill makes a transfer for each edge that carries the layer.
func (p *GroupPush) fill(f *groupFlight) error {
	var held *layout.Held // nil: no digests
	if p.digests != nil && p.s.cfg.Digest(f.layer) {
		held = p.s.held(false, p.tables, p.span)
	}
	for _, l := range p.links {
		if l.edge == nil || !l.edge.Carries(f.layer) {
			continue
		}
		t, err := p.s.lines[l.to].transfer()
		if err != nil {
			return err
		}
		f.sent = append(f.sent, sentLayer{l, t})
		if l.edge.Op == engine.Write {
			err = t.fill(l.edge, f.layer, p.tables, l.there.tables, p.span, p.s.cfg.Regions,
				l.imports)
		}
		if err != nil {
			return err
		}
		t.msg = appendLayer(t.msg[:0], l.session, f.layer)
		if held != nil {
			d, err := p.digests.Layer(l.edge, f.layer, held, layout.Scope{})
			if err != nil {
				return err
			}
			t.msg = appendDigest(t.msg, d)
		}
		if err := t.t.Notify(t.msg); err != nil {
			return err
		}
	}
	return nil
}

// post starts the transfers of a layer, unless fill has failed with err. It returns the transfers
// that it has not started to their line.
func (p *GroupPush) post(f *groupFlight, err error) error {
	p.mu.Lock()
	f.posted = time.Now()
	posted := 0
	if err == nil && isClosed(p.over) {
		err = p.outcome()
	}
	for err == nil && posted < len(f.sent) {
		if err = f.sent[posted].t.t.Post(); err == nil {
			posted++
		}
	}
	for _, s := range f.sent[posted:] {
		p.s.lines[s.to.to].putBack(s.t, err)
	}
	f.sent = f.sent[:posted]
	if posted > 0 {
		p.unposted--
		p.inFlight++
		p.flights <- f
	}
	p.mu.Unlock()
	if posted == 0 {
		<-p.window
	}
	return err
}

// Finish waits until every layer is handed over, and until each receiver has all that it gets of
// this and all other ranks. It returns nil when and only when all of them have confirmed it: the
// blocks of this rank are free then. ctx and TakenTimeout bound the wait, and where ctx ends it
// the push goes on, to be finished or aborted. ErrBusy means that a layer is missing.
func (p *GroupPush) Finish(ctx context.Context) error {
	if err := p.drain(ctx); err != nil {
		return err
	}
	limit, cancel := context.WithTimeoutCause(ctx, p.s.cfg.TakenTimeout, engine.ErrTimeout)
	defer cancel()
	var all sync.WaitGroup
	for _, l := range p.links {
		all.Go(func() {
			msg := appendHeader(nil, toReceiver, kindDone, 0, l.session)
			err := p.s.cfg.Peers[l.to].Notify(limit, msg)
			if err != nil && ctx.Err() == nil {
				p.fail(p.s.endOf(limit, p.request, l.to, err), nil)
			}
		})
	}
	all.Wait()
	select {
	case <-p.over:
	case <-limit.Done():
	}
	if !isClosed(p.over) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		p.fail(endOf(limit, p.request, fmt.Errorf("wait for the other side to take it over: %w",
			context.Cause(limit))), nil)
	}
	<-p.ended
	return p.Err()
}

// drain waits until all layers are written.
func (p *GroupPush) drain(ctx context.Context) error {
	for {
		p.mu.Lock()
		ready, err := p.beginFinish()
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

// beginFinish reports whether Done may be sent. Precondition: p.mu is held.
func (p *GroupPush) beginFinish() (ready bool, err error) {
	switch {
	case isClosed(p.over):
		return false, p.outcome()
	case p.unposted > 0:
		return false, fmt.Errorf("finish request %d: %d layers have not been handed over: %w",
			p.request, p.unposted, engine.ErrBusy)
	}
	p.finishing = p.inFlight == 0
	return p.finishing, nil
}

// landed records that a layer is no longer in flight.
func (p *GroupPush) landed(f *groupFlight) {
	p.mu.Lock()
	p.inFlight--
	p.spare = append(p.spare, f)
	drained := p.inFlight == 0
	p.mu.Unlock()
	<-p.window
	if drained {
		signal(p.drained)
	}
}

// addUnproven keeps the error of a transfer that ended without a proof.
func (p *GroupPush) addUnproven(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unproven = errors.Join(p.unproven, err)
}

// Abort ends the request on all ranks. When it returns nil, no byte that this rank sends lands any
// more, no receiver can read its blocks, and all receivers that can be reached have been notified;
// each of them notifies the other senders, and has its own proof. ctx bounds the wait; the end goes
// on without it. driver.ErrUnproven means that there is no proof: for the blocks of this rank see
// Ended. It is idempotent, and does nothing to a push that has ended.
func (p *GroupPush) Abort(ctx context.Context) error {
	p.fail(&EndError{Reason: Aborted}, nil)
	select {
	case <-p.ended:
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.unproven
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// run follows the layers in flight, and cleans up when the push is over.
func (p *GroupPush) run() {
	defer close(p.ended)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for !isClosed(p.over) {
		select {
		case f := <-p.flights:
			p.finishFlight(f, timer)
		case a := <-p.asked:
			p.answer(a)
		case <-p.over:
		}
	}
	for held := 0; held < cap(p.window); { // then no call of Layer is under way
		select {
		case f := <-p.flights:
			p.finishFlight(f, timer)
		case p.window <- struct{}{}:
			held++
		}
	}
	<-p.ready
	p.cleanUp()
}

// finishFlight waits until the transfers of a layer have ended on all its edges. It aborts them
// when the push fails or their time is over.
func (p *GroupPush) finishFlight(f *groupFlight, timer *time.Timer) {
	timer.Reset(time.Until(f.posted) + p.s.cfg.LayerTimeout)
	for _, s := range f.sent {
		p.awaitLayer(s, timer)
	}
	took, failed := time.Since(f.posted), false
	for _, s := range f.sent {
		failed = failed || !s.t.t.Done() || s.t.t.Err() != nil
	}
	if failed {
		p.abortLayer(f)
	}
	for _, s := range f.sent {
		err := s.t.t.Err()
		p.s.lines[s.to.to].putBack(s.t, err)
		if errors.Is(err, engine.ErrRevoked) {
			p.awaitEnd(s.to, err, timer)
		} else if err != nil {
			p.fail(p.s.endOf(context.Background(), p.request, s.to.to, err), nil)
		}
	}
	if !failed && p.s.cfg.OnLayer != nil {
		p.s.cfg.OnLayer(LayerReport{Request: p.request, Layer: f.layer, Took: took})
	}
	p.landed(f)
}

// abortLayer aborts all transfers of a layer that have not succeeded: also those that have ended
// with an error, since they may have ended without a proof.
func (p *GroupPush) abortLayer(f *groupFlight) {
	var all sync.WaitGroup
	for _, s := range f.sent {
		if !s.t.t.Done() || s.t.t.Err() != nil {
			all.Go(func() { p.addUnproven(s.t.abort()) })
		}
	}
	all.Wait()
}

// awaitLayer waits until a transfer has ended, its time is over, or the push has ended. Meanwhile
// it answers questions of receivers about digests.
func (p *GroupPush) awaitLayer(s sentLayer, timer *time.Timer) {
	for {
		select {
		case <-s.t.t.Completed():
			// Done is called only now: a call before the end makes the engine leave the polling to
			// us.
			if s.t.t.Done() {
				return
			} // it was the signal of an earlier post
		case a := <-p.asked:
			p.answer(a)
		case <-timer.C:
			err := fmt.Errorf("layer to rank %d is not written: %w", p.s.others[s.to.to].Rank,
				engine.ErrTimeout)
			p.fail(p.s.endOf(context.Background(), p.request, s.to.to, err), nil)
			return
		case <-p.over:
			return
		}
	}
}

// awaitEnd waits for a receiver to say why it has revoked a lease.
func (p *GroupPush) awaitEnd(l *outLink, cause error, timer *time.Timer) {
	timer.Reset(p.s.cfg.NotifyTimeout)
	select {
	case <-p.over:
	case <-timer.C:
		p.fail(&EndError{Remote: true, Reason: Cancelled, Err: cause}, l)
	}
}

// answer sends a receiver a digest of this rank's memory.
func (p *GroupPush) answer(a asking) {
	held := p.s.held(false, p.tables, p.span)
	d, err := p.digests.Layer(a.from.edge, int(a.q.layer), held, a.q.scope)
	if err != nil {
		p.fail(p.s.endOf(context.Background(), p.request, a.from.to, err), nil)
		return
	}
	p.mu.Lock()
	a.from.asking = false // the answer may be followed by the next one
	p.mu.Unlock()
	msg := appendDigest(appendSum(nil, a.from.session, a.q.number), d)
	ctx, cancel := context.WithTimeout(context.Background(), p.s.cfg.NotifyTimeout)
	defer cancel()
	_ = p.s.cfg.Peers[a.from.to].Notify(ctx, msg) // else the receiver's limit ends its wait
}

// cleanUp releases the transfers, leases and imports of the push. Preconditions: no transfer is in
// flight, and no call of Begin or Layer runs.
func (p *GroupPush) cleanUp() {
	err := p.s.revoke(p.leases)
	p.mu.Lock()
	p.unproven = errors.Join(p.unproven, err)
	if err != nil || errors.Is(p.unproven, ErrInUse) { // this side's blocks are not free
		last := EndError{Request: p.request, Reason: Failed}
		if end, ok := errors.AsType[*EndError](p.err); ok {
			last = *end // others may be reading it
		}
		last.Err = errors.Join(last.Err, p.unproven)
		p.err = &last
	}
	for _, l := range p.links {
		p.s.places.Add(-int64(l.reserved))
	}
	p.mu.Unlock()
	for _, l := range p.links {
		p.s.lines[l.to].keepLastImport(l.imports)
	}
	p.s.forget(p)
}
