// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"fmt"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// digest returns the digest of the part of a layer of the edge that this rank has.
func (l *inLink) digest(layer int, in layout.Scope) (layout.Digest, error) {
	return l.digests.Layer(l.edge, layer, l.r.held(true, l.q.tables, l.q.span), in)
}

// compare returns a *layout.MismatchError if this rank does not have what the sender has. It then
// asks the sender for digests of parts of the layer, to say where they differ.
func (l *inLink) compare(a arrival) error {
	want, _ := decodeDigest(a.digest) // of that length: see decodeBody
	got, err := l.digest(a.layer, layout.Scope{})
	if err != nil || got == want {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(l.q.ctx, l.r.cfg.LayerTimeout, engine.ErrTimeout)
	defer cancel()
	err = l.edge.Locate(a.layer, l.q.span, func(in layout.Scope) (bool, error) {
		theirs, err := l.ask(ctx, a.layer, in)
		if err != nil {
			return false, err
		}
		ours, err := l.digest(a.layer, in)
		return ours != theirs, err
	})
	if _, ok := err.(*layout.MismatchError); ok {
		return err
	}
	return fmt.Errorf("layer %d of sending rank %d, it cannot be said where (%v): %w", a.layer,
		l.r.others[l.from].Rank, err, layout.ErrMismatch)
}

// ask asks the sender for a digest.
func (l *inLink) ask(ctx context.Context, layer int, in layout.Scope) (layout.Digest, error) {
	l.r.mu.Lock()
	l.asks++
	l.question = l.asks
	l.r.mu.Unlock()
	ask := question{l.asks, uint32(layer), in}
	msg := ask.append(appendHeader(nil, toSender, kindAsk, 0, l.session))
	if err := l.r.cfg.Peers[l.from].Notify(ctx, msg); err != nil {
		return layout.Digest{}, err
	}
	select {
	case d := <-l.sums:
		return d, nil
	case <-ctx.Done():
		return layout.Digest{}, context.Cause(ctx)
	}
}
