// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/sluicehq/sluice/driver"
	kvlayout "github.com/sluicehq/sluice/kv/layout"
)

// ReshapeOp is the Result.Op of Reshape, and ReshapeLoopName what stands beside it.
const (
	ReshapeOp       = "reshape"
	ReshapeLoopName = "reshape-loop"
)

// Reshaping is the hand-over of one request from one group of ranks to another, which lays the
// cache out in another way. Both are in this process, with memory of their own for each rank.
type Reshaping struct {
	Spec     kvlayout.Spec
	From, To kvlayout.GroupSpec
	Tokens   int
	Threads  int // that copy: of the loop beside it, and, by Open, of the backends
	Memory   Memory
	Only     string // engine.Route.Only

	Open  func() ([]driver.Backend, error) // for each of the two engines
	Notes []string                         // for the result
}

// Scale keeps the first of every n layers, with n 0 of as many as the memory holds twice over,
// and says in Notes which layers are left.
func (r *Reshaping) Scale(n int, available uint64) error {
	whole, of := *r, 0
	for _, t := range r.Spec.Tensors {
		for _, l := range t.Layers {
			of = max(of, l+1)
		}
	}
	last := max(n, 1)
	if n == 0 {
		last = of
	}
	var need uint64
	for n = max(n, 1); n <= last; n++ {
		kept := (of + n - 1) / n
		*r = whole.cut(kept, of)
		from, to, err := r.sides()
		if err != nil {
			return err
		}
		need = groupBytes(from) + groupBytes(to)
		if available == 0 || need <= available/2 {
			if kept < of {
				r.Notes = append(slices.Clone(r.Notes), fmt.Sprintf("%d of %d layers, in %s of "+
					"memory", kept, of, RoundSize(need)))
			}
			return nil
		}
	}
	return fmt.Errorf("the two groups need %s, half of %s may be used: use fewer --tokens, or a "+
		"larger --scale", RoundSize(need), RoundSize(available))
}

// cut keeps the first layers of each stage's share.
func (r Reshaping) cut(kept, of int) Reshaping {
	spec := kvlayout.Spec{Name: r.Spec.Name}
	for _, t := range r.Spec.Tensors {
		t.Layers = slices.DeleteFunc(slices.Clone(t.Layers), func(l int) bool { return l >= kept })
		if len(t.Layers) > 0 {
			spec.Tensors = append(spec.Tensors, t)
		}
	}
	r.Spec = spec
	for _, g := range []*kvlayout.GroupSpec{&r.From, &r.To} {
		cuts, at, begin := slices.Clone(g.Cuts), 0, 0
		for i, n := range g.Cuts {
			at += n
			end := (at*kept + of - 1) / of
			cuts[i], begin = end-begin, end
		}
		g.Cuts = cuts
	}
	return r
}

// sides lays both groups out, with as many blocks as the request takes.
func (r *Reshaping) sides() (from, to []*kvlayout.Side, err error) {
	blocks := func(g kvlayout.GroupSpec) kvlayout.GroupSpec {
		tokens := cmp.Or(g.BlockTokens, kvlayout.BlockTokens)
		g.Blocks, g.StateBlocks = uint32((r.Tokens+tokens-1)/tokens), 1
		for _, t := range r.Spec.Tensors {
			if g.Ring { // a slot more than the window takes
				g.Blocks = max(g.Blocks, uint32((t.Window+tokens-1)/tokens+1))
			}
		}
		return g
	}
	if from, err = blocks(r.From).Sides(r.Spec, 0); err != nil {
		return nil, nil, fmt.Errorf("prefill: %w", err)
	}
	if to, err = blocks(r.To).Sides(r.Spec, 0); err != nil {
		return nil, nil, fmt.Errorf("decode: %w", err)
	}
	return from, to, nil
}

// Reshape measures the hand-over by a plan's patterns, building them included, beside a loop in
// this process that copies the same cells between the same memories. Before, it has each of the
// two hand the request over once, and compares the digests of all edges. Errors are those of
// layout.NewPlan, of the engine, and *layout.MismatchError for bytes that differ.
func Reshape(ctx context.Context, r Reshaping, o Options) (res Result, err error) {
	o = o.withDefaults()
	o.lists = 1
	h, err := r.open(ctx)
	if h != nil {
		defer func() { err = errors.Join(err, h.close()) }()
	}
	if err != nil {
		return Result{}, err
	}
	loop := newReshapeLoop(h.from, h.to, uint64(r.Tokens), r.Threads)
	if err := h.check(ctx, loop); err != nil {
		return Result{}, err
	}
	shape := &Shape{Op: driver.Write, Size: h.bytes, Batch: 1, Threads: 1}
	var ways []*way
	for _, c := range []struct {
		name string
		copier
	}{{"engine", copierFunc(func(int) error { return h.move(ctx) })}, {ReshapeLoopName, loop}} {
		w, err := newWay(c.name, shape, func(int) (copier, error) { return c.copier, nil })
		if err != nil {
			return Result{}, err
		}
		ways = append(ways, w)
	}
	if err := race(ctx, ways, NewContest(nil), o, h.bytes); err != nil {
		return Result{}, fmt.Errorf("reshape %s: %w", r.Spec.Name, err)
	}
	return r.result(h, ways)
}

type copierFunc func(int) error

func (f copierFunc) do(i int) error { return f(i) }

func (r *Reshaping) result(h *handing, ways []*way) (Result, error) {
	route, err := h.route()
	if err != nil {
		return Result{}, err
	}
	own := ways[0]
	res := Result{Backend: route, Op: ReshapeOp, Size: h.bytes, Batch: 1, Threads: r.Threads,
		GBps: Median(own.rates), P50us: Micros(own.lats.Percentile(50)),
		P99us:  Micros(own.lats.Percentile(99)),
		Rounds: len(own.rates), Ops: own.ops, Route: route, Memory: h.from.memory.From(),
		AllocsPerOp: own.allocs / float64(own.ops),
		Workload: fmt.Sprintf("reshape %s, %d tokens, %v to %v", r.Spec.Name, r.Tokens, r.From,
			r.To),
		Extra: map[string]float64{"patterns": float64(h.patterns),
			"descriptors": float64(h.descriptors)},
		Notes: append(slices.Clone(r.Notes), fmt.Sprintf("the digests of %d cells agree "+
			"after the engine, and after the loop", h.cells))}
	res.OpsPerS = res.GBps * 1e9 / float64(h.bytes)
	res.SetBaselines([]Baseline{ways[1].baseline()})
	return res, nil
}
