// SPDX-License-Identifier: Apache-2.0

package replay

import (
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/handoff"
	"github.com/sluicehq/sluice/kv/pool"
	"github.com/sluicehq/sluice/kv/trace"
	"github.com/sluicehq/sluice/replay/internal/content"
)

// request pushes one request to the decode process, or aborts it as planned.
func (p *prefill) request(i int) error {
	q := &p.plan.Requests[i]
	blocks := make([]handoff.Block, len(q.HashIDs))
	for j, id := range q.HashIDs {
		blocks[j] = handoff.Block{Hash: pool.HashOf(id), Local: uint32(j)}
	}
	idle := p.res.Fill + p.base.took
	begin := time.Now()
	push, err := p.handOver(i, blocks)
	p.progress(len(blocks) * p.staging.geometry.Layers())
	switch {
	case err == nil:
		p.res.Requests = append(p.res.Requests, time.Since(begin)-(p.res.Fill+p.base.took-idle))
		p.res.BlocksMoved += uint64(len(push.MissingBlocks()))
		p.res.BlocksReused += uint64(len(blocks) - len(push.MissingBlocks()))
		return nil
	case p.asPlanned(i, err):
		p.res.Aborted++
		return nil
	}
	return err
}

// asPlanned reports whether a request ended with the abort that the plan asks for.
func (p *prefill) asPlanned(i int, err error) bool {
	abort, planned := p.plan.Aborts[i]
	return planned && (abort.By == PrefillSide && errors.Is(err, engine.ErrAborted) ||
		abort.By == DecodeSide && errors.Is(err, handoff.ErrCancelled))
}

// push sends the layers in order.
func (p *prefill) push(push *handoff.Push, q *trace.Request, i int) error {
	abort, planned := p.plan.Aborts[i]
	for layer := range p.staging.geometry.Layers() {
		if planned && abort.By == PrefillSide && abort.Layer == layer {
			return p.abort(push, q, layer)
		}
		if planned && layer > 0 && layer == p.staging.geometry.Layers()-1 {
			return p.awaitCancel(push)
		}
		if err := p.layer(push, q, layer); err != nil {
			return err
		}
	}
	return push.Finish(p.ctx)
}

// awaitCancel holds back the last layer until the decode side has cancelled. The cancel usually
// arrives during the layers before, but may be late.
func (p *prefill) awaitCancel(push *handoff.Push) error {
	select {
	case <-push.Ended():
		return push.Err()
	case <-time.After(p.plan.patience()):
		return errors.Join(fmt.Errorf("the decode side does not cancel: %w", engine.ErrTimeout),
			push.Abort(p.ctx))
	}
}

// abort aborts a push right after the start of a layer.
func (p *prefill) abort(push *handoff.Push, q *trace.Request, layer int) error {
	if _, err := p.fill(q, layer, push.MissingBlocks()); err != nil {
		return err
	}
	if err := push.Layer(p.ctx, layer); err != nil {
		return err
	}
	if err := push.Abort(p.ctx); err != nil {
		return err
	}
	// No copy is in flight any more, so the slots may be filled again at once.
	select {
	case r := <-p.landed: // the layer was complete before the abort
		p.count(push, r)
	default:
	}
	return push.Err()
}

// layer fills and pushes a layer. As a baseline it also copies the same pieces by memcpy: before
// the push in odd layers, after it in even ones.
func (p *prefill) layer(push *handoff.Push, q *trace.Request, layer int) error {
	pieces, err := p.fill(q, layer, push.MissingBlocks())
	if err != nil {
		return err
	}
	if layer%2 == 1 {
		p.base.run(pieces)
	}
	if err := push.Layer(p.ctx, layer); err != nil {
		return err
	}
	select {
	case r := <-p.landed:
		p.count(push, r)
	case <-push.Ended():
		return push.Err()
	}
	if layer%2 == 0 {
		p.base.run(pieces)
	}
	p.progress(0)
	return nil
}

func (p *prefill) count(push *handoff.Push, r handoff.LayerReport) {
	if len(push.MissingBlocks()) == 0 {
		return // the decode side has all blocks already
	}
	p.res.Bytes += uint64(len(push.MissingBlocks())) * p.staging.geometry.LayerBytes()
	p.res.Transfer += r.Took
	p.layers.Add(r.Took)
}

// fill writes the content of a layer of the missing blocks to the slots, and returns the pieces to
// push.
func (p *prefill) fill(q *trace.Request, layer int, missing []int) ([][]byte, error) {
	start := time.Now()
	g := p.staging.geometry
	pieces := make([][]byte, 0, len(missing)*len(g.Parts()))
	for _, j := range missing {
		for part := range g.Parts() {
			b, err := p.staging.piece(uint64(j), layer, part)
			if err != nil {
				return nil, err
			}
			cell := content.Cell{Request: q.HashIDs[j], Part: uint64(part), Layer: layer}
			cell.Fill(b)
			pieces = append(pieces, b)
		}
	}
	p.res.Fill += time.Since(start)
	return pieces, nil
}
