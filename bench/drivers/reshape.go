// SPDX-License-Identifier: Apache-2.0

package drivers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/sluicehq/sluice/bench"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/internal/hostmem"
	kvlayout "github.com/sluicehq/sluice/kv/layout"
)

// reshapeEnd hands the KV cache of one request over, again and again, from one group of ranks to
// another, which lays it out in another way. Both are in this process, with memory of their own for
// each rank. It goes by the patterns of a plan, which are built each time, or by a loop that copies
// the same cells between the same memories.
type reshapeEnd struct {
	base
	backend  string // with options
	byLoop   bool
	spec     kvlayout.Spec
	from, to kvlayout.GroupSpec
	tokens   int
	*handing
}

// newReshape takes a backend, and then the words of newReshapeLoop.
func newReshape(args []string) (end, error) {
	if len(args) == 0 {
		return nil, errors.New("want a backend")
	}
	e := &reshapeEnd{backend: args[0]}
	return e, e.parse(args[1:])
}

// newReshapeLoop takes MODEL[/LAYERS] PREFILL DECODE TOKENS: with LAYERS the first of the model,
// for memory's sake.
func newReshapeLoop(args []string) (end, error) {
	e := &reshapeEnd{backend: "mem", byLoop: true}
	return e, e.parse(args)
}

// CheckReshape says what is wrong with the words MODEL[/LAYERS] PREFILL DECODE TOKENS, before any
// driver starts.
func CheckReshape(words []string) error {
	var e reshapeEnd
	err := e.parse(words)
	if err == nil {
		_, _, err = e.sides()
	}
	return err
}

func (e *reshapeEnd) parse(args []string) (err error) {
	if len(args) != 4 {
		return errors.New("want a model, the groups of prefill and decode, and tokens")
	}
	model, layers, cut := strings.Cut(args[0], "/")
	if e.spec, err = kvlayout.LookupSpec(model); err != nil {
		return err
	}
	if cut {
		n, err := strconv.Atoi(layers)
		if err != nil || n < 1 {
			return fmt.Errorf("layers %q: want a number", layers)
		}
		for i, t := range e.spec.Tensors {
			e.spec.Tensors[i].Layers = slices.DeleteFunc(slices.Clone(t.Layers),
				func(l int) bool { return l >= n })
		}
		e.spec.Tensors = slices.DeleteFunc(e.spec.Tensors,
			func(t kvlayout.Tensors) bool { return len(t.Layers) == 0 })
	}
	if e.from, err = kvlayout.ParseGroup(args[1]); err != nil {
		return fmt.Errorf("prefill: %w", err)
	}
	if e.to, err = kvlayout.ParseGroup(args[2]); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	if e.tokens, err = strconv.Atoi(args[3]); err != nil || e.tokens < 1 || e.tokens > 1<<24 {
		return fmt.Errorf("tokens %q: want 1 to %d", args[3], 1<<24)
	}
	return nil
}

// Open implements bench.End.
func (e *reshapeEnd) Open(r *bench.Request) (a bench.Answer, err error) {
	if err := onlyLane(r, bench.Reshape); err != nil {
		return a, err
	}
	from, to, err := e.sides()
	if err != nil {
		return a, err
	}
	need, room := groupBytes(from)+groupBytes(to), hostmem.Limits().Available
	if room > 0 && need > room {
		return a, fmt.Errorf("the two groups need %s, %s are available: use fewer tokens, or "+
			"MODEL/LAYERS", figures.RoundSize(need), figures.RoundSize(room))
	}
	threads := max(r.Threads, 1)
	e.backend = copying(e.backend, threads)
	if e.handing, err = newHanding(e.backend, from, to, e.tokens); err != nil {
		return a, err
	}
	a.Version, a.Settings = "sluice", fmt.Sprintf("%s, %d tokens, %v to %v, backend %s: %d "+
		"patterns", e.spec.Name, e.tokens, e.from, e.to, e.backend, e.patterns)
	if e.byLoop {
		e.loop = loopBetween(e.handing.from, e.handing.to, uint64(e.tokens), threads)
		a.Version, a.Settings = "a loop", fmt.Sprintf("%d threads that know both layouts and "+
			"copy the longest runs", threads)
	}
	return a, nil
}

// reshapePosting is one hand-over.
type reshapePosting struct {
	posting
	bytes uint64
}

// Bytes implements bench.Sizer.
func (p reshapePosting) Bytes() uint64 { return p.bytes }

// Prepare implements bench.End. It hands the request over once, and compares the digests of all
// edges.
func (e *reshapeEnd) Prepare(string, uint64, []int32, []int32) (bench.Posting, error) {
	move := e.handing.move
	if e.byLoop {
		move = e.loop.move
	}
	e.handing.from.fill(e.span.To, rand.Uint64())
	e.handing.to.wipe()
	if err := errors.Join(move(context.Background()), e.compare()); err != nil {
		return nil, err
	}
	return reshapePosting{move, e.bytes}, nil
}

