// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"time"

	"github.com/sluicehq/sluice/cuda"
)

// The sizes that a line is put through, in entries, and how often each is measured.
var fitBatches = []int{200, 512, 1024, 2048, 4096, 8192, 16384}

const fitTimes = 40

// fit parts the fixed cost of a Move from the slope, by least squares over several sizes, which are
// measured in turn by the variant that the whole batch took.
func (g *devicePool) fit(ctx context.Context, r *Result) error {
	var xs []float64
	var lats []*Samples
	for _, batch := range fitBatches {
		if batch <= g.shape.Batch {
			xs = append(xs, float64(batch)*float64(g.shape.Size))
			lats = append(lats, NewSamples(fitTimes))
		}
	}
	if len(xs) < 2 {
		r.Notes = append(r.Notes, "too few entries for a line through several sizes")
		return nil
	}
	for n := range fitTimes {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		for i := range lats {
			m := g.move(n%len(g.plan.places), fitBatches[i], r.Route)
			begin := time.Now()
			if _, _, err := g.dev.Run(m, g.budget, r.Route); err != nil {
				return err
			}
			lats[i].Add(time.Since(begin))
		}
	}
	ys := make([]float64, len(lats))
	for i := range lats {
		ys[i] = float64(lats[i].Percentile(50).Nanoseconds())
	}
	t0, slope := line(xs, ys)
	g.extra(r, "t0-us", t0/1e3)
	if slope > 0 {
		g.extra(r, "slope-GB/s", 1/slope)
	} else {
		r.Notes = append(r.Notes, "longer Moves took no longer: no slope")
	}
	return nil
}

func (g *devicePool) extra(r *Result, unit string, v float64) {
	if r.Extra == nil {
		r.Extra = map[string]float64{}
	}
	r.Extra[unit] = v
}

// line is the one with the least squares of errors: what it begins with, and by how much it rises.
func line(xs, ys []float64) (begin, rise float64) {
	n := float64(len(xs))
	var x, y, xx, xy float64
	for i := range xs {
		x += xs[i] / n
		y += ys[i] / n
	}
	for i := range xs {
		xx += (xs[i] - x) * (xs[i] - x)
		xy += (xs[i] - x) * (ys[i] - y)
	}
	if xx == 0 {
		return y, 0
	}
	rise = xy / xx
	return y - rise*x, rise
}

// The steps of a neighbour that one phase times, and how many phases of each kind there are.
const (
	stepsMin    = 50
	stepsMax    = 1 << 14
	stepsPhases = 3
)

// disturb times the steps of a neighbour alone, beside Moves, and beside large copies by the copy
// engine, in turn.
func (g *devicePool) disturb(ctx context.Context, r *Result, o Options) error {
	if g.neighbour == nil {
		return nil
	}
	beside := []struct {
		name string
		work copier
	}{{"alone", nil}, {"beside-" + r.Route, g.moves(r.Route, g.shape.Batch)},
		{"beside-copy-engine", &copyEngine{g, g.shape.BatchBytes(), r.Op == ScatterOp}}}
	lats := make([]*Samples, len(beside))
	for i := range lats {
		lats[i] = NewSamples(stepsPhases * stepsMax)
	}
	for range stepsPhases {
		for i := range beside {
			if err := g.steps(ctx, lats[i], beside[i].work,
				o.Time/(stepsPhases*time.Duration(len(beside)))); err != nil {
				return err
			}
		}
	}
	alone := lats[0].Percentile(99)
	for i, b := range beside {
		p99 := lats[i].Percentile(99)
		g.extra(r, "step-p99-us-"+b.name, Micros(p99))
		if i > 0 && alone > 0 {
			g.extra(r, "step-p99-slower-percent-"+b.name, 100*(float64(p99)/float64(alone)-1))
		}
	}
	return nil
}

// steps times the neighbour's steps while the work goes on, if there is any.
func (g *devicePool) steps(ctx context.Context, lats *Samples, work copier,
	limit time.Duration) error {
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		var err error
		for i := 0; work != nil && err == nil; i++ {
			select {
			case <-stop:
				ended <- nil
				return
			default:
				err = work.do(i)
			}
		}
		ended <- err
	}()
	err := timed(ctx, lats, g.neighbour, limit)
	close(stop)
	if worked := <-ended; err == nil {
		err = worked
	}
	return err
}

func timed(ctx context.Context, lats *Samples, n *cuda.Neighbour, limit time.Duration) error {
	begin := time.Now()
	for i := 0; i < stepsMax && (i < stepsMin || time.Since(begin) < limit); i++ {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		start := time.Now()
		if err := n.Step(); err != nil {
			return err
		}
		lats.Add(time.Since(start))
	}
	return nil
}
