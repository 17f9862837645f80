// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/engine"
)

// Layer starts to write a layer of all missing blocks, which must be complete in
// this side's pool. It waits while Window layers are in flight, and ctx bounds
// that wait, not the write. Each layer is pushed once, in any order.
func (p *Push) Layer(ctx context.Context, layer int) error {
	if err := p.claim(layer); err != nil {
		return err
	}
	if len(p.targets) == 0 {
		return nil // the receiver has all of it
	}
	select {
	case p.window <- struct{}{}:
	case <-p.over:
		return p.Err()
	case <-ctx.Done():
		p.unclaim(layer)
		return context.Cause(ctx)
	}
	err := p.post(layer)
	if err != nil {
		p.failHere(ctx, err)
		<-p.window
		err = p.Err()
	}
	return err
}

func (p *Push) claim(layer int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case isClosed(p.over):
		return p.outcome()
	case layer < 0 || layer >= len(p.claimed):
		return fmt.Errorf("push layer %d of %d: %w", layer, len(p.claimed), engine.ErrBounds)
	case p.claimed[layer]:
		return fmt.Errorf("push layer %d twice: %w", layer, engine.ErrBusy)
	}
	p.claimed[layer] = true
	if len(p.targets) == 0 {
		p.unposted-- // there is nothing to post
	}
	return nil
}

func (p *Push) unclaim(layer int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.claimed[layer] = false
}

// post fills a transfer and starts it.
func (p *Push) post(layer int) error {
	f, err := p.launch()
	if err != nil {
		return err
	}
	f.layer = layer
	if err = p.fill(f); err == nil {
		err = p.start(f)
	}
	if err != nil {
		p.land(f, err)
	}
	return err
}

func (p *Push) start(f *flight) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isClosed(p.over) {
		return p.outcome()
	}
	f.posted = time.Now()
	if err := f.t.Post(); err != nil {
		return err
	}
	p.unposted--
	p.inFlight++
	p.flights <- f
	return nil
}

// fill lists the pieces of a layer.
func (p *Push) fill(f *flight) error {
	g, region := p.s.cfg.Geometry, p.s.cfg.Region
	for _, b := range p.targets {
		at := uint64(f.layer) * g.LayerBytes() // in the receiver's block
		for part := range g.Parts() {
			piece, err := g.Piece(uint64(b.local), f.layer, part)
			if err != nil {
				return err
			}
			// Pieces that adjoin on both sides are merged by the engine.
			if err := f.t.Add(region, piece.Off, b.remote, at, piece.Len); err != nil {
				return err
			}
			at += piece.Len
		}
	}
	return f.t.Notify(appendLayer(f.msg[:0], p.session, f.layer))
}