func (e *reshapeEnd) close() {
	if e.handing != nil {
		e.handing.close()
	}
}

// sides lays both groups out, with as many blocks as the request takes.
func (r *reshapeEnd) sides() (from, to []*kvlayout.Side, err error) {
	blocks := func(g kvlayout.GroupSpec) kvlayout.GroupSpec {
		tokens := cmp.Or(g.BlockTokens, kvlayout.BlockTokens)
		g.Blocks, g.StateBlocks = uint32((r.tokens+tokens-1)/tokens), 1
		for _, t := range r.spec.Tensors {
			if g.Ring { // a slot more than the window takes
				g.Blocks = max(g.Blocks, uint32((t.Window+tokens-1)/tokens+1))
			}
		}
		return g
	}
	if from, err = blocks(r.from).Sides(r.spec, 0); err != nil {
		return nil, nil, fmt.Errorf("prefill: %w", err)
	}
	if to, err = blocks(r.to).Sides(r.spec, 0); err != nil {
		return nil, nil, fmt.Errorf("decode: %w", err)
	}
	return from, to, nil
}

// handing is the two groups, and one request that is handed over between them.
type handing struct {
	plan     *kvlayout.Plan
	span     kvlayout.Span
	from, to *rankGroup
	steps    []step // a layer at a time, as prefill computes them
	loop     *reshapeLoop

	bytes, patterns, cells uint64 // of the request
}

// step is one layer of one edge. The group that moves its bytes is by, the other is beside it.
type step struct {
	edge     *kvlayout.Edge
	layer    int
	by       *rankGroup
	local    []*engine.Region
	remote   []*engine.Remote
	patterns []driver.Pattern
	*engine.Transfer
}

func newHanding(backend string, from, to []*kvlayout.Side, tokens int) (_ *handing, err error) {
	h := &handing{span: kvlayout.Span{To: uint64(tokens)}, from: &rankGroup{sides: from},
		to: &rankGroup{sides: to}}
	if h.plan, err = kvlayout.NewPlan(from, to); err != nil {
		return nil, err
	}
	err = errors.Join(h.from.open("prefill", backend, h.span.To),
		h.to.open("decode", backend, h.span.To))
	if err == nil {
		err = errors.Join(h.from.meet(h.to), h.to.meet(h.from))
	}
	if err != nil {
		h.close()
		return nil, err
	}
	for rank := range to {
		edges := h.plan.Edges(rank)
		for i := range edges {
			e := &edges[i]
			s := step{edge: e, by: h.from, local: h.from.regions[e.From],
				remote: h.to.remotes[e.To]}
			if e.Op == driver.Read {
				s.by, s.local, s.remote = h.to, h.to.regions[e.To], h.from.remotes[e.From]
			}
			for _, s.layer = range e.Layers {
				h.steps = append(h.steps, s)
			}
		}
	}
	slices.SortStableFunc(h.steps, func(a, b step) int { return cmp.Compare(a.layer, b.layer) })
	for i := range h.steps {
		s := &h.steps[i]
		if s.Transfer, err = s.by.eng.NewTransfer(s.by.peer, s.edge.Op,
			engine.Route{}); err == nil {
			err = h.build(s)
		}
		if err != nil {
			h.close()
			return nil, err
		}
		for j := range s.patterns {
			h.bytes += s.patterns[j].Bytes()
		}
		h.patterns += uint64(len(s.patterns))
	}
	return h, nil
}

func (h *handing) close() {
	for _, g := range []*rankGroup{h.from, h.to} {
		g.close()
	}
}

// build makes the patterns of a step.
func (h *handing) build(s *step) (err error) {
	s.patterns, err = s.edge.Layer(s.patterns[:0], s.layer, h.from.tables[s.edge.From],
		h.to.tables[s.edge.To], h.span)
	return err
}

// move hands the request over once. It parks until all is done: Transfer.Wait would copy as well,
// with one thread more than the loop beside it has.
func (h *handing) move(context.Context) error {
	for i := range h.steps {
		s := &h.steps[i]
		if err := errors.Join(s.Reset(), h.build(s)); err != nil {
			return err
		}
		if len(s.patterns) == 0 {
			continue
		}
		for j := range s.patterns {
			p := &s.patterns[j]
			if err := s.AddPattern(s.local[p.LocalKey], s.remote[p.RemoteKey], *p); err != nil {
				return err
			}
		}
		if err := s.Post(); err != nil {
			return err
		}
	}
	for i := range h.steps {
		s := &h.steps[i]
		for len(s.patterns) > 0 && !s.Done() {
			<-s.Completed()
		}
		if err := s.Err(); err != nil {
			return err
		}
	}
	return nil
}

// compare digests what each edge moves on both ends.
func (h *handing) compare() error {
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
