// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	kvlayout "github.com/sluicehq/sluice/kv/layout"
)

// handing hands one request over between two groups, again and again.
type handing struct {
	plan     *kvlayout.Plan
	span     kvlayout.Span
	only     string
	from, to *rankGroup
	engines  []*engine.Engine
	byOp     map[driver.Op]*poster // by the senders, and by the receivers
	steps    []step

	bytes, patterns, descriptors, cells uint64 // of the request
}

// open makes both groups. What it returns beside an error must be closed, too.
func (r *Reshaping) open(ctx context.Context) (*handing, error) {
	from, to, err := r.sides()
	if err != nil {
		return nil, err
	}
	h := &handing{span: kvlayout.Span{To: uint64(r.Tokens)}, only: r.Only}
	if h.plan, err = kvlayout.NewPlan(from, to); err != nil {
		return nil, err
	}
	for _, name := range []string{"prefill", "decode"} {
		list, err := r.Open()
		if err != nil {
			return h, err
		}
		e, err := engine.Open(engine.Config{Name: name, Backends: list})
		if err != nil {
			return h, err
		}
		h.engines = append(h.engines, e)
	}
	sender, receiver := h.engines[0], h.engines[1]
	if h.from, err = newRankGroup(ctx, sender, "prefill", from, h.span.To,
		r.Memory); err != nil {
		return h, err
	}
	if h.to, err = newRankGroup(ctx, receiver, "decode", to, h.span.To,
		r.Memory); err != nil {
		return h, err
	}
	h.byOp = map[driver.Op]*poster{}
	if h.byOp[driver.Write], err = newPoster(ctx, sender, receiver, h.to, "decode"); err != nil {
		return h, err
	}
	if h.byOp[driver.Read], err = newPoster(ctx, receiver, sender, h.from, "prefill"); err != nil {
		return h, err
	}
	h.steps = steps(h.plan, len(to))
	return h, h.count()
}

func (h *handing) close() (err error) {
	for _, e := range h.engines {
		err = errors.Join(err, e.Close())
	}
	for _, g := range []*rankGroup{h.from, h.to} {
		if g != nil {
			err = errors.Join(err, g.close())
		}
	}
	return err
}

// count sums up what the request is.
func (h *handing) count() error {
	var list []driver.Pattern
	for i := range h.steps {
		var err error
		if list, err = h.build(&h.steps[i], list[:0]); err != nil {
			return err
		}
		for j := range list {
			h.bytes += list[j].Bytes()
			h.descriptors += uint64(list[j].Count) * uint64(list[j].Runs())
		}
		h.patterns += uint64(len(list))
	}
	return nil
}

// build makes the patterns of a step.
func (h *handing) build(s *step, dst []driver.Pattern) ([]driver.Pattern, error) {
	return s.edge.Layer(dst, s.layer, h.from.tables[s.edge.From], h.to.tables[s.edge.To], h.span)
}

// ends returns the regions of the ranks of an edge, from the side that moves the bytes.
func (h *handing) ends(e *kvlayout.Edge) (local []*engine.Region, remote []*engine.Remote) {
	if e.Op == driver.Read {
		return h.to.regions[e.To], h.from.remotes[e.From]
	}
	return h.from.regions[e.From], h.to.remotes[e.To]
}

// route is what the engine chose, or was told.
func (h *handing) route() (string, error) {
	if h.only != "" {
		return h.only, nil
	}
	edge := h.steps[0].edge
	local, remote := h.ends(edge)
	p := h.byOp[edge.Op]
	for i, region := range local {
		if region != nil {
			x, err := p.engine.Explain(p.peer, region, remote[i])
			return x.Chosen, err
		}
	}
	return "", nil
}

// step is one layer of one edge.
type step struct {
	edge  *kvlayout.Edge
	layer int
}

// steps are all layers of all edges, a layer at a time, as prefill computes them.
func steps(plan *kvlayout.Plan, receivers int) (list []step) {
	for to := range receivers {
		edges := plan.Edges(to)
		for i := range edges {
			for _, l := range edges[i].Layers {
				list = append(list, step{&edges[i], l})
			}
		}
	}
	slices.SortStableFunc(list, func(a, b step) int { return cmp.Compare(a.layer, b.layer) })
	return list
}

