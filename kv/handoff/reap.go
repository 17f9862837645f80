// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// run follows the layers in flight, and cleans up when the Push is over.
func (p *Push) run() {
	defer close(p.ended)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for !isClosed(p.over) {
		select {
		case f := <-p.flights:
			p.reap(f, timer)
		case <-p.endedThere:
			p.failThere(nil)
		case <-p.peer.Lost():
			p.fail(&EndError{Request: p.request, Reason: PeerLost})
		case <-p.over:
		}
	}
	for held := 0; held < cap(p.window); { // then no call of Layer is under way
		select {
		case f := <-p.flights:
			p.reap(f, timer)
		case p.window <- struct{}{}:
			held++
		}
	}
	<-p.ready
	p.cleanUp()
}

// reap waits for the end of a layer, or makes it end.
func (p *Push) reap(f *flight, timer *time.Timer) {
	timer.Reset(time.Until(f.posted) + p.s.cfg.LayerTimeout)
	if !p.awaitLayer(f, timer) || f.t.Err() != nil {
		p.abort(f) // also what has ended with an error may have done so without proof
	}
	took, err, layer := time.Since(f.posted), f.t.Err(), f.layer
	p.land(f, err)
	switch {
	case err == nil:
		p.arrived(layer, took)
	case errors.Is(err, engine.ErrRevoked):
		p.awaitEnd(timer)
		p.failThere(err)
	default:
		p.failHere(context.Background(), err)
	}
	p.landed()
}

// awaitLayer reports whether the transfer is done; if not, it is to be aborted.
func (p *Push) awaitLayer(f *flight, timer *time.Timer) bool {
	for {
		select {
		case <-f.t.Completed():
			if f.t.Done() {
				return true
			}
			// It was the signal of an earlier post.
		case <-timer.C:
			p.fail(&EndError{Request: p.request, Reason: TimedOut})
			return f.t.Done()
		case <-p.endedThere:
			p.failThere(nil)
			return f.t.Done()
		case <-p.over:
			return f.t.Done()
		}
	}
}

// abort ends a transfer and waits for the end, which the engine bounds. It keeps an answer
// that there is no proof.
func (p *Push) abort(f *flight) {
	p.addUnproven(withoutProof(f.t.Abort(context.Background())))
}

// awaitEnd waits for the receiver to say why it has revoked a lease: it does so
// when it has given its blocks back.
func (p *Push) awaitEnd(timer *time.Timer) {
	timer.Reset(p.s.cfg.AbortTimeout)
	select {
	case <-p.endedThere:
	case <-p.peer.Lost():
	case <-p.over:
	case <-timer.C:
	}
}

// arrived counts a layer that was written.
func (p *Push) arrived(layer int, took time.Duration) {
	bytes := uint64(len(p.targets)) * p.s.cfg.Geometry.LayerBytes()
	p.s.count.bytes.Add(bytes)
	p.s.count.layers.Add(1)
	if p.s.cfg.OnLayer != nil {
		p.s.cfg.OnLayer(LayerReport{Request: p.request, Layer: layer, Bytes: bytes, Took: took})
	}
}

// fail gives the Push its outcome, unless it has one.
func (p *Push) fail(err *EndError) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !isClosed(p.over) {
		err.Peer = p.peer.Name()
		p.err = err
		p.s.count.ended(err.Reason)
		close(p.over)
	}
}

// failHere is fail for an error of this side. That of a lost peer takes many
// forms, by what was to be done with it.
func (p *Push) failHere(ctx context.Context, err error) {
	end := endOf(ctx, p.request, err)
	if end.Reason == Failed && isLost(p.peer) {
		end.Reason = PeerLost
	}
	p.fail(end)
}

func isLost(peer *engine.Peer) bool {
	select {
	case <-peer.Lost():
		return true
	default:
		return false
	}
}

// failThere is fail for a reason that the receiver has, or had no time to tell.
func (p *Push) failThere(cause error) {
	p.mu.Lock()
	end := &EndError{Request: p.request, Remote: true, Reason: Cancelled, Err: cause}
	switch {
	case p.reasonThere != 0:
		end.Reason = p.reasonThere
	case isLost(p.peer):
		end.Remote, end.Reason = false, PeerLost
	}
	p.mu.Unlock()
	p.fail(end)
}

// succeed is the receiver's last word. Precondition: p.mu is held.
func (p *Push) succeed() {
	if !isClosed(p.over) {
		p.s.count.finished.Add(1)
		p.s.count.moved.Add(uint64(len(p.targets)))
		close(p.over)
	}
}

// cleanUp gives back what the Push holds, and tells the receiver of an end that
// it does not know of. Preconditions: no transfer is in flight, nor a call of Layer under way.
func (p *Push) cleanUp() {
	defer p.s.leave(p)
	for i, b := range p.targets {
		if i == 0 {
			p.moor(b.remote)
		} else {
			_ = b.remote.Close() // the receiver has ended the lease, or is about to
		}
	}
	var end *EndError
	if !errors.As(p.Err(), &end) || end.Remote || isLost(p.peer) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), p.s.cfg.AbortTimeout)
	defer cancel()
	// Where it cannot be told, its own limits end the request.
	_ = p.peer.Notify(ctx, appendHeader(nil, toReceiver, kindAbort, end.Reason, p.session))
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