// move hands the request over once.
func (h *handing) move(ctx context.Context) error {
	for i := range h.steps {
		if err := h.byOp[h.steps[i].edge.Op].post(ctx, h, &h.steps[i]); err != nil {
			return err
		}
	}
	for _, p := range h.byOp {
		for i := range p.flight {
			if err := p.flight[i].wait(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// flightMax is how many transfers each direction has under way.
const flightMax = 64

// poster posts the patterns of one direction.
type poster struct {
	engine *engine.Engine
	peer   *engine.Peer
	flight [flightMax]flying
	next   int
}

// flying is a transfer and the patterns that it refers to.
type flying struct {
	t        *engine.Transfer
	patterns []driver.Pattern
	posted   bool
}

// newPoster connects the engine that moves bytes to that of the other group, of which it looks
// the regions up.
func newPoster(ctx context.Context, e, other *engine.Engine, g *rankGroup, name string) (*poster,
	error) {
	description, err := other.Describe()
	if err != nil {
		return nil, err
	}
	p := &poster{engine: e}
	if p.peer, err = e.Connect(ctx, description); err != nil {
		return nil, err
	}
	return p, g.seenBy(p.peer, name)
}

// post builds a step's patterns and posts them, once a transfer is free.
func (p *poster) post(ctx context.Context, h *handing, s *step) error {
	f := &p.flight[p.next%flightMax]
	p.next++
	if err := f.wait(ctx); err != nil {
		return err
	}
	var err error
	if f.t == nil {
		if f.t, err = p.engine.NewTransfer(p.peer, s.edge.Op,
			engine.Route{Only: h.only}); err != nil {
			return err
		}
	} else if err := f.t.Reset(); err != nil {
		return err
	}
	if f.patterns, err = h.build(s, f.patterns[:0]); err != nil || len(f.patterns) == 0 {
		return err
	}
	local, remote := h.ends(s.edge)
	for i := range f.patterns {
		q := &f.patterns[i]
		if err := f.t.AddPattern(local[q.LocalKey], remote[q.RemoteKey], *q); err != nil {
			return err
		}
	}
	f.posted = true
	return f.t.Post()
}

// wait parks until the transfer is done: a Transfer.Wait would copy as well, with one thread more
// than the loop beside it has.
func (f *flying) wait(ctx context.Context) error {
	if !f.posted {
		return nil
	}
	for !f.t.Done() {
		select {
		case <-f.t.Completed():
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	f.posted = false
	return f.t.Err()
}

// check hands the request over by the plan and then by the loop, and digests both ends.
func (h *handing) check(ctx context.Context, loop *reshapeLoop) error {
	if err := h.from.fill(ctx, h.span.To, rand.Uint64()); err != nil {
		return err
	}
	for _, hand := range []func() error{func() error { return h.move(ctx) },
		func() error { return loop.do(0) }} {
		if err := h.to.wipe(ctx); err != nil {
			return err
		}
		if err := hand(); err != nil {
			return err
		}
		if err := h.compare(ctx); err != nil {
			return err
		}
	}
	return nil
}

// compare digests what each edge moves on both ends.
func (h *handing) compare(ctx context.Context) error {
	var seed kvlayout.Seed
	for i := range seed {
		seed[i] = byte(rand.Uint32())
	}
	d, err := h.plan.NewDigester(seed)
	if err != nil {
		return err
	}
	h.cells = 0
	for i := range h.steps {
		s := &h.steps[i]
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		ends := [2]kvlayout.Held{
			{Memory: h.from.held[s.edge.From], Tables: h.from.tables[s.edge.From], Span: h.span},
			{Memory: h.to.held[s.edge.To], Tables: h.to.tables[s.edge.To], Span: h.span,
				Receiver: true}}
		differ := func(in kvlayout.Scope) (bool, error) {
			a, err := d.Layer(s.edge, s.layer, &ends[0], in)
			if err != nil {
				return false, err
			}
			b, err := d.Layer(s.edge, s.layer, &ends[1], in)
			if in == (kvlayout.Scope{}) {
				h.cells += a.Cells
			}
			return a != b, err
		}
		if d, err := differ(kvlayout.Scope{}); err != nil || d {
			return cmp.Or(err, s.edge.Locate(s.layer, h.span, differ))
		}
	}
	return nil
}
